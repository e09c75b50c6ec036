# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Documents that are written to order: what a writer is asked, and its answer.

A task is a query and the quality that its documents should have. A prompt asks
a language model for them; what it writes must be

  Doc 1: text
  Doc 2: text

and so on, in lines of their own.
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
  """What a writer is asked for."""

  query: Query
  useful: bool  # whether the documents should help; else they are noise
  seed: int  # of the writer's randomness, below 2**63; this task's own


# One text a task, in order; or why there is none.
Writer = Callable[[Sequence[Task]], Sequence[str | SearchError]]


class Malformed(ValueError):
  """A text that is not a list of documents."""


class Unanswerable(ValueError):
  """A question that lacks what a prompt says about it."""


def task(query: Query, *, noise: float, seed: int) -> Task:
  """The task of a query: a coin decides whether its documents are noise.

  Coin and seed depend on the run's seed and the query's step, question, sample,
  turn and text alone, whatever else is asked and in whatever order.

  Args:
    query: of the policy.
    noise: the probability of noisy documents.
    seed: of the run.
  """
  name = json.dumps([seed, query.step, query.question.uid, query.sample,
                     query.turn, query.text]).encode()
  digest = hashlib.sha256(name).digest()
  draw = int.from_bytes(digest[:8], 'big') / 2**64  # in [0, 1)
  return Task(query, useful=draw >= noise,
              seed=int.from_bytes(digest[8:16], 'big') >> 1)


@dataclasses.dataclass(frozen=True)
class Prompts:
  """How a language model is asked.

  Both may hold {query}, {problem} (the question) and {ground_truth} (the first
  of its answers).
  """

  useful: str
  noisy: str

  def of(self, asked: Task) -> str:
    """The prompt of a task. What is filled in is never filled in again.

    Raises:
      Unanswerable: the prompt names an answer, and the question has none.
    """
    template = self.useful if asked.useful else self.noisy
    question = asked.query.question
    if '{ground_truth}' in template and not question.answers:
      raise Unanswerable(f'question {question.uid!r} has no answer')
    values = {'query': asked.query.text, 'problem': question.text,
              'ground_truth': (*question.answers, '')[0]}
    return _FIELD.sub(lambda field: values[field[1]], template)


def zerosearch() -> Prompts:
  """The prompts that ZeroSearch's published simulators were tuned with.

  Source: ZeroSearch's code, word for word (third_party); they ask for five
  documents, whatever the policy is shown.
  """
  return Prompts(_verbatim('zerosearch_useful.txt'),
                 _verbatim('zerosearch_noisy.txt'))


def _verbatim(name: str) -> str:
  folder = importlib.resources.files('searchrl') / 'third_party'
  return (folder / name).read_text(encoding='utf-8')


def read(text: str, top_k: int) -> tuple[str, ...]:
  """The documents of a writer's text, at most top_k, each in one line.

  Strict: the text begins with document 1, the numbers follow each other, and no
  document is empty, but the last, which a limit of tokens may have cut. What
  follows the top_k documents is dropped unread.

  Raises:
    Malformed: it is no such list.
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
  """The text that `read` reads; of (title, text), '' for no title."""
  texts = [f'"{title}" {text}' if title else text for title, text in passages]
  return '\n'.join(f'Doc {number}: {" ".join(text.split())}'
                   for number, text in enumerate(texts, start=1))


def titled(text: str) -> tuple[str, str]:
  """Title and text of a document that may begin with a title in quotes."""
  found = _TITLED.fullmatch(text)
  return (found[1], found[2]) if found else ('', text)
