# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Range checks of options: each raises a ValueError or does nothing.

An error names the field, the rule and the value that was found.
"""


def at_least_0(**values: float) -> None:
  """Raises a ValueError on a negative value or NaN."""
  for field, value in values.items():
    if not value >= 0:
      raise ValueError(f'{field} must be 0 or more, but is {value}.')


def choice(field: str, found: str, choices: tuple[str, ...]) -> None:
  """Raises a ValueError on a name that is not one of `choices`."""
  if found not in choices:
    raise ValueError(
        f'{field} must be one of {", ".join(choices)}, but is {found!r}.')


def overlong(max_length: int, buffer: int) -> None:
  """Raises a ValueError unless 0 < buffer <= max_length."""
  if not 0 < buffer <= max_length:
    raise ValueError(
        f'buffer must lie in (0, max_length], (0, {max_length}], but is '
        f'{buffer}. Give the tokens over which the penalty grows.')


def clip(
    clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
  """Raises a ValueError on a range of ratios that does not contain 1."""
  if not (0 <= clip_low <= 1 and clip_high >= 0):
    raise ValueError(
        'clip_low must lie in [0, 1] and clip_high be 0 or more, but they are '
        f'{clip_low} and {clip_high}. Give distances below and above 1.')
  if dual_clip is not None and not dual_clip > 1:
    raise ValueError(
        f'dual_clip must be above 1, but is {dual_clip}. 3 is usual; None is '
        'no dual clip.')


def log_clip(clip_low: float, clip_high: float) -> None:
  """Raises a ValueError on a range of log ratios that does not contain 0."""
  if not (clip_low >= 0 and clip_high >= 0):
    raise ValueError(
        'clip_low and clip_high must be 0 nats or more, but are '
        f'{clip_low} and {clip_high}. Give distances below and above 0.')


def fractions(**values: float) -> None:
  """Raises a ValueError on a value outside [0, 1]."""
  for field, value in values.items():
    if not 0 <= value <= 1:
      raise ValueError(f'{field} must lie in [0, 1], but is {value}.')


def length(length: int | None) -> None:
  """Raises a ValueError on a length below 1; None is allowed."""
  if length is not None and not length >= 1:
    raise ValueError(f'length must be at least 1, but is {length}. Give the '
                     'most tokens that a policy may write, or None.')


def interval(low: float, high: float) -> None:
  """Raises a ValueError on an empty interval of weights."""
  if not 0 <= low < high:
    raise ValueError(
        f'low and high must satisfy 0 <= low < high, but are {low} and {high}.')
