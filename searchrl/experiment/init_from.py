# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""train.init_from: a run that starts as another run's policy.

The policy is first exported to the folder of the new run, and read from there
ever after: a resume needs it as the reference, or to merge adapters with, when
the other run's checkpoints may be gone.
"""

from collections.abc import Callable
import dataclasses
import functools
import json
import pathlib
from typing import Any

from jax.sharding import Mesh

from searchrl.experiment import policy
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs

_NOTE = policy.INIT + '.json'  # {run, step, critic}: written when all is there


def check(config, folder: pathlib.Path) -> None:
  """Raises unless the run that a config names can be started from.

  Args:
    config: of the new run.
    folder: of the new run; one that has started is not checked again.

  Raises:
    FileNotFoundError: it is no run with checkpoints.
    ValueError: it is this run, lacks the step, or has another model.
  """
  if not config.train.init_from or (folder / _NOTE).exists():
    return
  run, step = policy.parse_run(config.train.init_from)
  if run.resolve() == folder.resolve():
    raise ValueError(
        f'train.init_from must be another run, but {run} is the --workdir '
        'itself. The same command without it resumes a run.')
  policy.kept_step(run, step, 'train.init_from')
  past = policy.recorded(run)['model']
  theirs, ours = past['path'], config.model.path
  if theirs != ours and (
      past['lora']['rank'] and not (run / policy.INIT).is_dir()
      or _shape(theirs) != _shape(ours)):
    raise ValueError(
        f'model.path must be a model of the shape that {run} trained, and the '
        f'same where it trained adapters: {theirs!r}, but is {ours!r}. Set it '
        'to that.')


def _shape(path: str) -> transformer.TransformerConfig:
  return weights.read_config(weights.locate(str(path or policy.TINY_BASE)))


def start(config, folder: pathlib.Path, sampler: Sampler,
          base: transformer.Params, mesh: Mesh
         ) -> tuple[transformer.Params, Callable[[Any], Any]]:
  """What a run starts from: the config's model, or another run's policy.

  Args:
    config: of the run, checked.
    folder: of the run.
    sampler: of the config.
    base: the params of model.path.
    mesh: of all processes.

  Returns:
    The params, which are also the reference policy; and a function that makes
    of a learner's fresh state on these params that of a fresh run: the policy
    as exact as it was trained, and the other run's critic, if both have one.
  """
  if not config.train.init_from:
    return base, lambda state: state
  if not processes.on_first('init?', (folder / _NOTE).exists):
    _export(config, folder, sampler, base)
  del base
  load = functools.partial(
      weights.load, str(folder / policy.INIT), sampler.shape,
      sharding_of=functools.partial(meshes.sharding, mesh))

  def fresh(state):
    state = dict(state)
    if not config.model.lora.rank and config.model.dtype != 'float32':
      state['policy'] = dataclasses.replace(
          state['policy'], params=load(dtype='float32'))
    return _with_critic(state, json.loads((folder / _NOTE).read_text()))

  return load(dtype=config.model.dtype), fresh


def _export(config, folder: pathlib.Path, sampler: Sampler,
            base: transformer.Params) -> None:
  """Writes the other run's policy to the folder, and then which it was."""
  run, step = policy.parse_run(config.train.init_from)
  step = processes.on_first('init step', lambda: policy.kept_step(
      run, step, 'train.init_from'))
  processes.say(f'Starting from step {step} of {run}.')
  weights.save(
      folder / policy.INIT,
      policy.trained(run, base, sampler.shape, step=step), sampler.shape,
      tokenizer_from=config.model.path or policy.TINY_BASE,
      eos_id=sampler.tokenizer.eos_ids[0])
  processes.on_first('init', lambda: workdirs.note(folder, policy.INIT, {
      'run': str(run), 'step': step,
      'critic': checkpoint.holds(run / 'checkpoints', step, 'critic')}))


def _with_critic(state: dict[str, Any], note: dict[str, Any]) -> dict[str, Any]:
  """The state with the critic of the run of a note, if both have one."""
  if 'critic' not in state or not note['critic']:
    return state
  run, step = pathlib.Path(note['run']), note['step']
  policy.kept_step(run, step, 'train.init_from')
  _, found, _ = checkpoint.restore(
      run / 'checkpoints', {'critic': {'params': state['critic'].params}},
      at=step, partial=True)
  return state | {'critic': dataclasses.replace(
      state['critic'], params=found['critic']['params'])}
