# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA: low-rank adapters of a frozen decoder, which can be merged into it.

A projection x W becomes x W + (alpha / rank) x A B, with W frozen, A [D r] and
B [r F]. B starts at 0, so that the adapted policy starts equal to the frozen
one, which is also the reference policy.

  layers/<target>/lora_a [L D r]   layers/<target>/lora_b [L r F]

In a mixture of experts, the targets gate, up and down are the matrices of every
expert, each with adapters of its own: lora_a [L E D r] and lora_b [L E r F].

Source: Hu et al. 2021, LoRA, arXiv:2106.09685, section 4.1.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from searchrl.models import transformer
from searchrl.models.transformer import Params, TransformerConfig

TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


@dataclasses.dataclass(frozen=True)
class Lora:
  """Settings of LoRA: rank, weight and target projections of the adapters.

  Raises:
    ValueError: The rank is below 1, alpha is not above 0, or a target is
      unknown.
  """

  rank: int  # inner size of an adapter, r
  alpha: float  # an adapter's weight is alpha / rank
  targets: Sequence[str] = TARGETS  # projections with adapters, in every layer

  def __post_init__(self):
    object.__setattr__(self, 'targets', tuple(self.targets))  # hashable
    if self.rank < 1 or not self.alpha > 0:
      raise ValueError(
          'lora.rank must be at least 1 and lora.alpha above 0, but they are '
          f'{self.rank} and {self.alpha}. Rank 0 in a config trains all '
          'parameters instead.')
    if not self.targets or not set(self.targets) <= set(TARGETS):
      raise ValueError(
          f'lora.targets must be some of {TARGETS}, but is {self.targets}.')

  @property
  def scale(self) -> float:
    """Weight of an adapter, alpha / rank."""
    return self.alpha / self.rank


def _names(lora: Lora, config: TransformerConfig) -> list[str]:
  """Returns the names of the modules with adapters in a layer's params.

  In a mixture of experts, the target 'gate' is 'expert_gate', which has the
  gates of all experts.
  """
  layer = transformer.abstract(config)['layers']
  return [target if target in layer else f'expert_{target}'
          for target in lora.targets]


def init(lora: Lora, config: TransformerConfig, key: Array) -> Params:
  """Returns float32 adapters: A uniform within +-1 / sqrt(D), and B zero."""
  kernels, layers = transformer.abstract(config)['layers'], {}
  keys = jax.random.split(key, len(lora.targets))
  for name, target_key in zip(_names(lora, config), keys):
    *stacked, inward, outward = kernels[name]['kernel'].shape
    bound = inward ** -0.5
    layers[name] = {
        'lora_a': jax.random.uniform(target_key, (*stacked, inward, lora.rank),
                                     minval=-bound, maxval=bound),
        'lora_b': jnp.zeros((*stacked, lora.rank, outward))}
  return {'layers': layers}


def logical_axes(lora: Lora, config: TransformerConfig) -> Params:
  """Returns the axis names of the adapters, in the tree that `init` returns.

  Each array has a tuple of names as in `transformer`, with None for the rank.
  """
  layers, axes = {}, transformer.logical_axes(config)['layers']
  for name in _names(lora, config):
    *stacked, inward, outward = axes[name]['kernel']
    layers[name] = {'lora_a': (*stacked, inward, None),
                    'lora_b': (*stacked, None, outward)}
  return {'layers': layers}


def attach(base: Params, adapters: Params, lora: Lora) -> Params:
  """Returns the base params with adapters beside the matrices that they adapt.

  `transformer.forward` adds their products to those of the base. `lora_b` is
  scaled by alpha / rank here.
  """
  return {**base, 'layers': base['layers'] | {
      name: {**base['layers'][name], 'lora_a': adapter['lora_a'],
             'lora_b': lora.scale * adapter['lora_b']}
      for name, adapter in adapters['layers'].items()}}


def merge(base: Params, adapters: Params, lora: Lora,
          dtype: str | None = None) -> Params:
  """Returns a plain decoder's params, with the adapters added to the kernels W.

  The sums have the data type `dtype`. None: that of W. Leaves without an
  adapter are shared with the base.
  """
  return merged(attach(base, adapters, lora), dtype)


def merged(params: Params, dtype: str | None = None) -> Params:
  """Returns a plain decoder's params, like `merge`, given a result of `attach`.

  Params without adapters are returned as they are.
  """
  return {**params, 'layers': {
      name: merged_matrix(leaves, dtype)
      for name, leaves in params['layers'].items()}}


def merged_matrix(leaves: Params, dtype: str | None = None) -> Params:
  """Returns a module's leaves, with its adapter (if any) added to the kernel.

  The leaves are those of one layer, or those of all layers, stacked. The sum
  has the data type `dtype`. None: that of the kernel.
  """
  if 'lora_a' not in leaves:
    return leaves
  others = {name: leaf for name, leaf in leaves.items()
            if name not in ('lora_a', 'lora_b')}
  return others | {'kernel': _merged(
      leaves['kernel'], leaves['lora_a'], leaves['lora_b'],
      dtype or leaves['kernel'].dtype.name)}


@functools.partial(jax.jit, static_argnums=3)
def _merged(kernel, a, b, dtype: str) -> Any:
  more = jnp.einsum('...dr,...rf->...df', a, b, precision='highest')
  return (kernel.astype(jnp.float32) + more).astype(dtype)
