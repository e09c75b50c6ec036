# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Text embedder: loads a BERT folder as a function from texts to unit vectors.

Texts are sorted by length, so that there is little padding. They go to the
devices of this process in batches of few shapes. On a CPU the shape of a
query's batch depends on the query only. The query's vector is therefore the
same bit by bit, however many other queries are encoded at the same time. Index
builds, runs and servers all encode with this module. Two encoders are the same
if their digests are equal.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from searchrl.runtime import activations
from searchrl.runtime import dispatch
from searchrl.runtime import log
from searchrl.runtime import mesh as meshes
from searchrl.search.index import dense
from searchrl.search.index import open_index

_WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens per row
_QUERY_ROWS = (8, 64)  # rows of a small query batch on an accelerator
_CPU_QUERY_ROWS = 8  # rows of every query batch on a CPU
_CPU_TOKENS = 2048  # tokens per batch on a CPU; a larger batch is not faster
_OPTION = 'search.options.encoder'  # config field of a search's encoder
TINY_E5 = pathlib.Path(__file__).parents[1] / 'assets' / 'tiny_e5'


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of an encoder. All but `batch_tokens` change its vectors."""

  query_prefix: str = encoder.QUERY_PREFIX
  passage_prefix: str = encoder.PASSAGE_PREFIX
  pooling: str = 'mean'  # 'mean' or 'cls'
  max_length: int = 256  # tokens of a text with its prefix and special tokens
  dtype: str = 'float32'  # dtype of activations: float32 or bfloat16
  batch_tokens: int = 8192  # tokens per device call, padded; fewer on a CPU

  def check(self, shape: encoder.EncoderConfig) -> None:
    """Raises a ValueError if an encoder of `shape` cannot use the settings."""
    if self.pooling not in encoder.POOLINGS:
      raise ValueError(
          f'encoder.pooling must be one of {", ".join(encoder.POOLINGS)}, but '
          f'is {self.pooling!r}.')
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
  """An encoder on the devices of this process. An instance is an EncodeFn.

  Attributes:
    about: Path, settings and digest of the encoder, for an index's manifest.
    dim: Width D of a vector.
  """

  def __init__(self, path: str, settings: Settings, mesh: Mesh):
    folder = locate(path)
    self._shape = encoder.read_config(str(folder))
    settings.check(self._shape)
    self._settings, self._mesh = settings, mesh
    self._replicas = meshes.ways(mesh, 'batch')
    self._on_cpu = mesh.devices.flat[0].platform == 'cpu'
    self._tokenizer = load_tokenizer(folder, settings.max_length)
    check_ids(self._tokenizer, self._shape, folder)
    _warn_of_pooling(folder, settings.pooling)
    self._params = encoder.load(
        str(folder), self._shape,
        sharding_of=functools.partial(meshes.sharding, mesh))
    self._embed = dispatch.Ordered(jax.jit(functools.partial(
        encoder.embed, config=self._shape, pooling=settings.pooling,
        dtype=jnp.dtype(settings.dtype),
        constrain=functools.partial(activations.split_by_tokens, mesh))), mesh)
    self.dim = self._shape.hidden_size
    self.about = {'kind': 'bert', 'path': str(path),
                  **dataclasses.asdict(settings),
                  'digest': digest(folder, settings)}

  def __call__(self, texts: Sequence[str], kind: dense.Kind
              ) -> Float[np.ndarray, 'N D']:
    """Returns one unit vector per text, in order. `kind` chooses the prefix."""
    rows = self._tokens(texts, kind)
    result = np.zeros((len(rows), self.dim), np.float32)
    running = None
    for batch, width, size in self._batches(rows, kind):
      vectors = self._run([rows[i] for i in batch], width, size)
      if running:  # the devices compute while the host packs
        result[running[0]] = np.asarray(running[1])[:len(running[0])]
      running = batch, vectors
    if running:
      result[running[0]] = np.asarray(running[1])[:len(running[0])]
    return result

  def _tokens(self, texts: Sequence[str], kind: dense.Kind) -> list[list[int]]:
    """Returns the token ids of each text with its prefix."""
    prefix = (self._settings.query_prefix if kind == 'query' else
              self._settings.passage_prefix)
    # The tokenizer rejects half of a surrogate pair, which is not a character.
    encodings = self._tokenizer.encode_batch_fast(
        [prefix + text.encode(errors='replace').decode() for text in texts])
    return [encoding.ids for encoding in encodings]

  def _batches(self, rows: Sequence[Sequence[int]], kind: dense.Kind
              ) -> Iterator[tuple[list[int], int, int]]:
    """Yields (texts' indices, row length, rows) per batch, long texts first."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    start = 0
    while start < len(order):
      width = self._width(rows[order[start]])
      batch = order[start:start + self._rows(width, len(order) - start, kind)]
      if kind == 'query' and self._on_cpu:
        batch = [i for i in batch if self._width(rows[i]) == width]
      start += len(batch)
      yield batch, width, self._rows(width, len(batch), kind)

  def _rows(self, width: int, left: int, kind: dense.Kind) -> int:
    """Returns the number of rows of a batch, which is smaller for few queries.

    Args:
      width: Number of tokens of a row.
      left: Number of texts that are not encoded yet.
      kind: Kind of the texts.
    """
    if kind == 'query' and self._on_cpu:  # whatever `batch_tokens` is
      return _CPU_QUERY_ROWS * self._replicas
    tokens = self._settings.batch_tokens
    if self._on_cpu:
      tokens = min(tokens, _CPU_TOKENS)
    rows = max(tokens // width, 1)
    if kind == 'query':
      rows = next((size for size in _QUERY_ROWS if left <= size < rows), rows)
    return -(-rows // self._replicas) * self._replicas

  def _width(self, ids: Sequence[int]) -> int:
    """Returns the number of tokens per row of a batch for a text with `ids`."""
    width = next((width for width in _WIDTHS if width >= len(ids)), len(ids))
    return min(width, max(self._settings.max_length, len(ids)))

  def _run(self, rows: Sequence[Sequence[int]], width: int, size: int):
    tokens = np.zeros((size, width), np.int32)
    mask = np.zeros((size, width), bool)
    for i, ids in enumerate(rows):
      tokens[i, :len(ids)], mask[i, :len(ids)] = ids, True
    tokens, mask = meshes.shard_batch(self._mesh, (tokens, mask))
    return self._embed(self._params, tokens, mask)


def load(path: str, settings: Settings, *, mesh: Mesh | None = None
        ) -> Embedder:
  """Loads an encoder from a directory or a hub id.

  Args:
    path: Directory with config.json, tokenizer.json and safetensors, or another
      argument of `locate`.
    settings: Settings of the encoder.
    mesh: Mesh of devices of this process. The default splits rows over all of
      them.

  Raises:
    FileNotFoundError, ValueError: The directory or the settings cannot be used.
  """
  return Embedder(path, settings, mesh or meshes.make(
      devices=jax.local_devices()))


def cached_loader() -> open_index.LoadEncoder:
  """Returns a function that loads an encoder, and keeps the last one loaded.

  If the same encoder is asked for again, the function returns it, with its
  compiled programs, and loads nothing. Pass the function to `engines.make` as
  `load_encoder`.
  """

  @functools.lru_cache(maxsize=1)
  def cached(path, settings, sha, devices):
    del sha  # only a key of the cache: another digest is another encoder
    return load(path, settings, mesh=meshes.make(
        devices=jax.local_devices()[:devices]))

  def load_encoder(about: Mapping[str, Any] | None = None, *, path: str = ''
                  ) -> Embedder:
    """Loads an encoder.

    Args:
      about: Description of the encoder in an index (`Embedder.about`), for
        queries on all devices of this process. None: an encoder for a new
        index, with the settings of E5 and on one device, because the last bits
        of a vector depend on the number of devices.
      path: Directory of the encoder; '': the directory in the description.

    Raises:
      FileNotFoundError: The encoder does not exist.
      ValueError: The encoder has changed since the index was built, or is not a
        BERT.
    """
    if about is None:
      settings = Settings()
      sha = digest(locate(path, _OPTION), settings)
      return cached(path, settings, sha, 1)
    if about['kind'] != 'bert':
      raise ValueError("the encoder of an index must be of kind 'bert', but is "
                       f'of kind {about["kind"]!r}. Build the index again with '
                       'configs/build_index.py.')
    settings = Settings(**{field.name: about[field.name]
                           for field in dataclasses.fields(Settings)})
    path = path or about['path']
    sha = digest(locate(path, _OPTION), settings)
    if sha != about['digest']:
      raise ValueError(
          f'the encoder in {path} must be the one that made the index, of '
          f'digest {about["digest"][:16]}, but has {sha[:16]}. Fetch that one '
          'again, or build another index.')
    return cached(path, settings, sha, None)

  return load_encoder


def locate(path: str, field: str = 'encoder.path') -> pathlib.Path:
  """Returns the directory of an encoder.

  Args:
    path: 'tiny_e5', the small encoder that comes with the package; the path of
      a directory; or a hub id.
    field: Config field of the path, for errors.

  Raises:
    FileNotFoundError: There is no such directory, and the hub does not have the
      id or cannot be reached.
  """
  return TINY_E5 if str(path) == 'tiny_e5' else pathlib.Path(
      weights.locate(path, field))


def digest(folder: pathlib.Path, settings: Settings) -> str:
  """Returns one SHA-256 of an encoder's files and settings, in hex digits.

  `batch_tokens` is left out, because it does not change the vectors.

  Raises:
    FileNotFoundError: config.json or tokenizer.json is missing.
  """
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
  """Loads a directory's tokenizer, which truncates texts and never pads.

  Args:
    folder: Directory with tokenizer.json.
    max_length: Largest number of tokens of a text; longer texts are truncated.

  Raises:
    ValueError: The file tokenizer.json cannot be read as a tokenizer.
  """
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  except Exception as error:  # the library raises no narrower type
    raise ValueError(
        f'{folder}/tokenizer.json must be a tokenizer, but: {error}. Fetch it '
        'again, or convert an older vocab.txt with transformers.') from error
  tokenizer.no_padding()
  tokenizer.enable_truncation(max_length)
  return tokenizer


def check_ids(tokenizer: tokenizers.Tokenizer, shape: encoder.EncoderConfig,
              folder: pathlib.Path, texts: int = 1) -> None:
  """Raises a ValueError if a tokenizer has ids that its model does not know.

  Args:
    tokenizer: Tokenizer of the directory.
    shape: Shape of the model.
    folder: Directory of both, for the error.
    texts: Number of texts in a row of the model, 1 or 2.
  """
  ids = max(tokenizer.get_vocab().values()) + 1
  segments = max(tokenizer.encode(*'ab'[:texts]).type_ids, default=0) + 1
  for what, count, most in (('ids', ids, shape.vocab_size),
                            ('segments', segments, shape.type_vocab_size)):
    if count > most:
      raise ValueError(
          f'tokenizer and model must belong together, but the tokenizer of '
          f'{folder} has {count} {what} and the model only {most}. Copy the '
          "model's own tokenizer.json into its folder.")


def _warn_of_pooling(folder: pathlib.Path, pooling: str) -> None:
  """Warns if a directory's file for sentence-transformers says otherwise."""
  file = folder / '1_Pooling' / 'config.json'
  modes = json.loads(file.read_text()) if file.is_file() else {}
  names = {'pooling_mode_mean_tokens': 'mean', 'pooling_mode_cls_token': 'cls'}
  said = [names.get(key, key) for key, value in modes.items() if value is True
          and key.startswith('pooling_mode_')]
  if said and said != [pooling]:
    log.say(f'Warning: {file} says that the pooling of this encoder is '
            f'{" and ".join(said)}, but encoder.pooling is {pooling!r}. Build '
            'an index with the pooling and the prefixes of the encoder.')
