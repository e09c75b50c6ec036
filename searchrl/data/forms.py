# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records of benchmarks that have columns of their own, as FlashRAG's keys.

FlashRAG's copies of ASQA and ELI5 need none of this; the originals do, and
GPQA and SimpleQA have no copy there. Files of all are jsonl or parquet.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import hashlib
from typing import Any

_INCORRECT = tuple(f'Incorrect Answer {n}' for n in (1, 2, 3))


@dataclasses.dataclass(frozen=True)
class Form:
  """How the records of a benchmark are read.

  Attributes:
    name: of the benchmark.
    question: the column that tells the form, and holds the question.
    columns: what else is read, where it is there.
    ids: the column of ids; a record without one is named by its question.
    golds: of a record.
    choices: of a record, listed below its question; () of most.
  """

  name: str
  question: str
  columns: tuple[str, ...]
  ids: str
  golds: Callable[[Mapping[str, Any]], Sequence[Any]]
  choices: Callable[[Mapping[str, Any]], Sequence[str]] = lambda record: ()

  @property
  def wanted(self) -> tuple[str, ...]:
    """All columns that are read."""
    return self.question, self.ids, *self.columns

  def record(self, record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the keys of FlashRAG's jsonl."""
    text = record[self.question].strip()
    choices = sorted(self.choices(record))  # so that none's place tells
    listed = ''.join(f'\n- {choice.strip()}' for choice in choices)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {'id': record.get(self.ids) or digest, 'question': text + listed,
            'golden_answers': [gold for gold in self.golds(record) if gold],
            'data_source': self.name}


FORMS = (
    # Scored by their text: the letter A is an article to the scores.
    Form('gpqa', 'Question', ('Correct Answer', *_INCORRECT), 'Record ID',
         lambda record: [record['Correct Answer']],
         lambda record: [record['Correct Answer'], *(
             record[name] for name in _INCORRECT)]),
    Form('simpleqa', 'problem', ('answer',), 'id',
         lambda record: [record.get('answer')]),
    Form('asqa', 'ambiguous_question', ('annotations',), 'sample_id',
         lambda record: [one['long_answer']
                         for one in record.get('annotations') or ()]),
    Form('eli5', 'title', ('answers',), 'q_id',
         lambda record: (record.get('answers') or {}).get('text', ())),
)


def of(names: Collection[str]) -> Form | None:
  """The form of records with such keys; None of FlashRAG's and Search-R1's."""
  if {'question', 'prompt'} & {*names}:
    return None
  return next((form for form in FORMS if form.question in names), None)
