# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A solver that plays for a reward: frozen, in the engine of the policy."""

from collections.abc import Sequence
import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from searchrl.agent import proposals
from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import policy
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts import driver
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import mesh as meshes
from searchrl.runtime import plugins
from searchrl.trajectory import Question, Request, SearchFn, Trajectory


def player(options: Any, sampler: Sampler, params: transformer.Params,
           search: SearchFn, mesh: Mesh) -> proposals.Play:
  """What a reward calls to have questions tried.

  The attempts are played by all processes, in the slots of the policy, between
  its rollouts. An attempt depends on the question's uid and the number of the
  attempt; not on the step.

  Args:
    options: config.solver.
    sampler: of the policy.
    params: of the policy, as the run starts.
    search: the engine of training.
    mesh: of all processes.

  Raises:
    ValueError, FileNotFoundError: the solver is another kind of model, or its
      dialogue and budgets do not fit.
  """
  dialogue = plugins.resolve(
      options.dialogue, field='solver.dialogue',
      ours='searchrl.agent.dialogue:laptop and searchrl.agent.tools:dr_zero')
  speaking = sampler.speaking(
      dialogue(sampler.tokenizer), driver.Budgets(**options.budgets))
  if options.temperature <= 0:
    raise ValueError('solver.temperature must be above 0, or all attempts are '
                     f'one, but is {options.temperature}.')
  frozen = sampler.sync(_params(
      options, params, sampler, mesh)).weights
  return playing(speaking, frozen, search, temperature=options.temperature)


def _params(options: Any, params: transformer.Params, sampler: Sampler,
            mesh: Mesh) -> transformer.Params:
  """Of a run's newest checkpoint, of a model folder, or the policy's own."""
  if options.run:
    run = pathlib.Path(options.run)
    policy.kept_step(run, None, 'solver.run')
    return policy.trained(run, params, sampler.shape)
  if not options.path:
    return params
  path, shape = weights.locate(options.path), sampler.shape
  if (weights.read_config(path) != shape or tokenizers.load(path).token_bytes
      != sampler.tokenizer.token_bytes):
    raise ValueError(
        'solver.path must have the shape and the tokenizer of model.path, in '
        f'whose engine it plays, but {options.path!r} has others.')
  return weights.load(path, shape, dtype=jax.tree.leaves(params)[0].dtype,
                      sharding_of=functools.partial(meshes.sharding, mesh))


def playing(sampler: Sampler, frozen: transformer.Params, search: SearchFn, *,
            temperature: float) -> proposals.Play:
  """A solver of a sampler and of weights from its `sync`."""
  def play(questions: Sequence[Question], attempts: int
          ) -> list[list[Trajectory]]:
    requests = [Request(question, attempt, number)
                for number, question in enumerate(questions)
                for attempt in range(attempts)]
    found = sampler.rollout(frozen, requests, search=search, step=0,
                            temperature=temperature).trajectories
    return [found[i:i + attempts] for i in range(0, len(found), attempts)]

  return play
