# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of a decoder's parameters, and its inner width."""

import math

import jax

from searchrl.models import transformer


def inner_width(c: transformer.TransformerConfig) -> int:
  """Returns the inner width of the feed-forward part that one token uses.

  It is the inner width of the MLP, or the sum over the token's experts.
  """
  return c.intermediate_size if c.experts is None else (
      c.experts.num_experts_per_tok * c.experts.moe_intermediate_size)


def parameters(c: transformer.TransformerConfig) -> tuple[int, int]:
  """Returns the number of all parameters, and of those that one token uses."""
  sizes = {name: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
           for name, tree in transformer.abstract(c)['layers'].items()}
  rest = sum(math.prod(x.shape) for x in jax.tree.leaves(
      {k: v for k, v in transformer.abstract(c).items() if k != 'layers'}))
  idle = 0 if c.experts is None else (
      1 - c.experts.num_experts_per_tok / c.experts.num_experts)
  used = sum(round(size * (1 - idle * name.startswith('expert_')))
             for name, size in sizes.items())
  return rest + sum(sizes.values()), rest + used
