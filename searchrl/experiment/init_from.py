# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""train.init_from: starts a run from another run's policy.

The policy is first exported to the directory of the new run, and always read
from there. A resumed run needs it as the reference policy, or to merge adapters
into it, and the other run's checkpoints may have been deleted by then.
"""

from collections.abc import Callable
import dataclasses
import functools
import json
import pathlib
from typing import Any

from jax.sharding import Mesh

from searchrl.agent import chat
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs

_NOTE = past_runs.INIT + '.json'  # {run, step, critic}; written last


def check(config, folder: pathlib.Path) -> None:
  """Raises an error unless a run can start from the run that its config names.

  Args:
    config: Config of the new run.
    folder: Directory of the new run. A started run is not checked again.

  Raises:
    FileNotFoundError: The named run has no checkpoints.
    ValueError: The named run is this run, lacks the step, or has another model.
  """
  if not config.train.init_from or (folder / _NOTE).exists():
    return
  run, step = past_runs.parse_run(config.train.init_from)
  if run.resolve() == folder.resolve():
    raise ValueError(
        f'train.init_from must be another run, but {run} is the --workdir '
        'itself. The same command without it resumes a run.')
  past_runs.kept_step(run, step, 'train.init_from')
  past = past_runs.recorded(run)['model']
  theirs, ours = past['path'], config.model.path
  if theirs != ours and (
      past['lora']['rank'] and not (run / past_runs.INIT).is_dir()
      or _shape(theirs) != _shape(ours)):
    raise ValueError(
        f'model.path must have the shape of the model that {run} trained, and '
        'be that model if the run trained adapters, but is '
        f'{ours!r}. Set it to {theirs!r}.')


def _shape(path: str) -> transformer.TransformerConfig:
  return weights.read_config(weights.locate(str(path or policy.TINY_BASE)))


def start(config, folder: pathlib.Path, sampler: Sampler,
          base: transformer.Params, mesh: Mesh
         ) -> tuple[transformer.Params, Callable[[Any], Any]]:
  """Returns the initial params of a run, and a function for its initial state.

  The params are those of the config's model, or of another run's policy.

  Args:
    config: Config of the run, checked.
    folder: Directory of the run.
    sampler: Sampler of the config.
    base: Params of model.path.
    mesh: Mesh of all processes.

  Returns:
    Two values. The first is the params, which are also the reference policy.
    The second is a function from the state of a new learner to the state from
    which the run starts. Without train.init_from, it changes nothing. Otherwise
    the result has the policy in the precision in which it was trained, and the
    other run's critic, if both runs have a critic.
  """
  if not config.train.init_from:
    return base, lambda state: state
  if not processes.on_first('init?', (folder / _NOTE).exists):
    _export(config, folder, sampler, base)
  del base
  load = functools.partial(
      weights.load, str(folder / past_runs.INIT), sampler.shape,
      sharding_of=functools.partial(meshes.sharding, mesh))

  def fresh(state):
    state = dict(state)
    if not config.model.lora.rank and config.model.dtype != 'float32':
      state['policy'] = dataclasses.replace(
          state['policy'], params=load(dtype='float32'))
    return _with_critic(state, json.loads((folder / _NOTE).read_text()),
                        config.train.init_from)

  return load(dtype=config.model.dtype), fresh


def _export(config, folder: pathlib.Path, sampler: Sampler,
            base: transformer.Params) -> None:
  """Exports the policy of `train.init_from`, and then writes a record of it."""
  run, step = past_runs.parse_run(config.train.init_from)
  step = processes.on_first('init step', lambda: past_runs.kept_step(
      run, step, 'train.init_from'))
  processes.say(f'Starting from step {step} of {run}.')
  weights.save(
      folder / past_runs.INIT,
      policy.trained(run, base, sampler.shape, step=step), sampler.shape,
      tokenizer_from=config.model.path or policy.TINY_BASE,
      eos_id=chat.ends(sampler.tokenizer))
  processes.on_first('init', lambda: workdirs.note(folder, past_runs.INIT, {
      'run': str(run), 'step': step,
      'critic': checkpoint.holds(run / 'checkpoints', step, 'critic')}))


def _with_critic(state: dict[str, Any], note: dict[str, Any], named: str
                ) -> dict[str, Any]:
  """Returns the state with the critic of the run that `note` names.

  The state is unchanged if the state or that run has no critic. `named` is
  train.init_from, which says where the run is if it was moved.
  """
  if 'critic' not in state or not note['critic']:
    return state
  run, step = pathlib.Path(note['run']), note['step']
  if not run.is_dir():
    run, _ = past_runs.parse_run(named)
  past_runs.kept_step(run, step, 'train.init_from')
  restored = checkpoint.restore(
      run / 'checkpoints', {'critic': {'params': state['critic'].params}},
      at=step, partial=True, warn=processes.warn)
  assert restored  # kept_step has found its checkpoint
  return state | {'critic': dataclasses.replace(
      state['critic'], params=restored[1]['critic']['params'])}
