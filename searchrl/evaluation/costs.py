# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the searches of a run cost, by a paid engine or by a model of one's own.

Source: ZeroSearch, arXiv:2505.04588, Table 8.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

COLUMNS = ('search by', 'queries', 'hours', 'devices', 'paid for queries',
           'paid for devices', 'in all')


@dataclasses.dataclass(frozen=True)
class Counts:
  """What a run has measured."""

  queries: int  # to the engine of training
  hours: float  # of all training steps
  writing_hours: float  # of these, those in which the documents were written
  tokens: int  # that were sampled for documents; 0: none, or not known


@dataclasses.dataclass(frozen=True)
class Prices:
  """In any one currency."""

  thousand_queries: float  # to an engine that is paid by the query
  device_hour: float


def count(steps: Sequence[Mapping[str, float]]) -> Counts:
  """The counts of a metrics.jsonl; its lines of evaluations count nothing.

  Raises:
    ValueError: no line is of a step with searches.
  """
  def total(name):
    return sum(line.get(name, 0.0) for line in steps)

  if not total('search/queries'):
    raise ValueError(
        'cost.run must have steps with searches, but its metrics.jsonl has '
        'none.')
  return Counts(
      queries=round(total('search/queries')),
      hours=total('timing_s/step') / 3600,
      writing_hours=total('simulated/secs') / 3600,
      tokens=round(total('simulated/tokens')))


def table(found: Counts, prices: Prices, devices: Sequence[int]
         ) -> list[dict[str, Any]]:
  """Rows of COLUMNS: the paid engine, then a model on so many devices.

  A model's devices are held as long as the run, as in the paper; where
  documents were written, a row also says what they cost if others have the
  devices in between.
  """
  def row(by, hours=found.hours, queries=0.0, count=0):
    paid = hours * count * prices.device_hour
    return dict(zip(COLUMNS, (by, found.queries, hours, count, queries, paid,
                              queries + paid), strict=True))

  rows = [row('a paid engine',
              queries=found.queries / 1000 * prices.thousand_queries)]
  rows += [row('a model', count=count) for count in devices]
  if found.writing_hours:
    rows += [row('a model, while it writes', found.writing_hours, count=count)
             for count in devices]
  return rows
