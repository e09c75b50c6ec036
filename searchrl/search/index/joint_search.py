# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Search of an index that several processes hold together.

A program on the devices of all processes must be started by all processes. A
process that searches therefore waits until each other process also searches or
has finished its rollouts. The queries of all processes are then searched in one
call, which is called a round. One thread of each process takes part in rounds.
No other thread may communicate between processes at the same time.
"""

from collections.abc import Callable
import json

from jaxtyping import Float
import numpy as np

from searchrl.runtime import processes
from searchrl.search.index.exact_host import FindFn

_WAIT_SECS = 24 * 3600  # limit of the wait for the slowest process


def make(find: FindFn, dim: int) -> tuple[FindFn, Callable[[], None]]:
  """Returns two functions that search one index from several processes.

  The first function searches this process's queries. It waits until every other
  process also searches or has finished. The second function is for a process
  that has no more queries. It takes part in the searches of the others until
  all processes have finished.

  Args:
    find: Search that returns the results of this process's queries. Every
      process must call it with the same number of queries and the same k.
    dim: Dimension of the queries.
  """

  def join(vectors: Float[np.ndarray, 'B D'], k: int, has_finished: bool):
    """Returns this process's results of a round; None if all have finished."""
    counts, ks, finished = zip(*map(json.loads, processes.exchange(
        'search over the mesh', json.dumps(
            [len(vectors), k, has_finished]).encode(), _WAIT_SECS)))
    if all(finished):
      return None
    padded = np.zeros((max(counts), dim), np.float32)
    padded[:len(vectors)] = vectors
    return [x[:len(vectors)] for x in find(padded, max(ks))]

  def finish() -> None:
    while join(np.zeros((0, dim), np.float32), 1, True) is not None:
      pass

  return lambda vectors, k: join(vectors, k, False), finish
