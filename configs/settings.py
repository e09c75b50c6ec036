# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The sizes of a config, and the settings of papers for those with a model.

  python -m searchrl.main --config=configs/grpo.py:study/qwen2.5-7b

The values of a setting, each with the sentence that it comes from, are in
searchrl/papers. docs/settings.md compares them.

Result: not yet measured for any setting.
"""

import difflib

import ml_collections

from searchrl.papers import settings
from searchrl.papers.paper_models import MODELS

# The laptop run with larger updates: learning rate and updates per batch.
# Recipes that allow one update per batch keep that. The values were fixed
# before anything was measured.
STRESS = {'stress_1': (2e-4, 2), 'stress_2': (4e-4, 4), 'stress_3': (6e-4, 4)}
_WITHOUT_MODEL = ('laptop', 'smoke', *STRESS)  # sizes that name no model


def apply(config: ml_collections.ConfigDict, size: str, default: str) -> bool:
  """Gives a config the values of a setting, if its size names a model.

  configs/common.py applies Search-R1's setting first. A recipe calls this
  function at its end with the setting that it prefers. The algorithm, a
  group_size of 1 and a single update per batch belong to the recipe. A setting
  reads them, so that they must be set before.

  Args:
    config: ml_collections.ConfigDict of a recipe, with the laptop's values.
    size: Name of the size: 'laptop', 'smoke', one of STRESS, a model, or
      SETTING/MODEL.
    default: Name of the setting for a size that is only a model.

  Returns:
    True if the size names a model.

  Raises:
    ValueError: There is no such size.
  """
  if size in _WITHOUT_MODEL:
    return False
  setting, model = parse(size, default)
  settings.apply(config, setting, MODELS[model])
  return True


def is_laptop(size: str) -> bool:
  """Returns whether a size is a laptop run, with larger updates or without."""
  return size == 'laptop' or size in STRESS


def parse(size: str, default: str) -> tuple[str, str]:
  """Returns the setting and the model of a size that names a model."""
  setting, slash, model = size.rpartition('/')
  setting = setting if slash else default
  if setting in settings.SETTINGS and model in MODELS:
    return setting, model
  near = _nearest(model, [*MODELS])
  if size in settings.SETTINGS:
    why, near = 'a setting alone', [f'{size}/qwen2.5-7b-instruct']
  elif not slash:
    why, near = 'none of them', _nearest(
        model, [*_WITHOUT_MODEL, *MODELS])
  elif setting in settings.SETTINGS:
    why, near = f'no model {model!r}', [f'{setting}/{name}' for name in near]
  else:
    why, near = f'no setting {setting!r}', [
        f'{name}/{near[0]}' for name in _nearest(setting, [*settings.SETTINGS])]
  raise ValueError(
      f"size must be {', '.join(map(repr, _WITHOUT_MODEL))}, a model, or "
      f'SETTING/MODEL, but is {size!r}, {why}. The nearest: '
      f'{", ".join(near)}; docs/settings.md lists all. Write for instance '
      '--config=configs/dspo.py:smoke.')


def _nearest(name: str, known: list[str]) -> list[str]:
  return difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.0)


