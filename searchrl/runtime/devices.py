# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Kinds of accelerators: memory, speeds, devices per process, compilers."""

import collections
from collections.abc import MutableMapping, Sequence
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
from typing import Any

import jax

GIB = 2**30
# Facts that XLA needs to compile for a kind of GPU, in a file per kind.
_TARGETS = pathlib.Path(__file__).parents[1] / 'assets' / 'gpu_targets'


@dataclasses.dataclass(frozen=True)
class Kind:
  """One kind of device, as its maker describes it. Rates are per second.

  Sources: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e), and NVIDIA's data
  sheets for A100, H100 (SXM), H200 and HGX B200, without sparsity.
  """

  name: str  # such as 'h100'
  gib: float  # memory per device, in GiB
  a_process: int  # devices per process, with one process per host
  flops: float = 0  # bfloat16 operations per second; 0: unknown
  bandwidth: float = 0  # memory bandwidth, bytes per second
  link: float = 0  # bytes per second sent to other devices, over all links
  torus: bool | None = None  # whether a TPU is a 3D torus; None: not a TPU


KINDS = {kind.name: kind for kind in (
    Kind('v4', 32, 4, 275e12, 1228e9, 300e9, torus=True),
    Kind('v5e', 16, 8, 197e12, 819e9, 200e9, torus=False),
    Kind('v5p', 95, 4, 459e12, 2765e9, 600e9, torus=True),
    Kind('v6e', 32, 8, 918e12, 1640e9, 448e9, torus=False),
    Kind('a100-40gb', 40, 8, 312e12, 1555e9, 300e9),
    Kind('a100', 80, 8, 312e12, 2039e9, 300e9),
    Kind('h100', 80, 8, 989e12, 3350e9, 450e9),
    Kind('h200', 141, 8, 989e12, 4800e9, 450e9),
    Kind('b200', 180, 8, 2250e12, 8000e9, 900e9),
)}
_FLAT = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8',
         128: '8x16', 256: '16x16'}
_TORUS = {4: '2x2x1', 8: '2x2x2', 16: '2x2x4', 32: '2x4x4', 64: '4x4x4',
          128: '4x4x8', 256: '4x8x8', 512: '8x8x8'}
_THREADS = 8  # threads per simulated device
_QUIET = dict(  # for libtpu on a machine without a TPU
    TPU_ACCELERATOR_TYPE='v5litepod-8', TPU_WORKER_HOSTNAMES='localhost',
    TPU_SKIP_MDS_QUERY='1', ALLOW_MULTIPLE_LIBTPU_LOAD='1')


def parse(text: str) -> tuple[Kind, int]:
  """Returns the kind and the number of devices in a text such as 'v5e-64'.

  Raises:
    ValueError: The text has another form, or names an unknown kind.
  """
  match = re.fullmatch(r'([a-z0-9-]+?)-(\d+)', text)
  if match is None or match[1] not in KINDS or not int(match[2]):
    raise ValueError(
        'plan.devices must be KIND-COUNT, such as v5e-64 or h200-8, with one '
        f'of {sorted(KINDS)} and a count of devices (of chips, not cores), but '
        f'is {text!r}. Leave it empty for the devices of this machine.')
  return KINDS[match[1]], int(match[2])


def make_threads(environ: MutableMapping[str, str] = os.environ) -> None:
  """Gives each simulated CPU device several threads. Call it before jax starts.

  XLA makes one thread for each device, and a collective blocks its thread until
  all devices have reached it. Where a program has independent collectives,
  devices may begin with different ones. Then every thread waits, none is left
  to run, and XLA ends the process. Several threads for each device avoid this
  deadlock. XLA reads their number from NPROC; a value set by the user is kept.
  """
  simulated = re.search(r'--xla_force_host_platform_device_count=(\d+)',
                        environ.get('XLA_FLAGS', ''))
  if simulated and int(simulated[1]) > 1:
    environ.setdefault('NPROC', str(_THREADS * int(simulated[1])))


def to_compile_for(kind: Kind, count: int) -> Sequence[jax.Device] | None:
  """Returns devices for which programs can be compiled without the hardware.

  TPU programs can be compiled on any machine that has libtpu. GPU programs can
  be compiled on any machine that has jax's plugin for CUDA 12. The result is
  None if the needed package is missing, if the TPU slice has an unusual size,
  or if the GPUs need several hosts but do not fill them all.
  """
  if kind.torus is None:
    return _gpus_to_compile_for(kind, count)
  shape = (_TORUS if kind.torus else _FLAT).get(count)
  if not shape or not importlib.util.find_spec('libtpu'):
    return None
  for name, value in _QUIET.items():
    os.environ.setdefault(name, value)
  from jax.experimental import topologies  # needs libtpu
  return topologies.get_topology_desc(
      platform='tpu', topology_name=f'{kind.name}:{shape}').devices


def _gpus_to_compile_for(kind: Kind, count: int) -> Sequence[jax.Device] | None:
  each = min(count, kind.a_process)  # GPUs of a host
  if count % each or not importlib.util.find_spec('jax_cuda12_plugin'):
    return None
  from jax.experimental import topologies  # needs the plugin
  describe = functools.partial(
      topologies.get_topology_desc, platform='cuda',
      topology_name=f'{kind.name}:{count}',
      topology=f'1x{count // each}x{each}',
      target_config=(_TARGETS / f'{kind.name}.txtpb').read_text())
  try:
    return describe().devices
  except NotImplementedError:  # the plugin does not load itself without a GPU
    from jax_plugins import xla_cuda12
    os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'
    xla_cuda12.initialize()
    return describe().devices


def by_process(devices: Sequence[Any]) -> list[Any]:
  """Returns the devices sorted by process, so that each process's are adjacent.

  Raises:
    ValueError: The processes do not have the same number of devices.
  """
  devices = sorted(devices, key=lambda x: (x.process_index, x.id))
  counts = collections.Counter(x.process_index for x in devices)
  if len({*counts.values()}) > 1:
    raise ValueError(
        'all processes must have the same number of devices, but these have '
        + ', '.join(f'{count} (process {i})' for i, count in counts.items())
        + '. Start them on hosts of one kind, or choose the devices of each, by '
        'CUDA_VISIBLE_DEVICES for example.')
  return devices
