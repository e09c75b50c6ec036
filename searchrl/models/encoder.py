# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A BERT encoder of texts, as in E5: token ids and a mask to unit vectors.

Callers add QUERY_PREFIX or PASSAGE_PREFIX, [CLS] and [SEP] to a text and pad it
on the right. The modules are thin Flax Linen. The parameters are a plain nested
dict, in which layers are stacked on axis 0:

  embed/{token [V D], position [P D], type [K D]}
  embed_norm/{scale, bias} [D]
  layers/{q, k, v, o, up, down}/{kernel [L ...], bias [L ...]}
  layers/{attention_norm, mlp_norm}/{scale, bias} [L D]

Sources: Devlin et al. 2018, arXiv:1810.04805; Wang et al. 2022 (E5),
  arXiv:2212.03533.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import pathlib
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from searchrl.models import attention
from searchrl.models import families
from searchrl.models import tensors
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.transformer import Params, Projection

QUERY_PREFIX = 'query: '
PASSAGE_PREFIX = 'passage: '
POOLINGS = ('mean', 'cls')

# Hugging Face's names of the keys of params; see `tensors.sources`.
NAMES = {
    'embed': 'embeddings', 'token': 'word_embeddings',
    'position': 'position_embeddings', 'type': 'token_type_embeddings',
    'embed_norm': 'embeddings.LayerNorm', 'layers': 'encoder.layer.{}',
    'q': 'attention.self.query', 'k': 'attention.self.key',
    'v': 'attention.self.value', 'o': 'attention.output.dense',
    'attention_norm': 'attention.output.LayerNorm', 'up': 'intermediate.dense',
    'down': 'output.dense', 'mlp_norm': 'output.LayerNorm'}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """Shape of an encoder. Field names follow config.json."""

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  intermediate_size: int
  max_position_embeddings: int = 512
  type_vocab_size: int = 2
  layer_norm_eps: float = 1e-12


class LayerNorm(nn.Module):
  """Layer norm in float32: (x - mean) / standard deviation * scale + bias."""

  eps: float

  @nn.compact
  def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B D']:
    """Returns x normalised over its last axis, in the dtype of x."""
    param = lambda name, init: transformer.param(
        self, name, init, x.shape[-1:], ('embed',)).astype(jnp.float32)
    x32 = x.astype(jnp.float32)
    x32 -= jnp.mean(x32, -1, keepdims=True)
    x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
    scale = param('scale', nn.initializers.ones)
    bias = param('bias', nn.initializers.zeros)
    return (x32 * scale + bias).astype(x.dtype)


def _gelu(x: Float[Array, '*B']) -> Float[Array, '*B']:
  """Returns the GELU: x times the normal distribution function of x.

  `jax.nn.gelu` uses erfc, which is more precise for tiny results, but slower.
  """
  return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


class Block(nn.Module):
  """Attention to all tokens, then an MLP. Each residual sum is normalised."""

  config: EncoderConfig

  @nn.compact
  def __call__(self, x: Float[Array, 'B T D'], mask: Bool[Array, 'B T T']
              ) -> Float[Array, 'B T D']:
    """Returns the layer's output for rows of hidden states.

    `mask` is True where token t of a row attends to token s, [B, t, s].
    """
    c = self.config
    dense = functools.partial(Projection, use_bias=True)
    flat = x.reshape(-1, x.shape[-1])
    q, k, v = (
        dense(c.hidden_size, ('embed', 'heads'), name=name)(flat).reshape(
            *x.shape[:2], c.num_attention_heads, -1) for name in 'qkv')
    y = attention.grouped(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
    y = dense(c.hidden_size, ('heads', 'embed'), name='o')(
        y.reshape(flat.shape))
    flat = LayerNorm(c.layer_norm_eps, name='attention_norm')(flat + y)
    y = dense(c.intermediate_size, ('embed', 'mlp'), name='up')(flat)
    y = dense(c.hidden_size, ('mlp', 'embed'), name='down')(_gelu(y))
    flat = LayerNorm(c.layer_norm_eps, name='mlp_norm')(flat + y)
    return flat.reshape(x.shape)


def forward(
    params: Params,
    tokens: Int[Array, 'B T'],
    mask: Bool[Array, 'B T'],
    config: EncoderConfig,
    *,
    segments: Int[Array, 'B T'] | None = None,
    remat: bool | str = False,
    dtype: Any = jnp.float32,
    constrain: Callable[[Array], Array] = lambda x: x,
) -> Float[Array, 'B T D']:
  """Returns hidden states of texts. Each token attends to its whole text.

  Args:
    params: Parameters as described at the top of this file.
    tokens: Right-padded rows of token ids, with [CLS] and [SEP].
    mask: True, or 1, except for padding.
    config: Shape of the encoder.
    segments: 0 for the first text of a pair, 1 for the second. Default: 0.
    remat: Choice of what the backward pass recomputes; see
      `transformer.forward_with_load`.
    dtype: Data type of activations, and of parameters in products.
    constrain: Function from a layer's input to the same values, which may set
      their sharding.

  Returns:
    The last layer's output, in `dtype`. It is undefined for padding.

  Raises:
    ValueError: The rows are longer than the table of positions, or `remat` has
      an unknown value.
  """
  rows, length = tokens.shape
  if length > config.max_position_embeddings:
    raise ValueError(
        f'texts must have at most {config.max_position_embeddings} tokens, the '
        f'positions of the model, but have {length}. Cut them.')
  embed = params['embed']
  kinds = embed['type'][0 if segments is None else segments]
  x = embed['token'][tokens] + kinds + embed['position'][:length]
  x = LayerNorm(config.layer_norm_eps).apply(
      {'params': params['embed_norm']}, x.astype(dtype))
  visible = jnp.broadcast_to(mask.astype(bool)[:, None], (rows, length, length))

  def layer(x, layer_params):
    return Block(config).apply(
        {'params': layer_params}, constrain(x), visible), None

  x, _ = jax.lax.scan(
      transformer.recomputed(layer, remat), x, params['layers'])
  return x


def embed(
    params: Params,
    tokens: Int[Array, 'B T'],
    mask: Bool[Array, 'B T'],
    config: EncoderConfig,
    *,
    pooling: str = 'mean',
    **options: Any,
) -> Float[Array, 'B D']:
  """Returns float32 unit vectors of texts, pooled from their hidden states.

  `pooling` is 'mean', which averages all tokens of a text as in E5, or 'cls',
  which takes its first token as in BGE. The other arguments are those of
  `forward`. A row of only padding gives 0.

  Raises:
    ValueError: The pooling has another name.
  """
  if pooling not in POOLINGS:
    raise ValueError(f'pooling must be one of {", ".join(POOLINGS)}, but is '
                     f'{pooling!r}.')
  hidden = forward(params, tokens, mask, config, **options)
  pooled = mask.astype(bool)[..., None]
  if pooling == 'cls':
    pooled = pooled & (jnp.arange(tokens.shape[1]) == 0)[:, None]
  total = jnp.sum(hidden.astype(jnp.float32), 1, where=pooled)
  mean = total / jnp.maximum(jnp.sum(pooled, 1), 1)
  square = jnp.sum(mean * mean, -1, keepdims=True)
  # A second `where`, so that the gradient of an empty row is not NaN.
  length = jnp.sqrt(jnp.where(square > 0, square, 1.0))
  return mean / jnp.maximum(length, 1e-12)


def init(config: EncoderConfig, key: Array) -> Params:
  """Returns random float32 parameters: normal(0.02), norms 1, biases 0."""
  return nn.meta.unbox(_boxed(config, key))


def logical_axes(config: EncoderConfig) -> Params:
  """Returns the axis names of each parameter, as a tree like that of `init`."""
  return transformer.axes_of(lambda key: _boxed(config, key))


def _boxed(config: EncoderConfig, key: Array) -> Params:
  """Returns the tree of `init`, with each array in flax's box of axis names."""
  keys, width = jax.random.split(key, 4), config.hidden_size
  box = nn.LogicallyPartitioned

  def table(key, size, axis):
    return nn.with_logical_partitioning(transformer.normal, (axis, 'embed'))(
        key, (size, width))

  layer = lambda key: Block(config).init(
      key, jnp.zeros((1, 1, width)), jnp.ones((1, 1, 1), bool))['params']
  return {
      'embed': {
          'token': table(keys[0], config.vocab_size, 'vocab'),
          'position': table(keys[1], config.max_position_embeddings, None),
          'type': table(keys[2], config.type_vocab_size, None)},
      'embed_norm': {'scale': box(jnp.ones(width), ('embed',)),
                     'bias': box(jnp.zeros(width), ('embed',))},
      'layers': transformer.stacked_layers(
          layer, keys[3], config.num_hidden_layers),
  }


def read_config(folder: str) -> EncoderConfig:
  """Returns the shape that the config.json of a BERT folder describes.

  Raises:
    FileNotFoundError: The folder does not exist or has no config.json.
    ValueError: The file is not JSON, the shape is incomplete, or the
      architecture is not implemented here.
  """
  raw, path = weights.read_json(folder)
  families.check_values(
      {'model_type': None} | raw, path, model_type='bert', hidden_act='gelu',
      position_embedding_type='absolute', is_decoder=False,
      quantization_config=None)
  names = [field.name for field in dataclasses.fields(EncoderConfig)]
  try:
    config = EncoderConfig(**{name: raw[name] for name in names if name in raw})
  except TypeError as error:
    raise ValueError(f'{path} must hold the whole shape of a model, but: '
                     f'{error}. Fetch it again.') from error
  families.check_sizes(config, path)
  if config.hidden_size % config.num_attention_heads:
    raise ValueError(
        f'num_attention_heads in {path} must divide hidden_size, but they are '
        f'{config.num_attention_heads} and {config.hidden_size}.')
  return config


def load(folder: str | pathlib.Path, config: EncoderConfig, **options: Any
        ) -> Params:
  """Loads the params of a BERT folder, array by array onto their devices.

  Names of tensors may begin with `bert.`. Position ids, the pooler and heads
  for other tasks are ignored.

  Args:
    folder: Folder with safetensors.
    config: Shape that `read_config` returns for the same folder.
    **options: Options of `weights.load`: sharding_of and dtype.

  Raises:
    FileNotFoundError: The folder has no safetensors.
    ValueError: A file is damaged; or a tensor is missing, unexpected or has a
      wrong shape.
  """
  leaves = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
  return tensors.load(
      tensors.Folder(pathlib.Path(folder), _rename), NAMES, leaves,
      logical_axes(config), **options)


def save(
    folder: str | pathlib.Path,
    params: Params,
    config: EncoderConfig,
    *,
    tokenizer_from: str | pathlib.Path,
    dtype: str = 'float32',
) -> None:
  """Writes a folder for transformers' BertModel, without a pooler.

  Args:
    folder: Path of a folder that is new, empty, or an earlier export.
    params: Params on the host or on any devices.
    config: Shape of the params.
    tokenizer_from: Folder or hub id whose tokenizer files are copied.
    dtype: Data type in the files, 'float32' or 'bfloat16'.

  Raises:
    ValueError: The dtype is not one of these, or the folder contains folders.
  """
  raw = {'architectures': ['BertModel'], 'model_type': 'bert',
         **dataclasses.asdict(config), 'hidden_act': 'gelu',
         'position_embedding_type': 'absolute', 'pad_token_id': 0,
         'dtype': dtype, 'torch_dtype': dtype}
  weights.export(folder, params, NAMES, raw, dtype=dtype,
                 tokenizer_from=tokenizer_from)


def _rename(name: str) -> str | None:
  """Returns a tensor's `modern` name; None also for the pooler and heads."""
  renamed = modern(name)
  is_head = renamed and renamed.startswith(('pooler.', 'cls.'))
  return None if is_head else renamed


def modern(name: str) -> str | None:
  """Returns a BERT tensor's name as present versions of transformers write it.

  The prefix `bert.` is removed. Older files call the scale and the bias of a
  layer norm gamma and beta; here they become weight and bias. The result is
  None for position ids, which present versions do not write.
  """
  name = name.removeprefix('bert.').replace(
      'LayerNorm.gamma', 'LayerNorm.weight').replace(
          'LayerNorm.beta', 'LayerNorm.bias')
  return None if name == 'embeddings.position_ids' else name
