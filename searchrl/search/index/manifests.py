# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""manifest.json of an index's folder: facts, and checksums of all its files.

It is written last, so that a folder without it is incomplete. Checksums
(CRC-32, which detects every single flipped bit) protect against damage, not
against forgery. They are compared when an index is opened. Every file is then
read once, at the speed of the disk, or at some 4 GB per second and core if it
is in the system's cache (an AMD EPYC of family 25).
"""

from collections.abc import Mapping
from concurrent import futures
import json
import pathlib
from typing import Any
import zlib

from searchrl.runtime import atomic_files

_NAME = 'manifest.json'
_BLOCK = 2**28  # bytes per checksum
_READ = 2**20  # bytes that are read at once
_THREADS = 8  # number of threads that read


def write(folder: pathlib.Path, facts: Mapping[str, Any]) -> dict[str, Any]:
  """Writes and returns the manifest of a folder whose files are complete."""
  files = {str(file.relative_to(folder)): _checksums(file)
           for file in sorted(folder.rglob('*')) if file.is_file()}
  manifest = {**facts, 'bytes': {
      name: (folder / name).stat().st_size for name in files}, 'crc32': files}
  rewrite(folder, manifest)
  return manifest


def rewrite(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Replaces a folder's manifest by `manifest`, which lists the same files."""
  atomic_files.write_json(folder / _NAME, {**manifest, 'seal': seal(manifest)})


def read(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the manifest of an index whose files exist in their full sizes.

  Raises:
    FileNotFoundError: There is no manifest.
    ValueError: The manifest is damaged, or a file is missing or truncated.
  """
  if not (folder / _NAME).is_file():
    raise FileNotFoundError(
        f'an index must hold {_NAME}, but {folder} does not. Build it with '
        f"--config.build=\"('{folder.name}',)\" of configs/build_index.py.")
  try:
    manifest = json.loads((folder / _NAME).read_text())
    written = manifest.pop('seal', None)
    sizes, _ = manifest['bytes'].items(), manifest['crc32'].items()
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
        f'{folder / _NAME} must be whole, and of this version, but: '
        f'{type(error).__name__} {error}. Build it again.') from error
  if written != seal(manifest):
    raise ValueError(f'{folder / _NAME} must be as it was written, but is '
                     'damaged. Build it again.')
  for name, size in sizes:
    path = folder / name
    if not path.is_file() or path.stat().st_size != size:
      raise ValueError(f'{path} must have {size} bytes, but is missing or cut. '
                       'Build it again.')
  return manifest


def check(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Reads all files. Raises a ValueError if one differs from its checksum."""
  for name, expected in manifest['crc32'].items():
    if _checksums(folder / name) != expected:
      raise ValueError(f'{folder / name} must be as it was written, but is '
                       'damaged. Build it again, and check the disk.')


def _checksums(file: pathlib.Path) -> list[int]:
  """Returns the checksum of each block of a file."""
  starts = range(0, file.stat().st_size, _BLOCK)
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return [*pool.map(lambda start: _checksum(file, start), starts)]


def _checksum(file: pathlib.Path, start: int) -> int:
  checksum = 0
  with file.open('rb', buffering=0) as opened:
    opened.seek(start)
    for _ in range(0, _BLOCK, _READ):
      checksum = zlib.crc32(opened.read(_READ), checksum)
  return checksum


def seal(manifest: Mapping[str, Any]) -> int:
  """Returns a manifest's checksum, which is later added as its field 'seal'."""
  return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
