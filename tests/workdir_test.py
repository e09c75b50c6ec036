# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""workdir: a run's folder remembers its config and refuses another."""

import json

import pytest

from searchrl.runtime import workdir


def test_run_folder_remembers_its_config_and_refuses_another(tmp_path):
  import ml_collections
  config = ml_collections.ConfigDict(
      dict(a=dict(b=1), steps=2, allow_changes=True))
  workdir.prepare(tmp_path, config, free=('steps',))
  config.allow_changes = False  # the flag is no part of what was asked
  config.steps = 3
  workdir.prepare(tmp_path, config, free=('steps',))
  config.a.b = 2
  with pytest.raises(ValueError, match='a.b: 1 -> 2'):
    workdir.prepare(tmp_path, config)
  workdir.prepare(tmp_path, config, allow_changes=True)
  assert json.loads((tmp_path / 'config.json').read_text())['a']['b'] == 2
  assert json.loads((tmp_path / 'environment.json').read_text())['packages'][
      'jax']
