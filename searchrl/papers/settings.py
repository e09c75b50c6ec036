# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Settings of the papers: values of config fields that each paper fixes.

  python -m searchrl.main \
      --config=configs/grpo.py:model=qwen2.5-7b,setting=study

A setting is a table in PAPER/PAPER.toml. It applies to every model and fixes
the values that a paper or its published scripts fix: batch, group, learning
rates, warm-up, steps, KL, lengths, turns, engine, dialogue and reward. The
algorithm stays that of the recipe. A setting has the keys

  about, differs   its description, and its differences from the paper
  base             the setting whose values are applied before its own values
  plays_base       true: the reward uses a frozen solver with the base's values
  ours             values of config fields that we have chosen
  set              one or several rows for each config field

A row has the keys

  value            the value of the field, or instead of it
  share_of_steps   for a warm-up: its share of the steps, from which its number
                   of updates is computed
  source           the place in the paper or in its authors' scripts
  sentence, note   the words of that place, and our note on them
  stated           the sentence's numbers, if the value is computed from them
  ours             our reason, if the value is not from the paper
  where            conditions; see `rows_for`. If the conditions of several rows
                   of a field hold, the last row counts
"""

from collections.abc import Mapping
import dataclasses
import functools
import operator
import pathlib
import tomllib
from typing import Any

from searchrl.papers.known_models import Model
from searchrl.runtime import config_fields


@dataclasses.dataclass(frozen=True)
class Row:
  """A value that a setting gives to a config field, and its source in a paper.

  The attributes are the name of the field, and the keys of a row that the
  module's docstring explains.
  """

  field: str
  value: Any = None
  share_of_steps: float = 0.0
  source: str = ''
  sentence: str = ''
  note: str = ''
  stated: tuple[float, ...] | None = None
  ours: str = ''
  where: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Setting:
  """A named set of config values that a paper or its published scripts fix.

  The attributes are the keys of a setting in the module's docstring. `rows` has
  the values under the keys `ours` and `set`.
  """

  about: str
  rows: tuple[Row, ...]
  base: str = ''
  differs: str = ''
  plays_base: bool = False


def lineage(name: str) -> list[str]:
  """Returns the names of a setting and of all settings that it builds on.

  They are in the order in which they are applied: the setting itself is last.
  """
  return [*(lineage(_ALL[name].base) if _ALL[name].base else ()), name]


def rows_for(name: str, model: Model, algorithm: str, grouped: bool
            ) -> list[Row]:
  """Returns the rows of a setting whose conditions all hold.

  The rows of the setting that it builds on are not included. A condition has
  the name 'algorithm', 'grouped', 'model', 'billions_from', 'billions_below',
  'chat' or 'tools'.

  Args:
    name: Name of the setting.
    model: Facts about the model.
    algorithm: Name of the recipe's algorithm.
    grouped: Whether a question has several samples.
  """
  conditions = {
      'algorithm': lambda names: algorithm in names,
      'grouped': lambda wanted: grouped == wanted,  # several samples a question
      'model': model.hub_id.startswith,
      'billions_from': lambda least: model.billions >= least,
      'billions_below': lambda limit: model.billions < limit,
      'chat': lambda wanted: model.chat == wanted,
      'tools': lambda wanted: model.tools == wanted}
  return [row for row in _ALL[name].rows if all(
      conditions[key](value) for key, value in row.where.items())]


def apply(config, name: str, model: Model) -> None:
  """Changes a config: gives it the values of a setting and the model's path.

  Some values depend on the recipe's algorithm, and on whether it has a
  group_size of 1 or a single update per batch. The config must have these
  before the call.

  Args:
    config: Config of a recipe.
    name: Name of the setting, a key of SETTINGS.
    model: Facts about the model.
  """
  algorithm = config.algorithm.name.rpartition(':')[2]
  grouped = config.rollout.group_size > 1
  one_update = config.learner.minibatches == 1
  config.model.path = model.hub_id
  for ancestor in lineage(name):
    if _ALL[ancestor].plays_base:
      config.solver = dict(
          path=model.hub_id, run='', dialogue=config.dialogue,
          budgets=config.rollout.budgets.to_dict(), temperature=1.0)
    rows = rows_for(ancestor, model, algorithm, grouped)
    for row in sorted(rows, key=lambda row: bool(row.share_of_steps)):
      if not one_update or row.field != 'learner.minibatches':
        _set(config, row)


def follow_steps(config, name: str, model: Model) -> None:
  """Changes a config whose number of steps has changed since `apply`.

  Each warm-up of which the setting itself has a share gets this share of the
  steps. The arguments are those of `apply`.
  """
  for row in rows_for(name, model, config.algorithm.name.rpartition(':')[2],
                      config.rollout.group_size > 1):
    if row.share_of_steps:
      _set(config, row)


def _set(config, row: Row) -> None:
  """Sets the field of a row, unless it is one that the algorithm lacks."""
  *groups, field = row.field.split('.')
  parent = functools.reduce(operator.getitem, groups, config)
  if groups != ['algorithm'] or field in parent:
    parent[field] = (_updates(config, row.share_of_steps)
                     if row.share_of_steps else row.value)


def _updates(config, share: float) -> int:
  """Returns the number of updates in a share of the steps of a run.

  The steps in this share are rounded down to a whole number. A step has
  `learner.minibatches` updates.
  """
  steps = int(round(share * config.train.num_steps, 6))
  return steps * config.learner.minibatches


def _with_tuples(value: Any) -> Any:
  """Returns a value with tuples in place of lists, as in configs."""
  if isinstance(value, dict):
    return {key: _with_tuples(child) for key, child in value.items()}
  return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _read(table: dict[str, Any]) -> Setting:
  facts = {key: value for key, value in table.items()
           if key not in ('ours', 'set')}
  rows = [Row(field, _with_tuples(value), ours='ours')
          for field, value in config_fields.leaves(table.get('ours', {}))]
  rows += [Row(field, **_with_tuples(row))
           for field, cases in config_fields.leaves(table.get('set', {}))
           for row in cases]
  return Setting(rows=tuple(rows), **facts)


def _tables(file: pathlib.Path) -> dict[str, Any]:
  """Returns the tables of a TOML file by name: settings, paper and prompts."""
  return tomllib.loads(file.read_text('utf-8'))


_HERE = pathlib.Path(__file__).parent
PAPERS = {  # folder's name -> its tables
    file.stem: _tables(file) for file in sorted(_HERE.glob('*/*.toml'))
    if file.stem == file.parent.name}
SETTINGS = {  # name -> setting
    name: _read(table) for tables in PAPERS.values()
    for name, table in tables.items() if name not in ('paper', 'prompts')}
_ALL = SETTINGS | {name: _read(table)
                   for name, table in _tables(_HERE / 'shared.toml').items()}
