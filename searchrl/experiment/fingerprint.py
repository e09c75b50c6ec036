# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: digests of all that a score depends on.

These are the data, the index, the model, the prompt and the code.
"""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
from typing import Any

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.data import question_files
from searchrl.data import questions as questions_lib
from searchrl.evaluation import compare
from searchrl.experiment import config_checks
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.trajectory import Question


def of(facts: Any) -> str:
  """Returns a digest, of twelve hex digits, of values that JSON can hold."""
  return _digest(json.dumps(facts, sort_keys=True).encode())


def facts(config: Any, sampler: Sampler, sets: Sequence[datasets.Dataset],
          search: Any, run: str) -> dict[str, Any]:
  """Returns a description of all that an evaluation's scores depend on.

  Args:
    config: Config of the evaluation.
    sampler: Sampler of the model.
    sets: Sets of questions.
    search: Description of the searched data; see `search.describe_all`.
    run: Run whose checkpoint is evaluated, such as 'runs/dspo' or
      'runs/dspo@20' with a step. '': the model of the config.

  Returns:
    A dict with the keys data, search, engines, model, prompt, budgets,
    max_length, sampling and revision (of the code), and judge if there is one.
  """
  dialogue = sampler.dialogue
  return {
      'data': questions(sets),
      'search': search, 'engines': {
          name: searches.settings(engine)
          for name, engine in searches.of_evaluation(config).items()},
      'model': model(config, run),
      'prompt': _digest(''.join(
          [dialogue.head, dialogue.template, dialogue.tail]).encode()),
      'budgets': config.rollout.budgets.to_dict(),
      'max_length': config.rollout.max_length,
      'sampling': [config.rollout.temperature,
                   *config_checks.truncation_of(config.rollout)],
      **_judge(config.evaluate),
      'revision': workdirs.environment()['git']}


def sources(facts: Any, step: int) -> Callable[[str, str], str]:
  """Returns a function that gives the `source` of recorded answers.

  A source is a digest of all that answers depend on, except for the questions
  and the version of the code. An evaluation does not use recorded answers with
  another source. A model that was moved keeps its source.

  Args:
    facts: Result of the function `facts`, perhaps with further keys.
    step: Seed of sampled answers.

  Returns:
    A function from the name of a set and the name of an engine to a source.
  """
  rest = {name: value for name, value in facts.items()
          if name not in ('data', 'search', 'engines', 'revision')}
  rest |= {'model': facts['model']['digest'], 'step': step}
  engines = facts['engines']

  def source(dataset: str, engine: str) -> str:
    searched = facts['search']
    if len(engines) > 1:  # else there is no level of engines
      searched = searched.get(engine, {})
    return of(rest | {'search': searched.get(dataset),
                      'engine': engines.get(engine)})

  return source


def _judge(evaluate: Any) -> dict[str, Any]:
  """Returns a description of an evaluation's judge; {} if it has none."""
  judge = evaluate.get('judge')
  return {'judge': judge.to_dict()} if judge and judge.name else {}


def questions(sets: Sequence[datasets.Dataset]) -> dict[str, str]:
  """Returns {name of a set: digest of its questions with all their fields}."""
  return {data.name: of([dataclasses.astuple(q) for q in data.questions])
          for data in sets}


def model(config: Any, run: str) -> dict[str, Any]:
  """Returns a description of the evaluated model, with a digest of it.

  For a run, the digest is that of the checkpoint's file of checksums; without a
  run, it is that of the weight files of config.model.path.
  """
  if run:
    folder, step = past_runs.parse_run(run)
    step = past_runs.kept_step(folder, step, 'evaluate.run')
    seal = folder / 'checkpoints' / str(step) / 'integrity.json'
    return {'run': run, 'step': step, 'digest': _digest(seal.read_bytes())}
  return {'path': config.model.path} | policy.base_of(config.model.path)


def overlap(run: str, sets: Sequence[datasets.Dataset]) -> dict[str, float]:
  """Returns {name of a set: share of its questions in a run's training data}.

  A run without data files was trained on questions that it generated. These
  are compared with their gold answers, because another world asks the same
  about other facts. The result is {} if the files do not exist any more.
  """
  folder, _ = past_runs.parse_run(run)
  recorded = past_runs.recorded(folder) if run else {}
  names = recorded.get('data', {}).get('train', '')
  generated = folder / 'data' / 'train'
  try:
    files = [(file.path, file.name)
             for file in question_files.named(names, 'data.train')]
  except (ValueError, FileNotFoundError):
    return {}
  trained: list[Question] = []
  for path, name in files or [
      (path, '') for path in (generated / 'questions.jsonl',
                              generated / 'train_common.jsonl')
      if path.exists()]:
    trained += questions_lib.read(path, prefix=name, needs_golds=False)
  if limit := recorded.get('data', {}).get('limit', 0):
    trained = questions_lib.subset(trained, limit, recorded['seed'])
  return compare.overlap(
      trained, {data.name: data.questions for data in sets},
      with_answers=not files) if trained else {}


def warn_of_repeats(train: Sequence[Question],
                    sets: Sequence[datasets.Dataset]) -> None:
  """Warns of questions that `train` has twice, or shares with one of `sets`."""
  first: dict[str, Question] = {}
  repeats = [(question, other) for question in train if (
      other := first.setdefault(rewards.normalise(question.text), question)
  ) is not question]
  if repeats:
    differ = sum(set(a.answers) != set(b.answers) for a, b in repeats)
    processes.say(
        f'Warning: {len(repeats)} of the {len(train)} questions of data.train '
        f'repeat an earlier one, such as {repeats[0][0].uid!r} (that of '
        f'{repeats[0][1].uid!r}); {differ} with other answers. Drop them, '
        'unless they should count more than others.')
  for data in sets:
    both = [question for question in data.questions
            if rewards.normalise(question.text) in first]
    if both:
      other = first[rewards.normalise(both[0].text)]
      processes.say(
          f'Warning: {len(both)} of the {len(data.questions)} questions of '
          f'{data.name} are in data.train, too, such as {both[0].uid!r} '
          f'({other.uid!r} there). Its scores are too high, unless you take '
          'them out of one of the two.')


def _digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:12]
