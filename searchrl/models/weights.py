# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder in, config and params out; and back again.

Only safetensors are read, never pickle; shapes and names are checked before
anything is built, so that nothing is ever half loaded.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from searchrl.models.transformer import Params, TransformerConfig

_ARCHITECTURES = {'Qwen2ForCausalLM': 'qwen2'}
# ours -> (Hugging Face's, in layer {}), whether the matrix is transposed
_LAYER = {
    ('attention_norm', 'scale'): ('input_layernorm.weight', False),
    ('q', 'kernel'): ('self_attn.q_proj.weight', True),
    ('q', 'bias'): ('self_attn.q_proj.bias', False),
    ('k', 'kernel'): ('self_attn.k_proj.weight', True),
    ('k', 'bias'): ('self_attn.k_proj.bias', False),
    ('v', 'kernel'): ('self_attn.v_proj.weight', True),
    ('v', 'bias'): ('self_attn.v_proj.bias', False),
    ('o', 'kernel'): ('self_attn.o_proj.weight', True),
    ('mlp_norm', 'scale'): ('post_attention_layernorm.weight', False),
    ('gate', 'kernel'): ('mlp.gate_proj.weight', True),
    ('up', 'kernel'): ('mlp.up_proj.weight', True),
    ('down', 'kernel'): ('mlp.down_proj.weight', True),
}


def read_config(folder: str) -> TransformerConfig:
  """The shape in config.json, in the keys of transformers 4 or 5.

  Raises:
    FileNotFoundError: no folder, or no config.json in it.
    ValueError: not JSON, an incomplete shape, or an architecture or rotary
      embedding that is not built here.
  """
  path = pathlib.Path(folder)
  if not path.is_dir():
    raise FileNotFoundError(
        f'model.path must be a folder, but {path} is none. Give the folder of '
        'a Hugging Face checkpoint (config.json, *.safetensors, '
        'tokenizer.json).')
  if not (path / 'config.json').is_file():
    raise FileNotFoundError(
        f'model.path must hold a config.json, but {path} has none.')
  try:
    return _parse(json.loads((path / 'config.json').read_text()), path)
  except (json.JSONDecodeError, KeyError) as error:
    raise ValueError(
        f'{path / "config.json"} must hold the whole shape of a model, but: '
        f'{type(error).__name__} {error}. Fetch it again.') from error


def _parse(raw, path: pathlib.Path) -> TransformerConfig:
  architecture = (raw.get('architectures') or ['none'])[0]
  if architecture not in _ARCHITECTURES:
    raise ValueError(
        f'model.path must hold one of {sorted(_ARCHITECTURES)}, but '
        f'{path / "config.json"} names {architecture!r}.')
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind != 'default':
    raise ValueError(
        f'rotary embeddings must be of the default kind, but rope_type in '
        f'{path / "config.json"} is {kind!r}, which is not built here.')
  heads = raw['num_attention_heads']
  return TransformerConfig(
      vocab_size=raw['vocab_size'],
      hidden_size=raw['hidden_size'],
      num_hidden_layers=raw['num_hidden_layers'],
      num_attention_heads=heads,
      num_key_value_heads=raw.get('num_key_value_heads', heads),
      head_dim=raw.get('head_dim') or raw['hidden_size'] // heads,
      intermediate_size=raw['intermediate_size'],
      rope_theta=rope.get('rope_theta', raw.get('rope_theta', 10_000.0)),
      rms_norm_eps=raw.get('rms_norm_eps', 1e-6),
      attention_bias=True,  # of q, k and v; fixed in Qwen2
      tie_word_embeddings=raw.get('tie_word_embeddings', False),
      max_position_embeddings=raw.get('max_position_embeddings', 2048),
  )


def load(folder: str, config: TransformerConfig) -> Params:
  """Float32 params on the host, from every *.safetensors of a folder.

  Raises:
    FileNotFoundError: no safetensors.
    ValueError: a damaged file; a missing, unexpected or misshapen tensor.
  """
  path = pathlib.Path(folder)
  files = sorted(path.glob('*.safetensors'))
  if not files:
    raise FileNotFoundError(
        f'model.path must hold *.safetensors, but {path} has none. Convert '
        'older .bin files with transformers first; pickle is never read.')
  tensors = {}
  for file in files:
    try:
      tensors.update(safetensors.numpy.load_file(file))
    except Exception as error:
      raise ValueError(f'{file} cannot be read: {error}. Fetch it again.') from (
          error)
  if config.tie_word_embeddings:
    tensors.pop('lm_head.weight', None)  # some exporters write it all the same
  shapes = _shapes(config)
  problems = [f'{n} is missing' for n in shapes if n not in tensors]
  problems += [f'{n} is not expected' for n in tensors if n not in shapes]
  problems += [f'{n} is {tensors[n].shape}, not {shapes[n]}' for n in shapes
               if n in tensors and tensors[n].shape != shapes[n]]
  if problems:
    raise ValueError(
        f'the tensors of {path} must fit its config.json, but '
        f'{"; ".join(problems[:4])} ({len(problems)} in all).')
  return _from_huggingface(tensors, config)


def save(folder: str, params: Params, config: TransformerConfig, *,
         tokenizer_from: str, eos_id: int) -> None:
  """Writes a folder that transformers loads: config, weights, tokenizer.

  Args:
    folder: made if need be.
    params: float32; fetched to the host.
    config: the shape.
    tokenizer_from: the folder whose tokenizer files are copied.
    eos_id: ends a generation by default.
  """
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  raw = {
      'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2',
      'vocab_size': config.vocab_size, 'hidden_size': config.hidden_size,
      'num_hidden_layers': config.num_hidden_layers,
      'num_attention_heads': config.num_attention_heads,
      'num_key_value_heads': config.num_key_value_heads,
      'head_dim': config.head_dim,
      'intermediate_size': config.intermediate_size,
      'rope_theta': config.rope_theta,
      'rope_parameters': {'rope_type': 'default',
                          'rope_theta': config.rope_theta},
      'rms_norm_eps': config.rms_norm_eps, 'hidden_act': 'silu',
      'tie_word_embeddings': config.tie_word_embeddings,
      'max_position_embeddings': config.max_position_embeddings,
      'dtype': 'float32', 'torch_dtype': 'float32', 'eos_token_id': eos_id,
  }
  (path / 'config.json').write_text(json.dumps(raw, indent=2) + '\n')
  tensors = _to_huggingface(jax.device_get(params), config)
  safetensors.numpy.save_file(tensors, path / 'model.safetensors',
                              metadata={'format': 'pt'})
  (path / 'model.safetensors').chmod(0o644)  # safetensors: owner only
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    source = pathlib.Path(tokenizer_from) / name
    if source.exists() and source.resolve() != (path / name).resolve():
      shutil.copyfile(source, path / name)


def _shapes(c: TransformerConfig) -> dict[str, tuple[int, ...]]:
  """Hugging Face's name -> shape of every tensor."""
  wide, narrow = c.num_attention_heads, c.num_key_value_heads
  width, inner = c.hidden_size, c.intermediate_size
  layer = {
      'input_layernorm.weight': (width,),
      'post_attention_layernorm.weight': (width,),
      'self_attn.q_proj.weight': (wide * c.head_dim, width),
      'self_attn.k_proj.weight': (narrow * c.head_dim, width),
      'self_attn.v_proj.weight': (narrow * c.head_dim, width),
      'self_attn.o_proj.weight': (width, wide * c.head_dim),
      'mlp.gate_proj.weight': (inner, width),
      'mlp.up_proj.weight': (inner, width),
      'mlp.down_proj.weight': (width, inner),
  }
  if c.attention_bias:
    layer |= {'self_attn.q_proj.bias': (wide * c.head_dim,),
              'self_attn.k_proj.bias': (narrow * c.head_dim,),
              'self_attn.v_proj.bias': (narrow * c.head_dim,)}
  shapes = {f'model.layers.{i}.{name}': shape
            for i in range(c.num_hidden_layers) for name, shape in layer.items()}
  shapes |= {'model.embed_tokens.weight': (c.vocab_size, width),
             'model.norm.weight': (width,)}
  if not c.tie_word_embeddings:
    shapes['lm_head.weight'] = (c.vocab_size, width)
  return shapes


def _from_huggingface(tensors, config: TransformerConfig) -> Params:
  def stacked(name, transpose):
    leaves = [np.asarray(tensors[f'model.layers.{i}.{name}'], np.float32)
              for i in range(config.num_hidden_layers)]
    return np.stack([leaf.T if transpose else leaf for leaf in leaves])

  layers = {}
  for (part, leaf), (name, transpose) in _LAYER.items():
    if leaf != 'bias' or config.attention_bias:
      layers.setdefault(part, {})[leaf] = stacked(name, transpose)
  params = {
      'embed': {'embedding': np.asarray(
          tensors['model.embed_tokens.weight'], np.float32)},
      'layers': layers,
      'norm': {'scale': np.asarray(tensors['model.norm.weight'], np.float32)},
  }
  if not config.tie_word_embeddings:
    params['head'] = {'kernel': np.asarray(
        tensors['lm_head.weight'], np.float32).T}
  return jax.tree.map(jnp.asarray, params)


def _to_huggingface(params: Params, config: TransformerConfig):
  tensors = {
      'model.embed_tokens.weight': np.asarray(params['embed']['embedding']),
      'model.norm.weight': np.asarray(params['norm']['scale']),
  }
  for (part, leaf), (name, transpose) in _LAYER.items():
    if leaf == 'bias' and not config.attention_bias:
      continue
    for i in range(config.num_hidden_layers):
      value = np.asarray(params['layers'][part][leaf][i])
      tensors[f'model.layers.{i}.{name}'] = np.ascontiguousarray(
          value.T if transpose else value)
  if not config.tie_word_embeddings:
    tensors['lm_head.weight'] = np.ascontiguousarray(
        np.asarray(params['head']['kernel']).T)
  return tensors
