# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""stops: the automaton against plain search, however a text is cut."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tiny

from searchrl.models.inference import stops

quick = hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
# Few letters, so that stop strings occur, overlap and contain each other.
words = st.text('ab', min_size=1, max_size=4) | st.sampled_from(
    ['é', 'aé', 'éa', '<é', 'b<'])


def first_stop(table, ids):
  """How many ids the automaton reads until it stops; None if it never does."""
  state = 0
  for count, id_ in enumerate(ids, start=1):
    if table.hit[state, id_]:
      return count
    state = table.next_state[state, id_]
  return None


def first_found(pieces, stop_strings):
  """The same by searching the text, token by token."""
  for count in range(1, len(pieces) + 1):
    text = b''.join(pieces[:count])
    if any(stop.encode() in text for stop in stop_strings):
      return count
  return None


@quick
@hypothesis.given(st.lists(words, min_size=1, max_size=3), st.text(
    'aabbé<', max_size=12), st.lists(st.integers(0, 20), max_size=12))
@hypothesis.example(['abc', 'b'], 'xab', [1, 2])  # one inside another's start
def test_any_segmentation_of_a_text_stops_where_search_finds(
    stop_strings, text, cuts):
  data = text.encode()
  cuts = sorted({0, len(data), *(c for c in cuts if c < len(data))})
  pieces = [data[i:j] for i, j in zip(cuts, cuts[1:])]
  table = stops.compile_table(pieces, stop_strings)
  ids = list(range(len(pieces)))
  assert first_stop(table, ids) == first_found(pieces, stop_strings)


@quick
@hypothesis.given(st.lists(words, min_size=1, max_size=3), st.lists(
    st.binary(max_size=3) | words.map(str.encode), min_size=1, max_size=6),
                  st.lists(st.integers(0, 5), max_size=15))
def test_any_sequence_of_tokens_stops_where_search_finds(
    stop_strings, vocabulary, ids):
  ids = [i % len(vocabulary) for i in ids]
  table = stops.compile_table(vocabulary, stop_strings)
  pieces = [vocabulary[i] for i in ids]
  assert first_stop(table, ids) == first_found(pieces, stop_strings)


def test_all_ways_to_write_a_tag_stop_at_its_last_token():
  pieces = tiny.Tokenizer().token_bytes
  table = stops.compile_table(pieces, ('</search>', '</answer>'))
  tag = b'</search>'

  def ways(rest):
    if not rest:
      yield ()
      return
    for id_, piece in enumerate(pieces):
      if piece and (rest.startswith(piece) or piece.startswith(rest)):
        for more in ways(rest[len(piece):]):
          yield (id_, *more)

  count = 0
  for ids in ways(tag):
    assert first_stop(table, ids) == len(ids)
    assert first_stop(table, ids[:-1]) is None
    count += 1
  assert count > 50


def test_ids_beyond_the_tokenizer_add_nothing():
  table = stops.compile_table((b'a', b'b', b''), ('ab',), vocab_size=6)
  assert table.next_state.shape == table.hit.shape == (64, 6)
  assert first_stop(table, [0, 5, 2, 1]) == 4
  np.testing.assert_array_equal(table.next_state[:3, 5], np.arange(3))


def test_an_end_id_stops_in_the_middle_of_a_stop_string_and_without_any():
  for stop_strings in (('ab',), ()):
    table = stops.compile_table(
        (b'a', b'b', b''), stop_strings, vocab_size=6, end_ids=(2, 4))
    assert first_stop(table, [1, 0, 4, 1]) == 3
    assert first_stop(table, [0, 5, 2]) == 3
    assert first_stop(table, [0, 1]) == (2 if stop_strings else None)


@pytest.mark.parametrize('length, rows', [(1, 64), (63, 64), (64, 128)])
def test_tables_of_nearly_all_dialogues_have_one_shape(length, rows):
  table = stops.compile_table((b'a', b'b'), ('a' * length,))
  assert table.hit.shape == table.next_state.shape == (rows, 2)
  assert first_stop(table, [1, *[0] * 99]) == length + 1
  assert (table.next_state[:length + 1] <= length).all()  # never among the rest


@pytest.mark.parametrize('stop_strings', [(), ('a', '')])
def test_no_or_empty_stop_strings_are_refused(stop_strings):
  with pytest.raises(ValueError, match='stop_strings must hold at least one'):
    stops.compile_table((b'a',), stop_strings)


def test_a_large_vocabulary_takes_two_bytes_a_state_and_token():
  rng = np.random.default_rng(0)
  pieces = [bytes(rng.integers(32, 127, n))
            for n in rng.integers(1, 20, 50_000)]
  table = stops.compile_table(pieces, ('</search>', '</answer>'), 50_100)
  assert table.next_state.shape == (64, 50_100)
  assert table.next_state.nbytes + table.hit.nbytes == 2 * 64 * 50_100


def test_more_states_than_a_byte_can_count_still_stop():
  words = [f'{n:03d}-{"x" * (n % 7)}.' for n in range(200)]
  table = stops.compile_table([bytes([b]) for b in range(256)], words)
  assert len(table.next_state) > 256 and table.next_state.dtype == np.uint16
  for text in ('xx' + words[17], words[199][1:] + words[3]):
    assert first_stop(table, list(text.encode())) == len(text)
    assert first_stop(table, list(text.encode())[:-1]) is None
