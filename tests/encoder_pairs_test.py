# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""encoder_pairs: batches follow from their number; no negative is an answer."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from searchrl.data import encoder_pairs
from searchrl.search import corpus as corpora
from searchrl.world import facts
from searchrl.world import text

OPTIONS = dict(seed=0, queries=8, hard_negatives=2, depth=6)


@functools.lru_cache(maxsize=4)
def world(number):
  return encoder_pairs.world_pairs(number, seed=7, count=16, fresh=.5)


def write(file, *records):
  file.write_text('\n'.join(
      r if isinstance(r, str) else json.dumps(r) for r in records))
  return str(file)


def pair(query, positive, *negatives):
  return {'query': query, 'positive': positive, 'negatives': list(negatives)}


def test_the_answer_of_a_worlds_query_is_the_passage_of_its_name():
  source = world(0)
  assert len(source.queries) == 16
  for query, (answer,) in zip(source.queries, source.answers):
    title, _, text = answer.partition('\n')
    assert title.removeprefix('The ') in query and title in text


def test_in_a_hard_world_the_answer_is_the_passage_that_states_the_fact():
  source = encoder_pairs.world_pairs(1, seed=7, count=60, fresh=0, hard=1)
  world = facts.make(8, source='known', hard=True)
  stated = {f'{subject} {relation}': corpora.text_of(passage) for
            (subject, relation), passage in text.stated(world).items()}
  asked = [(query, answer) for query, (answer,) in
           zip(source.queries, source.answers) if query in stated]
  assert len(asked) > 15
  assert all(stated[query] == answer for query, answer in asked)
  titles = [[t.partition('\n')[0] for t in found]
            for found in source.find([query for query, _ in asked], 8)]
  siblings = [sum(query.startswith(t) for t in ts) for (query, _), ts
              in zip(asked, titles)]
  assert sum(siblings) / len(siblings) > 2  # among the candidate negatives


@pytest.mark.parametrize('share, least, most',
                         [(0.0, 0, 0), (0.5, 6, 18), (1.0, 24, 24)])
def test_a_share_of_the_worlds_is_hard(monkeypatch, share, least, most):
  made, make = [], facts.make

  def small(seed, *, source, hard):
    made.append(hard)
    return make(seed, sizes=facts.SMALL_SIZES, source=source, hard=hard)

  monkeypatch.setattr(encoder_pairs.facts, 'make', small)
  for number in range(24):
    encoder_pairs.world_pairs(number, seed=7, count=2, fresh=.5, hard=share)
  assert len(made) == 24 and least <= sum(made) <= most


def test_batches_follow_from_their_number_alone():
  found = [encoder_pairs.batch(world, step, **OPTIONS) for step in range(5)]
  for step in (4, 1):
    again = encoder_pairs.batch(world.__wrapped__, step, **OPTIONS)
    assert (again.queries, again.passages) == (
        found[step].queries, found[step].passages)
  # Two batches of eight are a world's sixteen queries.
  assert sorted(found[0].queries + found[1].queries) == sorted(world(0).queries)
  assert sorted(found[2].queries + found[3].queries) == sorted(world(1).queries)


def test_no_passage_that_answers_is_a_negative():
  for step in range(3):
    batch = encoder_pairs.batch(world, step, **OPTIONS)
    source = world(step // 2)
    answer_of = {q: a for q, (a,) in zip(source.queries, source.answers)}
    assert batch.excluded.shape == (8, len(batch.passages))
    for row, query in enumerate(batch.queries):
      assert batch.passages[row] == answer_of[query]
      np.testing.assert_array_equal(
          batch.excluded[row],
          [p == answer_of[query] for p in batch.passages])
    assert 16 < len(batch.passages) <= 24


def test_hard_negatives_are_what_bm25_finds():
  batch = encoder_pairs.batch(world, 0, **OPTIONS)
  candidates = {text for found in world(0).find(batch.queries, 6)
                for text in found}
  assert set(batch.passages[8:]) <= candidates
  assert len(encoder_pairs.batch(world, 0, **OPTIONS | dict(
      hard_negatives=0)).passages) == 8


def test_own_pairs_keep_their_texts_and_bring_their_negatives(tmp_path):
  source = encoder_pairs.file_pairs(write(
      tmp_path / 'p.jsonl', pair('red', 'red\nball', 'red car'),
      '', pair('red', 'a red hat'), {'query': 'blue', 'positive': 'blue sky'},
      pair('green', 'red\nball')))(3)
  assert source.queries == ['red', 'red', 'blue', 'green']
  batch = encoder_pairs.batch(lambda number: source, 0, seed=0, queries=4,
                      hard_negatives=1, depth=3)
  rows = {(q, p): i for i, (q, p) in enumerate(zip(
      batch.queries, batch.passages))}
  red = rows['red', 'red\nball']
  assert batch.passages.count('red car') == 2  # given once, found by BM25 once
  np.testing.assert_array_equal(
      batch.excluded[red],
      [text in ('red\nball', 'a red hat') for text in batch.passages])
  np.testing.assert_array_equal(
      batch.excluded[rows['blue', 'blue sky']],
      [text == 'blue sky' for text in batch.passages])


def test_a_short_source_is_one_batch():
  source = dataclasses.replace(world(0), queries=world(0).queries[:3])
  batch = encoder_pairs.batch(lambda number: source, 5, **OPTIONS)
  assert sorted(batch.queries) == sorted(source.queries)


@pytest.mark.parametrize('lines, message', [
    (['{'], 'p.jsonl, line 1 must be a JSON object, but .* is not'),
    ([pair('a', 'b'), '[]'], r'must have "query" and .*p.jsonl, line 2 holds \[\]'),
    ([{'query': 'a'}], 'must have "query" and "positive"'),
    ([pair(' ', 'b')], 'texts that are not blank'),
    ([{'query': 'a', 'positive': 3}], 'must have "query" and "positive"'),
    ([{'query': 'a', 'positive': 'b', 'negatives': 'c'}], 'a list of texts'),
    ([pair('a', 'b')], 'must hold two pairs or more, but .* has 1'),
])
def test_a_bad_file_is_refused_and_the_line_named(tmp_path, lines, message):
  with pytest.raises(ValueError, match=message):
    encoder_pairs.file_pairs(write(tmp_path / 'p.jsonl', *lines))


def test_a_missing_file_is_named():
  with pytest.raises(FileNotFoundError, match='data.pairs must be a jsonl'):
    encoder_pairs.file_pairs('/nowhere.jsonl')
