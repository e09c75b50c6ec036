# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Converts records of benchmarks with other columns to FlashRAG's keys.

These keys are id, question, golden_answers and data_source. FlashRAG's copies
of ASQA and ELI5 need no conversion, but the originals do. FlashRAG has no
copies of the other benchmarks. Files are csv, jsonl or parquet. A user may add
a form to `FORMS`; see docs/extend.md.
"""

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import hashlib
import itertools
from typing import Any

_INCORRECT = tuple(f'Incorrect Answer {n}' for n in (1, 2, 3))


@dataclasses.dataclass(frozen=True)
class Form:
  """The form of a benchmark's records: which columns have which content."""

  name: str  # name of the benchmark
  question: str  # column of the question, by which the form is recognised
  ids: str  # column of the ids; without an id, the question's hash is the id
  others: tuple[str, ...]  # other columns to read, if the file has them
  golds: Callable[[Mapping[str, Any]], Sequence[Any]]  # a record's gold answers
  # A record's choices, which are listed below its question.
  choices: Callable[[Mapping[str, Any]], Sequence[str]] = lambda record: ()
  also: tuple[str, ...] = ()  # other columns by which the form is recognised
  never: tuple[str, ...] = ()  # columns that the form does not have
  # Function that is applied to a record before its columns are read.
  decode: Callable[[Mapping[str, Any]], Mapping[str, Any]] = (
      lambda record: record)

  @property
  def columns(self) -> tuple[str, ...]:
    """Names of all columns that are read."""
    return self.question, self.ids, *_listed(self.others)

  def convert(self, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record with the keys of FlashRAG's jsonl."""
    record = self.decode(record)
    text, uid = record[self.question].strip(), record.get(self.ids)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # Sorted, so that a choice's place does not reveal the answer.
    choices = [f'\n- {x.strip()}' for x in sorted(self.choices(record))]
    return {'id': digest if uid in (None, '') else uid,
            'question': text + ''.join(choices),
            'golden_answers': [
                gold for gold in _listed(self.golds(record))
                if gold not in (None, '')],
            'data_source': self.name}


def _listed(texts: str | Sequence[str]) -> Sequence[str]:
  """Returns several texts as they are, and a single text in a list."""
  return [texts] if isinstance(texts, str) else texts


def _decrypted(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a BrowseComp record with its question and answer decrypted.

  The key is the SHA-256 of the record's canary, repeated as often as needed.
  Each encrypted text is base64, and its bytes are XORed with the key's bytes.
  """
  key = hashlib.sha256(record['canary'].encode()).digest()
  return {**record, **{
      name: bytes(byte ^ mask for byte, mask in zip(
          base64.b64decode(record[name], validate=True), itertools.cycle(key))
                 ).decode() for name in ('problem', 'answer')}}


_BUILT_IN = (
    # Choices are scored by their text, because normalisation drops the letter A
    # as an article.
    Form('gpqa', 'Question', 'Record ID', ('Correct Answer', *_INCORRECT),
         lambda record: [record['Correct Answer']],
         lambda record: [record['Correct Answer'], *(
             record[name] for name in _INCORRECT)], also=('Correct Answer',)),
    Form('browsecomp', 'problem', 'id', ('answer', 'canary'),
         lambda record: [record['answer']], decode=_decrypted,
         also=('canary',)),
    # The file of the published script, which decrypts it.
    Form('browsecomp_plus', 'query', 'query_id', ('answer',),
         lambda record: [record['answer']], also=('query_id', 'answer')),
    Form('simpleqa', 'problem', 'id', ('answer',),
         lambda record: [record.get('answer')]),
    Form('asqa', 'ambiguous_question', 'sample_id', ('annotations',),
         lambda record: [annotation['long_answer']
                         for annotation in record.get('annotations') or ()]),
    Form('eli5', 'title', 'q_id', ('answers',),
         lambda record: (record.get('answers') or {}).get('text', ()),
         also=('answers',)),
    Form('bamboogle', 'Question', 'id', ('Answer',),
         lambda record: [record['Answer']], also=('Answer',)),
    Form('kilt', 'input', 'id', ('output',),
         lambda record: [output.get('answer') for output in record['output']],
         also=('output',)),
    # Queries of BEIR have no gold answers. Its passages have titles.
    Form('beir', 'text', '_id', (), lambda record: (), also=('_id',),
         never=('title', 'contents', 'wikipedia_title')),
)
FORMS = [*_BUILT_IN]


def detect_format(names: Collection[str]) -> Form | None:
  """Returns the form of the benchmark whose records have these keys, or None.

  A form that a user has added comes before all others. The result is None for
  the records of FlashRAG and Search-R1, and if no form fits.
  """
  fitting = [form for form in FORMS if not {*form.never} & {*names}
             and {form.question, *form.also} <= {*names}]
  added = [form for form in fitting if form not in _BUILT_IN]
  if added or {'question', 'prompt'} & {*names}:
    return next(iter(added), None)
  return next(iter(fitting), None)
