# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The part of the networks' state that training changes, and where it is kept.

Parameters are on the devices of a mesh. The optimiser's moments are there, too,
or in the memory of the devices' hosts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool
import optax

from searchrl.runtime import mesh as meshes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The part of a network's state that training changes.

  A checkpoint names arrays by these fields: 'policy/params/...', and so on.
  """

  params: Any  # pytree of float32 arrays
  opt_state: optax.OptState
  updates: Any = None  # optimiser steps, a scalar; None: not counted

  def apply_gradient(self, optimizer: optax.GradientTransformation,
                     gradient: Any) -> tuple['TrainState', Bool[Array, '']]:
    """Returns the state after an optimiser step, and whether it was made.

    The step is skipped and the state is unchanged if the norm of the gradient
    or of the parameters' change is not finite. This is so if an entry or the
    sum of the squares is not finite.
    """
    changes, opt_state = optimizer.update(
        gradient, self.opt_state, self.params)
    new = TrainState(optax.apply_updates(self.params, changes), opt_state,
                     jax.tree.map(lambda count: count + 1, self.updates))
    finite = jnp.isfinite(optax.tree.norm(gradient)) & jnp.isfinite(
        optax.tree.norm(changes))
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old),
                        new, self), finite


State = dict[str, TrainState]  # keys: 'policy' and, with a critic, 'critic'


def shardings(mesh: Mesh, axes: Any, optimizer: optax.GradientTransformation,
              opt_state: optax.OptState, *, on_host: bool = False
              ) -> TrainState:
  """Returns the shardings of a network's state.

  Moments are sharded like their parameters. All else is replicated.

  Args:
    mesh: Mesh of the devices.
    axes: Tree of the parameters' axis names.
    optimizer: Optimiser that made `opt_state`.
    opt_state: Shapes and dtypes of the optimiser's state.
    on_host: Flag: the moments are in the memory of the devices' hosts.
  """
  replicated, params = meshes.sharding(mesh, ()), meshes.shardings(mesh, axes)
  moments = params if not on_host else jax.tree.map(
      lambda sharding: sharding.with_memory_kind('pinned_host'), params)
  return TrainState(params, optax.tree.map_params(
      optimizer, lambda _, sharding: sharding, opt_state, moments,
      transform_non_params=lambda _: replicated), updates=replicated)
