# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Range checks of options: each raises a ValueError or does nothing.

An error names the field, the rule and the value that was found.
"""


def require(is_legal: bool, message: str) -> None:
  """Raises a ValueError with a message unless an option is legal."""
  if not is_legal:
    raise ValueError(message)


def at_least_0(**values: float) -> None:
  """Raises a ValueError if a value is negative or NaN."""
  for field, value in values.items():
    require(value >= 0, f'{field} must be 0 or more, but is {value}.')


def fractions(**values: float) -> None:
  """Raises a ValueError if a value is outside [0, 1]."""
  for field, value in values.items():
    require(0 <= value <= 1, f'{field} must lie in [0, 1], but is {value}.')


def choice(field: str, value: str, choices: tuple[str, ...]) -> None:
  """Raises a ValueError if `value` is not one of `choices`.

  The error names the `field`.
  """
  require(value in choices, f'{field} must be one of {", ".join(choices)}, but '
          f'is {value!r}.')


def overlong(max_length: int, buffer: int) -> None:
  """Raises a ValueError unless 0 < buffer <= max_length."""
  require(0 < buffer <= max_length,
          f'buffer must lie in (0, max_length], (0, {max_length}], but is '
          f'{buffer}. Give the tokens over which the penalty grows.')


def clip(clip_low: float, clip_high: float, dual_clip: float | None = None
        ) -> None:
  """Raises a ValueError if options that clip ratios are out of their ranges."""
  require(0 <= clip_low <= 1 and clip_high >= 0,
          'clip_low must lie in [0, 1] and clip_high be 0 or more, but they '
          f'are {clip_low} and {clip_high}. Give distances below and above 1.')
  require(dual_clip is None or dual_clip > 1,
          f'dual_clip must be above 1, but is {dual_clip}. 3 is usual; None is '
          'no dual clip.')


def log_clip(clip_low: float, clip_high: float) -> None:
  """Raises a ValueError if options that clip log ratios are below 0."""
  require(clip_low >= 0 and clip_high >= 0,
          'clip_low and clip_high must be 0 nats or more, but are '
          f'{clip_low} and {clip_high}. Give distances below and above 0.')


def interval(low: float, high: float) -> None:
  """Raises a ValueError unless 0 <= low < high.

  They are the smallest and the largest importance weight.
  """
  require(0 <= low < high, 'low and high must satisfy 0 <= low < high, but are '
          f'{low} and {high}.')
