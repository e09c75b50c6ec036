# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Memory plans: the most bytes at any time, and whether they fit."""

import dataclasses
from typing import NamedTuple

from searchrl.experiment.rollout_memory import Engine
from searchrl.runtime import devices as devices_lib

ROOM = 0.92  # usable share of the memory; the runtime needs the rest


class Update(NamedTuple):
  """The memory that an update needs, in bytes per device.

  Some bytes are held all the time; `bytes` and `workspace` come on top during
  an update. If a config does not train, `holds` has only the policy.
  """

  holds: dict[str, float]  # bytes held all the time, by content
  bytes: float = 0  # further bytes during an update; 0: there is none
  workspace: float = 0  # further bytes of cuDNN's workspace
  compiled: bool = False  # True: `bytes` is the compiler's; False: an estimate
  # Bytes of moments in the hosts' memory, for each device.
  on_host: float = 0


@dataclasses.dataclass(frozen=True)
class Plan:
  """The memory plan of a config: bytes per device, for each kind of content.

  If some devices sample while others train, `sampling` has the bytes on the
  devices that sample, and `holds` has the bytes on the devices that train.
  """

  devices: str  # text about the number and kind of the devices
  available: float  # bytes of memory
  parameters: int  # parameters of the policy
  active: int  # parameters that a token uses
  mesh: dict[str, int]  # name of an axis -> its size
  holds: dict[str, float]  # bytes held all the time, by content
  update: Update
  kind: devices_lib.Kind  # kind of the devices
  engine: Engine  # the config's engine
  engines: tuple[Engine, ...]  # engines that model and devices allow
  sampling: dict[str, float] | None = None  # None: all devices do both
  frees_cache: bool = False  # whether updates free the KV cache, as on CPUs

  @property
  def peak(self) -> float:
    """Estimate of the largest number of bytes on any device at any time.

    The rollouts are those of the engine that the config describes.
    """
    return max(self.training_peak, self.peak_with(self.engine))

  @property
  def training_peak(self) -> float:
    """Largest number of bytes at any time on a device that only trains.

    It is 0 if there are no such devices.
    """
    if self.sampling is None:
      return 0
    update = self.update
    return sum(self.holds.values()) + max(  # a copy is made for the sampler
        update.bytes + update.workspace, self.engine.weights)

  def peak_with(self, engine: Engine) -> float:
    """Returns the peak number of bytes on a device that samples with `engine`.

    The peak is the largest number at any time.
    """
    chosen, update = self.engine, self.update
    change = engine.cache - chosen.cache + engine.frozen - chosen.frozen
    if self.sampling is not None:
      return sum(self.sampling.values()) + change + engine.besides
    freed = engine.cache if self.frees_cache else 0
    return sum(self.holds.values()) + change + max(
        engine.besides, update.bytes + update.workspace - freed)

  @property
  def fits(self) -> bool:
    """True if the config's engine and its training fit into the memory."""
    return self.peak <= ROOM * self.available

  def has_room_for(self, engine: Engine) -> bool:
    """Returns whether rollouts with an engine fit into the memory."""
    return self.peak_with(engine) <= ROOM * self.available

  @property
  def fastest(self) -> Engine | None:
    """Engine with the shortest time per token among those that fit.

    It is None if no engine fits, or if the device's rates are unknown.
    """
    fitting = [engine for engine in self.engines if self.has_room_for(engine)]
    return min(fitting, key=lambda engine: engine.secs(self.kind),
               default=None) if self.kind.bandwidth else None
