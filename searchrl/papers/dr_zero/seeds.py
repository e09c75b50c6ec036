# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seeds: what a proposer is asked, drawn from a corpus; no question is needed.

Source: Dr. Zero, arXiv:2601.07055, whose code shuffles Wikipedia, cuts each
passage to 256 tokens and draws the hops at 4:3:2:1. Differs: hops are drawn by
the seed, too, so that seeds can be made again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from searchrl.agent import markup
from searchrl.papers.dr_zero import proposals
from searchrl.trajectory import Passage, Question


def draw(corpus: Any, tokenizer: Any, *, first: int, count: int,
         hops: Sequence[float], seed: int, tokens: int = 256,
         documents: bool = True, name: str = 'seed') -> list[Question]:
  """Seeds of a seeded shuffle of a corpus; after its end comes another.

  Args:
    corpus: Passages, with a length.
    tokenizer: of the proposer.
    first: seeds that were drawn before.
    count: how many.
    hops: shares of 1, 2, ... hops asked for.
    seed: of the orders and of the hops.
    tokens: a longer document is cut.
    documents: without them, all seeds of a hop count are alike.
    name: their uids begin with it.

  Returns:
    Questions without answers; their text is `proposals.ask`.

  Raises:
    ValueError: the shares are none.
  """
  check(hops)
  shares, seeds, orders = np.array(hops) / sum(hops), [], {}
  for number in range(first, first + count):
    epoch, place = divmod(number, len(corpus))
    if epoch not in orders:
      orders = {epoch: np.random.default_rng([seed, epoch]).permutation(
          len(corpus))}
    asked = 1 + int(np.random.default_rng([seed, epoch, place]).choice(
        len(shares), p=shares))
    shown = _document(corpus[int(orders[epoch][place])], tokenizer, tokens)
    seeds.append(Question(
        f'{name}-{number}', proposals.ask(shown if documents else '', asked), (),
        asked, 'seeds'))
  return seeds


def check(hops: Sequence[float]) -> None:
  """Raises a ValueError for shares that nothing can be drawn by."""
  if not hops or min(hops) < 0 or sum(hops) <= 0:
    raise ValueError(
        'selfplay.hops needs shares of 1, 2, ... hops from 0 on, one of them '
        f'above 0, but is {tuple(hops)}.')


def _document(passage: Passage, tokenizer: Any, tokens: int) -> str:
  """A passage as a proposer reads it."""
  text = markup.neutralise(f'(Title: "{passage.title}") {passage.text}')
  ids = tokenizer.encode_data(text)
  return text if len(ids) <= tokens else tokenizer.decode(ids[:tokens])
