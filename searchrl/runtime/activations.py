# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Constraints on how the activations of a network are split over devices."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from searchrl.runtime import mesh as meshes


def split_by_tokens(mesh: Mesh, x: jax.Array, place: str = 'layer'
                   ) -> jax.Array:
  """Returns activations with a sharding that splits only their tokens.

  It is for use in a jitted function. Activations have the shape [B T D]: rows,
  positions, width. They are split over rows and, if the mesh has the axis
  'sequence', over positions. FSDP splits weights over their width. Without this
  constraint, the compiler may split activations over their width, too, and then
  sums each product over all devices, which sends far more than the weights. The
  gradient is split in the same way.

  Args:
    mesh: Mesh of the devices.
    x: Activations, [B T D].
    place: Name of the point in the network at which x occurs. 'layer': input of
      a layer. 'embedded': embeddings, which arrive split over their width.
      'last': output of the last layer; here the result is split over rows
      alone, because what follows needs all positions of a row.
  """
  has_parts = meshes.ways(mesh, 'length') > 1
  if not has_parts and (
      place != 'layer' or meshes.ways(mesh, 'batch') == mesh.shape['data']):
    return x  # the width is not split, or nothing is to be done here
  tokens = meshes.spec(mesh, ('batch', 'length', None))
  # The embeddings are exchanged over one mesh axis after the other. In a single
  # step, the compiler would gather all of them.
  steps = {'layer': (tokens,),
           'embedded': (PartitionSpec('data', 'sequence', 'fsdp'), tokens),
           'last': (tokens, meshes.spec(mesh, ('batch', None, None)))}
  for step in steps[place]:
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, step))
  return x
