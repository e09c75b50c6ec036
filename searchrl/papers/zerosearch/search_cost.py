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
from searchrl.experiment import config_checks
from searchrl.runtime import metrics

COLUMNS = ('search by', 'queries', 'hours', 'devices', 'paid for queries',
           'paid for devices', 'in all')


@dataclasses.dataclass(frozen=True)
class Counts:
  """Queries, hours and tokens of a training run, from its metrics."""

  queries: int  # queries to the engine in training
  hours: float  # duration of all training steps
  writing_hours: float  # part of `hours` in which documents were written
  tokens: int  # tokens sampled for documents; 0: none or unknown


def run(config, workdir: str) -> None:
  """Prints the cost of the searches of a run and writes no files.

  Args:
    config: Config as in configs/search_cost.py.
    workdir: Directory of the job, which is not used.

  Raises:
    ValueError: The run has no searches, or the config is not legal.
    FileNotFoundError: The run does not exist or has no metrics file.
  """
  del workdir
  config_checks.check(config)
  options = config.cost
  file = pathlib.Path(options.run) / metrics.FILE
  if not options.run or not file.is_file():
    raise FileNotFoundError(
        'cost.run must be the folder of a training run, but '
        f'{options.run!r} has no {metrics.FILE}. Name for instance '
        'runs/zerosearch.')
  counts = count(metrics.read(file))
  print(figures.table(table(
      counts, thousand_queries=options.thousand_queries,
      device_hour=options.device_hour, devices=options.devices), COLUMNS))
  if counts.tokens:
    print(f'{counts.tokens:,} tokens were written, '
          f'{counts.tokens / counts.queries:.0f} a query.')


def count(steps: Sequence[Mapping[str, float]]) -> Counts:
  """Returns the totals of a training run over its steps.

  Args:
    steps: Lines of the run's metrics.jsonl. Those of evaluations do not count.

  Raises:
    ValueError: No line is for a training step with searches.
  """
  def total(name: str) -> float:
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


def table(counts: Counts, *, thousand_queries: float, device_hour: float,
          devices: Sequence[int]) -> list[dict[str, Any]]:
  """Returns the cost of a run's searches, as a table with one row per option.

  The first row is for a paid engine. The next rows are for a model that writes
  the documents, one row for each number of devices. The model keeps these
  devices for the whole run, as in the paper. If a model wrote documents in this
  run, there are further rows, which count only the hours in which it wrote.
  This is the cost if other jobs use the devices for the rest of the run.

  Args:
    counts: Queries and hours of the run.
    thousand_queries: Price of 1,000 queries to a paid engine.
    device_hour: Price of one device for one hour, in the same currency.
    devices: Numbers of devices on which the model might run.

  Returns:
    Rows {column: value}, whose keys are COLUMNS.
  """
  def row(by: str, hours: float = counts.hours, number: int = 0,
          queries: float = 0.0) -> dict[str, Any]:
    paid = hours * number * device_hour
    return dict(zip(COLUMNS, (by, counts.queries, hours, number, queries, paid,
                              queries + paid), strict=True))

  rows = [row('a paid engine',
              queries=counts.queries / 1000 * thousand_queries)]
  rows += [row('a model', number=number) for number in devices]
  if counts.tokens:
    rows += [row('a model, while it writes', counts.writing_hours, number)
             for number in devices]
  return rows
