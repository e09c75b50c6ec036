# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""guards: what a run does about its alerts; a collapse that is rolled back."""

import dataclasses
import json

from configs import grpo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_test

from searchrl.experiment import guards
from searchrl.experiment import loop
from searchrl.experiment import rollbacks
from searchrl.jobs import train
from searchrl.models import weights
from searchrl.rollouts.collect import Progress
from searchrl.runtime import alerts
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics
from searchrl.training import learner as learners

OPTIMIZATION_LEVEL = 1


def options_of(**actions):
  options = grpo.get_config().guards
  options.actions.update(actions)
  return options


def watched(folder, metric, values, **actions):
  """The verdict on the last of some steps, and what each of them said."""
  watch = guards.Guards(options_of(**actions), folder)
  for n, value in enumerate(values, 1):
    verdict = watch.verdict(Progress(step=n), {alerts.STEP: n, metric: value})
  return verdict


def committed(folder, *steps):
  for step in steps:
    checkpoint.save(folder / 'checkpoints', step, {'x': jnp.ones(1)},
                    Progress(step=step, position=(10 * step,)).to_json(),
                    keep=9)


def test_an_alert_is_told_when_it_begins_and_when_it_begins_again(
    tmp_path, capsys):
  verdict = watched(tmp_path, 'search/error_rate', [0, 0.5, 0.5, 0, 0.5])
  assert verdict.broken[0].rule == 'search_errors' and not verdict.action
  said = capsys.readouterr().err.splitlines()
  assert [line.split(':')[1] for line in said] == [' step 2', ' step 5']
  watched(tmp_path, 'search/error_rate', [0, 0.5], search_errors='off')
  assert not capsys.readouterr().err


def test_a_metric_that_stops_being_a_number_is_named(tmp_path, capsys):
  watched(tmp_path, 'actor/pg_loss', [0.5, np.nan, np.nan])
  assert capsys.readouterr().err == (
      'Warning: step 2: actor/pg_loss is not a finite number.\n')


def test_stop_says_why_and_what_to_do(tmp_path):
  committed(tmp_path, 0, 1)
  with pytest.raises(ValueError, match=(
      'the run ends at step 3, as guards.actions says so: entropy fell below '
      '0.1 of what it was at first. Its checkpoints, of steps 0-1, are whole.*'
      'guards.actions.entropy=warn')):
    watched(tmp_path, 'actor/entropy', [1, 1, 0.05], entropy='stop')


def test_rollbacks_end_at_some_time(tmp_path):
  committed(tmp_path, 0)
  watch = guards.Guards(options_of(clip_fraction='rollback'), tmp_path)
  values = {'actor/pg_clipfrac': 0.9}
  assert watch.verdict(
      Progress(step=1, rollbacks=2), values).action == guards.ROLLBACK
  with pytest.raises(ValueError, match='rolled back 3 times already'):
    watch.verdict(Progress(step=2, rollbacks=3), values)


def test_the_way_out_names_what_ended_the_run(tmp_path):
  """An update was left out, too, which only warns."""
  committed(tmp_path, 0)

  def error(rollbacks=0, values=(('actor/pg_clipfrac', 0.9),), **actions):
    watch = guards.Guards(options_of(**actions), tmp_path)
    with pytest.raises(ValueError) as raised:
      watch.verdict(Progress(step=2, rollbacks=rollbacks),
                    {'actor/updates_left_out': 0.5} | dict(values))
    text = str(raised.value)
    assert 'left out' not in text
    return text.partition(' or set ')[2]

  assert error(clip_fraction='stop') == 'guards.actions.clip_fraction=warn.'
  assert error(3, clip_fraction='rollback') == (
      'guards.actions.clip_fraction=warn or a larger guards.most_rollbacks.')
  broken = {'guards/arrays_not_finite': 1}.items()
  assert error(values=broken, state='stop') == (
      'guards.actions.state=rollback.')


def test_a_rule_that_cannot_warn_is_not_told_to(tmp_path):
  committed(tmp_path, 0)
  watch = guards.Guards(options_of(), tmp_path)
  with pytest.raises(ValueError, match='or set a larger guards.most_rollbacks'):
    watch.verdict(Progress(step=2, rollbacks=3),
                  {'guards/arrays_not_finite': 3.0})


@pytest.mark.parametrize('rule, at, to', [
    ('entropy', 9, 4),  # which may have begun some steps before
    ('entropy', 2, 0),  # none is that old
    ('gradient', 9, 8), ('state', 8, 4)])
def test_a_checkpoint_is_trusted_from_before_an_alert(tmp_path, rule, at, to):
  committed(tmp_path, 0, 4, 8)
  verdict = guards.Verdict((alerts.Alert(rule, ''),))
  watch = guards.Guards(options_of(), tmp_path)
  assert watch.before(at, verdict) == to


def test_the_checkpoint_before_a_collapse_is_remembered(tmp_path):
  committed(tmp_path, 0, 4, 8)
  watch = guards.Guards(options_of(), tmp_path)
  collapse, calm = guards.Verdict((alerts.Alert('score', ''),)), guards.Verdict()
  progress = watch.remember_collapse(Progress(step=9), collapse)
  assert progress.before_collapse == 4
  progress = watch.remember_collapse(
      dataclasses.replace(progress, step=15), collapse)
  assert progress.before_collapse == 4  # it is the same one
  progress = watch.remember_collapse(progress, calm)
  assert progress.before_collapse == 4 and not progress.collapsing


@pytest.mark.parametrize('actions, words', [
    (dict(entropy='skip'), 'known after the update alone'),
    (dict(slow_step='stop'), 'no two machines agree'),
    (dict(state='warn'), 'nothing of such a step can be kept'),
    (dict(score='ignore'), "must be one of off, warn, .*, but is 'ignore'")])
def test_actions_that_cannot_be_are_refused(actions, words):
  with pytest.raises(ValueError, match=words):
    guards.check(options_of(**actions))
  guards.check(options_of(empty_batch='stop', score='rollback'))


def test_a_rollback_is_finished_after_a_kill(tmp_path, monkeypatch):
  committed(tmp_path, 0, 4, 8)
  (tmp_path / metrics.FILE).write_text('{"training/global_step": 9}\n')
  with monkeypatch.context() as patch:
    patch.setattr(rollbacks, 'finish', lambda folder: None)  # killed here
    rollbacks.note(tmp_path, Progress(step=9, position=(95,)), 4, 'why')
  assert checkpoint.steps(tmp_path / 'checkpoints') == [0, 4, 8]
  for _ in range(2):
    rollbacks.finish(tmp_path)
    assert checkpoint.steps(tmp_path / 'checkpoints') == [0, 4]
  progress = rollbacks.applied(tmp_path, Progress(step=4, position=(40,)))
  assert progress == Progress(step=4, position=(95,), rollbacks=1,
                              before_collapse=4)
  assert rollbacks.applied(tmp_path, progress) == progress
  later = Progress(step=8, position=(130,), rollbacks=1)
  checkpoint.save(tmp_path / 'checkpoints', 8, {'x': jnp.ones(1)},
                  later.to_json(), keep=9)
  rollbacks.finish(tmp_path)  # of the run that went on
  assert checkpoint.steps(tmp_path / 'checkpoints') == [0, 4, 8]


def test_a_damaged_file_of_rollbacks_is_named(tmp_path):
  (tmp_path / rollbacks.FILE).write_text('{"rollback": 1, "to": 0}\n{"roll')
  with pytest.raises(ValueError, match=(
      f'line 2 of {tmp_path}/rollbacks.jsonl must be JSON, but is damaged: .*. '
      'Restore the file, or delete that line')):
    rollbacks.finish(tmp_path)


def config_of(steps, **actions):
  config = train_test.tiny(grpo, steps=steps, checkpoint_every=1)
  config.evaluate.worlds.kinds = ()
  config.evaluate.initial = False
  config.guards.actions.update(actions)
  return config


def asked(folder, step):
  file = folder / 'trajectories' / f'step_{step:06d}.jsonl.gz'
  return {t.question.uid for t in loop.records.read(file)}


def poisoned(monkeypatch, calls, poison):
  """Learner.update whose n-th calls leave a poisoned state."""
  update, made = learners.Learner.update, []

  def update_and_poison(self, *args, **kwargs):
    made.append(1)
    updated = update(self, *args, **kwargs)
    if len(made) in calls:
      updated = updated._replace(state=poison(updated.state))
    return updated

  monkeypatch.setattr(learners.Learner, 'update', update_and_poison)


def with_nan(state):
  """Sets one parameter to NaN, as a flipped bit of the memory might."""
  policy = state['policy']
  leaves, tree = jax.tree.flatten(policy.params)
  leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(jnp.nan)
  return state | {'policy': dataclasses.replace(
      policy, params=jax.tree.unflatten(tree, leaves))}


@pytest.mark.slow
def test_nan_in_the_state_is_rolled_back_and_the_run_finishes(
    tmp_path, monkeypatch, capsys):
  poisoned(monkeypatch, {3}, with_nan)
  train.run(config_of(4), tmp_path)
  said = capsys.readouterr().err
  assert 'step 3: parameters or the optimizer\'s state are not finite' in said
  assert 'Step 3 is rolled back to the checkpoint of step 2.' in said
  lines = metrics.read(tmp_path / metrics.FILE)
  assert [line['training/global_step'] for line in lines] == [1, 2, 3, 4]
  assert [line['guards/rollbacks'] for line in lines] == [0, 0, 1, 1]
  lost = metrics.read(tmp_path / 'rollback_1_metrics.jsonl')
  assert [line['training/global_step'] for line in lost] == [1, 2, 3]
  record, = (tmp_path / rollbacks.FILE).read_text().splitlines()
  assert json.loads(record)['to'] == 2
  assert 2 in checkpoint.steps(tmp_path / 'checkpoints')  # kept besides
  assert (tmp_path / 'model').is_dir() and (tmp_path / 'summary.txt').exists()


@pytest.mark.slow
def test_a_gradient_that_is_no_number_changes_nothing_and_is_told(
    tmp_path, monkeypatch, capsys):
  """A reward so large that a gradient's square is none, in the second step."""
  config = config_of(2)
  config.reward = 'guards_test:huge_later'
  with config.unlocked():
    config.algorithm.normalize_std = False
  train.run(config, tmp_path)
  assert [line['actor/updates_left_out'] for line in metrics.read(
      tmp_path / metrics.FILE)] == [0, 1]
  assert 'step 2: updates were left out' in capsys.readouterr().err
  one, two = (json.loads((
      tmp_path / 'checkpoints' / step / 'integrity.json').read_text())['leaves']
              for step in '12')
  assert one == two  # parameters, moments, and the count of updates


def huge_later(trajectory):
  return 1e30 * (trajectory.policy_step == 1 and trajectory.sample == 0)


def test_a_model_with_nan_is_neither_trained_nor_exported():
  params = {'a': jnp.ones(3), 'b': {'c': jnp.array([1, jnp.nan])}}
  assert weights.not_finite(params) == ['b/c']
  with pytest.raises(ValueError, match='it must hold finite .* is in b/c'):
    weights.check_finite(params, 'it')
  weights.check_finite({'a': jnp.ones(3)}, 'it')
