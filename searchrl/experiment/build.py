# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config in, what a run is made of out; everything is checked on the way.

The config ends here: below are keyword arguments. The only file that knows
everyone.
"""

from collections.abc import Callable
import dataclasses
import functools
import json
import pathlib
from typing import Any

from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.evaluation import suite
from searchrl.models import attention
from searchrl.models import lora as loras
from searchrl.rl import algorithms
from searchrl.rollouts import collect
from searchrl.rollouts import sampler as samplers
from searchrl.runtime import lockstep as lockstep_lib
from searchrl.runtime import mesh as meshes
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.search import factory
from searchrl.search import metered
from searchrl.search import wrapped
from searchrl.training import learner as learners
from searchrl.training import optimizer as optimizers

_FREE = ('train.num_steps', 'train.max_rollouts', 'train.checkpoint_every',
         'train.keep_checkpoints', 'train.progress', 'train.lockstep',
         'train.watchdog_secs')


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a config builds: everything that does not change during a run."""

  algorithm: algorithms.Algorithm
  sampler: samplers.Sampler
  learner: learners.Learner
  params: Any  # that the run starts from; also the reference policy
  stream: questions_lib.Stream
  search: metered.Metered
  reward: Callable[..., float]
  outcome: Callable[..., float]
  cases: list[suite.EvalCase]
  lockstep: lockstep_lib.LockstepCheck


def build(config, folder: pathlib.Path) -> Parts:
  """Builds and checks everything, before any compilation.

  Raises:
    ValueError, FileNotFoundError: the config cannot be run.
  """
  processes.agree('config', json.loads(config.to_json()))
  recipe = algorithm(config)
  mesh = meshes.make(**config.mesh)
  _check_staleness(config.train.max_staleness, recipe, mesh)
  lockstep = lockstep_lib.LockstepCheck(config.train.lockstep)
  sampler, params = samplers.build(config, mesh)
  its_learner = learner(
      config, recipe, sampler.shape, mesh,
      attend(config, tested_attention(config, sampler.shape, mesh), mesh), lockstep)
  reward, outcome = (
      plugins.resolve(config[field], field=field,
                      ours='searchrl.agent.rewards:em, :subem and :f1')
      for field in ('reward', 'outcome'))
  processes.on_first('workdir', lambda: workdirs.prepare(
      folder, config, free=_FREE, allow_changes=config.allow_changes))
  is_remote = not factory.needs_corpus(
      config.search.engine, config.search.options)
  data, sets = datasets.shared(lambda: (
      datasets.train_set(
          folder / 'data', train=config.data.train,
          corpus=config.search.corpus, world_seed=config.data.world_seed,
          per_hop=config.data.per_hop, is_remote=is_remote),
      datasets.evaluation_sets(
          folder / 'data', evaluate=config.data.evaluate,
          corpus=config.search.corpus, own_train=bool(config.data.train),
          is_remote=is_remote, **config.evaluate.worlds)))
  processes.on_first('search', lambda: workdirs.note(
      folder, 'search', factory.describe(
          config.search.engine, data.corpus, config.search.options,
          load_encoder=embedder.load_again),
      allow_changes=config.allow_changes))
  return Parts(
      algorithm=recipe, sampler=sampler, learner=its_learner, params=params,
      stream=questions_lib.Stream(
          data.questions, seed=config.seed, mix=config.data.mix),
      search=metered.Metered(wrapped.with_typed_errors(factory.make(
          config.search.engine, data.corpus, seed=config.seed,
          load_encoder=embedder.load_again, load_judge=reranker.load,
          **config.search.options))),
      reward=reward, outcome=outcome,
      cases=suite.cases(
          sets, config.search.engine, config.search.options,
          noise=config.evaluate.noise, seed=config.seed),
      lockstep=lockstep)


def algorithm(config) -> algorithms.Algorithm:
  """The config's algorithm, checked against its rollouts."""
  options = dict(config.algorithm)
  name = options.pop('name')
  built = plugins.build(
      name, options, field='algorithm',
      ours='searchrl.rl.algorithms:grpo, :dspo and others')
  if not isinstance(built, algorithms.Algorithm):
    raise ValueError(
        f'algorithm.name must lead to a function that returns an Algorithm, '
        f'but {name} returned {type(built).__name__}.')
  if config.rollout.group_size < built.min_group_size:
    raise ValueError(
        f'rollout.group_size must be at least {built.min_group_size} for '
        f'{name}, whose baseline is the group, but is '
        f'{config.rollout.group_size}. Raise it, or choose an algorithm '
        'without a group baseline.')
  _check_truncation(name, built, config.rollout)
  if config.mismatch.how == 'none':
    return built
  return algorithms.corrected(built, **config.mismatch)


def _check_staleness(staleness: int, recipe, mesh) -> None:
  if staleness < 0:
    raise ValueError(
        f'train.max_staleness must be at least 0, but is {staleness}.')
  if staleness and recipe.one_update:
    raise ValueError(
        'train.max_staleness must be 0 for an algorithm without an importance '
        f'ratio, but is {staleness}: another policy samples than is trained. '
        'Set it to 0, or choose a recipe with a ratio.')
  if staleness and mesh.size > 1:
    raise ValueError(
        'train.max_staleness must be 0 on several devices, where two programs '
        f'at a time could wait for each other, but is {staleness} on '
        f'{mesh.size}. Set it to 0, or start one process with one device.')


def _check_truncation(name: str, built: algorithms.Algorithm, options) -> None:
  """Raises a ValueError if a ratio would divide by another distribution."""
  if options.truncation not in ('refuse', 'renormalise'):
    raise ValueError("rollout.truncation must be 'refuse' or 'renormalise', "
                     f'but is {options.truncation!r}.')
  truncation = collect.truncation(options)
  truncation.check()
  if built.one_update or truncation.is_off or (
      options.truncation == 'renormalise'):
    return
  raise ValueError(
      f'rollout.top_k, top_p and min_p must be off for {name}, whose loss has '
      'an importance ratio: they make the sampler another distribution than '
      f'the policy. They are {truncation.top_k}, {truncation.top_p} and '
      f'{truncation.min_p}. Turn them off (0, 1.0, 0.0), or accept that with '
      "rollout.truncation='renormalise'.")


def learner(config, recipe, shape, mesh, attention_options,
            lockstep=lambda *facts: None) -> learners.Learner:
  """The config's learner for a model of a shape."""
  return learners.make(
      shape, recipe, optimizers.adamw(**config.optimizer), mesh,
      rows=config.rollout.questions * config.rollout.group_size,
      length=config.rollout.length, temperature=config.rollout.temperature,
      lora=loras.Lora(**config.model.lora) if config.model.lora.rank else None,
      seed=config.seed,
      critic_optimizer=optimizers.adamw(**config.critic.optimizer),
      critic_warmup=config.critic.warmup_updates, lockstep=lockstep,
      **attention_options, **config.learner)


def tested_attention(config, shape, mesh) -> str:
  """The config's attention of whole rows, tested by the first process."""
  name, note = processes.on_first('attention', lambda: attention.resolve(
      config.model.attention, platform=mesh.devices.flat[0].platform,
      dtype=config.learner.dtype, heads=shape.num_attention_heads,
      kv_heads=shape.num_key_value_heads, head_dim=shape.head_dim,
      length=config.learner.row_length or config.rollout.length,
      sliding_window=shape.sliding_window))
  if name != 'xla' or note.startswith('Warning'):
    processes.say(note)
  heads, ways = shape.num_key_value_heads, mesh.shape['tensor']
  if name != 'xla' and heads % ways:
    legal = [n for n in range(1, heads + 1) if heads % n == 0]
    raise ValueError(
        f'mesh.tensor must divide the {heads} KV heads under {name} attention, '
        f"but is {ways}. Choose one of {legal}, or model.attention='xla'.")
  return name


def attend(config, name: str, mesh) -> dict[str, Any]:
  """An attention as the learner is told of it."""
  implementation = functools.partial(
      attention.causal, implementation=name,
      block=config.model.attention_block or None,
      sharding=meshes.sharding(mesh, ('batch', None, 'heads', None)))
  return dict(attend=implementation, by_document=name == 'cudnn')
