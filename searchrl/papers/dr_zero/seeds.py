# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Seeds: prompts of a proposer, each with a random document and hop count.

Source: Dr. Zero, arXiv:2601.07055. Its code shuffles Wikipedia, cuts each
passage to 256 tokens and draws the hops at 4:3:2:1. Here the random seed also
decides the hops, so that the same seeds can be drawn again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from searchrl.agent import markup
from searchrl.agent import tokenizer as tokenizers
from searchrl.papers.dr_zero import proposals
from searchrl.trajectory import Passage, Question


def draw(corpus: Any, tokenizer: Any, *, first: int, count: int,
         hops: Sequence[float], seed: int, tokens: int = 256,
         documents: bool = True, name: str = 'seed') -> list[Question]:
  """Draws documents in random order, for which a proposer writes questions.

  Such a document is called a seed. After the last passage of the corpus, its
  order is drawn anew.

  Args:
    corpus: Passages, as an indexable object with a length.
    tokenizer: Tokenizer of the proposer.
    first: Number of seeds that were drawn before.
    count: Number of seeds to draw.
    hops: Shares of the seeds whose questions shall have 1, 2, ... hops.
    seed: Seed of the random numbers.
    tokens: Maximum number of tokens of a document. Longer ones are cut.
    documents: If False, the proposer is not shown the documents. Then all seeds
      with the same number of hops have the same text.
    name: Prefix of the uids.

  Returns:
    A question for each seed, without answers. Its text is the proposer's task,
    as `proposals.ask` writes it.

  Raises:
    ValueError: The shares are empty or negative, or all are 0.
  """
  check(hops)
  shares, seeds, orders = np.array(hops) / sum(hops), [], {}
  for number in range(first, first + count):
    epoch, place = divmod(number, len(corpus))
    if epoch not in orders:
      orders = {epoch: np.random.default_rng([seed, epoch]).permutation(
          len(corpus))}
    hops_asked = 1 + int(np.random.default_rng([seed, epoch, place]).choice(
        len(shares), p=shares))
    shown = _document(corpus[int(orders[epoch][place])], tokenizer, tokens)
    seeds.append(Question(
        f'{name}-{number}',
        proposals.ask(shown if documents else '', hops_asked), (), hops_asked,
        'seeds'))
  return seeds


def check(hops: Sequence[float]) -> None:
  """Raises a ValueError if shares of hops are empty, negative or all 0."""
  if not hops or min(hops) < 0 or sum(hops) <= 0:
    raise ValueError(
        'selfplay.hops must have the shares of questions with 1, 2, ... hops, '
        f'none below 0 and not all 0, but is {tuple(hops)}. Write for '
        'instance (1, 1).')


def _document(passage: Passage, tokenizer: Any, tokens: int) -> str:
  """Returns a passage as a proposer reads it, cut to a number of tokens."""
  return tokenizers.cut(tokenizer, markup.neutralise(
      f'(Title: "{passage.title}") {passage.text}'), tokens)
