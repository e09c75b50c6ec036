# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Small files with the schemas of the published data sets.

  python tests/published.py downloads
"""

import csv
import gzip
import json
import pathlib
import struct
import sys

import numpy as np
from pyarrow import Table
from pyarrow import parquet

FLASHRAG = {  # file -> number of rows here
    'nq/train': 6, 'hotpotqa/train': 4, 'nq/test': 3, 'triviaqa/test': 2,
    'popqa/test': 2, 'hotpotqa/dev': 2, '2wikimultihopqa/dev': 2,
    'musique/dev': 2, 'bamboogle/test': 2, 'asqa/train': 2, 'asqa/dev': 2,
    'eli5/dev': 2}
GPQA = ['Record ID', 'Question', 'Correct Answer', 'Incorrect Answer 1',
        'Incorrect Answer 2', 'Incorrect Answer 3', 'Explanation']


def flashrag(name, number):
  """A row of FlashRAG's file, such as number 3 of 'nq/test'."""
  source, _, split = name.partition('/')
  city = f'City {number}'
  row = {'id': f'{split}_{number}', 'question': f'what is the {source} of {city}',
         'golden_answers': [f'River {number}', f'the river {number}']}
  if source == 'hotpotqa':
    row['metadata'] = {'type': 'bridge', 'level': 'hard', 'context': {
        'title': [city], 'sentences': [[f'{city} lies on River {number}.']]}}
  if source == 'musique':
    row['id'] = f'{2 + number % 3}hop__{number}_7'
  return row


def search_r1(source, row, index):
  """The row of Search-R1's merged parquet for one of FlashRAG's."""
  question = row['question'].strip()
  question += '?' * (not question.endswith('?'))
  return {'id': row['id'], 'question': question,
          'golden_answers': row['golden_answers'], 'data_source': source,
          'prompt': [{'role': 'user', 'content':
                      f'Answer the given question. Question: {question}\n'}],
          'ability': 'fact-reasoning',
          'reward_model': {'style': 'rule', 'ground_truth': {
              'target': row['golden_answers']}},
          'extra_info': {'split': 'train', 'index': index}}


def passages():
  return [{'id': str(n), 'contents':
           f'"City {n}"\nCity {n} lies on River {n}, below the hills.'}
          for n in range(8)]


def write_lines(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  text = ''.join(json.dumps(row) + '\n' for row in rows).encode()
  path.write_bytes(gzip.compress(text) if path.suffix == '.gz' else text)


def write_csv(path, names, rows):
  with path.open('w', newline='', encoding='utf-8') as file:
    csv.writer(file).writerows([names, *rows])


def write_flashrag(folder):
  """FlashRAG's files, and the corpus of Search-R1."""
  for name, count in FLASHRAG.items():
    write_lines(folder / f'{name}.jsonl', [
        flashrag(name, number) for number in range(count)])
  write_lines(folder / 'wiki-18.jsonl.gz', passages())


def write_merged(folder):
  """Search-R1's train.parquet and test.parquet, of the same questions."""
  names = [*FLASHRAG]
  for file, parts in (('train', names[:2]), ('test', names[2:9])):
    rows = [search_r1(name.partition('/')[0], flashrag(name, n), n)
            for name in parts for n in range(FLASHRAG[name])]
    parquet.write_table(Table.from_pylist(rows), folder / f'{file}.parquet')


def write_study(folder):
  """GPQA's and SimpleQA's files."""
  write_csv(folder / 'gpqa_diamond.csv', GPQA, [
      [f'rec{n}', f'Which, of "all",\nis {n}?', f'right {n}', 'a b', 'c', 'd', '']
      for n in range(3)])
  write_csv(folder / 'simple_qa_test_set.csv', ['metadata', 'problem', 'answer'], [
      ["{'topic': 'Art'}", f'Who won in {1990 + n}?', f'Ann {n}']
      for n in range(9)])


def write_vectors(folder, dim=4):
  """The parts of a flat index of the passages."""
  count = len(passages())
  rows = np.arange(count * dim, dtype='<f4').tobytes()
  whole = struct.pack('<4siqqq?iQ', b'IxFI', dim, count, 0, 0, True, 0,
                      count * dim) + rows
  (folder / 'part_aa').write_bytes(whole[:50])
  (folder / 'part_ab').write_bytes(whole[50:])
  return whole


if __name__ == '__main__':
  target = pathlib.Path(sys.argv[1])
  write_flashrag(target)
  print(f'{target}: {len(FLASHRAG)} files of questions, and wiki-18.jsonl.gz')
