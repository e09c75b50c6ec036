# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""InfoNCE, the contrastive loss of queries and passages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def info_nce(
    queries: Float[Array, 'B D'],
    passages: Float[Array, 'P D'],
    positives: Int[Array, 'B'],
    excluded: Bool[Array, 'B P'],
    *,
    temperature: float,
) -> tuple[Float[Array, 'B'], Float[Array, 'B']]:
  """Classifies each query's passage among the passages of the batch.

    s_ij = q_i . p_j / temperature
    loss_i = -ln( exp s_ip / sum over j with j = p or not excluded_ij of
                  exp s_ij ),  p = positives_i

  Args:
    queries: unit vectors from `encoder.embed`; any float type.
    passages: likewise, the positives of the queries and any hard negatives.
    positives: the index of each query's passage.
    excluded: True for passages that are no negatives of a query: they answer
      it too, or repeat its positive. The positive itself always counts.
    temperature: above 0. E5: 0.01.

  Returns:
    The loss of each query in nats, float32, 0 if it has no negatives; and 1
    if its passage scores above all negatives, else 0.

  Raises:
    ValueError: temperature is not above 0.

  Source: van den Oord et al. 2018, arXiv:1807.03748, eq. 4; as Wang et al. 2022
    (E5), arXiv:2212.03533, eq. 1.
  """
  if not temperature > 0:
    raise ValueError(f'temperature must be above 0, but is {temperature}. E5 '
                     'takes 0.01.')
  own = jnp.arange(passages.shape[0])[None] == positives[:, None]
  scores = jnp.einsum('bd,pd->bp', queries, passages,
                      precision=jax.lax.Precision.HIGHEST,
                      preferred_element_type=jnp.float32) / temperature
  scores = jnp.where(excluded & ~own, -jnp.inf, scores)
  right = jnp.take_along_axis(scores, positives[:, None], 1)[:, 0]
  others = jnp.max(jnp.where(own, -jnp.inf, scores), 1)
  loss = jax.nn.logsumexp(scores, 1) - right
  return loss, (right > others).astype(jnp.float32)
