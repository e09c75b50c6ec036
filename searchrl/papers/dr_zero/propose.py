# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a proposer on seeds, and writes a report or a file of questions.

A seed is a prompt for one proposal: a document and a number of hops (see
`seeds`). It has nothing to do with a random seed.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from searchrl.agent import dialogue as dialogues
from searchrl.agent import rewards
from searchrl.agent import tokenizer as tokenizers
from searchrl.data import jsonl
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.experiment import solver
from searchrl.papers.dr_zero import oracle
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import proposers
from searchrl.papers.dr_zero import rivals
from searchrl.papers.dr_zero import selection
from searchrl.rollouts import records
from searchrl.rollouts import scoring
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import atomic_files
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.trajectory import Question, Request, SearchFn, Trajectory
from searchrl.world import facts

QUESTIONS = 'questions.jsonl'
REPORT = 'report.json'


@dataclasses.dataclass(frozen=True)
class Proposer:
  """A proposer, its search engine, and the solver that tries its questions."""

  sampler: Sampler
  weights: Any  # weights as the sampler's sync returns them
  search: SearchFn
  play: solver.Solver
  attempts: int  # number of the solver's attempts per question
  seed: int  # random seed of the run


def load(config, corpus: Any, run: str) -> Proposer:
  """Loads a proposer that a run has trained, or the proposer before training.

  Args:
    config: Config of a run that trains a proposer. Its field `solver`
      determines which solver is loaded.
    corpus: Passages to search.
    run: Directory of the run whose newest checkpoint is loaded. If it is '',
      the model at model.path is loaded.

  Raises:
    ValueError, FileNotFoundError: A model cannot be used.
  """
  folder = policy.folder_of(config)  # fails before a device is used
  mesh = meshes.make(**config.mesh)
  sampler, params = policy.build(config, mesh, folder=folder)
  search = searches.engine(
      config.search, corpus, seed=config.seed, steps=config.train.num_steps,
      load_model=functools.partial(policy.second, mesh=mesh, seed=config.seed))
  play = solver.load(config.solver, sampler, params, search, mesh)
  if run:
    params = policy.trained(pathlib.Path(run), params, sampler.shape)
  return Proposer(sampler, sampler.sync(params).weights, search, play,
                  config.reward_options.get('attempts', 5), config.seed)


def examine(proposer: Proposer, seeds: Sequence[Question],
            folder: pathlib.Path, *, scorer: Callable[..., scoring.Scorer],
            limits: Any, world: facts.World | None) -> None:
  """Samples and judges one proposal per seed, and writes report.json.

  Args:
    proposer: Proposer from `load`.
    seeds: Seeds, one proposal each.
    folder: Directory that gets the samples and then the report.
    scorer: Function that makes a scorer from a solver; see `build.scorer`.
    limits: Limits of `proposers.alarms`, as keyword arguments.
    world: Generated world of the seeds; None if the true answers are unknown.
  """
  sampled = _sample(proposer, seeds, 1, step=0)
  judged = scorer(proposer.play)(sampled)
  if not processes.is_first():
    return
  records.write(folder / 'trajectories.jsonl.gz', judged)
  known = None if world is None else lambda question: truth(world, question)
  atomic_files.write_json(folder / REPORT, {
      'rows': proposers.rows(judged, known),
      'pass_rates': proposers.histogram(judged, proposer.attempts),
      'diversity': selection.diversity(judged),
      'alarms': proposers.alarms(judged, **limits)})


def questions(proposer: Proposer, seeds: Sequence[Question],
              folder: pathlib.Path, *, options: Any,
              world: facts.World | None) -> None:
  """Writes questions.jsonl: the best proposal of each seed, if it is usable.

  A round is a number of seeds. Its samples are written at its end, so that an
  interrupted call loses at most one round.

  Args:
    proposer: Proposer from `load`.
    seeds: Seeds, each of which gives at most one question.
    folder: Directory that gets the samples, the questions and then a report.
    options: The config's `proposing`.
    world: Generated world of the seeds; None if the true answers are unknown.

  Raises:
    ValueError: No proposal is usable.
  """
  groups = []
  for sampled in records.in_rounds(
      folder / 'trajectories', seeds, options.seeds_a_round,
      lambda number, asked: _sample(proposer, asked, options.samples, step=1)):
    groups += _by_seed(sampled)
    processes.say(f'{folder}: {len(groups)} of {len(seeds)} seeds')
  selected = selection.select(groups, proposer.play.fits)
  if options.check.attempts:
    selected = selection.checked(
        selected, _tried(proposer, selected.kept, options.check))
  answers = [proposals.read(t).answer for t in selected.kept]
  if options.majority.attempts:
    selected, answers = _by_majority(proposer, selected, options.majority)
  if processes.is_first():
    _write_questions(folder, selected, answers, options, proposer.seed, world)


def _tried(proposer: Proposer, proposed: Sequence[Trajectory], options: Any
          ) -> list[tuple[int, int]]:
  """Returns for each proposal two counts of the solver's right attempts.

  The first is with the proposal's evidence in the prompt, the second without.
  Evidence is the document and the passages that the proposer read.
  """
  counts = []
  for kind in ('from_documents', 'from_memory'):
    play = proposer.play.with_dialogue(
        options[kind], f'proposing.check.{kind}', max_turns=1,
        max_prompt_tokens=options.max_prompt_tokens)
    questions = [_with_evidence(play, t) if kind == 'from_documents' else
                 proposals.question(t) for t in proposed]
    tried = play([dataclasses.replace(q, uid=f'{kind}:{q.uid}')
                  for q in questions], options.attempts)
    counts.append([int(sum(map(rewards.em, of_one))) for of_one in tried])
  return [*zip(*counts)]


def _by_majority(proposer: Proposer, selected: selection.Selected, options: Any
                ) -> tuple[selection.Selected, list[str]]:
  """Keeps questions whose most common answer has a share within the limits.

  The solver tries each question again. The limits are options.least and
  options.most, shares of its attempts.

  Returns:
    The selection, and the most common answer to each kept question.
  """
  tried = proposer.play([dataclasses.replace(q, uid=f'majority:{q.uid}')
                         for q in map(proposals.question, selected.kept)],
                        options.attempts)
  kept, answers, dropped = [], [], list(selected.dropped)
  for t, attempts in zip(selected.kept, tried, strict=True):
    answer, share = rivals.majority(attempts)
    if answer and options.least <= share <= options.most:
      kept.append(t)
      answers.append(answer)
    else:
      dropped.append((t, selection.SURE_OR_UNSURE))
  return selection.Selected(kept, dropped), answers


def _with_evidence(reader: solver.Solver, proposal: Trajectory) -> Question:
  """Returns a proposal's question with its evidence before it, for a solver.

  Evidence is the document and the passages that the proposer read. It is cut to
  fit the solver's prompt.
  """
  question, sampler = proposals.question(proposal), reader.sampler
  room = sampler.budgets.max_prompt_tokens - len(dialogues.opening(
      sampler.dialogue, f'\n{question.text}', sampler.tokenizer))
  evidence = selection.evidence(proposal, sampler.dialogue.passage)

  def asked() -> Question:
    shown = tokenizers.cut(sampler.tokenizer, evidence, max(room, 0))
    return dataclasses.replace(question, text=f'{shown}\n{question.text}')

  while room > 0 and not reader.fits(asked()):
    room -= 1  # the tokens of the two texts are others beside each other
  return asked()


def _sample(proposer: Proposer, seeds: Sequence[Question], samples: int, *,
            step: int) -> list[Trajectory]:
  requests = [Request(seed, sample, group) for group, seed in enumerate(seeds)
              for sample in range(samples)]
  return proposer.sampler.rollout(
      proposer.weights, requests, search=proposer.search, step=step,
      temperature=1.0).trajectories


def _by_seed(sampled: Sequence[Trajectory]) -> list[list[Trajectory]]:
  """Returns the proposals by seed, without proposals whose search failed.

  The proposals of one seed are samples for the same prompt.
  """
  groups: dict[str, list[Trajectory]] = {}
  for t in sampled:
    if t.stop_reason != 'search_error':
      groups.setdefault(t.question.uid, []).append(t)
  return [*groups.values()]


def _write_questions(folder: pathlib.Path, selected: selection.Selected,
                     answers: list[str], options: Any, seed: int,
                     world: facts.World | None) -> None:
  """Writes the file of questions, then its report."""
  seeds = len(selected.kept) + len(selected.dropped)
  if not selected.kept:
    raise ValueError(
        f'the proposer must write questions, but of {seeds} seeds none has a '
        f'usable proposal: {_reasons(selected)}. {folder} has what was '
        'sampled. Teach it the form first, or train it for more steps.')
  if options.shuffle_answers:  # a control experiment
    answers = selection.others(answers, seed)
  jsonl.write(folder / QUESTIONS, map(
      selection.record, selected.kept, answers))
  report = {'seeds': seeds, 'kept': len(selected.kept),
            'dropped': _reasons(selected),
            'diversity': selection.diversity(selected.kept)}
  if world is not None:
    questions = map(proposals.question, selected.kept)
    truths = [truth(world, dataclasses.replace(question, answers=(answer,)))
              for question, answer in zip(questions, answers)]
    report |= {'true': float(np.mean([t.true for t in truths])),
               'needed': {str(n): sum(t.needed == n for t in truths)
                          for n in sorted({t.needed for t in truths})}}
  atomic_files.write_json(folder / REPORT, report)


def _reasons(selected: selection.Selected) -> dict[str, int]:
  return {reason: sum(why == reason for _, why in selected.dropped)
          for reason in selection.REASONS}


def truth(world: facts.World, question: Question) -> proposers.Truth:
  """Returns whether a question's answer is right, and the hops it needs.

  A question that the oracle does not understand gives (False, 0).
  """
  chain = oracle.understand(world, question.text)
  if chain is None:
    return proposers.Truth(False, 0)
  return proposers.Truth(bool(rewards.exact_match(
      question.answers[0], world.answers(chain.values[-1]))),
                         len(chain.values))
