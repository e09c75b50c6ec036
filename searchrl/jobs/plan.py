# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the memory that a config needs on each device, and a verdict."""

import copy

from searchrl.evaluation import figures
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import memory_plan
from searchrl.experiment import plan_totals
from searchrl.experiment import run_defaults
from searchrl.runtime.devices import GIB

_FOR_ROLLOUTS = ('more rollout.tensor, fewer rollout.max_num_seqs, '
                 "rollout.dtype='bfloat16'")
_FOR_UPDATES = ("more mesh.fsdp, learner.remat='nothing', "
                "learner.dtype='bfloat16', model.lora.rank, "
                'learner.offload_optimizer')


def run(config, workdir: str) -> None:
  """Prints whether the config fits config.plan.devices, and a table of sizes.

  A job of several trainings or phases has a plan for each; see
  `build.beside_job`.

  Raises:
    ValueError: The config cannot be run on these devices.
  """
  del workdir  # nothing is written
  config = _with_engine(config)
  config = memory_plan.resolved(config)
  config_checks.check(config)
  parts = build.beside_job(config, 'phases') or build.beside_job(
      config, 'trainings')
  for part in parts.values():
    config_checks.check(part)
  for part in parts.values() or [config]:
    if 'algorithm' in part and 'learner' in part:
      config_checks.check_learner(part, build.algorithm(part))
    elif 'learner' in part:
      config_checks.check_supervised(part)
  if not parts:
    print(describe(memory_plan.make(config)))
  for name, part in parts.items():
    print(f'The {name}:\n\n{describe(memory_plan.make(part))}\n')


def _with_engine(config):
  """Returns the config of an evaluation with the values of the run it names."""
  run, field = run_defaults.run_of(config)
  if 'search' not in config or config.search.engine:
    return config
  if run:
    return run_defaults.complete(config, run, field)
  config = copy.deepcopy(config)  # a model alone, perhaps not on this machine
  run_defaults.take_engine(config.search, '')
  return config


def describe(plan: plan_totals.Plan) -> str:
  """Returns a text with the memory per device, and whether it fits."""
  axes = ' x '.join(f'{axis}={n}' for axis, n in plan.mesh.items())
  active = '' if plan.active == plan.parameters else (
      f'{plan.active / 1e9:.3g} billion active, ')
  return (f'{plan.parameters / 1e9:.3g} billion parameters on {plan.devices}, '
          f'{active}'
          f'mesh {axes}\n{_describe_devices(plan)}{_describe_host(plan)}'
          f'{_describe_engines(plan)}')


def _describe_devices(plan: plan_totals.Plan) -> str:
  """Returns a table of a device's memory, and whether it fits.

  If some devices only sample, there are two tables.
  """
  update, sampling = plan.update, plan.sampling
  how = 'compiled' if update.compiled else 'estimated, not compiled'
  rollouts = {
      'rollouts: weights, logits, a prefill (estimated)': plan.engine.besides}
  prefix = 'or ' * bool(sampling is None and plan.engine.besides)
  training = {
      f'{prefix}update: gradients, activations ({how})': update.bytes,
      'and update: the KV cache is freed':
          -plan.engine.cache * bool(plan.frees_cache and update.bytes),
      "and update: cuDNN's workspace, at most (by formula)": update.workspace}
  if sampling is None:
    remedy = f'These help: {_FOR_UPDATES}.' if not plan.engine.slots else (
        f'For rollouts, {_FOR_ROLLOUTS} help; for updates, {_FOR_UPDATES}; for '
        'both, more devices.' if update.bytes else
        f'These help: {_FOR_ROLLOUTS}.')
    return _table(plan, 'a device holds', plan.holds | rollouts | training,
                  plan.peak, remedy)
  copy = {'or a copy of the weights, before it is sent': plan.engine.weights}
  return _table(
      plan, 'a device that trains holds', plan.holds | training | copy,
      plan.training_peak, f'These help: {_FOR_UPDATES}.') + '\n\n' + _table(
          plan, 'a device that samples holds', sampling | rollouts,
          plan.peak_with(plan.engine), f'These help: {_FOR_ROLLOUTS}.')


def _describe_host(plan: plan_totals.Plan) -> str:
  """Returns a sentence about moments in the hosts' memory; '' if none are."""
  if not plan.update.on_host:
    return ''
  return (f"\nThe hosts' memory holds the moments: "
          f'{plan.update.on_host / GIB:.2f} GiB for each device.')


def _table(plan: plan_totals.Plan, title: str, sizes: dict[str, float],
           peak: float, remedy: str) -> str:
  """Returns a table of the bytes that a device holds, with a verdict."""
  sizes = {name: size for name, size in sizes.items()
           if size or name in plan.holds} | {
               'at most, together': peak, 'of': plan.available}
  rows = [{title: name, 'GiB': f'{size / GIB:.2f}'}
          for name, size in sizes.items()]
  share = peak / plan.available
  verdict = f'It fits: {share:.0%} of the memory.' if (
      peak <= plan_totals.ROOM * plan.available) else (
          f'It does not fit: {share:.0%} of the memory, and at most '
          f'{plan_totals.ROOM:.0%} should be used. {remedy}')
  return f'{figures.table(rows)}\n{verdict}'


def _describe_engines(plan: plan_totals.Plan) -> str:
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
          f'{figures.table(rows)}\n{choice}')
