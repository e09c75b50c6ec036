# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Self-play: a proposer and a solver that train each other, phase by phase.

An iteration trains the proposer, lets it write questions, and trains the solver
on them. Each training is an ordinary run in its own directory. It is resumed,
evaluated and inspected like any other run.

Source: Dr. Zero, arXiv:2601.07055, section 3.4.
"""

import functools
import pathlib
import sys
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.evaluation import summary
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import policy
from searchrl.experiment import solver
from searchrl.models import weights
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import propose
from searchrl.papers.dr_zero import roles
from searchrl.papers.dr_zero import seeds as seeds_lib
from searchrl.papers.dr_zero import selfplay_report as report
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.search import mapped_corpus
from searchrl.world import facts


def run(config, workdir: str) -> None:
  """Runs all iterations. The same call resumes a run that was stopped.

  Args:
    config: Config of self-play; see configs/drzero.py.
    workdir: Directory that gets iteration_N/{seeds.jsonl, proposer, proposals,
      solver} for N = 1, 2, ..., examined/ and a summary.

  Raises:
    ValueError, FileNotFoundError: The config cannot be run, or the proposer
      writes no usable question.
  """
  folder = pathlib.Path(workdir)
  _check(config)
  free = ('selfplay.iterations', *(
      f'{role}.{name}' for role in roles.ROLES for name in build.FREE
      if name != 'train.num_steps'))
  directory = workdirs.Workdir(folder, config, free)
  directory.prepare()
  path, corpus = _corpus(config, folder)
  directory.note('corpus', lambda: {'digest': corpus.digest}, alike=True)
  iterations = _Iterations(config, folder, path, corpus)
  for number in range(1, config.selfplay.iterations + 1):
    iterations.iterate(number)
  processes.on_first('summary', lambda: processes.say(
      report.finish(folder, _finished(folder, config.selfplay.iterations),
                    f'seed {config.seed}'),
      file=sys.stdout))


def _finished(folder: pathlib.Path, iterations: int) -> int:
  """Returns `iterations`, or more if an earlier command has finished more."""
  while (folder / f'iteration_{iterations + 1}/solver/summary.txt').exists():
    iterations += 1
  return iterations


def trainings(config) -> dict[str, Any]:
  """Returns the config of each role's training run: role -> config.

  Jobs that plan or inspect a run, such as `jobs.plan`, call it.
  """
  return {role: roles.role_config(config, role) for role in roles.ROLES}


def examples(config) -> dict[str, str]:
  """Returns {'proposer': an example of the text that asks it for a question}.

  `jobs.show_prompt` shows it.
  """
  document = 'A title\nThe text of a passage.'
  return {'proposer': proposals.ask(
      document if config.selfplay.documents else '', 2)}


class _Iterations:
  """Self-play in a folder; `iterate` runs all phases of one iteration.

  A phase whose last file exists is not run again.
  """

  def __init__(self, config, folder: pathlib.Path, path: str, corpus: Any):
    self._config, self._folder = config, folder
    self._path, self._corpus = path, corpus
    self._tokenizer = tokenizers.load(weights.locate(
        config.proposer.model.path or str(policy.TINY_BASE)))
    self._world = _world(config)
    options = config.selfplay
    self._draw = functools.partial(
        seeds_lib.draw, self._corpus, self._tokenizer, hops=options.hops,
        seed=config.seed, tokens=options.document_tokens,
        documents=options.documents)

  def iterate(self, number: int) -> None:
    """Trains the proposer, has it propose questions, and trains the solver.

    A phase is skipped if its last file exists: the summary of a training, or
    the report of an examination or of proposals.
    """
    here, options = self._of(number), self._config.selfplay
    if _exists(here / 'solver' / summary.FILE):
      return
    seeds = self._draw(first=(number - 1) * options.seeds, count=options.seeds)
    file = here / 'seeds.jsonl'
    processes.on_first('seeds', lambda: questions_lib.write(file, seeds))
    before = self._folder / 'examined' / 'before'
    if number == 1 and not _exists(before / propose.REPORT):
      self._examine(self._load(''), before)
    if not _exists(here / 'proposer' / summary.FILE):
      self._train('proposer', number, file)
    written = here / 'proposals'
    if not _exists(written / propose.REPORT):
      proposer = self._load(str(here / 'proposer'))
      self._examine(proposer, self._folder / 'examined' / here.name)
      options = self._config.proposing
      if options.majority.attempts and number > 1:  # answers of today's solver
        del proposer
        proposer = self._load(str(here / 'proposer'), number)
      propose.questions(proposer, seeds[:options.seeds], written,
                        options=options, world=self._world)
      del proposer  # frees memory for the solver
    self._train('solver', number, written / propose.QUESTIONS)

  def _train(self, role: str, number: int, file: pathlib.Path) -> None:
    """Trains a role in an iteration on the questions of a file."""
    processes.say(f'\nIteration {number}: the {role}.')
    config = self._phase(role, number, file)
    job = plugins.resolve(config.job, field=f'{role}.job',
                          ours='searchrl.jobs.train:run')
    job(config, str(self._of(number) / role))

  def _load(self, run: str, number: int = 1) -> propose.Proposer:
    """Loads the proposer of a run, with the solver that an iteration starts at.

    If `run` is '', the proposer is loaded as it was before any training.
    """
    return propose.load(self._phase('proposer', number, ''), self._corpus, run)

  def _examine(self, proposer: propose.Proposer, folder: pathlib.Path) -> None:
    """Examines a proposer on documents that are drawn with another seed."""
    config = self._config
    propose.examine(
        proposer, self._draw(first=0, count=config.selfplay.examined,
                             name='examined', seed=config.seed + 1), folder,
        scorer=functools.partial(
            build.scorer, roles.role_config(config, 'proposer')),
        limits=config.alarms, world=self._world)

  def _of(self, number: int) -> pathlib.Path:
    return self._folder / f'iteration_{number}'

  def _phase(self, role: str, number: int, file: Any) -> Any:
    """Returns the config of a training, with the files of earlier phases."""
    config, before = roles.role_config(self._config, role), self._of(number - 1)
    config.search.corpus = self._path
    config.data.update(train=str(file), mix=(), per_hop=(), common=0.0)
    if role == 'proposer':
      config.data.update(golds=False, evaluate='')
      config.solver.run = str(before / 'solver') if number > 1 else ''
    elif number > 1:
      config.evaluate.initial = False  # the iteration before has evaluated it
    config.train.init_from = self._begins(role, number)
    return config

  def _begins(self, role: str, number: int) -> str:
    """Returns the directory of the run whose model a training starts from.

    '' stands for the model of the config.
    """
    is_shared = self._config.selfplay.one_model
    if role == 'solver' and is_shared:
      return str(self._of(number) / 'proposer')
    if number == 1:
      return ''
    return str(self._of(number - 1) / ('solver' if is_shared else role))


def _exists(path: pathlib.Path) -> bool:
  return processes.on_first(str(path), path.exists)


def _corpus(config, folder: pathlib.Path) -> tuple[str, Any]:
  """Returns the path of the corpus, and the passages in it.

  If the config names no corpus, a world is generated and its corpus is written.
  """
  if config.search.corpus:
    return config.search.corpus, mapped_corpus.load(config.search.corpus)
  data = datasets.shared(lambda: build.train_set(config, folder))
  return str(folder / 'data' / 'train' / 'corpus.jsonl'), data.corpus


def _world(config) -> facts.World | None:
  """Returns the generated world with all answers; None if there is a corpus."""
  if config.search.corpus:
    return None
  return build.world(config).make(config.data.world_seed, 'known')


def check_fields(config) -> None:
  """Raises a ValueError for a field that is illegal, or that a phase sets.

  No file is read.
  """
  config_checks.check(config)
  for role in roles.ROLES:
    config_checks.check(config[role])
  seeds_lib.check(config.selfplay.hops)
  for field, value, remedy in (
      ('data.train', config.data.train, 'name the passages by search.corpus'),
      *((f'{role}.train.init_from', config[role].train.init_from,
         f'export that run, and name its model by {role}.model.path')
        for role in roles.ROLES),
      ('proposer.solver.run', config.proposer.get('solver', {}).get('run'),
       'export that run, and name its model by proposer.solver.path')):
    if value:
      raise ValueError(f'{field} must be empty in self-play, which sets it in '
                       f'each phase, but is {value!r}. Leave it out, or '
                       f'{remedy}.')


def _check(config) -> None:
  """Raises an error if the config cannot be run."""
  check_fields(config)
  for role in roles.ROLES:
    _check_role(roles.role_config(config, role))
  config_checks.check_seeds(config.data, roles.role_config(config, 'solver'))
  _check_proposing(config)
  seeds, most = config.proposing.seeds, config.selfplay.seeds
  if not 1 <= seeds <= most:
    raise ValueError('proposing.seeds must be from 1 to selfplay.seeds, '
                     f'{most}, but is {seeds}.')
  if not config.search.corpus and not any(config.data.per_hop):
    raise ValueError(
        'search.corpus must name the passages that questions are written '
        'about, as no world is generated here, but it is empty. Add '
        '--config.search.corpus=corpus.jsonl; docs/settings.md says where to '
        'get them.')


def _check_proposing(config) -> None:
  """Raises a ValueError if documents do not fit, or an option is wrong."""
  role = roles.role_config(config, 'proposer')
  folder, options = policy.folder_of(role), config.selfplay
  longest = options.document_tokens * bool(options.documents) + len(
      dialogues.opening(folder.dialogue, proposals.ask(
          '', len(options.hops)), folder.tokenizer))
  limit = role.rollout.budgets.max_prompt_tokens
  if longest > limit:
    raise ValueError(
        'proposer.rollout.budgets.max_prompt_tokens must hold a task with its '
        f'document, about {longest} tokens with selfplay.document_tokens='
        f'{options.document_tokens}, but is {limit}. Change one of them.')
  check, majority = config.proposing.check, config.proposing.majority
  for kind in ('from_documents', 'from_memory') if check.attempts else ():
    solver.check_dialogue(check[kind], folder.tokenizer,
                          f'proposing.check.{kind}')
  if majority.least > majority.most:
    raise ValueError(
        'proposing.majority.least must be at most proposing.majority.most, '
        f'{majority.most}, but is {majority.least}.')


def _check_role(config) -> None:
  """Raises an error if a role, proposer or solver, cannot be trained.

  `config` is the role's own. Without this, mistakes in the solver's config
  would be found only after the proposer was trained.
  """
  build.scorer(config)
  config_checks.check_questions(config)
  config_checks.check_worlds(config)
  config_checks.check_learner(config, build.algorithm(config))
  folder = policy.folder_of(config)
  if 'solver' in config:
    solver.check(config.solver, folder.tokenizer)
