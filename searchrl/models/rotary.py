# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings, and Llama 3's scaling of their frequencies."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Settings of Llama 3's scaling of slow rotary frequencies for long texts.

  A frequency is slow or fast by its number of turns over the original context.
  """

  factor: float  # divisor of slow frequencies
  low_freq_factor: float  # number of turns up to which a frequency is slow
  high_freq_factor: float  # number of turns from which a frequency is fast
  original_max_position_embeddings: int  # tokens of the original context


def rotate(
    x: Float[Array, 'B T H d'],
    positions: Int[Array, 'B T'],
    theta: float,
    scaling: Llama3Rope | None = None,
) -> Float[Array, 'B T H d']:
  """Applies rotary position embedding (RoPE) to queries or keys.

  `theta` is the base of the frequencies, which are scaled if there is a
  `scaling`.

  Source: Su et al. 2021, arXiv:2104.09864, in the layout of Hugging Face, which
  pairs entry i with entry i + d / 2.
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if scaling is not None:
    frequency = stretched(frequency, scaling)
  angle = positions[..., None].astype(jnp.float32) * frequency
  cos = jnp.cos(angle)[:, :, None].astype(x.dtype)
  sin = jnp.sin(angle)[:, :, None].astype(x.dtype)
  left, right = x[..., :half], x[..., half:]
  return jnp.concatenate(
      [left * cos - right * sin, right * cos + left * sin], -1)


def stretched(frequency: Float[Array, 'h'], scaling: Llama3Rope
              ) -> Float[Array, 'h']:
  """Returns slow frequencies divided by the factor, and fast ones unchanged.

  Between slow and fast, the result goes from one to the other, linearly in the
  number of turns over the original context.

  Source: Llama 3.1; `rope_type: llama3` in transformers.
  """
  turns = scaling.original_max_position_embeddings * frequency / (2 * jnp.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  share = jnp.clip((turns - low) / (high - low), 0, 1)
  return share * frequency + (1 - share) * frequency / scaling.factor
