# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Flags of the commands whose runs fill a table of a paper."""

from collections.abc import Sequence
import functools
import shlex

from searchrl.runtime import config_fields
from searchrl.runtime import config_files

Command = tuple[str, tuple[str, ...], str]  # config, own flags, folder of the run


def quoted(commands: Sequence[Command], shared: str) -> list[list[str]]:
  """Returns all flags of each command once, quoted for a shell.

  Args:
    commands: Commands, of which some may be equal.
    shared: Flags that all commands have, in addition to their own.
  """
  return [
      [*map(shlex.quote, (
          f'--config=configs/{command[0]}', f'--workdir={command[2]}',
          *flags(command, shared)))]
      for command in dict.fromkeys(commands)]


def check(commands: Sequence[Command], shared: str) -> None:
  """Raises a ValueError if a shared flag names no field of the first recipe."""
  for command in commands:
    if not command[0].startswith('sft.'):
      config_fields.assign(
          config_files.load(f'configs/{command[0]}'),
          config_fields.split(flags(command, shared))[0], command[0])
      return


def flags(command: Command, shared: str) -> list[str]:
  """Returns the shared flags of a command, and its own flags, which win.

  Tuning takes only data.train of the shared flags. Self-play takes all others,
  because it writes the questions that it trains on.
  """
  config, own, _ = command
  given = [flag for flag in shared.split() if not (
      _is_selfplay(config) if flag.startswith('--config.data.train=')
      else config.startswith('sft.'))]
  return [*{flag.partition('=')[0]: flag for flag in (*given, *own)}.values()]


@functools.cache
def _is_selfplay(config: str) -> bool:
  return 'selfplay' in config_files.load(f'configs/{config}')
