# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""build: what a config cannot ask of its rollouts."""

import pytest
import tiny

from configs import grpo
from configs import rloo
from searchrl.experiment import build
from searchrl.runtime import mesh as meshes


@pytest.mark.parametrize('option', [dict(top_k=5), dict(top_p=0.9),
                                    dict(min_p=0.1)])
def test_truncated_sampling_needs_a_loss_without_a_ratio_or_consent(option):
  config = grpo.get_config()
  build.algorithm(config)
  config.rollout.update(option)
  with pytest.raises(ValueError, match='must be off for .*grpo, whose loss has '
                                       'an importance ratio'):
    build.algorithm(config)
  config.rollout.truncation = 'renormalise'
  build.algorithm(config)
  without = rloo.get_config()
  without.rollout.update(option)
  assert build.algorithm(without).one_update


def test_a_truncation_of_no_kind_and_out_of_range_is_refused():
  config = grpo.get_config()
  config.rollout.truncation = 'ignore'
  with pytest.raises(ValueError, match="must be 'refuse' or 'renormalise'"):
    build.algorithm(config)
  config.rollout.update(truncation='renormalise', top_p=0.0)
  with pytest.raises(ValueError, match='rollout.top_p must be above 0'):
    build.algorithm(config)


def test_an_attention_that_fails_its_test_is_logged(monkeypatch, capsys):
  """As on a GPU without a working kernel."""
  monkeypatch.setattr(
      build.attention, 'resolve',
      lambda *_, **__: ('xla', 'Warning: no kernel'))
  config = grpo.get_config()
  shape = tiny.CONFIG
  name = build.tested_attention(config, shape, meshes.make())
  assert name == 'xla' and 'Warning: no kernel' in capsys.readouterr().err
  assert not build.attend(config, name, meshes.make())['by_document']
  assert build.attend(config, 'cudnn', meshes.make())['by_document']


def test_heads_that_a_kernel_cannot_split_are_refused(monkeypatch):
  monkeypatch.setattr(
      build.attention, 'resolve', lambda *_, **__: ('splash', 'tested'))
  mesh = meshes.make(data=1, tensor=8)
  with pytest.raises(ValueError,
                     match=r'mesh.tensor must divide the 2 KV heads under '
                           r'splash .* is 8.*one of \[1, 2\]'):
    build.tested_attention(grpo.get_config(), tiny.CONFIG, mesh)
