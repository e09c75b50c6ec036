# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Demonstrations of an agent that searches generated worlds and answers.

The demonstrations come from `world.teacher`, a scripted agent that knows the
world's facts. The agent's text is trained on; the text that it reads is not.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from searchrl.search import corpus as corpora
from searchrl.search import engines
from searchrl.texts import Segment
from searchrl.world import facts
from searchrl.world import teacher
from searchrl.world import text


def generate(
    count: int,
    dialogue,
    *,
    seed: int,
    a_world: int,
    mix: Sequence[float],
    sloppiness: float,
    eos: str,
) -> Iterator[list[Segment]]:
  """Yields demonstrations, world after world.

  Args:
    count: Number of demonstrations.
    dialogue: The protocol; see `agent.dialogue`.
    seed: Seed of the first world; each further world adds 1.
    a_world: Number of demonstrations per world.
    mix: Shares of questions of 1, 2, ... hops.
    sloppiness: Factor of the error rates. With 0 the agent makes no errors.
      With 1 it has the error rates of the training data of tiny_instruct.
    eos: Text of the token that ends a turn without an action.
  """
  habits = teacher.Habits(**{
      name: sloppiness * rate
      for name, rate in dataclasses.asdict(teacher.Habits()).items()})
  for number in range(-(-count // a_world)):
    rng = np.random.default_rng([seed + number, 5])
    world = facts.make(seed + number, sizes=facts.SMALL_SIZES, source='known')
    room = teacher.Classroom(world, text.stated(world), engines.make(
        'bm25', corpora.Corpus(tuple(text.passages(world)))), eos)
    chains = [facts.chains(world, hops, rng)
              for hops in range(1, len(mix) + 1)]
    for _ in range(min(a_world, count - number * a_world)):
      hops = rng.choice(len(mix), p=np.array(mix) / sum(mix))
      pieces = teacher.demonstration(
          room, next(chains[hops]), rng, dialogue, habits=habits)
      yield [Segment(piece.text, piece.weight == 1) for piece in pieces]
