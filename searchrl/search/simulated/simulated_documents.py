# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks and prompts for a writer of documents, and the format of its texts.

A task is a query and the quality that its documents should have. A prompt asks
a language model for the documents. The text that it writes must have the form

  Doc 1: text
  Doc 2: text

and so on, with each document on a line of its own.
"""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import importlib.resources
import json
import re

from searchrl.trajectory import Query, SearchError

_HEADING = re.compile(r'^[ \t]*Doc ([0-9]+):', re.MULTILINE)
_FIELD = re.compile(r'\{(query|problem|ground_truth)\}')
_TITLED = re.compile(r'"([^"]+)" (.+)')


@dataclasses.dataclass(frozen=True)
class Task:
  """A request to a writer for the documents of one query."""

  query: Query
  useful: bool  # True: the documents should help; False: they are noise
  seed: int  # seed of the writer for this task only, below 2**63


# Function that returns one text per task, in the order of the tasks, or a
# SearchError for a task that failed.
Writer = Callable[[Sequence[Task]], Sequence[str | SearchError]]


class Malformed(ValueError):
  """Error for a text that is not a list of documents."""


class Unanswerable(ValueError):
  """Error for a prompt that needs an answer that the question lacks."""


def task(query: Query, *, noise: float, seed: int) -> Task:
  """Returns a query's task, with useful or noisy documents drawn at random.

  The draw and the task's seed depend only on the run's seed and on the query's
  step, question, sample, turn and text. Other queries and their order do not
  affect them.

  Args:
    query: Query of the policy.
    noise: Probability of noisy documents.
    seed: Seed of the run.
  """
  name = json.dumps([seed, query.step, query.question.uid, query.sample,
                     query.turn, query.text]).encode()
  digest = hashlib.sha256(name).digest()
  draw = int.from_bytes(digest[:8], 'big') / 2**64  # in [0, 1)
  return Task(query, useful=draw >= noise,
              seed=int.from_bytes(digest[8:16], 'big') >> 1)


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Prompt templates that ask a language model for documents.

  Both may contain {query}, {problem} (the question) and {ground_truth} (the
  question's first answer).

  Attributes:
    useful: Template for useful documents.
    noisy: Template for noisy documents.
  """

  useful: str
  noisy: str

  def of(self, asked: Task) -> str:
    """Returns the prompt of a task. Fields inside inserted text stay as is.

    Raises:
      Unanswerable: The prompt uses the answer, but the question has none.
    """
    template = self.useful if asked.useful else self.noisy
    question = asked.query.question
    if '{ground_truth}' in template and not question.answers:
      raise Unanswerable(f'question {question.uid!r} has no answer')
    values = {'query': asked.query.text, 'problem': question.text,
              'ground_truth': (*question.answers, '')[0]}
    return _FIELD.sub(lambda field: values[field[1]], template)


def zerosearch() -> Prompts:
  """Returns the prompts that ZeroSearch's published simulators were tuned with.

  Source: ZeroSearch's code, word for word (third_party). The prompts always ask
  for five documents, regardless of how many the policy is shown.
  """
  return Prompts(_verbatim('zerosearch_useful.txt'),
                 _verbatim('zerosearch_noisy.txt'))


def _verbatim(name: str) -> str:
  folder = importlib.resources.files('searchrl') / 'third_party'
  return (folder / name).read_text(encoding='utf-8')


def read(text: str, top_k: int) -> tuple[str, ...]:
  """Returns the documents of a writer's text, at most top_k, each on one line.

  The check is strict: the text begins with document 1, the numbers are
  consecutive, and no document is empty. If there are several, the last may be
  empty, because a token limit may have cut it, and is then dropped. Text after
  the first top_k documents is dropped; only the number of the next heading is
  checked.

  Raises:
    Malformed: The text is not such a list.
  """
  headings = [*_HEADING.finditer(text)]
  if not headings or text[:headings[0].start()].strip():
    raise Malformed("the text must begin with 'Doc 1:'")
  found = []
  for number, heading in enumerate(headings, start=1):
    if heading[1] != str(number):
      raise Malformed(f"'Doc {number}:' must follow, not "
                      f"'Doc {heading[1][:20]}:'")
    if number > top_k:
      break
    end = headings[number].start() if number < len(headings) else len(text)
    found.append(' '.join(text[heading.end():end].split()))
  if len(found) > 1 and len(found) == len(headings) and not found[-1]:
    found.pop()
  if not all(found):
    raise Malformed(f'document {found.index("") + 1} is empty')
  return tuple(found)


def write(passages: Sequence[tuple[str, str]]) -> str:
  """Returns (title, text) pairs as a text for `read`; title '' means none."""
  texts = [f'"{title}" {text}' if title else text for title, text in passages]
  return '\n'.join(f'Doc {number}: {" ".join(text.split())}'
                   for number, text in enumerate(texts, start=1))


def titled(text: str) -> tuple[str, str]:
  """Returns (title, text) of a document; title '' if it has none in quotes."""
  found = _TITLED.fullmatch(text)
  return (found[1], found[2]) if found else ('', text)
