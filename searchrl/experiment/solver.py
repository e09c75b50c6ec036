# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The solver: a frozen model whose answers a reward needs.

It answers questions in the engine of the policy, between the policy's rollouts.
Its only tool is the search, even if the policy has more.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from searchrl.agent import dialogue as dialogues
from searchrl.experiment import model_folders
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts import driver
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import mesh as meshes
from searchrl.trajectory import Question, Request, SearchFn, Trajectory

_FIELDS = ('path', 'run', 'dialogue', 'budgets', 'temperature')
_OURS = ('searchrl.agent.dialogue:laptop and :laptop_read, '
         'searchrl.agent.chat:search_r1 and searchrl.agent.tools:dr_zero')


@dataclasses.dataclass(frozen=True)
class Solver:
  """A function that lets a frozen model attempt each question several times.

  All processes take part. The model uses the engine of the policy, which
  samples nothing meanwhile. The randomness of an attempt depends on the
  question's uid and the attempt's number, but not on the step. A question whose
  prompt is too long is not asked. Its attempts have no turns and no answer.
  """

  sampler: Sampler  # the policy's, with the solver's dialogue and budgets
  weights: transformer.Params  # from the sampler's sync
  search: SearchFn  # search engine of training
  temperature: float  # sampling temperature of all attempts

  def __call__(self, questions: Sequence[Question], attempts: int
              ) -> list[list[Trajectory]]:
    """Returns a list of `attempts` trajectories for each question."""
    fits = [*map(self.fits, questions)]
    played = iter(self.sampler.rollout(
        self.weights, [Request(question, attempt, number)
                       for number, question in enumerate(questions)
                       if fits[number] for attempt in range(attempts)],
        search=self.search, step=0, temperature=self.temperature).trajectories)
    return [[next(played) if fit else Trajectory(
        question, attempt, 0, (), stop_reason='length_limit')
             for attempt in range(attempts)]
            for question, fit in zip(questions, fits)]

  def fits(self, question: Question) -> bool:
    """Returns whether the prompt of a question is within the solver's limit."""
    return len(dialogues.opening(
        self.sampler.dialogue, question.text, self.sampler.tokenizer)) <= (
            self.sampler.budgets.max_prompt_tokens)

  def with_dialogue(self, dialogue: str, field: str, **budgets: Any
                   ) -> 'Solver':
    """Returns this solver with another dialogue and other budgets.

    Args:
      dialogue: Name, as 'module:function', of a function that makes a Dialogue
        for a Tokenizer.
      field: Config field that names the dialogue.
      **budgets: Limits that are different from this solver's.

    Raises:
      ValueError: The dialogue does not exist, or the budgets do not fit.
    """
    return dataclasses.replace(self, sampler=self.sampler.with_dialogue(
        model_folders.load_dialogue(
            dialogue, self.sampler.tokenizer, field, _OURS),
        dataclasses.replace(self.sampler.budgets, **budgets)))


def check(options: Any, tokenizer: Any) -> None:
  """Raises a ValueError if a solver has invalid options; uses no device.

  Args:
    options: Options of config.solver.
    tokenizer: Tokenizer of the policy. The solver samples in the policy's
      engine.
  """
  _check_fields('solver', options, _FIELDS, needed=_FIELDS)
  _check_fields('solver.budgets', options.budgets, [
      field.name for field in dataclasses.fields(driver.Budgets)])
  if options.temperature <= 0:
    raise ValueError('solver.temperature must be above 0, or all attempts are '
                     f'one, but is {options.temperature}.')
  check_dialogue(options.dialogue, tokenizer, 'solver.dialogue')


def _check_fields(name: str, fields: Mapping[str, Any], legal: Sequence[str],
                  needed: Sequence[str] = ()) -> None:
  """Raises a ValueError if a field is not legal or a needed one is missing."""
  wrong = ([f'lacks {field}' for field in needed if field not in fields]
           + [f'has {field}' for field in fields if field not in legal])
  if wrong:
    raise ValueError(f'{name} {"must" if needed else "may"} have the fields '
                     f'{", ".join(legal)}, but {wrong[0]}.')


def check_dialogue(name: str, tokenizer: Any, field: str) -> None:
  """Raises a ValueError unless a field names a dialogue for a tokenizer."""
  model_folders.load_dialogue(name, tokenizer, field, _OURS)


def load(options: Any, sampler: Sampler, params: transformer.Params,
         search: SearchFn, mesh: Mesh) -> Solver:
  """Loads the solver that a reward calls to attempt questions.

  Args:
    options: Options of config.solver.
    sampler: Sampler of the policy.
    params: Params of the policy at the start of the run.
    search: Search engine of training.
    mesh: Mesh of all processes.

  Raises:
    ValueError, FileNotFoundError: The solver has another shape or tokenizer
      than the policy, or its dialogue and budgets do not fit.
  """
  check(options, sampler.tokenizer)
  player = Solver(sampler, None, search, options.temperature).with_dialogue(
      options.dialogue, 'solver.dialogue', **options.budgets)
  return dataclasses.replace(player, weights=sampler.sync(_params(
      options, params, sampler, mesh)).weights)


def _params(options: Any, params: transformer.Params, sampler: Sampler,
            mesh: Mesh) -> transformer.Params:
  """Returns the solver's params, on the mesh.

  They are those of the run `options.run`, of the model `options.path`, or, if
  both are empty, the given params of the policy.
  """
  load = functools.partial(
      weights.load, dtype=jax.tree.leaves(params)[0].dtype,
      sharding_of=functools.partial(meshes.sharding, mesh))
  if options.run:
    run, step = past_runs.parse_run(options.run)
    step = past_runs.kept_step(run, step, 'solver.run')
    model = past_runs.recorded(run)['model']
    if model.get('lora', {}).get('rank'):  # over a base of its own
      params = load(weights.locate(model['path'] or str(policy.TINY_BASE)),
                    sampler.shape)
    return policy.trained(run, params, sampler.shape, step=step)
  if not options.path:
    return params
  path, shape, tokenizer = model_folders.parts(options.path)
  if (shape != sampler.shape
      or tokenizer.token_bytes != sampler.tokenizer.token_bytes):
    raise ValueError(
        'solver.path must have the shape and the tokenizer of model.path, '
        f'because one sampler runs both, but {options.path!r} has another '
        f'{"shape" if shape != sampler.shape else "tokenizer"}. Choose a '
        'checkpoint of the same model.')
  return load(path, shape)
