# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Number, index and coordinator of a run's processes, by the environment."""

from collections.abc import Mapping
from typing import Any

from jax._src import cloud_tpu_init  # private; used only in this file
from jax._src import clusters

_EXPLICIT = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
_SLURM = tuple(f'SLURM_{name}' for name in (  # as read by jax's detection
    'JOB_ID', 'STEP_NODELIST', 'NTASKS', 'PROCID', 'LOCALID'))


def read(environ: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
  """Returns the number of processes, and arguments to start them.

  The arguments are those of `jax.distributed.initialize`. They are {} if jax
  detects them itself, and for a single process.

  Raises:
    ValueError: Some of the variables are missing, or one has an illegal value.
  """
  if any(environ.get(name) for name in _EXPLICIT):
    arguments = _explicit(environ)
    return arguments['num_processes'], arguments
  return _detected(environ), {}


def _explicit(environ: Mapping[str, str]) -> dict[str, Any]:
  """Returns arguments of jax.distributed.initialize from the variables."""
  missing = [name for name in _EXPLICIT if not environ.get(name)]
  if missing:
    raise ValueError(f'{", ".join(_EXPLICIT)} must be set together, but lack '
                     f'{", ".join(missing)}. Set all, or none for one process.')
  address = environ['JAX_COORDINATOR_ADDRESS']
  host, _, port = address.rpartition(':')
  if not host or not port.isdecimal():
    raise ValueError('JAX_COORDINATOR_ADDRESS must be host:port of process 0, '
                     f'but is {address!r}. Any free port will do.')
  size, process = (number(environ, name) for name in _EXPLICIT[1:])
  if process >= size:
    raise ValueError(f'JAX_PROCESS_ID must be below JAX_NUM_PROCESSES={size}, '
                     f'but is {process}. Number the processes from 0.')
  arguments = dict(  # so that jax detects nothing
      coordinator_address=address, num_processes=size, process_id=process,
      cluster_detection_method='deactivate')
  if host.startswith('127.') or host in ('localhost', '[::1]'):
    arguments['coordinator_bind_address'] = address  # not on all interfaces
  return arguments


def _detected(environ: Mapping[str, str]) -> int:
  """Returns the number of tasks of a SLURM step or hosts of a TPU pod, or 1."""
  if all(environ.get(name) for name in _SLURM):
    return number(environ, 'SLURM_NTASKS')
  if environ.get('JAX_PLATFORMS') == 'cpu':
    return 1  # a pod's host that is used without its devices
  hosts = (environ.get('TPU_PROCESS_ADDRESSES') or
           environ.get('TPU_WORKER_HOSTNAMES'))
  if hosts:
    return len(hosts.split(',')) * number(environ, 'MEGASCALE_NUM_SLICES', 1)
  if not cloud_tpu_init.running_in_cloud_tpu_vm:
    return 1
  # Asks the metadata server; TPU_SKIP_MDS_QUERY=1 means that there is one host.
  for cluster in clusters.ClusterEnv._cluster_types:
    if not cluster.opt_in_only_method and cluster.is_env_present():
      return cluster.get_process_count()
  return 1


def number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
  """Returns the whole number that a variable has, or the default.

  Raises:
    ValueError: The variable is not a whole number.
  """
  text = environ.get(name) or str(default)
  if not text.isdecimal():
    raise ValueError(f'{name} must be a whole number, but is {text!r}.')
  return int(text)
