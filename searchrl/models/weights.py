# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Model folders of Hugging Face: reads and writes Qwen2, Qwen3, Llama, Mistral.

This file translates config.json and the names of tensors. `models.tensors`
reads and writes the tensors.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from searchrl.models import tensors
from searchrl.models import transformer
from searchrl.models.tensors import ShardingOf, Source
from searchrl.models.transformer import Llama3Rope, Params, TransformerConfig

_MODEL_TYPES = {
    'LlamaForCausalLM': 'llama', 'MistralForCausalLM': 'mistral',
    'Qwen2ForCausalLM': 'qwen2', 'Qwen3ForCausalLM': 'qwen3'}
_DEFAULTS = {  # defaults of transformers that differ from the common ones below
    'MistralForCausalLM': {'num_key_value_heads': 8, 'sliding_window': 4096},
    'Qwen3ForCausalLM': {'head_dim': 128}}
_ROPE = tuple(f.name for f in dataclasses.fields(Llama3Rope))
# Our name -> Hugging Face's name, for each part of a layer. Their kernels are
# the transposes of ours.
_LAYER = {
    'attention_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm',
    'q': 'self_attn.q_proj', 'k': 'self_attn.k_proj', 'v': 'self_attn.v_proj',
    'o': 'self_attn.o_proj', 'q_norm': 'self_attn.q_norm',
    'k_norm': 'self_attn.k_norm', 'gate': 'mlp.gate_proj', 'up': 'mlp.up_proj',
    'down': 'mlp.down_proj'}
_BESIDE = (  # files of the tokenizer, the chat template and generation
    'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
    'added_tokens.json', 'vocab.json', 'vocab.txt', 'merges.txt',
    'chat_template.jinja', 'generation_config.json')
_FETCHED = ('*.json', 'model*.safetensors', 'vocab.txt', 'merges.txt',
            'chat_template.jinja')
_ASSETS = pathlib.Path(__file__).parents[1] / 'assets'
# Names of the models that the package ships.
SHIPPED = ('tiny_base', 'tiny_instruct', 'tiny_proposer',
           'tiny_raw')


def locate(path: str) -> str:
  """Returns the local folder of a model, fetched from the hub if necessary.

  Args:
    path: Path of a folder; or else one of `SHIPPED`, or a hub id such as
      'Qwen/Qwen2.5-7B', optionally with a branch, tag or commit as in
      'Qwen/Qwen2.5-7B@main'. Only json, text and safetensors are fetched.

  Raises:
    FileNotFoundError: There is no such folder, and the hub lacks the model or
      cannot be reached.
  """
  path = str(path)
  hub_id = re.fullmatch(
      r'([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([A-Za-z0-9][\w./-]*))?', path)
  if path in SHIPPED and not pathlib.Path(path).exists():
    return str(_ASSETS / path)
  if pathlib.Path(path).exists() or not hub_id:
    return path
  import huggingface_hub  # slow to import
  try:
    return huggingface_hub.snapshot_download(
        hub_id[1], revision=hub_id[2], allow_patterns=list(_FETCHED))
  except Exception as error:  # the hub raises its own, of many kinds
    raise FileNotFoundError(
        f'model.path must be a folder or a hub id, but {path} is no folder and '
        f'could not be fetched: {type(error).__name__} {error}. Check the name '
        'and the revision, or fetch it elsewhere and give the folder.'
    ) from error


def read_json(folder: str) -> tuple[Mapping[str, Any], pathlib.Path]:
  """Returns the content of a model's config.json, and its path.

  Raises:
    FileNotFoundError: The folder does not exist or has no config.json.
    ValueError: The file is not a JSON object.
  """
  path = pathlib.Path(folder)
  if not path.is_dir():
    raise FileNotFoundError(
        f'model.path must be a folder, but {path} is none. Give the folder of '
        'a Hugging Face checkpoint (config.json, *.safetensors, '
        'tokenizer.json), or a hub id.')
  path = path / 'config.json'
  if not path.is_file():
    raise FileNotFoundError(
        f'model.path must hold a config.json, but {path.parent} has none.')
  try:
    return dict(json.loads(path.read_text(encoding='utf-8'))), path
  except (ValueError, TypeError) as error:
    raise ValueError(f'{path} must hold a JSON object, but: '
                     f'{type(error).__name__} {error}. Fetch it again.') from (
                         error)


def read_config(folder: str) -> TransformerConfig:
  """Returns the shape that a config.json of transformers 4 or 5 describes.

  Raises:
    FileNotFoundError: The folder does not exist or has no config.json.
    ValueError: The file is not JSON, the shape is incomplete, or the
      architecture, rotary embedding or attention is not implemented here.
  """
  raw, path = read_json(folder)
  try:
    return _parse(raw, path)
  except (KeyError, TypeError, ZeroDivisionError) as error:
    raise ValueError(
        f'{path} must hold the whole shape of a model, but: '
        f'{type(error).__name__} {error}. Fetch it again.') from error


def _parse(raw: Mapping[str, Any], path: pathlib.Path) -> TransformerConfig:
  architecture = (raw.get('architectures') or ['none'])[0]
  if architecture not in _MODEL_TYPES:
    raise ValueError(
        f'model.path must hold one of {sorted(_MODEL_TYPES)}, but {path} names '
        f'{architecture!r}.')
  raw = _DEFAULTS.get(architecture, {}) | raw
  for field, built in (('hidden_act', 'silu'), ('quantization_config', None)):
    if raw.get(field, built) != built:
      raise ValueError(f'{field} in {path} must be {built}, but is '
                       f'{raw[field]!r}, which is not built here.')
  heads = raw['num_attention_heads']
  bias = raw.get('attention_bias', False)
  theta, scaling = _rope(raw, path)
  config = TransformerConfig(
      vocab_size=raw['vocab_size'],
      hidden_size=raw['hidden_size'],
      num_hidden_layers=raw['num_hidden_layers'],
      num_attention_heads=heads,
      num_key_value_heads=raw.get('num_key_value_heads') or heads,
      head_dim=raw.get('head_dim') or raw['hidden_size'] // heads,
      intermediate_size=raw['intermediate_size'],
      rope_theta=theta,
      rms_norm_eps=raw.get('rms_norm_eps', 1e-6),
      attention_bias={'Qwen2ForCausalLM': True,
                      'MistralForCausalLM': False}.get(architecture, bias),
      tie_word_embeddings=raw.get('tie_word_embeddings', False),
      max_position_embeddings=raw.get('max_position_embeddings', 2048),
      architecture=architecture,
      qk_norm=architecture == 'Qwen3ForCausalLM',
      attention_out_bias=bias and architecture in (
          'LlamaForCausalLM', 'Qwen3ForCausalLM'),
      mlp_bias=(architecture == 'LlamaForCausalLM'
                and raw.get('mlp_bias', False)),
      sliding_window=_window(raw, path, architecture),
      rope_scaling=scaling,
  )
  if heads % config.num_key_value_heads or config.head_dim % 2:
    raise ValueError(
        f'{path} must have an even head_dim, and num_key_value_heads that '
        f'divide num_attention_heads, but they are {config.head_dim}, '
        f'{config.num_key_value_heads} and {heads}. Fetch it again.')
  check_sizes(config, path)
  return config


def check_sizes(config: Any, path: pathlib.Path) -> None:
  """Raises a ValueError unless all sizes are whole numbers of at least 1."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.type is int and (type(value) is not int or value < 1):
      raise ValueError(f'{field.name} in {path} must be a whole number from 1 '
                       f'on, but is {value!r}. Fetch it again.')


def _rope(raw, path: pathlib.Path) -> tuple[float, Llama3Rope | None]:
  """Returns theta and scaling; transformers 5 has both in `rope_parameters`."""
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if any(isinstance(value, Mapping) for value in rope.values()):
    kind = 'one a kind of layer'
  elif rope.get('partial_rotary_factor', 1) != 1:
    kind = 'partial'
  theta = rope.get('rope_theta', raw.get('rope_theta', 10_000.0))
  if kind == 'default':
    return theta, None
  if kind != 'llama3':
    raise ValueError(
        f'rotary embeddings must be of the default or llama3 kind, but '
        f'rope_type in {path} is {kind!r}, which is not built here.')
  rope = {'original_max_position_embeddings':
          raw.get('max_position_embeddings', 2048)} | rope
  return theta, Llama3Rope(**{name: rope[name] for name in _ROPE})


def _window(raw, path: pathlib.Path, architecture: str) -> int | None:
  """Returns the window of every layer in tokens; None if there is no window."""
  layers, window = raw['num_hidden_layers'], raw.get('sliding_window', 4096)
  mistral = architecture == 'MistralForCausalLM'
  if architecture == 'LlamaForCausalLM' or not (
      mistral or raw.get('use_sliding_window', False)):
    window = None
  full = layers  # number of first layers that see all tokens
  if window is not None:
    full = 0 if mistral else min(raw.get('max_window_layers', 28), layers)
  kinds = raw.get('layer_types') or (
      ['full_attention'] * full + ['sliding_attention'] * (layers - full))
  legal = [{'full_attention'}] * (window is None or not mistral)
  legal += [{'sliding_attention'}] * (window is not None)
  if set(kinds) not in legal:
    raise ValueError(
        f'all layers must see equally far, but {path} has layers of '
        f'{sorted(set(kinds))} with sliding_window {window!r}, which is not '
        'built here.')
  return window if kinds[0] == 'sliding_attention' else None


def load(
    folder: str,
    config: TransformerConfig,
    *,
    sharding_of: ShardingOf | None = None,
    dtype: Any = jnp.float32,
) -> Params:
  """Loads params from a folder's safetensors, leaf by leaf onto devices.

  Args:
    folder: Local folder; see `locate`.
    config: Shape that `read_config` returns for the same folder.
    sharding_of: Function from a leaf's logical axes to its sharding. Only the
      slices of local devices are read. Default: the default device.
    dtype: Data type of all params, whatever type the files hold.

  Raises:
    FileNotFoundError: The folder has no safetensors.
    ValueError: A file is damaged; or a tensor is missing, unexpected or has a
      wrong shape.
  """
  path = pathlib.Path(folder)
  found = tensors.Folder(path, _ours)
  if config.tie_word_embeddings and 'lm_head.weight' in found.shapes:
    _check_tied(found, path)  # some exporters write the head nevertheless
  found.check(_shapes(config))
  return tensors.load(found, _sources(config), transformer.logical_axes(config),
                      sharding_of=sharding_of, dtype=dtype)


def _ours(name: str) -> str | None:
  """Returns a tensor's name; None for a rotary table, which is recomputed.

  Older exporters wrote this table.
  """
  return None if name.endswith('.rotary_emb.inv_freq') else name


def _check_tied(found: tensors.Folder, path: pathlib.Path, rows: int = 4096):
  """Drops a tied model's head. Raises a ValueError if it differs."""
  name, head = 'model.embed_tokens.weight', 'lm_head.weight'
  size = found.shapes[head][0]
  same = found.shapes[head] == found.shapes.get(name) and all(
      (found.read(name, index) == found.read(head, index)).all()
      for index in ((slice(i, min(i + rows, size)), slice(None))
                    for i in range(0, size, rows)))
  if not same:
    raise ValueError(
        f'{head} must equal {name} if embeddings are tied, but does not in '
        f'{path}. Set tie_word_embeddings to false in its config.json.')
  del found.shapes[head]


def save(
    folder: str | pathlib.Path,
    params: Params,
    config: TransformerConfig,
    *,
    tokenizer_from: str | pathlib.Path,
    eos_id: int,
    dtype: str = 'float32',
    shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a folder for transformers: config, weights and tokenizer.

  The folder appears whole or not at all. One tensor is on the host at a time.
  With several processes, all must call this function; the first one writes.

  Args:
    folder: Path of a folder that is new, empty, or an earlier export. An
      earlier export is replaced; other files in it are kept.
    params: Params on the host or on any devices.
    config: Shape of the params.
    tokenizer_from: Folder or hub id whose tokenizer files are copied.
    eos_id: Token id that ends a generation.
    dtype: Data type in the files, 'float32' or 'bfloat16'.
    shard_bytes: Largest size of one file in bytes. Larger weights become
      several files with an index.

  Raises:
    ValueError: The dtype is another one, a parameter is NaN or infinite, or the
      folder contains folders.
  """
  check_finite(params, 'a model that is exported')
  with export(folder, tokenizer_from) as new:
    tensors.save(new, params, _sources(config), dtype=dtype,
                 shard_bytes=shard_bytes)
    if jax.process_index() == 0:
      source, raw = pathlib.Path(locate(tokenizer_from)), {}
      if (source / 'config.json').is_file():
        raw = read_json(source)[0]
      raw = {name: raw[name] for name in ('bos_token_id', 'pad_token_id')
             if name in raw} | _describe(config, dtype, eos_id)
      (new / 'config.json').write_text(json.dumps(raw, indent=2) + '\n')


def check_finite(params: Params, what: str) -> None:
  """Raises a ValueError that names the parameters with NaN or infinity."""
  bad = not_finite(params)
  if bad:
    raise ValueError(
        f'{what} must hold finite numbers, but NaN or infinity stands in '
        f'{", ".join(bad[:4])}{f" and {len(bad) - 4} more" if bad[4:] else ""}.'
        ' Start from another checkpoint or model folder.')


def not_finite(tree: Any) -> list[str]:
  """Returns the names of a tree's arrays that contain NaN or infinity."""
  finite = jax.device_get(_are_finite(tree))
  return [jax.tree_util.keystr(path, simple=True, separator='/')
          for path, ok in jax.tree_util.tree_leaves_with_path(finite) if not ok]


@jax.jit
def _are_finite(tree: Any) -> Any:
  return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)


@contextlib.contextmanager
def export(folder: str | pathlib.Path, tokenizer_from: str | pathlib.Path
          ) -> Iterator[pathlib.Path]:
  """Yields a temporary folder that replaces `folder` when it is complete.

  The arguments and errors are those of `save`.
  """
  path = pathlib.Path(folder).resolve()
  new = path.with_name(f'.{path.name}.unfinished')
  first = jax.process_index() == 0
  if first:
    _check_replaceable(path)
    shutil.rmtree(new, ignore_errors=True)  # left by a run that was killed
    new.mkdir(parents=True)
  yield new
  if first:
    source = pathlib.Path(locate(tokenizer_from))
    for name in _BESIDE:
      if (source / name).is_file():
        shutil.copyfile(source / name, new / name)
    _replace(path, new)


def _check_replaceable(path: pathlib.Path) -> None:
  """Raises a ValueError if a path is not an export that may be replaced."""
  old = path.with_name(f'.{path.name}.old')
  if old.exists() and not path.exists():
    old.rename(path)  # undo: a run was killed between the two renames
  inner = [p.name for p in path.glob('*') if p.is_dir()]
  if inner or path.is_file():
    raise ValueError(
        f'{path} must be new or an earlier export, which is replaced as a '
        f'whole, but {f"holds the folder {inner[0]}" if inner else "is a file"}'
        '. Give another folder.')


def _replace(path: pathlib.Path, new: pathlib.Path) -> None:
  """Replaces a folder with a finished one and keeps its other files."""
  old = path.with_name(f'.{path.name}.old')
  shutil.rmtree(old, ignore_errors=True)
  if path.exists():
    for file in path.iterdir():
      if not (re.fullmatch(r'model.*\.safetensors(\.index\.json)?', file.name)
              or (new / file.name).exists()):
        shutil.copy2(file, new / file.name)
    path.rename(old)
  new.rename(path)
  shutil.rmtree(old, ignore_errors=True)


def _describe(c: TransformerConfig, dtype: str, eos_id: int) -> dict[str, Any]:
  """Returns a config.json with the keys of both transformers 4 and 5."""
  scaling = {'rope_type': 'default'}
  if c.rope_scaling is not None:
    scaling = {'rope_type': 'llama3', **dataclasses.asdict(c.rope_scaling)}
  raw = {
      'architectures': [c.architecture],
      'model_type': _MODEL_TYPES[c.architecture],
      **{name: getattr(c, name) for name in (
          'vocab_size', 'hidden_size', 'num_hidden_layers',
          'num_attention_heads', 'num_key_value_heads', 'head_dim',
          'intermediate_size', 'rope_theta')},
      'rope_parameters': {**scaling, 'rope_theta': c.rope_theta},
      'rms_norm_eps': c.rms_norm_eps, 'hidden_act': 'silu',
      'tie_word_embeddings': c.tie_word_embeddings,
      'max_position_embeddings': c.max_position_embeddings,
      'dtype': dtype, 'torch_dtype': dtype, 'eos_token_id': eos_id,
  }
  if c.rope_scaling is not None:
    raw['rope_scaling'] = scaling
  if c.architecture in ('LlamaForCausalLM', 'Qwen3ForCausalLM'):
    raw['attention_bias'] = c.attention_bias
  if c.architecture == 'LlamaForCausalLM':
    raw['mlp_bias'] = c.mlp_bias
  elif c.architecture == 'MistralForCausalLM':
    raw['sliding_window'] = c.sliding_window
  elif c.sliding_window is not None:  # Qwen, with a window in all layers
    raw |= {'use_sliding_window': True, 'sliding_window': c.sliding_window,
            'max_window_layers': 0}
  return raw


def _shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every tensor, by its name in the files."""
  return tensors.shapes(_sources(config), transformer.abstract(config))


def _sources(config: TransformerConfig) -> Params:
  """Returns the `Source` of each leaf of `transformer.init`."""
  sources = {'embed': {'embedding': Source('model.embed_tokens.weight')},
             'norm': {'scale': Source('model.norm.weight')},
             'layers': tensors.layer_sources(
                 transformer.abstract(config)['layers'], _LAYER,
                 'model.layers')}
  if not config.tie_word_embeddings:
    sources['head'] = {'kernel': Source('lm_head.weight', transposed=True)}
  return sources
