# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The two roles of self-play, and the config of a run of each role."""

import copy
from typing import Any

from searchrl.experiment import rules

ROLES = ('proposer', 'solver')
_FOLLOW_MEMORY = 'rollout.tensor', 'rollout.max_num_seqs'
SHARED = ('seed', 'allow_changes', 'data', 'world', 'search', 'plan')


def role_config(config: Any, role: str) -> Any:
  """Returns the config of the training run of one role of self-play.

  It has the role's own part of the config, and the fields that roles share. The
  fields of _FOLLOW_MEMORY still depend on the memory if nothing has set them.

  Args:
    config: Config of self-play; see configs/drzero.py.
    role: Name of the role, one of ROLES.

  Returns:
    An unlocked copy.
  """
  own = config[role].copy_and_resolve_references()
  own.unlock()
  for name in SHARED:
    own[name] = config[name]
  own = own.copy_and_resolve_references()  # makes shared fields copies
  own.unlock()
  for name, field in rules.unset(config[role]):
    if name in _FOLLOW_MEMORY:
      own.rollout[name.removeprefix('rollout.')] = copy.deepcopy(field)
  return own
