# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Cost of the searches of a run, with a paid engine or with one's own model.

Source: ZeroSearch, arXiv:2505.04588, Table 8.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

from searchrl.evaluation import figures
from searchrl.runtime import metrics

COLUMNS = ('search by', 'queries', 'hours', 'devices', 'paid for queries',
           'paid for devices', 'in all')


@dataclasses.dataclass(frozen=True)
class Counts:
  """Numbers that a run has measured."""

  queries: int  # queries to the engine in training
  hours: float  # duration of all training steps
  writing_hours: float  # part of `hours` in which documents were written
  tokens: int  # tokens sampled for documents; 0: none or unknown


@dataclasses.dataclass(frozen=True)
class Prices:
  """Prices, all in the same currency."""

  thousand_queries: float  # price of 1000 queries to a paid engine
  device_hour: float  # price of one device for an hour


def count(steps: Sequence[Mapping[str, float]]) -> Counts:
  """Returns the counts of the lines of a metrics.jsonl.

  Lines of evaluations do not count.

  Raises:
    ValueError: No line is for a training step with searches.
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
  """Returns rows with COLUMNS: a paid engine, then a model per device count.

  A model keeps its devices for the whole run, as in the paper. If a model wrote
  documents in the run, further rows give the cost for the time of writing
  alone, when others use the devices in between.
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


def run(config, workdir: str) -> None:
  """Prints the cost of the searches of a run and writes no files.

  Args:
    config: Config as in configs/search_cost.py.
    workdir: Directory of the job, which is not used.

  Raises:
    ValueError: The run has no searches, a price is negative, or a number of
      devices is below 1.
    FileNotFoundError: The run does not exist or has no metrics file.
  """
  del workdir
  options = config.cost
  for name in ('thousand_queries', 'device_hour'):
    if options[name] < 0:
      raise ValueError(
          f'cost.{name} must be at least 0, but is {options[name]}.')
  if not options.devices or min(options.devices) < 1:
    raise ValueError('cost.devices must be numbers of at least 1, but are '
                     f'{tuple(options.devices)}.')
  file = pathlib.Path(options.run) / metrics.FILE
  if not options.run or not file.is_file():
    raise FileNotFoundError(
        'cost.run must be the folder of a training run, but '
        f'{options.run!r} has no {metrics.FILE}. Name for instance '
        'runs/zerosearch.')
  found = count(metrics.read(file))
  rows = table(
      found, Prices(options.thousand_queries, options.device_hour),
      options.devices)
  print(figures.table(rows, COLUMNS))
  if found.tokens:
    print(f'{found.tokens:,} tokens were written, '
          f'{found.tokens / found.queries:.0f} a query.')
