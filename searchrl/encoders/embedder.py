# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A BERT folder in, a function out: texts and their kind to unit vectors.

Texts are sorted by length, so that little is padding, and come to the devices
of this process in batches of few shapes. On CPUs the shape of a query's batch
follows from the query alone, so that its vector is the same to the last bit
whoever is searched for beside it. Index builds, runs and servers encode through
it; a digest of everything that matters tells encoders apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Float
import numpy as np
import tokenizers

from searchrl.models import encoder
from searchrl.models import weights
from searchrl.runtime import mesh as meshes
from searchrl.search.index import dense

_WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens a row
_FEW = (8, 64)  # rows of a batch of queries, if no more are left
_ALWAYS = 8  # rows of a batch of queries on a CPU
_CPU_TOKENS = 2048  # of a batch on a CPU, which more do not keep busier
TINY_E5 = pathlib.Path(__file__).parents[1] / 'assets' / 'tiny_e5'


@dataclasses.dataclass(frozen=True)
class Settings:
  """What an encoder is besides its folder; all but the last change vectors."""

  query_prefix: str = encoder.QUERY_PREFIX
  passage_prefix: str = encoder.PASSAGE_PREFIX
  pooling: str = 'mean'  # or 'cls'
  max_length: int = 256  # tokens of a text, prefix and special ones included
  dtype: str = 'float32'  # of activations: or bfloat16
  batch_tokens: int = 8192  # a device call, padding included; less on CPUs

  def check(self, shape: encoder.EncoderConfig) -> None:
    """Raises a ValueError if the encoder cannot be run so."""
    if self.pooling not in encoder.POOLINGS:
      raise ValueError('encoder.pooling must be one of '
                       f'{", ".join(encoder.POOLINGS)}, but is {self.pooling!r}.')
    if not 8 <= self.max_length <= shape.max_position_embeddings:
      raise ValueError(
          'encoder.max_length must lie in [8, '
          f'{shape.max_position_embeddings}], the positions that the encoder '
          f'knows, but is {self.max_length}.')
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError("encoder.dtype must be 'float32' or 'bfloat16', but is "
                       f'{self.dtype!r}.')
    if self.batch_tokens < self.max_length:
      raise ValueError(
          'encoder.batch_tokens must be at least max_length='
          f'{self.max_length}, but is {self.batch_tokens}.')


class Embedder:
  """An encoder on the devices of this process; an EncodeFn.

  Attributes:
    about: what made the vectors, for the manifest of an index.
    dim: of a vector.
  """

  def __init__(self, path: str, settings: Settings, mesh: Mesh):
    folder = locate(path)
    self._shape = encoder.read_config(str(folder))
    settings.check(self._shape)
    self._settings, self._mesh = settings, mesh
    self._ways = mesh.shape['data'] * mesh.shape['fsdp']
    self._on_cpu = mesh.devices.flat[0].platform == 'cpu'
    self._tokenizer = load_tokenizer(folder, settings.max_length)
    self._params = encoder.load(
        str(folder), self._shape,
        sharding_of=functools.partial(meshes.sharding, mesh))
    self._embed = jax.jit(functools.partial(
        encoder.embed, config=self._shape, pooling=settings.pooling,
        dtype=jnp.dtype(settings.dtype)))
    self.dim = self._shape.hidden_size
    self.about = {'kind': 'bert', 'path': str(path),
                  **dataclasses.asdict(settings),
                  'digest': digest(folder, settings)}

  def __call__(self, texts: Sequence[str], kind: dense.Kind
              ) -> Float[np.ndarray, 'N D']:
    """One vector of length 1 a text, in their order."""
    prefix = (self._settings.query_prefix if kind == 'query' else
              self._settings.passage_prefix)
    # Half a surrogate pair is no character, and the tokenizer refuses it.
    coded = self._tokenizer.encode_batch_fast(
        [prefix + text.encode(errors='replace').decode() for text in texts])
    rows = [c.ids for c in coded]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    result = np.zeros((len(rows), self.dim), np.float32)
    pending, start = [], 0
    while start < len(order):
      width = self._width(rows[order[start]])
      taken = order[start:start + self._rows(width, len(order) - start, kind)]
      if kind == 'query' and self._on_cpu:
        taken = [i for i in taken if self._width(rows[i]) == width]
      start += len(taken)
      size = self._rows(width, len(taken), kind)
      pending.append((taken, self._run([rows[i] for i in taken], width, size)))
      if len(pending) > 1:  # the devices compute while the host packs
        at, vectors = pending.pop(0)
        result[at] = np.asarray(vectors)[:len(at)]
    for at, vectors in pending:
      result[at] = np.asarray(vectors)[:len(at)]
    return result

  def _rows(self, width: int, left: int, kind: str) -> int:
    """Rows of a batch: what `batch_tokens` allow, or few of queries."""
    tokens = self._settings.batch_tokens
    full = max((min(tokens, _CPU_TOKENS) if self._on_cpu else tokens) // width, 1)
    if kind == 'query' and self._on_cpu:
      return _ALWAYS * self._ways
    sizes = (*(few for few in _FEW if few < full), full)
    wanted = full if kind == 'passage' else next(
        (size for size in sizes if size >= left), full)
    return -(-wanted // self._ways) * self._ways

  def _width(self, ids: Sequence[int]) -> int:
    """Tokens of a row that holds a text."""
    length, most = len(ids), self._settings.max_length
    fitting = next((width for width in _WIDTHS if width >= length), length)
    return min(fitting, max(most, length))

  def _run(self, rows: Sequence[Sequence[int]], width: int, size: int):
    tokens = np.zeros((size, width), np.int32)
    mask = np.zeros((size, width), bool)
    for i, ids in enumerate(rows):
      tokens[i, :len(ids)], mask[i, :len(ids)] = ids, True
    tokens, mask = meshes.shard_batch(self._mesh, (tokens, mask))
    return self._embed(self._params, tokens, mask)


def load(path: str, settings: Settings, *, mesh: Mesh | None = None
        ) -> Embedder:
  """The encoder of a folder, or of a hub id.

  Args:
    path: holds config.json, tokenizer.json and safetensors.
    settings: how it is used.
    mesh: of devices of this process. Default: rows over all of them.

  Raises:
    FileNotFoundError, ValueError: the folder or the settings cannot be used.
  """
  return Embedder(path, settings, mesh or meshes.make(
      devices=jax.local_devices()))


def load_again(about: Mapping[str, Any] | None = None, *, path: str = ''
              ) -> Embedder:
  """The encoder that made an index, from its manifest; or any, for a new one.

  Args:
    about: as of `Embedder.about`. None: there is no index yet; then the
      encoder is used as E5 is, on one device of this process, so that its
      vectors do not depend on how many there are.
    path: where the encoder is now; see `locate`. Default: where it was.

  Raises:
    FileNotFoundError: it is not there.
    ValueError: it has changed, or is none of these.
  """
  if about is None:
    settings = Settings()
    return _once(path, settings, digest(locate(path), settings), 1)
  if about['kind'] != 'bert':
    raise ValueError(f"an encoder must be of kind 'bert', but this index has "
                     f'{about["kind"]!r}.')
  settings = Settings(**{field.name: about[field.name]
                         for field in dataclasses.fields(Settings)})
  path = path or about['path']
  found = digest(locate(path), settings)
  if found != about['digest']:
    raise ValueError(
        f'the encoder in {path} must be the one that made the index, of digest '
        f'{about["digest"][:16]}, but has {found[:16]}. Fetch that one again, or '
        'build another index.')
  return _once(path, settings, found, None)


@functools.lru_cache(maxsize=1)  # training and evaluation share one
def _once(path: str, settings: Settings, found: str,
          devices: int | None) -> Embedder:
  del found  # another digest is another encoder
  return load(path, settings, mesh=meshes.make(
      devices=jax.local_devices()[:devices]))


def locate(path: str) -> pathlib.Path:
  """The folder of an encoder: 'tiny_e5' (shipped), a folder, or a hub id.

  Raises:
    FileNotFoundError: no folder, and the hub has none or cannot be reached.
  """
  return TINY_E5 if str(path) == 'tiny_e5' else pathlib.Path(
      weights.locate(path))


def digest(folder: pathlib.Path, settings: Settings) -> str:
  """SHA-256 of an encoder's files and of the settings that change vectors."""
  facts = dataclasses.asdict(settings)
  del facts['batch_tokens']
  sha = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
  for file in sorted([folder / 'config.json', folder / 'tokenizer.json',
                      *folder.glob('*.safetensors')]):
    if not file.is_file():
      raise FileNotFoundError(
          f'an encoder must be a folder with {file.name}, but {folder} has '
          'none. Check encoder.path.')
    with file.open('rb') as opened:
      sha.update(hashlib.file_digest(opened, 'sha256').digest())
  return sha.hexdigest()


def load_tokenizer(
    folder: pathlib.Path, max_length: int) -> tokenizers.Tokenizer:
  """A folder's tokenizer, which cuts texts and never pads.

  Raises:
    ValueError: its tokenizer.json is none.
  """
  try:
    found = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  except Exception as error:  # the library raises nothing more exact
    raise ValueError(
        f'{folder}/tokenizer.json must be a tokenizer, but: {error}. Fetch it '
        'again, or convert an older vocab.txt with transformers.') from error
  found.no_padding()
  found.enable_truncation(max_length)
  return found
