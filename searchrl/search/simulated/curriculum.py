# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Schedule of the noise of a simulated engine over the steps of a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Curriculum:
  """The probability that a query is answered with noisy documents.

    p(i) = start + (base^(i / steps) - 1) / (base - 1) (end - start)

  From step `steps` on, the probability is `end`. The noise grows where start
  is below end, falls where it is above, and is constant where both are equal.
  With both at 0, there is no noise.

  Source: ZeroSearch, arXiv:2505.04588, eq. 1, where base is 4.

  Attributes:
    start: Probability at step 0, p_s in the paper, in [0, 1].
    end: Probability at step `steps`, p_e in the paper, in [0, 1].
    base: Base of the exponential, b in the paper, above 0. The noise changes
      mostly late if it is above 1, mostly early if below 1, evenly if 1.
    steps: Number of steps of the run, m in the paper, at least 1.

  Raises:
    ValueError: A field is out of range.
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
        raise ValueError(
            f'search.options.curriculum.{name} must be {rule}, but '
            f'is {getattr(self, name)}.')

  def noise(self, step: int) -> float:
    """Returns the probability of noise, p, at a step counted from 0."""
    part = min(step, self.steps) / self.steps
    if self.base != 1:
      part = (self.base ** part - 1) / (self.base - 1)
    return self.start + part * (self.end - self.start)
