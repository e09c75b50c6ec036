# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shapes of the models that the library names, which need no download."""

import pathlib

from searchrl.models import weights

FOLDER = pathlib.Path(__file__).parents[1] / 'assets' / 'shapes'  # by hub id


def locate(path: str) -> str:
  """Returns a directory with a model's config.json; weights are not needed.

  Args:
    path: Path of a directory, or a hub id. The config.json of models that the
      library names are included in it, so that no download is needed.
  """
  import huggingface_hub  # slow to import
  shipped = FOLDER / path / 'config.json'
  if pathlib.Path(path).is_dir() or not shipped.is_file():
    return weights.locate(path)
  fetched = huggingface_hub.try_to_load_from_cache(path, 'config.json')
  file = fetched if isinstance(fetched, str) else shipped
  return str(pathlib.Path(file).parent)


def has_tokenizer(path: str) -> bool:
  """Returns whether a model's tokenizer is on this machine.

  A model that the library does not name counts, so that an error names it where
  it is read.
  """
  if pathlib.Path(path).is_dir():
    return (pathlib.Path(path) / 'tokenizer.json').is_file()
  if not (FOLDER / path / 'config.json').is_file():
    return True
  import huggingface_hub  # slow to import
  return isinstance(
      huggingface_hub.try_to_load_from_cache(path, 'tokenizer.json'), str)
