# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""How much noise a simulated engine returns, over the steps of a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Curriculum:
  """The probability that a query is answered with noisy documents.

    p(i) = start + (base^(i / steps) - 1) / (base - 1) (end - start)

  and `end` from step `steps` on. Noise grows, falls (start above end) or stays
  (both equal; both 0: there is none).

  Source: ZeroSearch, arXiv:2505.04588, eq. 1, where base is 4.

  Attributes:
    start: p_s, of step 0, in [0, 1].
    end: p_e, likewise.
    base: b, above 0; above 1 noise changes late, below 1 early, at 1 evenly.
    steps: m, of the run; at least 1.

  Raises:
    ValueError: one of them is out of range.
  """

  start: float = 0.0
  end: float = 0.5
  base: float = 4.0
  steps: int = 1

  def __post_init__(self):
    for name, legal, rule in (
        ('start', 0 <= self.start <= 1, 'in [0, 1]'),
        ('end', 0 <= self.end <= 1, 'in [0, 1]'),
        ('base', 0 < self.base < float('inf'), 'above 0 and finite'),
        ('steps', self.steps >= 1, 'at least 1')):
      if not legal:
        raise ValueError(f'search.options.curriculum.{name} must be {rule}, but '
                         f'is {getattr(self, name)}.')

  def noise(self, step: int) -> float:
    """p of a step, counted from 0."""
    part = min(step, self.steps) / self.steps
    if self.base != 1:
      part = (self.base ** part - 1) / (self.base - 1)
    return self.start + part * (self.end - self.start)
