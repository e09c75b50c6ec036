# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks for a writer of documents, and the format of the texts that it returns.

A task is a query and the quality that its documents should have. The text for a
task must have the form

  Doc 1: text
  Doc 2: text

and so on, with each document on a line of its own.
"""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
import re

from searchrl.trajectory import Passage, Query, SearchError

_HEADING = re.compile(r'^[ \t]*Doc ([0-9]+):', re.MULTILINE)
_TITLED = re.compile(r'"([^"]+)" (.+)')


@dataclasses.dataclass(frozen=True)
class Task:
  """A request to a writer: write the documents for one query."""

  query: Query
  useful: bool  # True: the documents should help; False: they are noise
  seed: int  # seed of the writer for this task only, below 2**63


# Function that returns one text per task, in the order of the tasks, or a
# SearchError for a task that failed.
Writer = Callable[[Sequence[Task]], Sequence[str | SearchError]]


class Malformed(ValueError):
  """Error for a text that is not a list of documents."""


def task(query: Query, *, noise: float, seed: int) -> Task:
  """Returns the Task that asks a writer for useful or noisy documents.

  The choice and the task's seed depend only on the run's seed and the query's
  step, question, sample, turn and text. Other queries and their order do not
  affect them.

  Args:
    query: Query of the policy.
    noise: Probability that noisy documents are asked for, in [0, 1].
    seed: Seed of the run.
  """
  name = json.dumps([seed, query.step, query.question.uid, query.sample,
                     query.turn, query.text]).encode()
  digest = hashlib.sha256(name).digest()
  draw = int.from_bytes(digest[:8], 'big') / 2**64  # in [0, 1)
  return Task(query, useful=draw >= noise,
              seed=int.from_bytes(digest[8:16], 'big') >> 1)


def read(text: str, top_k: int) -> tuple[str, ...]:
  """Returns the documents of a writer's text, at most top_k, each on one line.

  The check is strict: the text begins with document 1, the numbers are
  consecutive, and no document is empty. Only the last of several documents may
  be empty, because a token limit may have cut it; it is then dropped. Text
  after the first top_k documents is dropped; only the number of the next
  heading is checked.

  Raises:
    Malformed: The text is not such a list.
  """
  headings = [*_HEADING.finditer(text)]
  if not headings or text[:headings[0].start()].strip():
    raise Malformed("the text must begin with 'Doc 1:'")
  documents = []
  for number, heading in enumerate(headings, start=1):
    if heading[1] != str(number):
      raise Malformed(f"'Doc {number}:' must follow, not "
                      f"'Doc {heading[1][:20]}:'")
    if number > top_k:
      break
    end = headings[number].start() if number < len(headings) else len(text)
    documents.append(' '.join(text[heading.end():end].split()))
  if 1 < len(documents) == len(headings) and not documents[-1]:
    documents.pop()
  if not all(documents):
    raise Malformed(f'document {documents.index("") + 1} is empty')
  return tuple(documents)


def write(passages: Sequence[tuple[str, str]]) -> str:
  """Returns passages as a text of documents, in the form that `read` reads.

  Args:
    passages: (title, text) pairs. A title is written in quotes; '': no title.
  """
  texts = [f'"{title}" {text}' if title else text for title, text in passages]
  return '\n'.join(f'Doc {number}: {" ".join(text.split())}'
                   for number, text in enumerate(texts, start=1))


def write_passages(passages: Sequence[Passage], *, titled: bool) -> str:
  """Returns passages as a text of documents; see `write`.

  Args:
    passages: Passages, each with a title or a text.
    titled: True if the documents begin with their titles. If False, only a
      passage without a text is shown by its title.
  """
  return write([(p.title, p.text) if titled else
                ('', p.text if p.text.strip() else p.title) for p in passages])


def titled(text: str) -> tuple[str, str]:
  """Splits a document into (title, text).

  The title is in double quotes at its start. Without quotes, it is ''.
  """
  match = _TITLED.fullmatch(text)
  return (match[1], match[2]) if match else ('', text)
