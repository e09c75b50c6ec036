# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Families of decoders: how config.json and tensor names describe a model.

A family is all models of one architecture of Hugging Face, such as Qwen2.
`FAMILIES` has an entry for each. docs/extend.md shows how to add a family.
"""

from collections.abc import Mapping
import dataclasses
import math
import pathlib
from typing import Any

from searchrl.models.experts import Experts
from searchrl.models.rotary import Llama3Rope
from searchrl.models.transformer import TransformerConfig

# Hugging Face's names of the keys of params; see `tensors.sources`.
NAMES = {
    'embed': 'model.embed_tokens', 'norm': 'model.norm', 'head': 'lm_head',
    'layers': 'model.layers.{}', 'attention_norm': 'input_layernorm',
    'mlp_norm': 'post_attention_layernorm', 'q': 'self_attn.q_proj',
    'k': 'self_attn.k_proj', 'v': 'self_attn.v_proj', 'o': 'self_attn.o_proj',
    'q_norm': 'self_attn.q_norm', 'k_norm': 'self_attn.k_norm',
    'gate': 'mlp.gate_proj', 'up': 'mlp.up_proj', 'down': 'mlp.down_proj'}
_EXPERTS = {
    'router': 'mlp.gate', 'expert_gate': 'mlp.experts.{}.gate_proj',
    'expert_up': 'mlp.experts.{}.up_proj',
    'expert_down': 'mlp.experts.{}.down_proj'}


@dataclasses.dataclass(frozen=True)
class Family:
  """Models of one architecture, and how their folders describe a decoder.

  Attributes:
    model_type: Value of `model_type` in config.json.
    fields: Names of TransformerConfig's flags that this family has, each with
      its key in config.json. Other flags are False, except for those that all
      families have (`_SAME`).
    fixed: Values of keys that all models of the family share. These keys are
      neither read from config.json nor written to it.
    defaults: Values of keys that config.json may leave out.
    names: Names of the tensors; see `NAMES`.
    has_experts: True if every layer has a mixture of experts.
  """

  model_type: str
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  names: Mapping[str, str] = dataclasses.field(default_factory=NAMES.copy)
  has_experts: bool = False


# Families by the architecture that config.json names. A program may add its own
# before it reads a model.
FAMILIES = {
    'LlamaForCausalLM': Family(
        'llama', fixed={'use_sliding_window': False},
        fields={'attention_bias': 'attention_bias',
                'attention_out_bias': 'attention_bias',
                'mlp_bias': 'mlp_bias'}),
    'MistralForCausalLM': Family(
        'mistral', fixed={'use_sliding_window': True, 'max_window_layers': 0,
                          'layer_types': None},
        defaults={'num_key_value_heads': 8, 'sliding_window': 4096}),
    'Qwen2ForCausalLM': Family(
        'qwen2', fields={'attention_bias': 'attention_bias'},
        fixed={'attention_bias': True}),
    'Qwen3ForCausalLM': Family(
        'qwen3', fixed={'qk_norm': True}, defaults={'head_dim': 128},
        fields={'attention_bias': 'attention_bias',
                'attention_out_bias': 'attention_bias', 'qk_norm': 'qk_norm'}),
    'Qwen3MoeForCausalLM': Family(
        'qwen3_moe', has_experts=True,
        fixed={'qk_norm': True, 'max_window_layers': 0, 'layer_types': None},
        defaults={'num_key_value_heads': 4, 'num_experts_per_tok': 8,
                  'moe_intermediate_size': 768, 'norm_topk_prob': False},
        fields={'attention_bias': 'attention_bias',
                'attention_out_bias': 'attention_bias', 'qk_norm': 'qk_norm'},
        names=NAMES | _EXPERTS),
}
_DEFAULTS = {
    'rms_norm_eps': 1e-6, 'tie_word_embeddings': False,
    'max_position_embeddings': 2048, 'sliding_window': 4096,
    'use_sliding_window': False, 'max_window_layers': 28}
# Fields of TransformerConfig whose key in config.json has the same name.
_SAME = ('vocab_size', 'hidden_size', 'num_hidden_layers',
         'num_attention_heads', 'intermediate_size', 'rms_norm_eps',
         'tie_word_embeddings', 'max_position_embeddings')


def parse(raw: Mapping[str, Any], path: pathlib.Path) -> TransformerConfig:
  """Returns the shape of the decoder that a config.json describes.

  Args:
    raw: Content of config.json.
    path: Path of config.json, for errors.

  Raises:
    ValueError: The shape is contradictory, or a part of it is not implemented.
    KeyError, TypeError: A value is missing or has another type.
  """
  architecture = (raw.get('architectures') or ['none'])[0]
  if architecture not in FAMILIES:
    if (path.parent / 'model' / 'config.json').is_file():
      raise ValueError('model.path must be the folder of a model, but '
                       f'{path.parent} is that of a run. Name its model: '
                       f'{path.parent / "model"}.')
    raise ValueError(
        f'model.path must hold one of {sorted(FAMILIES)}, but {path} names '
        f'{architecture!r}. docs/extend.md shows how to add a family.')
  family = FAMILIES[architecture]
  raw = {**_DEFAULTS, **family.defaults, **raw, **family.fixed}
  check_values(raw, path, hidden_act='silu', quantization_config=None)
  heads = raw['num_attention_heads']
  theta, scaling = _rope(raw, path)
  fields: dict[str, Any] = {'attention_bias': False}
  fields |= {name: raw.get(key, False) for name, key in family.fields.items()}
  config = TransformerConfig(
      **{name: raw[name] for name in _SAME}, **fields,
      num_key_value_heads=raw.get('num_key_value_heads') or heads,
      head_dim=raw.get('head_dim') or raw['hidden_size'] // heads,
      rope_theta=theta, rope_scaling=scaling, architecture=architecture,
      sliding_window=_window(raw, path),
      experts=_experts(raw, path) if family.has_experts else None)
  if heads % config.num_key_value_heads or config.head_dim % 2:
    raise ValueError(
        f'{path} must have an even head_dim, and num_key_value_heads that '
        f'divide num_attention_heads, but they are {config.head_dim}, '
        f'{config.num_key_value_heads} and {heads}. Fetch it again.')
  check_sizes(config, path)
  return config


def _experts(raw: Mapping[str, Any], path: pathlib.Path) -> Experts:
  """Returns the settings of experts. All layers must have experts."""
  # transformers 5 writes the second name, and reads both.
  raw = {'num_experts': raw.get('num_local_experts', 128)} | dict(raw)
  if raw.get('decoder_sparse_step', 1) != 1 or raw.get('mlp_only_layers'):
    raise ValueError(
        f'all layers must have experts, but {path} has decoder_sparse_step '
        f'{raw.get("decoder_sparse_step", 1)!r} and mlp_only_layers '
        f'{raw.get("mlp_only_layers")!r}, which is not implemented here.')
  experts = Experts(**{field.name: raw[field.name]
                       for field in dataclasses.fields(Experts)})
  check_sizes(experts, path)
  if experts.num_experts_per_tok > experts.num_experts:
    raise ValueError(
        f'num_experts_per_tok in {path} must be at most num_experts, '
        f'{experts.num_experts}, but is {experts.num_experts_per_tok}. Fetch '
        'it again.')
  return experts


def check_values(raw: Mapping[str, Any], path: pathlib.Path, **values: Any
                ) -> None:
  """Raises a ValueError for a value in config.json that is not implemented.

  Args:
    raw: Content of config.json. A key that is missing there is accepted.
    path: Path of config.json, for the error.
    **values: Keys to check, each with the only value that is implemented.
  """
  for key, value in values.items():
    if raw.get(key, value) != value:
      raise ValueError(f'{key} in {path} must be {value!r}, but is '
                       f'{raw[key]!r}, which is not implemented here.')


def check_sizes(config: Any, path: pathlib.Path) -> None:
  """Raises a ValueError unless the fields are above 0, and sizes are whole."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.type is int and (type(value) is not int or value < 1):
      raise ValueError(f'{field.name} in {path} must be a whole number from 1 '
                       f'on, but is {value!r}. Fetch it again.')
    if field.type is float and (
        type(value) not in (int, float) or not 0 < value < math.inf):
      raise ValueError(f'{field.name} in {path} must be a number above 0, but '
                       f'is {value!r}. Fetch it again.')


def _rope(raw: Mapping[str, Any], path: pathlib.Path
         ) -> tuple[float, Llama3Rope | None]:
  """Returns the base theta and the scaling of a model's rotary frequencies.

  The scaling is None if the frequencies are not scaled. transformers 5 writes
  both into `rope_parameters`. If a user has added `rope_scaling`, it is used
  instead, as in transformers.
  """
  parameters = raw.get('rope_parameters') or {}
  rope = raw.get('rope_scaling') or parameters
  if not isinstance(rope, Mapping):
    raise TypeError(f'the rotary embeddings are {rope!r}')
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if any(isinstance(value, Mapping) for value in rope.values()):
    kind = 'one a kind of layer'
  elif rope.get('partial_rotary_factor', 1) != 1:
    kind = 'partial'
  theta = rope.get('rope_theta', parameters.get(
      'rope_theta', raw.get('rope_theta', 10_000.0)))
  if kind == 'default':
    return theta, None
  if kind != 'llama3':
    raise ValueError(
        f'rotary embeddings must be of the default or llama3 kind, but '
        f'rope_type in {path} is {kind!r}, which is not implemented '
        'here.')
  rope = {'original_max_position_embeddings':
          raw['max_position_embeddings'], **rope}
  scaling = Llama3Rope(**{
      field.name: rope[field.name] for field in dataclasses.fields(Llama3Rope)})
  check_sizes(scaling, path)
  if scaling.low_freq_factor >= scaling.high_freq_factor:
    raise ValueError(
        f'low_freq_factor in {path} must be below high_freq_factor, '
        f'{scaling.high_freq_factor}, but is {scaling.low_freq_factor}. Fetch '
        'it again.')
  return theta, scaling


def _window(raw: Mapping[str, Any], path: pathlib.Path) -> int | None:
  """Returns the window of every layer in tokens; None if there is no window."""
  layers = raw['num_hidden_layers']
  window = raw['sliding_window'] if raw['use_sliding_window'] else None
  # The first layers may see all tokens.
  full = layers if window is None else min(raw['max_window_layers'], layers)
  kinds = set(raw.get('layer_types') or (
      ['full_attention'] * full + ['sliding_attention'] * (layers - full)))
  if kinds == {'full_attention'}:
    return None
  if kinds != {'sliding_attention'} or window is None:
    raise ValueError(
        f'all layers must see equally far, but {path} has layers of '
        f'{sorted(kinds)} with sliding_window {window!r}, which is not '
        'implemented here.')
  if type(window) is not int or window < 1:
    raise ValueError(f'sliding_window in {path} must be a whole number from 1 '
                     f'on, but is {window!r}. Fetch it again.')
  return window


def describe(c: TransformerConfig, dtype: str, eos_id: int | list[int]
            ) -> dict[str, Any]:
  """Returns the content of a config.json for transformers 4 and 5.

  Args:
    c: Shape of the decoder.
    dtype: Name of the data type of the weights.
    eos_id: Token id, or ids, that end a generation.
  """
  family = FAMILIES[c.architecture]
  scaling: dict[str, Any] = {'rope_type': 'default'}
  if c.rope_scaling is not None:
    scaling = {'rope_type': 'llama3', **dataclasses.asdict(c.rope_scaling)}
  raw = {
      'architectures': [c.architecture], 'model_type': family.model_type,
      **{name: getattr(c, name) for name in (
          *_SAME, 'num_key_value_heads', 'head_dim', 'rope_theta')},
      'rope_parameters': {**scaling, 'rope_theta': c.rope_theta},
      'hidden_act': 'silu', 'dtype': dtype, 'torch_dtype': dtype,
      'eos_token_id': eos_id}
  if c.rope_scaling is not None:
    raw['rope_scaling'] = scaling
  if c.experts is not None:
    raw |= dataclasses.asdict(c.experts) | {
        'decoder_sparse_step': 1, 'mlp_only_layers': []}
  optional = {key: getattr(c, name) for name, key in family.fields.items()}
  if c.sliding_window is not None or 'sliding_window' in family.defaults:
    optional |= {'sliding_window': c.sliding_window, 'use_sliding_window': True,
                 'max_window_layers': 0}
  return raw | {key: value for key, value in optional.items()
                if key not in family.fixed}
