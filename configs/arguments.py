# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The text after a config's colon: KEY=VALUE pairs, separated by commas.

  python -m searchrl.main --config=configs/grpo.py:size=smoke
  python -m searchrl.main \
      --config=configs/grpo.py:model=qwen2.5-7b,setting=study

Most configs take a size or a model, and with a model a setting of a paper. Some
take keys of their own, which their get_config names. A value without its key is
short for the pair, and a slash for the comma: `smoke`, `study/qwen2.5-7b`.

Result: docs/settings.md lists sizes, models and settings.
"""

from collections.abc import Callable
import dataclasses
import difflib
import pathlib

import ml_collections

from searchrl.papers import settings
from searchrl.papers.known_models import MODELS

# Laptop runs with updates of growing size: learning rate and updates per batch.
# The first has common.py's values. Recipes that allow only one update per
# batch keep that. The values were fixed before anything was measured.
STRESS = {'stress_1': (2e-4, 2), 'stress_2': (4e-4, 4), 'stress_3': (6e-4, 4)}
SIZES = ('laptop', 'smoke', *STRESS)


@dataclasses.dataclass(frozen=True)
class Arguments:
  """Values that were given after a config's colon.

  Attributes:
    size: One of SIZES, or '' if there is a model.
    model: Name of a model, or ''.
    setting: Name of a setting for the model; '' is the recipe's own.
    others: Values of the other keys, '' for those that were not given.
  """

  size: str
  model: str
  setting: str
  others: dict[str, str]

  @property
  def is_laptop(self) -> bool:
    """Whether it is a laptop run, with larger updates or without."""
    return self.size == 'laptop' or self.size in STRESS

  @property
  def base(self) -> str:
    """The text for a config that takes size, model and setting alone."""
    return '/'.join(filter(None, (self.size, self.setting, self.model)))


def parse(text: str, *, size: tuple[str, ...] = SIZES,
          model: tuple[str, ...] = tuple(MODELS),
          setting: tuple[str, ...] = tuple(settings.SETTINGS),
          laptop_only: tuple[str, ...] = (), **others: tuple[str, ...]
         ) -> Arguments:
  """Reads the text after a config's colon.

  Args:
    text: Pairs KEY=VALUE, or values alone, which belong to one key each.
    size: Legal sizes.
    model: Legal names of models; (): the config takes none.
    setting: Legal names of settings; (): the config takes none.
    laptop_only: Keys of others that a model cannot have.
    **others: Legal values of each further key of the config.

  Raises:
    ValueError: A key or value is unknown, given twice, or does not belong to
      the others.
  """
  legal = {key: values for key, values in dict(
      size=size, model=model, setting=setting, **others).items() if values}
  given: dict[str, str] = {}
  for key, value in _pairs(text, legal):
    if key in given:
      raise _refusal(legal, text, f'{key} is given twice', [f'{key}={value}'])
    given[key] = value
  if 'model' in given and (both := [
      key for key in ('size', *laptop_only) if key in given]):
    raise _refusal(legal, text, f'{both[0]} does not go with a model',
                   [f'model={given["model"]}'])
  if 'setting' in given and 'model' not in given:
    raise _refusal(legal, text, 'a setting needs a model',
                   [f'{given["setting"]}/qwen2.5-7b-instruct'])
  return Arguments(
      size=given.get('size', '' if 'model' in given else 'laptop'),
      model=given.get('model', ''), setting=given.get('setting', ''),
      others={key: given.get(key, '') for key in others})


def _pairs(text: str, legal: dict[str, tuple[str, ...]]
          ) -> list[tuple[str, str]]:
  """Returns the pairs of a text, with the keys of values that stand alone."""
  pairs = []
  for part in text.split(',') if text else ():
    key, equals, value = part.partition('=')
    if equals and key not in legal:
      raise _refusal(legal, text, f'there is no key {key!r}',
                     _nearest(key, [*legal]))
    for value in [value] if equals else part.split('/'):
      keys = [key] if equals else [*legal]
      matches = [key for key in keys if value in legal[key]]
      if not matches:
        near = _nearest(value, [name for key in keys for name in legal[key]])
        what = f'{key} cannot be {value!r}' if equals else (
            f'{value!r} is no value of these')
        raise _refusal({key: legal[key] for key in keys}, text, what, near)
      pairs.append((matches[0], value))
  return pairs


def _refusal(legal: dict[str, tuple[str, ...]], text: str, problem: str,
             near: list[str]) -> ValueError:
  """Returns the error that names the legal values and the nearest ones."""
  shown = legal | ({'model': ('NAME',)} if {*legal} > {'model'} else {})
  choices = ', '.join(f'{key}={"|".join(shown[key])}' for key in shown)
  return ValueError(
      f"The text after the config's colon must be pairs of {choices}, but is "
      f'{text!r}: {problem}. The nearest: {", ".join(near)}; docs/settings.md '
      'lists all.')


def _nearest(name: str, known: list[str]) -> list[str]:
  return difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.0)


def with_run(text: str, make: Callable[[str], ml_collections.ConfigDict]
            ) -> tuple[str, ml_collections.ConfigDict]:
  """Returns the run that a text names, and the config for the other texts.

  Args:
    text: Text after the colon: the folder of a run, or its address in an object
      store, perhaps with 'run=' before it and a step as in runs/mine@20; or a
      text that `make` takes.
    make: Function that returns the config of a text. If the text names a run,
      it is called with ''.

  Returns:
    The run, or '' if the text names none, and the config.

  Raises:
    ValueError: The text is neither of them.
  """
  run = text.removeprefix('run=')
  if '://' in run or run and any(
      (pathlib.Path(folder) / 'config.json').is_file()
      for folder in (run, run.rpartition('@')[0] or run)):
    return run, make('')
  try:
    return '', make(text)
  except ValueError as error:
    parent = pathlib.Path(run).parent
    others = [str(file.parent) for file in parent.glob('*/config.json')
              if '/' in run]
    way_out = (f'The nearest: {", ".join(_nearest(run, others))}.' if others
               else 'Train it first, or go to the folder in which runs/ is.'
               if parent.name == 'runs' else f'Without a run: {error}')
    raise ValueError('run must be the folder of a run, with its config.json, '
                     f'but {run!r} is none. {way_out}') from error


def apply_setting(config: ml_collections.ConfigDict, text: str, default: str
                 ) -> bool:
  """Gives a config the values of a paper's setting, if the text has a model.

  configs/common.py calls this first, with Search-R1's setting as the default. A
  recipe calls it again at its end, with the default that it prefers. A setting
  that the text names is applied in both calls. The algorithm, a
  group_size of 1 and a single update per batch belong to the recipe. A setting
  reads them, so that they must be set before.

  Args:
    config: Config of a recipe, with the laptop's values.
    text: Text after the config's colon.
    default: Name of the setting for a model alone.

  Returns:
    True if the text has a model.
  """
  arguments = parse(text)
  if arguments.model:
    settings.apply(
        config, arguments.setting or default, MODELS[arguments.model])
  return bool(arguments.model)
