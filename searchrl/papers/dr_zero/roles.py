# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The roles of self-play: from its config to that of a run of one of them."""

from typing import Any

ROLES = ('proposer', 'solver')
SHARED = ('seed', 'allow_changes', 'data', 'world', 'search', 'plan')


def of(config: Any, role: str) -> Any:
  """The config of a run: the role's part, with what both roles share.

  Args:
    config: of self-play; see configs/drzero.py.
    role: of ROLES.

  Returns:
    A copy, unlocked.
  """
  own = config[role].copy_and_resolve_references()
  own.unlock()
  for name in SHARED:
    own[name] = config[name]
  own = own.copy_and_resolve_references()  # else what is shared is one object
  own.unlock()
  return own
