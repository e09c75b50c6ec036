# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the memory that a config needs on each device, and a verdict."""

from searchrl.evaluation import figures
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import memory_plan
from searchrl.runtime.devices import GIB


def run(config, workdir: str) -> None:
  """Prints whether the config fits config.plan.devices, and a table of sizes.

  A job of several trainings or phases has a plan for each; see
  `build.beside_job`.

  Raises:
    ValueError: The config cannot be run on these devices.
  """
  del workdir  # nothing is written
  if config.get('train', {}).get('rollout_devices'):
    raise ValueError(
        'train.rollout_devices must be 0 with --plan, which takes all devices '
        f'for one mesh, but is {config.train.rollout_devices}. Plan with '
        "plan.devices of the number that trains.")
  config_checks.check(config)
  config = memory_plan.resolved(config)
  parts = build.beside_job(config, 'phases') or build.beside_job(
      config, 'trainings')
  if not parts:
    print(describe(memory_plan.make(config)))
  for name, part in parts.items():
    config_checks.check(part)
    print(f'The {name}:\n\n{describe(memory_plan.make(part))}\n')


def describe(plan: memory_plan.Plan) -> str:
  """Returns the plan as a table, with the verdict."""
  axes = ' x '.join(f'{axis}={n}' for axis, n in plan.mesh.items())
  update = plan.update
  how = 'compiled' if update.compiled else 'estimated, not compiled'
  prefix = 'or ' * bool(plan.engine.besides)
  further = {
      'rollouts: weights, logits, a prefill (estimated)': plan.engine.besides,
      'and rollouts: the checkpoint before, being written': update.saving,
      f'{prefix}update: gradients, activations ({how})': update.bytes,
      "and update: cuDNN's workspace, at most (by formula)": update.workspace}
  further = {name: size for name, size in further.items() if size}
  sizes = plan.holds | further | {
      'at most, together': plan.peak, 'of': plan.available}
  rows = [{'a device holds': name, 'GiB': f'{size / GIB:.2f}'}
          for name, size in sizes.items()]
  share = plan.peak / plan.available
  verdict = f'It fits: {share:.0%} of the memory.' if plan.fits else (
      f'It does not fit: {share:.0%} of the memory, and at most '
      f'{memory_plan.ROOM:.0%} should be used. For rollouts, more '
      'rollout.tensor, fewer rollout.max_num_seqs, '
      "rollout.dtype='bfloat16' help; for updates, more mesh.fsdp, learner."
      "remat='nothing', learner.dtype='bfloat16', model.lora.rank; for both, "
      'more devices.')
  active = '' if plan.active == plan.parameters else (
      f'{plan.active / 1e9:.3g} billion active, ')
  return (f'{plan.parameters / 1e9:.3g} billion parameters on {plan.devices}, '
          f'{active}'
          f'mesh {axes}\n{figures.table(rows, tuple(rows[0]))}\n{verdict}'
          f'{_describe_engines(plan)}')


def _describe_engines(plan: memory_plan.Plan) -> str:
  """Returns a table of the time per token by rollout.tensor; '' if unknown."""
  if not plan.kind.bandwidth or not plan.engines:
    return ''
  rows = []
  for engine in plan.engines:
    secs = engine.secs(plan.kind)
    rows.append({
        'rollout.tensor': engine.tensor,
        'GiB at most': f'{plan.peak_with(engine) / GIB:.2f}',
        'MB read': f'{engine.read / 1e6:,.0f}',
        'MB sent': f'{engine.sent / 1e6:.1f}',
        'ms a token': f'{1000 * secs:.2f}',
        'tokens/s at most': f'{engine.slots / secs:,.0f}'})
  best = plan.fastest
  choice = 'None of them fits.' if best is None else (
      f'rollout.tensor={best.tensor} is the fastest that fits' + (
          ', and is what the config has.' if best.tensor == plan.engine.tensor
          else f'; the config has {plan.engine.tensor}.'))
  return ('\n\nRollouts, a token of every slot, all of them full; the least '
          'that memory and links take\n'
          f'{figures.table(rows, tuple(rows[0]))}\n{choice}')
