# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the cost of the searches of an existing training run."""

import pathlib

from searchrl.evaluation import costs
from searchrl.evaluation import figures
from searchrl.runtime import metrics


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
  found = costs.count(metrics.read(file))
  rows = costs.table(
      found, costs.Prices(options.thousand_queries, options.device_hour),
      options.devices)
  print(figures.table(rows, costs.COLUMNS))
  if found.tokens:
    print(f'{found.tokens:,} tokens were written, '
          f'{found.tokens / found.queries:.0f} a query.')
