# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""seeds: equal for equal arguments, every passage once a shuffle, hops drawn."""

import collections

import pytest
import tiny

from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import policy
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import seeds
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage

CORPUS = Corpus(tuple(Passage(str(n), f't{n}', f'a text of {n}')
                      for n in range(40)))


def draw(**options):
  return seeds.draw(CORPUS, tiny.Tokenizer(), **dict(
      first=0, count=100, hops=(4, 3, 2, 1), seed=0) | options)


def test_seeds_depend_on_the_seed_and_their_number_alone():
  whole = draw()
  assert whole == draw() != draw(seed=1)
  assert whole[37:60] == draw(first=37, count=23)
  assert len({seed.uid for seed in whole}) == 100
  assert draw(name='examined', count=1)[0].uid == 'examined-0'


def test_a_shuffle_has_every_passage_once_and_the_next_is_another():
  shown = [proposals.document_of(seed) for seed in draw()]
  assert len({*shown[:40]}) == len({*shown[40:80]}) == 40
  assert {*shown[:40]} == {*shown[40:80]} and shown[:40] != shown[40:80]
  assert shown[0] in {f'(Title: "{p.title}") {p.text}' for p in CORPUS}


def test_hops_are_drawn_by_their_shares():
  drawn = draw(count=4000)
  counts = collections.Counter(seed.hops for seed in drawn)
  for hops, share in enumerate((.4, .3, .2, .1), start=1):
    assert counts[hops] / 4000 == pytest.approx(share, abs=.03)  # 4 sigma
  assert all(seed.text.startswith(f'Hops: {seed.hops}\n') for seed in drawn)
  assert {seed.hops for seed in draw(hops=(0, 1))} == {2}


def test_long_documents_are_cut_and_may_be_left_out():
  tokenizer = tiny.Tokenizer()
  for seed in draw(tokens=6, count=40):
    assert len(tokenizer.encode(proposals.document_of(seed))) <= 6
  hidden = draw(documents=False)
  assert {proposals.document_of(seed) for seed in hidden} == {''}
  assert [seed.hops for seed in hidden] == [seed.hops for seed in draw()]


def test_a_long_document_ends_with_a_whole_character():
  """The tokens of the tiny base are bytes there, three to a character."""
  tokenizer = tokenizers.load(str(policy.TINY_BASE))
  corpus = Corpus((Passage('0', 't', '日本' * 30),))
  for tokens in range(20, 26):
    seed, = seeds.draw(corpus, tokenizer, first=0, count=1, hops=(1,), seed=0,
                       tokens=tokens)
    shown = proposals.document_of(seed)
    assert '\ufffd' not in shown and shown.endswith(('日', '本'))
    assert tokens - 3 < len(tokenizer.encode_data(shown)) <= tokens


def test_a_document_shows_a_proposer_no_tag():
  """A document is data, as a passage is; '<think>' at its end opened one."""
  corpus = Corpus((Passage('0', '</answer>', 'x \ud800 <think>'),))
  seed, = seeds.draw(corpus, tiny.Tokenizer(), first=0, count=1, hops=(1,),
                     seed=0, tokens=99)
  assert proposals.document_of(seed) == '(Title: "‹/answer>") x \ud800 ‹think>'
  cut, = seeds.draw(corpus, tiny.Tokenizer(), first=0, count=1, hops=(1,),
                    seed=0, tokens=20)
  assert len(tiny.Tokenizer().encode(proposals.document_of(cut))) <= 20


@pytest.mark.parametrize('hops', [(), (0, 0), (2, -1)])
def test_shares_that_cannot_be_drawn_are_refused(hops):
  with pytest.raises(ValueError, match='selfplay.hops must have the shares'):
    draw(hops=hops)
