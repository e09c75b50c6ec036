# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates the policy of a run or a model directory: a table and records."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from searchrl.agent import prompts
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.evaluation import compare, figures, baselines, evaluator
from searchrl.experiment import (build, config_checks, fingerprint,
                                 run_defaults, policy)
from searchrl.experiment import past_runs
from searchrl.experiment import search as searches
from searchrl.experiment import toolsets
from searchrl.rollouts import scoring
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs


def run(config, workdir: str) -> None:
  """Evaluates a model directory, a run's checkpoint, or several methods.

  A method is a model with a way to answer: as the trained agent, or as one of
  the baselines, such as a prompt without a search.

  Args:
    config: Config of the job; see configs/evaluate.py.
    workdir: Directory for table.json and records/. With several methods, each
      has its own directory below methods/.

  Raises:
    ValueError, FileNotFoundError: The config cannot be evaluated.
  """
  config_checks.check(config)
  if config.search.engine and not config.evaluate.run:  # known without a run
    _check_sets(config)
  folder = pathlib.Path(workdir)
  config = run_defaults.complete(
      config, config.evaluate.run, 'evaluate.run', folder)
  options = config.evaluate
  run_defaults.judge_on_own_data(config, options.run)
  config_checks.check(config)  # again, with the filled-in values
  config_checks.check_questions(config)
  config_checks.check_worlds(config)
  _check_sets(config)
  _check_methods(options)
  config_checks.check_samples(options)
  judge = build.evaluation_judge(config)
  directory = workdirs.Workdir(folder, config)
  directory.check()
  model = None if options.methods else policy.folder_of(config)
  admit = (model.admit(policy.budgets_of(config)) if model else
           questions_lib.admit_all)  # methods have their own prompts
  sets = datasets.shared(lambda: build.evaluation_sets(
      config, folder, admit=admit))
  if options.methods:
    _check_prompts(config, sets)
  else:
    loaded = policy.of_run(config, options.run, limit=_most(sets, options),
                           alike=True, folder=model)
  directory.prepare()
  directory.note('questions', lambda: fingerprint.questions(sets), alike=True)
  through = searches.of_evaluation(config)
  searched = processes.on_first(
      'searched', lambda: searches.describe_all(through, sets))
  directory.note('search', lambda: searched, alike=True)
  if options.methods:
    cases = searches.cases(through, sets, options, seed=config.seed,
                           rollout=config.rollout)
    _compare(config, cases, sets, searched, folder, judge)
    return
  cases = searches.cases(through, sets, options, seed=config.seed,
                         rollout=config.rollout,
                         bind=toolsets.of_sampler(loaded[0], config.seed))
  facts = processes.on_first('facts', lambda: fingerprint.facts(
      config, loaded[0], sets, searched, options.run))
  rows = evaluator.run(
      *loaded, cases, step=options.step, samples=options.samples,
      fingerprint=fingerprint.of(facts),
      source=fingerprint.sources(facts, options.step), folder=folder,
      judge=judge)
  processes.on_first('fingerprint', lambda: _note(
      folder, facts, fingerprint.overlap(options.run, sets)))
  if processes.is_first():
    rows = evaluator.with_seconds(rows, folder)
    print(figures.narrow_table(rows, evaluator.columns(rows), evaluator.KEYS),
          flush=True)


def _most(sets: Sequence[datasets.Dataset], options: Any) -> int:
  """Returns the largest number of answers that are sampled for one set."""
  return max(len(data.questions) for data in sets) * options.samples


def _check_prompts(config, sets: Sequence[datasets.Dataset]) -> None:
  """Raises a ValueError if a question is too long for an agent's prompt."""
  for name in config.evaluate.order:
    method = _of_seed(config.evaluate.methods[name], config.seed)
    if method.method != evaluator.AGENT or _missing(method):
      continue
    method_config = _of_method(config, method)
    admit = policy.folder_of(method_config).admit(
        policy.budgets_of(method_config))
    for question in (q for data in sets for q in data.questions):
      admit(question, f'{question.uid!r} for evaluate.methods.{name}')


def _note(folder: pathlib.Path, facts: Any, overlap: dict[str, float]) -> None:
  """Writes the fingerprint of what the scores depend on.

  It warns if the run's training data has questions of the evaluation; `overlap`
  has their share of each set.
  """
  atomic_files.write_json(folder / 'fingerprint.json', {
      'fingerprint': fingerprint.of(facts), **facts, 'overlap': overlap})
  for name, share in overlap.items():
    if share:
      processes.say(f'Warning: {share:.1%} of the questions of {name} are in '
                    "the run's training data.")


def _compare(config, cases: Sequence[evaluator.EvalCase],
             sets: Sequence[datasets.Dataset], searched: Any,
             folder: pathlib.Path, judge: scoring.Scorer | None) -> None:
  """Evaluates the methods of evaluate.order, and writes a table of scores.

  The table is also printed, and the differences from the last method.

  Args:
    config: Config of the evaluation.
    cases: Sets of questions with their engines and decodings.
    sets: Sets of questions.
    searched: Description of the searched data, for the fingerprint.
    folder: Directory of the results.
    judge: Scorer of answers besides the built-in scores, or None.
  """
  options, rows, timed = config.evaluate, [], []
  loaded: Any = None  # the last model, with its sampler
  loaded_from = None
  for name in options.order:
    method = _of_seed(options.methods[name], config.seed)
    missing = _missing(method)
    if missing:
      rows.append({'method': name, 'note': missing})
      timed.append(rows[-1])
      continue
    processes.say(f'\n{name} ...')
    method_config, here = _of_method(config, method), folder / 'methods' / name
    if (method.path, method.run) != loaded_from:
      loaded = None  # frees the memory of the model before
      loaded = policy.of_run(
          method_config, method.run, limit=_most(sets, options), alike=True)
      loaded_from = (method.path, method.run)
    facts = processes.on_first('facts', lambda: fingerprint.facts(
        method_config, loaded[0], sets, searched, method.run) | {
            'method': method.method,
            'templates': prompts.SETS[options.prompts]})
    table = evaluator.run(
        loaded[0], loaded[1],
        [_with_method(case, method.method, toolsets.of_sampler(
            loaded[0], config.seed)) for case in cases],
        step=options.step, samples=options.samples,
        templates=prompts.SETS[options.prompts],
        fingerprint=fingerprint.of(facts),
        source=fingerprint.sources(facts, options.step), folder=here,
        title=f'Evaluating {name}', judge=judge)
    processes.on_first('fingerprint', lambda: _note(
        here, facts, fingerprint.overlap(method.run, sets)))
    note = '' if method.taught else 'prompt never taught'
    rows += [{'method': name, **row, 'note': note} for row in table]
    timed += [{'method': name, **row, 'note': note}
              for row in evaluator.with_seconds(table, here)]
  if not processes.is_first():
    return
  atomic_files.write_json(folder / evaluator.TABLE, rows)
  columns = dict.fromkeys(('method', *evaluator.columns(timed), 'note'))
  columns['note'] = columns.pop('note')  # moves it to the end
  print(figures.narrow_table(timed, list(columns), ('method', *evaluator.KEYS)))
  print(_differences(folder, [
      name for name in options.order
      if not _missing(_of_seed(options.methods[name], config.seed))],
                     options.score))


def _with_method(case: evaluator.EvalCase, method: str, bind: searches.Bind
                ) -> evaluator.EvalCase:
  """Returns a case that is answered by a method; an agent has its tools."""
  search = case.search
  if method == evaluator.AGENT:
    search = bind(search, case.dataset.corpus)
  return dataclasses.replace(case, method=method, search=search)


def _of_seed(method: Any, seed: int) -> Any:
  """Returns a method with '{seed}' in its paths replaced by the seed."""
  filled = method.copy_and_resolve_references()
  with filled.unlocked():
    for field in ('run', 'path'):
      filled[field] = filled[field].replace('{seed}', str(seed))
  return filled


def _missing(method: Any) -> str:
  """Returns a text that names the first missing directory of a method's model.

  It is '' if nothing is missing.
  """
  made = [str(past_runs.parse_run(method.run)[0]) if method.run else '',
          method.path if method.path.endswith('/model') else '']
  return next((f'{path} is not there' for path in made
               if path and not pathlib.Path(path).exists()), '')


def _of_method(config, method: Any) -> Any:
  """Returns a copy of the config that fits the model of a method.

  If the method names a training run, the model, the dialogue with its tools and
  the limits of a conversation are those of the run.
  """
  method_config = config.copy_and_resolve_references()
  method_config.unlock()
  method_config.model.path = method.path or config.model.path
  if method.run:
    run_defaults.take_protocol(method_config, method.run)
  return method_config


def _differences(folder: pathlib.Path, names: Sequence[str], score: str
                ) -> str:
  """Returns a table of each method's score minus that of the last method.

  A row is a method and a set, with the mean difference over the questions that
  both answered, its 95 % interval and McNemar's p. It is '' without rows.

  Args:
    folder: Directory of the evaluation.
    names: Names of the evaluated methods.
    score: Name of the score to compare.
  """
  scores = {name: evaluator.recorded(folder / 'methods' / name)
           for name in names}
  rows = []
  for name in names[:-1]:
    for case, theirs in scores[names[-1]].items():
      ours = scores[name].get(case)
      if ours:
        gap = compare.difference(ours, theirs, score)
        rows.append({'method': name, 'case': case, 'n': gap.questions,
                     f'minus {names[-1]}': gap.mean,
                     '95% interval': f'{gap.low:+.3f} to {gap.high:+.3f}',
                     "McNemar's p": f'{gap.p:.2g}'})
  return '' if not rows else (
      f'\nPaired by question: {evaluator.NAMED[score]}\n\n'
      + figures.table(rows))


def _check_methods(options: Any) -> None:
  """Raises a ValueError for unknown methods or prompts."""
  if not {*options.order} <= {*options.methods} or (
      options.methods and not options.order):
    raise ValueError(
        'evaluate.order must name rows of evaluate.methods, which are '
        f'{", ".join(options.methods)}, but is {tuple(options.order)}.')
  known = (evaluator.AGENT, *baselines.METHODS)
  for name, method in options.methods.items():
    if method.method not in known:
      raise ValueError(
          f'evaluate.methods.{name}.method must be one of {", ".join(known)}, '
          f'but is {method.method!r}.')
  if options.prompts not in prompts.SETS:
    raise ValueError(
        f'evaluate.prompts must be one of {", ".join(prompts.SETS)}, but is '
        f'{options.prompts!r}.')


def _check_sets(config) -> None:
  """Raises a ValueError if there are no questions to evaluate on."""
  generated = (config.evaluate.worlds.kinds and not config.data.train and
               searches.evaluation_needs_corpus(config))
  if not config.data.evaluate and not generated:
    raise ValueError(
        'data.evaluate must name questions if no world is generated, but is '
        'empty. (None is generated with evaluate.worlds.kinds=(), with '
        'data.train of your own, or with a remote engine.) Give '
        '--config.data.evaluate=my_test.jsonl and --config.search.corpus.')
