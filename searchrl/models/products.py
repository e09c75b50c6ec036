# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Matrix products of low-precision operands that are summed in float32."""

import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

_CPU = pathlib.Path('/proc/cpuinfo')  # only Linux has it
# Products of bfloat16 are the fastest on a CPU if that file has all words of a
# set in this tuple. Intel's CPUs with AVX-512 alone multiply float32 faster.
_BFLOAT16 = {'amx_bf16'}, {'avx512_bf16', 'AuthenticAMD'}


def fastest() -> str:
  """Returns the dtype in which matrix products are fastest on these devices.

  It is 'bfloat16' on CPUs with AMX, and on AMD's with AVX512_BF16. Otherwise it
  is '', which means the dtype of the operands.
  """
  if jax.default_backend() != 'cpu' or not _CPU.is_file():
    return ''
  words = {*_CPU.read_text().split()}
  return 'bfloat16' if any(fast <= words for fast in _BFLOAT16) else ''


def product(x, kernel, dtype: str = ''):
  """Returns x @ kernel in the dtype of x.

  Args:
    x: Array [... D].
    kernel: Matrix [D F] of any dtype.
    dtype: Dtype to which the operands are rounded, also in the backward pass.
      Sums and gradients are then float32. If it is '', operands, sums and
      gradients have the dtype of x.
  """
  if dtype:
    return float32_product(x, kernel, dtype).astype(x.dtype)
  return x @ kernel.astype(x.dtype)


def float32_product(x, kernel, dtype: str = ''):
  """Returns x @ kernel in float32, with sums in float32 in both passes.

  The backward pass first rounds the output's gradient to the dtype of the
  operands. Products of float32 would be many times slower.

  Args:
    x: Array [... D].
    kernel: Matrix [D F] of any dtype.
    dtype: Dtype to which the operands are rounded, also in the backward pass.
      If it is '', this is the dtype of x.
  """
  if dtype:
    return _rounded(x.astype(jnp.float32), kernel.astype(jnp.float32), dtype)
  return _summed(x, kernel.astype(x.dtype))


@jax.custom_vjp
def _summed(x, kernel):
  return jnp.dot(x, kernel, preferred_element_type=jnp.float32)


def _backward(operands, cotangent):
  x, kernel = operands
  product = functools.partial(jnp.tensordot, cotangent.astype(x.dtype),
                              preferred_element_type=jnp.float32)
  tokens = tuple(range(x.ndim - 1))
  return (product(kernel, axes=((-1,), (1,))).astype(x.dtype),
          product(x, axes=(tokens, tokens)).T.astype(x.dtype))


_summed.defvjp(lambda *operands: (_summed(*operands), operands), _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounded(x, kernel, dtype: Any):
  return jnp.dot(x.astype(dtype), kernel.astype(dtype),
                 preferred_element_type=jnp.float32)


def _rounded_forward(x, kernel, dtype):
  x = x.astype(dtype)  # half of what the backward pass keeps
  # Where a scan stacks what its layers keep, XLA's CPU compiler writes a whole
  # stack of bfloat16 again for each layer, but only one layer of integers.
  bits = jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
  return _rounded(x, kernel, dtype), (bits, kernel)


def _rounded_backward(dtype, operands, cotangent):
  bits, kernel = operands
  x = jax.lax.bitcast_convert_type(bits, dtype)
  cotangent = cotangent.astype(dtype)
  product = functools.partial(
      jnp.tensordot, preferred_element_type=jnp.float32)
  # XLA's CPU compiler has no fast product that contracts the first axis alone.
  tokens = math.prod(x.shape[:-1])
  halves = math.gcd(tokens, 2), -1
  of_kernel = product(x.reshape(*halves, x.shape[-1]),
                      cotangent.reshape(*halves, cotangent.shape[-1]),
                      axes=((0, 1), (0, 1)))
  # Without the barrier, XLA would merge a later transposition with the product,
  # and refuse the result.
  return (product(cotangent, kernel.astype(dtype), axes=((-1,), (1,))),
          jax.lax.optimization_barrier(of_kernel))


_rounded.defvjp(_rounded_forward, _rounded_backward)
