# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes of the models that the library names. They need no download."""

import pathlib

from searchrl.models import weights

FOLDER = pathlib.Path(__file__).parents[1] / 'assets' / 'shapes'  # by hub id


def locate(path: str) -> str:
  """Returns a directory with a model's config.json, maybe without its weights.

  The library contains the config.json of each model that it names. If the cache
  of the hub has a config.json of the model, this is preferred. Any other model
  is located by `weights.locate`, which fetches it with its weights if
  necessary.

  Args:
    path: Hub id, or another name or path that `weights.locate` takes.

  Raises:
    FileNotFoundError, ValueError: See `weights.locate`.
  """
  import huggingface_hub  # slow to import
  shipped = FOLDER / path / 'config.json'
  if pathlib.Path(path).is_dir() or not shipped.is_file():
    return weights.locate(path)
  fetched = huggingface_hub.try_to_load_from_cache(path, 'config.json')
  file = fetched if isinstance(fetched, str) else shipped
  return str(pathlib.Path(file).parent)


def has_tokenizer(path: str) -> bool:
  """Returns whether a model's tokenizer can be read without a download.

  The result is also True for a hub id that the library does not name. If its
  tokenizer is missing, reading it then raises an error that names the model.

  Args:
    path: Path of a directory, or a hub id.
  """
  if pathlib.Path(path).is_dir():
    return (pathlib.Path(path) / 'tokenizer.json').is_file()
  if not (FOLDER / path / 'config.json').is_file():
    return True
  import huggingface_hub  # slow to import
  return isinstance(
      huggingface_hub.try_to_load_from_cache(path, 'tokenizer.json'), str)
