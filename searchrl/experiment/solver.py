# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A solver that plays for a reward: frozen, in the engine of the policy."""

from collections.abc import Sequence
import dataclasses
import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import mesh as meshes
from searchrl.trajectory import Question, Request, SearchFn, Trajectory

_OURS = ('searchrl.agent.dialogue:laptop and :laptop_read, '
         'searchrl.agent.chat:read and searchrl.agent.tools:dr_zero')


@dataclasses.dataclass(frozen=True)
class Solver:
  """A `proposals.Play`: questions and attempts in, trajectories out.

  The attempts are played by all processes, in the slots of the policy, between
  its rollouts. An attempt depends on the question's uid and the number of the
  attempt; not on the step. A question that is too long for the prompt's budget
  is not played: its attempts have no turn, and so no answer.
  """

  sampler: Sampler
  weights: transformer.Params  # from the sampler's sync
  search: SearchFn
  temperature: float

  def __call__(self, questions: Sequence[Question], attempts: int
              ) -> list[list[Trajectory]]:
    fits = [*map(self.fits, questions)]
    found = iter(self.sampler.rollout(
        self.weights, [Request(question, attempt, number)
                       for number, question in enumerate(questions)
                       if fits[number] for attempt in range(attempts)],
        search=self.search, step=0, temperature=self.temperature).trajectories)
    return [[next(found) if fit else Trajectory(
        question, attempt, 0, (), stop_reason='length_limit')
             for attempt in range(attempts)]
            for question, fit in zip(questions, fits)]

  def fits(self, question: Question) -> bool:
    """Whether a question is short enough to be asked."""
    return len(dialogues.opening(
        self.sampler.dialogue, question.text, self.sampler.tokenizer)) <= (
            self.sampler.budgets.max_prompt_tokens)

  def speaking(self, dialogue: str, field: str, **budgets: int) -> 'Solver':
    """The same with another dialogue and other budgets.

    Args:
      dialogue: 'module:function' that makes a Dialogue of a Tokenizer.
      field: of the config that names it.
      **budgets: limits that differ.

    Raises:
      ValueError: there is none, or they do not fit.
    """
    return dataclasses.replace(self, sampler=self.sampler.speaking(
        model_folders.speaking(dialogue, self.sampler.tokenizer, field, _OURS),
        dataclasses.replace(self.sampler.budgets, **budgets)))


def check(options: Any, tokenizer: Any) -> None:
  """Raises a ValueError for a solver that cannot play; before any device.

  Args:
    options: config.solver.
    tokenizer: of the policy, in whose engine it plays.
  """
  if options.temperature <= 0:
    raise ValueError('solver.temperature must be above 0, or all attempts are '
                     f'one, but is {options.temperature}.')
  model_folders.speaking(options.dialogue, tokenizer, 'solver.dialogue', _OURS)


def load(options: Any, sampler: Sampler, params: transformer.Params,
         search: SearchFn, mesh: Mesh) -> Solver:
  """The solver that a reward calls to have questions tried.

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
  check(options, sampler.tokenizer)
  found = Solver(sampler, None, search, options.temperature).speaking(
      options.dialogue, 'solver.dialogue', **options.budgets)
  return dataclasses.replace(found, weights=sampler.sync(_params(
      options, params, sampler, mesh)).weights)


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
