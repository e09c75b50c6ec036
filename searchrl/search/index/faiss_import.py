# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Import of vectors from Search-R1's index builder, read block by block.

`e5_Flat.index` is a flat index of faiss; `emb_e5.memmap` is plain float32.
Reading them does not need faiss.
"""

import dataclasses
import pathlib
import struct

from jaxtyping import Float
import numpy as np

from searchrl.search import corpus as corpora
from searchrl.search.index import dense

# Type, D, N, two unused, trained, metric (0: inner product), number of floats.
_HEADER = struct.Struct('<4siqqq?iQ')
_SAMPLE = 32  # passages whose imported vectors are compared with the encoder's
_TOLERANCE = 0.05  # distance of the two vectors; float16 alone causes 0.01


@dataclasses.dataclass(frozen=True)
class ImportedRows:
  """Rows of vectors in a file that another program wrote."""

  path: pathlib.Path
  count: int  # N
  dim: int  # D
  offset: int  # bytes before the first row

  def read(self, start: int, stop: int) -> Float[np.ndarray, 'N D']:
    """Returns rows [start, stop) as float32."""
    stop = min(stop, self.count)
    rows = np.fromfile(
        self.path, '<f4', (stop - start) * self.dim,
        offset=self.offset + start * self.dim * 4)
    return rows.reshape(stop - start, self.dim)


def open_(path: str | pathlib.Path, *, count: int, dim: int) -> ImportedRows:
  """Opens a flat index of faiss, or a file of plain float32 rows (.memmap).

  Args:
    path: Path of a plain file if it ends in .memmap, else of a flat index.
    count: Number of passages of the corpus, in whose order the rows must be.
    dim: Dimension of the encoder's vectors.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: The file is of another kind or shape, or is truncated.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError('imported vectors must be a file, but there is '
                            f'none at {path}. Check config.imports.')
  rows = _plain(path, dim) if path.suffix == '.memmap' else _flat(path)
  if (rows.count, rows.dim) != (count, dim):
    raise ValueError(
        f'{path} must hold a row for each of {count} passages, as wide as the '
        f"encoder's {dim}, but holds {rows.count} of {rows.dim}. Give the "
        'corpus and the encoder that it was made of.')
  return rows


def _plain(path: pathlib.Path, dim: int) -> ImportedRows:
  size = path.stat().st_size
  if not size or size % (4 * dim):
    raise ValueError(f'{path} must hold float32 rows of {dim}, but has {size} '
                     'bytes, which is no multiple. Fetch it again, or give its '
                     'own encoder.')
  return ImportedRows(path, size // (4 * dim), dim, 0)


def _flat(path: pathlib.Path) -> ImportedRows:
  with path.open('rb') as file:
    head = file.read(_HEADER.size)
  kind = head[:4]
  if kind not in (b'IxFI', b'IxF2') or len(head) < _HEADER.size:
    raise ValueError(
        f'{path} must be a flat index of faiss or end in .memmap, but begins '
        f'with {kind!r}. Other kinds of index cannot be imported; build one '
        "from the corpus, for instance with --config.build=\"('hnsw',)\".")
  _, dim, count, _, _, _, metric, floats = _HEADER.unpack(head)
  if kind != b'IxFI' or metric != 0:
    raise ValueError(
        f'{path} must be an index by inner product, but is of metric {metric} '
        f'({kind.decode()}). Import one by inner product that your encoder '
        'made, or build one from the corpus.')
  size = _HEADER.size + 4 * floats
  if floats != dim * count or path.stat().st_size != size or count < 1:
    raise ValueError(
        f'{path} must have {_HEADER.size} + 4 * {count} * {dim} bytes, but has '
        f'{path.stat().st_size}. Fetch it again; the parts of a split file '
        'must be joined first.')
  return ImportedRows(path, count, dim, _HEADER.size)


def check_encoder(imported: ImportedRows, corpus: corpora.Corpus,
                  encode: dense.EncodeFn) -> None:
  """Checks that imported rows are an encoder's vectors of a corpus.

  It encodes up to 32 passages, and compares them with their imported rows.

  Raises:
    ValueError: A row is too far from the encoder's vector: by more than 0.05,
      or by a fifth of the usual distance of two passages if that is smaller.
  """
  places = dense.evenly_spaced(imported.count, _SAMPLE)
  ours = dense.encoded(
      encode, [corpora.text_of(corpus[int(i)]) for i in places], 'passage')
  theirs = np.concatenate([imported.read(i, i + 1) for i in places])
  gaps = np.nan_to_num(np.linalg.norm(ours - theirs, axis=1), nan=np.inf)
  apart = np.median(np.linalg.norm(ours - np.roll(ours, 1, 0), axis=1))
  limit = min(_TOLERANCE, max(apart / 5, 1e-3))  # some encoders crowd all texts
  worst = int(np.argmax(gaps))
  if gaps[worst] > limit:
    raise ValueError(
        'imported vectors must be those of this corpus and encoder, but row '
        f'{places[worst]} of {imported.path} lies {gaps[worst]:.3f} from our '
        f'own vector of that passage, above {limit:.3f}. Give the corpus and '
        'the encoder that they were made of, with its prefixes, pooling and '
        'max_length.')
