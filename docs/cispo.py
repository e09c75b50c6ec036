r"""CISPO: the clipped ratio is a constant weight; every token keeps a gradient.

  python -m searchrl.main --config=docs/cispo.py

Source: MiniMax-M1, arXiv:2506.13585, eq. 4. Both a recipe and its config.
"""

import jax
import jax.numpy as jnp

from configs import common
from searchrl import algorithms, losses


def cispo(*, clip_high: float = 4.0) -> algorithms.Algorithm:
  def policy_loss(logprobs, old, advs, mask, count_mask=None):
    ratio = jnp.minimum(losses.token_ratio(logprobs, old, mask), 1 + clip_high)
    per_token = losses.score_function_loss(logprobs, advs, mask)
    loss = jax.lax.stop_gradient(ratio) * per_token
    return losses.aggregate(
        loss, mask, how='token_mean', count_mask=count_mask), {}

  loss = algorithms.objective(policy_loss)
  return algorithms.Algorithm(
      algorithms.by_group(), loss, min_group_size=2, skips_zero=True,
      skips_unsampled=True)


def get_config(text: str = ''):  # the text after the colon
  config = common.get_config(text)
  config.algorithm.update(name='docs.cispo:cispo', clip_high=4.0)
  return config
