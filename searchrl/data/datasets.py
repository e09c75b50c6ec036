# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data sets: questions with their corpora, from files or generated worlds.

Without paths, worlds are generated and written as the jsonl files that your own
data comes in, then read back: downstream there is no difference.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from searchrl.data import question_files
from searchrl.data import questions as questions_lib
from searchrl.runtime import processes
from searchrl.search import corpus as corpora
from searchrl.search import mapped_corpus
from searchrl.trajectory import Question
from searchrl.world import facts
from searchrl.world import text

MEAN = 'mean'  # of the sets of an evaluation, where their names stand


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Questions and the corpus that they are answered from."""

  name: str
  questions: Sequence[Question]
  corpus: corpora.Corpus | mapped_corpus.MappedCorpus | None  # None: remote
  files: Sequence[Sequence[Question]] = ()  # the questions, by file of several


def train_set(folder: pathlib.Path, *, train: str, corpus: str, world_seed: int,
              per_hop: Sequence[int], needs_corpus: bool = True, limit: int = 0,
              seed: int = 0, question_mark: bool = False) -> Dataset:
  """Returns the questions that a policy is trained on, and their corpus.

  Args:
    folder: of generated files.
    train: files of questions, as `question_files.named` has them; '' generates
      a world.
    corpus: a corpus file; '' generates a world.
    world_seed: of the generated world.
    per_hop: how many questions of 1, 2, ... hops to generate.
    needs_corpus: False if the engine does without one.
    limit: so many of the questions, over all files; 0: all.
    seed: of the choice.
    question_mark: as of `questions.read`, for files.

  Raises:
    ValueError: one path is given without the other; or there are fewer
      questions than the limit.
  """
  if bool(train) != bool(corpus) and (needs_corpus or not train):
    raise ValueError(
        'own data needs both data.train and search.corpus, but they are '
        f'{train!r} and {corpus!r}. Give both paths, or neither for the '
        'generated world.')
  if train:
    files = [_read(file, question_mark)
             for file in question_files.named(train, 'data.train')]
    data = Dataset('train', [q for file in files for q in file],
                   _corpus(corpus), files)
  else:
    data = generated(folder / 'train', name='train', source='known',
                     world_seed=world_seed, per_hop=per_hop)
  return _limited(data, limit, seed) if limit else data


def _read(file: question_files.File, question_mark: bool) -> list[Question]:
  return questions_lib.read(
      file.path, prefix=file.name, source=file.name if file.is_named else '',
      question_mark=question_mark)


def _limited(data: Dataset, limit: int, seed: int) -> Dataset:
  """A data set of fewer questions."""
  if limit > len(data.questions):
    raise ValueError(
        f'data.limit must be at most the {len(data.questions)} questions of '
        f'training, but is {limit}. Lower it, or set it to 0 for all.')
  chosen = questions_lib.subset(data.questions, limit, seed)
  uids = {q.uid for q in chosen}
  return dataclasses.replace(data, questions=chosen, files=[
      [q for q in file if q.uid in uids] for file in data.files])


def evaluation_sets(folder: pathlib.Path, *, evaluate: str, corpus: str,
                    own_train: bool, world_seed: int, kinds: Sequence[str],
                    questions_per_hop: int, max_hops: int,
                    needs_corpus: bool = True, question_mark: bool = False
                   ) -> list[Dataset]:
  """Returns the data sets of an evaluation: unseen worlds, or files.

  Args:
    folder: of generated files.
    evaluate: files of questions, as `question_files.named` has them, or a
      folder of them, answered from `corpus`; '' generates worlds.
    corpus: a corpus file.
    own_train: training has its own data; then nothing is generated.
    world_seed: of the generated worlds; never that of training.
    kinds: 'known' or 'unseen' name parts; one world each.
    questions_per_hop: how many of each hop count.
    max_hops: the most hops of a question.
    needs_corpus: False if the engine does without one; then no world is
      generated, because it would not find that world's passages.
    question_mark: as of `questions.read`, for files.

  Raises:
    ValueError: questions are given without a corpus, or two sets have a name.
  """
  if evaluate and needs_corpus and not corpus:
    raise ValueError(
        f'data.evaluate={evaluate!r} needs search.corpus, but that is empty. '
        'Give the corpus that its questions are answered from.')
  if evaluate:
    return _sets(evaluate, _corpus(corpus), question_mark)
  if own_train or not needs_corpus:
    return []
  return [generated(folder / f'eval_{kind}', name=kind, source=kind,
                    world_seed=world_seed,
                    per_hop=[questions_per_hop] * max_hops)
          for kind in kinds]


def _sets(evaluate: str, corpus: Any, question_mark: bool) -> list[Dataset]:
  """A set a file; a set a data source, of a file that has several and no name.

  All share one corpus, so that an engine over it is built once.
  """
  sets = []
  for file in question_files.named(
      evaluate, 'data.evaluate', may_be_folder=True):
    questions = _read(file, question_mark)
    by_source = collections.defaultdict(list)
    for question in questions:
      by_source[_source(question)].append(question)
    if len(by_source) == 1:
      by_source = {file.name or file.path.stem: questions}
    sets += [Dataset(name, group, corpus) for name, group in by_source.items()]
  names = [dataset.name for dataset in sets]
  question_files.check_differ(names, 'data.evaluate')
  if len(names) > 1 and MEAN in names:
    raise ValueError(
        f'data.evaluate must not call a set {MEAN!r}, which the mean over all '
        'sets is called. Write name=path.')
  return sets


def _source(question: Question) -> str:
  """Its data source; worlds have one a hop count, which is not meant here."""
  return question.data_source.removesuffix(f'_{question.hops}hop')


def _corpus(path: str) -> mapped_corpus.MappedCorpus | None:
  return mapped_corpus.load(path) if path else None


def shared(read: Callable[[], Any]) -> Any:
  """Calls `read` on every process; on the first one before, to make files."""
  processes.on_first('data', lambda: read() and None)
  return read()


def generated(folder: pathlib.Path, *, name: str, source: str, world_seed: int,
              per_hop: Sequence[int]) -> Dataset:
  """Generates a world's files, unless they are there, and reads them back."""
  recipe_text = json.dumps(dict(name=name, source=source, world_seed=world_seed,
                                per_hop=list(per_hop)))
  recipe = folder / 'recipe.json'
  if not recipe.exists() or recipe.read_text() != recipe_text:
    folder.mkdir(parents=True, exist_ok=True)
    recipe.unlink(missing_ok=True)
    world = facts.make(world_seed, source=source)
    corpora.write(folder / 'corpus.jsonl', text.passages(world))
    questions_lib.write(folder / 'questions.jsonl',
                        text.questions(world, per_hop, data_source=name))
    recipe.write_text(recipe_text)  # last: without it all is made again
  return Dataset(name, questions_lib.read(folder / 'questions.jsonl'),
                 corpora.read(folder / 'corpus.jsonl'))
