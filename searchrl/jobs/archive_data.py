# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes an archive: documents, questions that need tools, demonstrations.

See configs/archive.py and docs/tools.md.
"""

from collections.abc import Iterator, Sequence
import hashlib
import itertools
import pathlib
import sys
from typing import Any

import numpy as np

from searchrl.agent import demonstrations
from searchrl.data import jsonl
from searchrl.experiment import config_checks
from searchrl.experiment import policy
from searchrl.experiment import toolsets
from searchrl.rollouts import scripted
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.search import corpus as corpora
from searchrl.search import engines
from searchrl.trajectory import Question, Request, ToolCall, Trajectory
from searchrl.world import archive

NEAR, DEEP = 'near', 'deep'  # a fact on the first page, or on a later one
SETS = (NEAR, DEEP, *archive.KINDS[1:])
_PER_ARCHIVE = 40  # towns and demonstrations of an archive that is shown
_ARCHIVES = 10_000  # seeds of archives that are shown; runs have smaller ones
_SHARES = (0.5, 0.25, 0.25)  # share of each kind in the demonstrations


def run(config, workdir: str) -> None:
  """Writes a generated archive as a data set into `workdir`.

  It writes corpus.jsonl, train.jsonl, a test file for each kind of question,
  and demonstrations.jsonl. The demonstrations are about other archives, so that
  they show no answer to a question.

  Raises:
    ValueError: A field is out of its range.
  """
  config_checks.check(config)
  folder = pathlib.Path(workdir)
  workdirs.Workdir(folder, config).prepare()
  if not processes.is_first():
    return
  options = config.archive
  split = round(options.test_share * options.towns)
  _check_counts(options, split)
  model = policy.folder_of(config)
  towns = archive.towns(config.seed, options.towns)
  corpus = _corpus(towns)
  page_of = _pages(config, model, corpus)
  jsonl.write(folder / 'corpus.jsonl', (
      {'id': p.id, 'title': p.title, 'text': p.text} for p in corpus))
  train = dict(_questions(
      towns[split:], options.train_per_kind, config.seed, 'train', page_of))
  jsonl.write(folder / 'train.jsonl', map(
      _row, itertools.chain(*zip(*train.values()))))
  for kind, questions in _questions(
      towns[:split], options.test_per_kind, config.seed, 'test', page_of):
    jsonl.write(folder / f'test_{kind}.jsonl', map(_row, questions))
  written = _demonstrate(config, model)
  jsonl.write(folder / 'demonstrations.jsonl', written)
  processes.say(
      f'{folder}: {len(corpus)} documents, questions of {len(SETS)} kinds, '
      f'{len(written)} demonstrations.', sys.stdout)


def _check_counts(options, split: int) -> None:
  """Raises a ValueError if there are too few towns for the questions of a kind.

  A kind gets at most as many questions as there are towns. The first `split`
  towns are for tests.
  """
  for name, count in (('train', options.towns - split), ('test', split)):
    if (wanted := options[f'{name}_per_kind']) > count:
      raise ValueError(
          f'archive.{name}_per_kind must be at most the number of towns that '
          f'{name} questions ask about, {count}, but is {wanted}. Lower it, or '
          'raise archive.towns.')


def _corpus(towns: Sequence[archive.Town]) -> corpora.Corpus:
  return corpora.Corpus(tuple(
      town.passage(number) for number, town in enumerate(towns)))


def _pages(config, model: Any, corpus: corpora.Corpus) -> Any:
  """Returns a function that tells on which page of a document a text is.

  Its arguments are a town, whose document is read, and the text. Its result is
  the number of the page from 1, as the tool `open` shows pages, or 0 if no page
  has the text.
  """
  tool, = (t for t in model.dialogue.tools if t.name == 'open')
  read = tool.bind(corpus=corpus, tokenizer=model.tokenizer,
                   result_tokens=policy.budgets_of(config).result_tokens)
  row_of = {passage.title: passage.id for passage in corpus}

  def page_of(town: archive.Town, text: str) -> int:
    question = Question('', '', ())
    result, = read([ToolCall('open', {'id': row_of[town.name], 'find': text},
                             question)])
    return 0 if result.is_error else int(
        result.text.split('(page ')[1].split()[0])

  return page_of


def _questions(towns: Sequence[archive.Town], count: int, seed: int, name: str,
               page_of: Any) -> Iterator[tuple[str, list[Question]]]:
  """Yields (kind, questions) for each kind of question.

  A question about a fact is 'near' if the fact is on the first page of its
  document, and else 'deep'.

  Args:
    towns: Towns to ask about.
    count: Maximum number of questions of a kind.
    seed: Seed of the choice.
    name: Name of the set, a part of the seed and of the questions' ids.
    page_of: Function from `_pages`.
  """
  rng = np.random.default_rng([seed, 32, len(name)])
  for kind in SETS:
    drawn: dict[str, archive.Problem] = {}
    is_fact = kind in (NEAR, DEEP)
    for problem in archive.problems(towns, 'fact' if is_fact else kind, rng):
      if is_fact:
        page = page_of(problem.town, problem.answer)
        if (page == 1) != (kind == NEAR) or not page:
          continue  # a name that is cut by a page's end is on none
      drawn.setdefault(problem.wording, problem)
      if len(drawn) == count:
        break
    yield kind, [archive.question(problem, f'{name}-{kind}-{number}', kind)
                 for number, problem in enumerate(drawn.values())]


def _row(question: Question) -> dict[str, Any]:
  return {'id': question.uid, 'question': question.text,
          'golden_answers': list(question.answers),
          'data_source': question.data_source}


def _demonstrate(config, model: Any) -> list[dict[str, Any]]:
  """Returns the lines of a demonstrations file, written by a scripted agent.

  Only trajectories that end with an answer are kept. They are about other
  archives than the questions. Each archive has few demonstrations, so that
  names have to be read and cannot be learned by heart.
  """
  options, written = config.archive, []
  for number in range(-(-options.demonstrations // _PER_ARCHIVE)):
    seed = config.seed * _ARCHIVES + number + 1
    count = min(_PER_ARCHIVE, options.demonstrations - number * _PER_ARCHIVE)
    for trajectory in _played(config, model, seed, count):
      if trajectory.stop_reason == 'answer':
        written += demonstrations.lines(trajectory, model.tokenizer)
  return written


def _played(config, model: Any, seed: int, count: int) -> list[Trajectory]:
  """Plays `count` questions about a new archive with a scripted agent."""
  towns = archive.towns(_ARCHIVES + seed, _PER_ARCHIVE)
  corpus = _corpus(towns)
  rng = np.random.default_rng([seed, 33])
  drawn = [archive.problems(towns, kind, rng) for kind in archive.KINDS]
  problems = {f'demo-{seed}-{n}': next(drawn[rng.choice(
      len(drawn), p=_SHARES)]) for n in range(count)}
  habits = archive.Habits(**config.archive.habits)
  names = [tool.name for tool in model.dialogue.tools]

  def write(request: Request, turns) -> str:
    uid = request.question.uid
    digest = hashlib.sha256(f'{uid}/{len(turns)}'.encode()).digest()
    thought, action = archive.act(
        problems[uid], turns, habits,
        np.random.default_rng(int.from_bytes(digest[:8])), names)
    # The tiny base was taught this form, without spaces before closing tags.
    return (f'<think> {thought}</think>\n'
            f'<{action.kind}> {action.texts[0]}</{action.kind}>')

  budgets = policy.budgets_of(config)
  search = toolsets.binder(
      model.dialogue, model.tokenizer, seed=seed,
      result_tokens=budgets.result_tokens)(engines.make(
          config.search.engine, corpus, **config.search.options), corpus)
  return scripted.rollout(
      write, [Request(archive.question(problem, uid, problem.kind))
              for uid, problem in problems.items()],
      tokenizer=model.tokenizer, dialogue=model.dialogue, search=search,
      budgets=budgets, length=config.rollout.max_length)
