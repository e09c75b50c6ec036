# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A check that all processes dispatch the same programs in the same order.

Processes that diverge do not always hang. Collectives are matched by position,
so the results may just be wrong.
"""

import hashlib
import re
from typing import Any

import jax

from searchrl.runtime import processes
from searchrl.runtime.processes import by_process, shortened

_SAME_CALLS = 'processes must make the same calls in the same order'


class LockstepCheck:
  """A check that all processes make the same calls in the same order.

  If the calls of processes differ, all processes raise a RuntimeError. Call it
  before each dispatch of a program with collectives:

      lockstep('update', batch, num_microbatches)  # what will be dispatched
      lockstep.phase('train')                      # at the end of a phase

  Args:
    mode: Kind of check. 'off': no check. 'phase': compares a running SHA-256 at
      the end of each phase, at almost no cost. 'call': compares every call,
      which takes some milliseconds, and names the call at which processes
      diverge.
    timeout_secs: Timeout of a comparison, as in `processes.exchange`.
  """

  def __init__(self, mode: str = 'phase',
               timeout_secs: float | None = None):
    if mode not in ('off', 'phase', 'call'):
      raise ValueError(
          "a lockstep check's mode must be 'off', 'phase' or 'call', but is "
          f"{mode!r}. Take 'phase' unless you are debugging.")
    self._mode, self._timeout_secs = mode, timeout_secs
    self._digest = hashlib.sha256()
    self._calls, self._last = 0, 'none'

  def __call__(self, tag: str, *facts: Any) -> None:
    """Records a call that is about to be dispatched.

    In 'call' mode, the calls of all processes are compared at once.

    Args:
      tag: Name of the program.
      facts: Arguments for which it is compiled. Arrays (or shapes) in any
        pytree are compared by dtype and shape, all else by `repr`.

    Raises:
      RuntimeError: In 'call' mode, processes make different calls. It is raised
        on all of them.
    """
    if self._mode == 'off' or processes.count() == 1:
      return
    call = f'{tag}({", ".join(_describe(facts))})'
    self._digest.update(call.encode() + b'\n')
    if self._mode == 'call':
      self._compare(tag, call)
    self._calls, self._last = self._calls + 1, call

  def phase(self, name: str) -> None:
    """Ends a phase. Raises a RuntimeError if the calls so far have differed."""
    if self._mode == 'off' or processes.count() == 1:
      return
    digest = self._digest.hexdigest()[:16]
    summary = (f'{self._calls} calls of digest {digest}, '
               f'the last {shortened(self._last)}')
    summaries = processes.exchange(
        f'phase {name}', summary.encode(), self._timeout_secs)
    if len(set(summaries)) > 1:
      raise RuntimeError(
          f'{_SAME_CALLS}, but differ at the end of phase {name!r}: '
          f'{by_process([other.decode() for other in summaries])}. Rerun with '
          "LockstepCheck('call'), which names the first call that differs.")

  def _compare(self, tag: str, call: str) -> None:
    """Raises a RuntimeError unless all processes make this call."""
    meetings = processes.meet(
        f'call {self._calls}: {tag}', call.encode(), self._timeout_secs)
    if all(other == call.encode() for _, other in meetings):
      return
    calls = [other.decode() if place.startswith('call ') else
             f'nothing, but is at {place!r}' for place, other in meetings]
    raise RuntimeError(
        f'{_SAME_CALLS}, but differ at call {self._calls}. This is process '
        f'{processes.index()}, which calls {shortened(call)}; of all, '
        f'{by_process(calls)}. Last call in common: {shortened(self._last)}. '
        'Choose between the two only by values that all processes share.')


def _describe(facts: Any) -> list[str]:
  """Returns 'path=dtype[shape]' for arrays and 'path=repr' for other leaves."""
  leaves = jax.tree.leaves_with_path(facts, is_leaf=lambda x: x is None)
  return [f'{jax.tree_util.keystr(path[1:])}='.lstrip('=') + _describe_leaf(x)
          for path, x in leaves]


def _describe_leaf(x: Any) -> str:
  if hasattr(x, 'shape') and hasattr(x, 'dtype'):
    return f'{x.dtype}[{",".join(map(str, x.shape))}]'
  return re.sub(r' at 0x[0-9a-f]+', '', repr(x))  # addresses differ by process
