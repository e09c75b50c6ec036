# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Pallas kernels of TPUs on any device, as plain XLA: slowly, exactly."""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from unittest import mock

from jax._src import literals
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
import tiny

from searchrl.models.inference import engine as engines


@contextlib.contextmanager
def interpreted():
  """Within it, the ragged paged attention is traced as plain XLA.

  The kernel has no switch for that, and jax's interpreter of TPU memory cannot
  reshape a reference, as the kernel does. The plain interpreter takes an index
  that is a number for an array (until `TypedInt` has a shape).
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.object(
        kernel.pl, 'pallas_call',
        functools.partial(kernel.pl.pallas_call, interpret=True)))
    stack.enter_context(mock.patch.object(  # has no meaning on other devices
        tpu, 'with_memory_space_constraint', lambda x, memory_space: x))
    if hasattr(literals, 'TypedInt'):
      stack.enter_context(mock.patch.object(
          literals.TypedInt, 'shape', (), create=True))
    yield


def ragged_engines() -> Callable[[], None]:
  """Makes engines attend by the kernel; the returned function undoes it."""
  stack = contextlib.ExitStack()
  stack.enter_context(interpreted())
  stack.enter_context(mock.patch.object(
      tiny, 'CONFIG', dataclasses.replace(tiny.CONFIG, head_dim=128)))
  stack.enter_context(mock.patch.dict(
      engines.Engine.__init__.__kwdefaults__, attention='ragged'))
  stack.enter_context(mock.patch.object(
      tiny.params, '__defaults__', (tiny.CONFIG, 0)))
  return stack.close
