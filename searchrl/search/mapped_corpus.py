# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A memory-mapped corpus: a jsonl file of any size, with no passage in memory.

The first opening reads and checks the whole file and writes, beside it, the
offset at which each line starts (8 bytes per passage). Later openings only map
both files. A passage is parsed when it is accessed.
"""

import array
from collections.abc import Iterator, Sequence
import hashlib
import itertools
import json
import mmap
import pathlib
from typing import Any

from jaxtyping import Int
import numpy as np

from searchrl.runtime import atomic_files
from searchrl.search import corpus as corpora
from searchrl.trajectory import Passage

IN_MEMORY_BYTES = 256 * 2**20  # the largest file that `load` reads into memory
_FORMAT = 3  # increased whenever a scan checks more


class MappedCorpus:
  """A corpus on disk, which engines use like a `corpus.Corpus`.

  Attributes:
    digest: SHA-256, in hex, of the file that `corpus.write` would write.
    ids_are_positions: True if the ids are '0', '1', '2', ... in order.
  """

  def __init__(self, path: pathlib.Path, starts: Int[np.ndarray, 'N'],
               digest: str, ids_are_positions: bool):
    self.path, self.digest = path, digest
    self.ids_are_positions = ids_are_positions
    self._starts = starts
    with path.open('rb') as file:
      self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, i: int) -> Passage:
    if not -len(self) <= i < len(self):
      raise IndexError(f'a passage must lie in [0, {len(self)}), but is {i}.')
    start = int(self._starts[i])
    end = self._bytes.find(b'\n', start)
    line = self._bytes[start:end if end >= 0 else None]
    return corpora.parse(line, f'passage {i} of {self.path}')

  def __iter__(self) -> Iterator[Passage]:
    return (self[i] for i in range(len(self)))

  @property
  def texts(self) -> Sequence[str]:
    """Title, line break and text of each passage, read when it is accessed."""
    return _Texts(self)


AnyCorpus = corpora.Corpus | MappedCorpus


class _Texts(Sequence[str]):
  """The texts of a corpus by position. Each is read when it is accessed."""

  def __init__(self, corpus: MappedCorpus):
    self._corpus = corpus

  def __len__(self) -> int:
    return len(self._corpus)

  def __getitem__(self, i: Any) -> Any:
    if isinstance(i, slice):
      return [self[j] for j in range(*i.indices(len(self)))]
    return corpora.text_of(self._corpus[i])


def load(path: str | pathlib.Path) -> corpora.Corpus | MappedCorpus:
  """Loads a corpus file: into memory up to `IN_MEMORY_BYTES`, mapped above.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: The file is not a valid corpus; see `corpus.read` and `open_`.
  """
  path = corpora.locate(path)
  is_large = path.stat().st_size > IN_MEMORY_BYTES
  return open_(path) if is_large else corpora.read(path)


def open_(path: str | pathlib.Path) -> MappedCorpus:
  """Maps an uncompressed jsonl file; scans it if it is new or has changed.

  The offsets are written to <path>.starts.npy and <path>.starts.json.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: A line is not a passage, a title has more than one line, an id
      occurs twice, the file has no passage or is compressed, or the offsets
      cannot be written.
  """
  path = corpora.locate(path)
  if path.suffix == '.gz':
    raise ValueError(
        f'a corpus that is mapped must be a plain file, but {path} is '
        f'compressed, and too large to be read into memory. Run: gunzip -k '
        f'{path}')
  facts = _read_facts(path) or _scan(path)
  starts = np.load(_beside(path, 'npy'), mmap_mode='r')
  return MappedCorpus(path, starts, facts['digest'], facts['ids_are_positions'])


def _beside(path: pathlib.Path, kind: str) -> pathlib.Path:
  return path.with_name(f'{path.name}.starts.{kind}')


def _state(path: pathlib.Path) -> dict[str, int]:
  """Returns the format of a scan, and the file's size and time of change."""
  stat = path.stat()
  return {'format': _FORMAT, 'bytes': stat.st_size,
          'mtime_ns': stat.st_mtime_ns}


def _read_facts(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns the result of an earlier scan; None if absent, damaged or stale."""
  try:
    facts = json.loads(_beside(path, 'json').read_text())
    shape = np.load(_beside(path, 'npy'), mmap_mode='r').shape
    fits = facts['state'] == _state(path) and shape == (facts['count'],)
    return facts if fits else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _scan(path: pathlib.Path) -> dict[str, Any]:
  """Reads and checks every line, writes the offsets, and returns the facts.

  The facts are the content of <path>.starts.json. A scan takes 16 bytes of
  memory per passage: its offset and a hash of its id.
  """
  state, sha = _state(path), hashlib.sha256()
  offsets, hashes = array.array('q'), array.array('q')
  ids_are_positions = True
  with path.open('rb') as file:
    for _, start, passage in corpora.parse_lines(file, path):
      sha.update(corpora.format_line(passage))
      ids_are_positions &= passage.id == str(len(offsets))
      offsets.append(start)
      hashes.append(_hash(passage.id))
  starts = np.frombuffer(offsets, np.int64)
  _check_unique(path, starts, np.frombuffer(hashes, np.int64))
  facts = {'state': state, 'count': len(starts), 'digest': sha.hexdigest(),
           'ids_are_positions': ids_are_positions}
  _publish(path, starts, facts)
  return facts


def _hash(uid: str) -> int:
  data = hashlib.blake2b(uid.encode('utf-8', 'surrogatepass'), digest_size=8)
  return int.from_bytes(data.digest(), 'little', signed=True)


def _check_unique(path: pathlib.Path, starts: Int[np.ndarray, 'N'],
                  hashes: Int[np.ndarray, 'N']) -> None:
  """Raises a ValueError if an id occurs twice; `hashes` are the ids' hashes."""
  order = np.argsort(hashes, kind='stable')
  ranked = hashes[order]
  corpus = MappedCorpus(path, starts, '', False)  # ids may share hashes
  for place in np.flatnonzero(ranked[1:] == ranked[:-1]):
    first, second = order[place:place + 2]
    if corpus[first].id == corpus[second].id:
      raise corpora.repeated_id(
          path, corpus[second].id, _line(path, starts[first]),
          _line(path, starts[second]))


def _line(path: pathlib.Path, start: int) -> int:
  """Returns the number, from 1, of the line that starts at a byte offset."""
  with path.open('rb') as file:
    offsets = itertools.accumulate(map(len, file), initial=0)
    return next(number for number, offset in enumerate(offsets, 1)
                if offset == start)


def _publish(path: pathlib.Path, starts: Int[np.ndarray, 'N'],
             facts: dict[str, Any]) -> None:
  """Writes the offsets, and then the json that makes readers accept them.

  If they cannot be written, it raises a ValueError.
  """
  try:
    with atomic_files.new_file(_beside(path, 'npy')) as temporary:
      with temporary.open('wb') as file:
        np.save(file, starts)
    atomic_files.write(_beside(path, 'json'), json.dumps(facts) + '\n')
  except OSError as error:
    raise ValueError(
        f'the offsets of {path} must be written beside it, but cannot be: '
        f'{error}. Copy the corpus to a folder that can be written.') from error
