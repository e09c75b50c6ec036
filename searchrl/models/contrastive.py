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
  """Returns the InfoNCE loss of each query, and whether its positive is first.

    s_ij = q_i . p_j / temperature
    loss_i = -ln( exp s_ip / sum over j with j = p or not excluded_ij of
                  exp s_ij ),  p = positives_i

  Args:
    queries: Unit vectors from `encoder.embed`, of any float type.
    passages: Unit vectors of the queries' positives and of any hard negatives.
    positives: Index of each query's positive among the passages.
    excluded: True for a passage that is not a negative of a query, because it
      also answers the query or repeats its positive. The positive always
      counts.
    temperature: Divisor of the scores, above 0. E5 uses 0.01.

  Returns:
    Two float32 arrays. The first has the loss of each query in nats, which is 0
    for a query without negatives. The second has 1 for a query whose positive
    scores above all negatives, and otherwise 0.

  Raises:
    ValueError: The temperature is not above 0.

  Source: van den Oord et al. 2018, arXiv:1807.03748, eq. 4, in the form of Wang
    et al. 2022 (E5), arXiv:2212.03533, eq. 1.
  """
  if not temperature > 0:
    raise ValueError(f'temperature must be above 0, but is {temperature}. E5 '
                     'takes 0.01.')
  is_positive = jnp.arange(passages.shape[0])[None] == positives[:, None]
  scores = jnp.einsum('bd,pd->bp', queries, passages,
                      precision=jax.lax.Precision.HIGHEST,
                      preferred_element_type=jnp.float32) / temperature
  scores = jnp.where(excluded & ~is_positive, -jnp.inf, scores)
  right = jnp.take_along_axis(scores, positives[:, None], 1)[:, 0]
  others = jnp.max(jnp.where(is_positive, -jnp.inf, scores), 1)
  loss = jax.nn.logsumexp(scores, 1) - right
  return loss, (right > others).astype(jnp.float32)
