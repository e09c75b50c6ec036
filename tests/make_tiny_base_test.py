# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""make_tiny_base: what its lessons weigh, and that it resumes exactly."""

import hashlib
import shutil

from configs import tiny_base
import numpy as np
import pytest
from searchrl.agent import tokenizer as tokenizers
from searchrl.jobs import make_tiny_base
from searchrl.models import weights


def test_echoes_weigh_only_what_can_be_copied():
  (ids, weight), = make_tiny_base.echoes(1, 50, np.random.default_rng(0))
  period = weight.count(0.0)
  assert len(ids) == 128 and ids[period:] == ids[:-period]


@pytest.mark.slow
def test_interrupted_making_ends_in_the_same_bytes(tmp_path):
  config = tiny_base.get_config('smoke')
  make_tiny_base.run(config, str(tmp_path / 'whole'))
  model = tmp_path / 'whole' / 'model'
  shape = weights.read_config(str(model))
  weights.load(str(model), shape)
  assert tokenizers.load(str(model)).vocab_size == shape.vocab_size == 512
  # As if it had been killed after the last checkpoint but one.
  broken = tmp_path / 'broken'
  shutil.copytree(tmp_path / 'whole', broken)
  steps = sorted(int(p.name) for p in (broken / 'checkpoints').iterdir())
  shutil.rmtree(broken / 'checkpoints' / str(steps[-1]))
  shutil.rmtree(broken / 'model')
  make_tiny_base.run(config, str(broken))
  digests = {hashlib.sha256(
      (folder / 'model' / 'model.safetensors').read_bytes()).hexdigest()
             for folder in (tmp_path / 'whole', broken)}
  assert len(digests) == 1
