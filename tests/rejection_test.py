# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""rejection: its model has read what was right; a kill changes no byte."""

import pytest

from configs import rejection as configured
from searchrl.agent import rewards
from searchrl.experiment import policy
from searchrl.jobs import rejection
from searchrl.rollouts import records


def config(**options):
  result = configured.get_config('smoke')
  result.tuning.train.update(progress=False, loggers=())
  result.rejection.update(iterations=1)
  result.rejection.update(options)
  return result


@pytest.mark.slow
def test_right_answers_become_the_data_and_then_a_model(tmp_path):
  rejection.run(config(), str(tmp_path))
  here = tmp_path / 'iteration_1'
  found = [t for file in sorted((here / 'trajectories').iterdir())
           for t in records.read(file)]
  assert len(found) == 24 * 4
  right = {t.question.uid for t in found if rewards.em(t) == 1}
  assert 0 < len((here / 'right.jsonl').read_text().splitlines()) <= len(right)
  model = (here / 'tuned/model/model.safetensors').read_bytes()
  assert model != (policy.TINY_BASE / 'model.safetensors').read_bytes()
  (here / 'right.jsonl').unlink()  # as if killed between
  (here / 'tuned/model/README.md').unlink()
  rejection.run(config(), str(tmp_path))
  assert (here / 'tuned/model/model.safetensors').read_bytes() == model
  assert rejection.run(config(), str(tmp_path)) is None  # all is there


@pytest.mark.parametrize('options, words', [
    (dict(iterations=0), 'rejection.iterations must be at least 1'),
    (dict(samples=0), 'rejection.samples must be at least 1'),
    (dict(temperature=0.0), 'rejection.temperature must be above 0'),
    (dict(balance=0.5), r'rejection.balance must be at least 1 \(0: keeps all\)')])
def test_bad_options_are_named(options, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    rejection.run(config(**options), str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()
