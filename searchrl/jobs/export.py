# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Exports the policy in a run's checkpoint as a Hugging Face model folder."""

import functools
import pathlib
import re
import sys

from searchrl.agent import chat
from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import config_checks
from searchrl.experiment import model_card
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.models import weights
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime import progress


def run(config, workdir: str) -> None:
  """Writes `workdir`/<name of the run>_step_<step>, and prints that path.

  Args:
    config: Config of the job; see configs/export.py.
    workdir: Directory of exports.

  Raises:
    ValueError, FileNotFoundError: The run, step or dtype does not exist.
  """
  config_checks.check(config)
  options = config.export
  folder, step = past_runs.parse_run(options.run)
  if options.step and step not in (None, options.step):
    raise ValueError(f'export.step must be that of export.run, {step}, but is '
                     f'{options.step}. Give one of them.')
  step = past_runs.kept_step(folder, options.step or step, 'export.run')
  model = past_runs.with_rollouts(folder, 'export.run')['model']
  path = weights.locate(model['path'] or str(policy.TINY_BASE))
  shape = weights.read_config(path)
  with progress.phase(f'Loading the weights of {path}'):
    base = weights.load(
        path, shape, dtype=model.get('dtype', 'float32'), sharding_of=(
            functools.partial(meshes.sharding, meshes.make(**config.mesh))))
  target = pathlib.Path(workdir) / f'{_name(folder.resolve())}_step_{step}'
  if processes.is_first():
    target.parent.mkdir(parents=True, exist_ok=True)
  params = policy.trained(folder, base, shape, step=step, dtype=options.dtype)
  with progress.phase('Writing the model'):
    weights.save(target, params, shape, tokenizer_from=path,
                 eos_id=chat.ends(tokenizers.load(path)), dtype=options.dtype)
  processes.on_first('card', lambda: model_card.write(target, folder, step))
  processes.say(str(target), file=sys.stdout)


def _name(run: pathlib.Path) -> str:
  """Returns a run's name, with the folder above if many runs have this name."""
  is_common = re.fullmatch(r'(seed|iteration)_\d+|solver|proposer', run.name)
  return f'{_name(run.parent)}_{run.name}' if is_common else run.name
