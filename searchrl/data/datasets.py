# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data sets: questions with their corpora, from files or generated worlds.

A world is a generated set of fictional entities and facts about them, with
passages and questions (see `searchrl.world`). Without paths, worlds are
generated, written as jsonl files in the form of a user's own data, and read
back. Some worlds contain common knowledge, which all worlds share. Questions
about it are in separate files, and have the same corpus.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import filelock

from searchrl.data import question_files
from searchrl.data import questions as questions_lib
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.search import corpus as corpora
from searchrl.search import mapped_corpus
from searchrl.trajectory import Question
from searchrl.world import facts
from searchrl.world import names
from searchrl.world import text

Corpus = corpora.Corpus | mapped_corpus.MappedCorpus
_RECIPE = 'recipe.json'
MEAN = 'mean'  # name under which the mean over the evaluation sets is reported
WORLDS = 'worlds'  # evaluate on generated worlds, even with own training data
# Sets of fresh facts, by the source of their names.
FRESH: tuple[names.NameSource, ...] = ('known', 'unseen')
# Sets of common knowledge, and the splits of their questions ('': all splits).
# Few facts are outdated, so questions about these come from all splits.
COMMON: dict[facts.Topic, text.Split] = {'famous': 'test', 'outdated': ''}


@dataclasses.dataclass(frozen=True)
class WorldOptions:
  """Options of a generated world besides its seed; default: a plain world."""

  common: bool = False  # the world also has common knowledge
  outdated: float = 0.15  # share of common knowledge that changed, in (0, 1)
  hard: bool = False  # entities have namesakes; see `world.hard`
  scale: float = 1.0  # factor of the numbers of entities

  def make(self, seed: int, source: names.NameSource) -> facts.World:
    """Returns the world of a seed; `source` is the source of its names."""
    sizes = {kind: round(self.scale * n) for kind, n in facts.SIZES.items()}
    return facts.make(seed, sizes=sizes, source=source, common=self.common,
                      outdated=self.outdated, hard=self.hard)


@dataclasses.dataclass(frozen=True)
class _About:
  """Questions about the common knowledge of a world."""

  name: str  # name of their file, and of their set in an evaluation
  topics: tuple[facts.Topic, ...]
  split: text.Split
  per_hop: tuple[int, ...]  # maximum number of questions of each hop count


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Questions, and the corpus from which they are answered."""

  name: str
  questions: Sequence[Question]
  corpus: Corpus | None  # None: remote
  files: Sequence[Sequence[Question]] = ()  # questions of each file, if several
  is_common: bool = False  # the questions are about common knowledge
  few: Sequence[Question] = ()  # subset for costly evaluations; (): all


def train_set(folder: pathlib.Path, *, train: str, corpus: str, world_seed: int,
              per_hop: Sequence[int], common: float = 0.0,
              world: WorldOptions = WorldOptions(), needs_corpus: bool = True,
              limit: int = 0, seed: int = 0, question_mark: bool = False,
              golds: bool = True,
              admit: questions_lib.Admit = questions_lib.admit_all) -> Dataset:
  """Returns the questions that a policy is trained on, and their corpus.

  A generated world has questions about fresh facts, which are in this world
  alone. If it also has questions about common knowledge, which all worlds
  share, `Dataset.files` has two entries, and the fresh facts are the first.

  Args:
    folder: Directory of the generated files.
    train: Files of questions in the syntax of `question_files.named`; ''
      generates a world.
    corpus: Path of a corpus file; '' generates a world.
    world_seed: Seed of the generated world.
    per_hop: Numbers of questions of 1, 2, ... hops to generate.
    common: Number of questions about common knowledge, as a multiple of
      `per_hop`. There may be fewer if the world has not enough facts.
    world: Options of the world. It must have common knowledge if `common` is
      above 0.
    needs_corpus: False if the search engine needs no corpus.
    limit: Number of questions to keep over all files; 0: all.
    seed: Seed of the choice of these questions.
    question_mark: True to append a ? to questions of files that lack it.
    golds: True if questions of files need golden answers.
    admit: Function that is called with each question and its place in a file.
      It raises a ValueError for a question that cannot be asked.

  Raises:
    ValueError: Only one of the two paths is given, or there are fewer questions
      than the limit.
  """
  if bool(train) != bool(corpus) and (needs_corpus or not train):
    raise ValueError(
        'own data needs both data.train and search.corpus, but they are '
        f'{train!r} and {corpus!r}. Give both paths, or neither for the '
        'generated world.')
  if train:
    read = functools.partial(questions_lib.read, needs_golds=golds,
                             question_mark=question_mark, admit=admit)
    files = [_read(file, read)
             for file in question_files.named(train, 'data.train')]
    data = Dataset('train', [q for file in files for q in file],
                   _corpus(corpus), files)
  else:
    abouts = [_About('train_common', tuple(COMMON), 'train', tuple(
        math.ceil(common * count) for count in per_hop))]
    data = generated(
        folder / 'train', name='train', source='known', world_seed=world_seed,
        per_hop=per_hop, world=world, abouts=abouts * (common > 0), admit=admit)
  return _limited(data, limit, seed) if limit else data


def _read(file: question_files.File, read: Callable[..., list[Question]]
         ) -> list[Question]:
  return read(file.path, prefix=file.name,
              source=file.name if file.is_named else '')


def _limited(data: Dataset, limit: int, seed: int) -> Dataset:
  """Returns the data set with only `limit` of its questions."""
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
                    common_per_hop: int = 0, sampled_per_hop: int = 0,
                    world: WorldOptions = WorldOptions(),
                    needs_corpus: bool = True, question_mark: bool = False,
                    golds: bool = True,
                    admit: questions_lib.Admit = questions_lib.admit_all
                   ) -> list[Dataset]:
  """Returns the data sets of an evaluation, from unseen worlds or from files.

  Args:
    folder: Directory of the generated files.
    evaluate: Files of questions in the syntax of `question_files.named`, or a
      directory of such files. Their questions are answered from `corpus`. If
      this is '' or WORLDS, worlds are generated instead.
    corpus: Path of a corpus file.
    own_train: Whether training has its own data. If so and `evaluate` is '',
      nothing is generated, and the result is [].
    world_seed: Seed of the generated worlds. It must not be the seed of the
      training world.
    kinds: Names of the sets to generate. A set in FRESH is about facts of a
      world with 'known' or 'unseen' name parts. A set in COMMON is about common
      knowledge of the world with known parts. The facts of 'famous' are
      unchanged and held out of training. The facts of 'outdated' have changed.
    questions_per_hop: Number of questions of each hop count.
    max_hops: Maximum number of hops of a question.
    common_per_hop: Number of questions about common knowledge of each hop
      count; 0: questions_per_hop. There are fewer if the world has too few
      facts.
    sampled_per_hop: Number of questions of each hop count in `Dataset.few`,
      which is for costly evaluations; 0: all.
    world: Options of the worlds. They must include common knowledge if `kinds`
      has a set in COMMON.
    needs_corpus: Whether the search engine needs a corpus. If not, no world is
      generated, because the engine would not find that world's passages.
    question_mark: Whether to append a ? to questions of files that lack it.
    golds: Whether the questions of files need gold answers.
    admit: Function that is called with each question and its place in a file.
      It raises a ValueError for a question that cannot be asked.

  Raises:
    ValueError: Files are given without the corpus that the search engine needs,
      or two sets have the same name.
  """
  if evaluate == WORLDS:
    evaluate, own_train = '', False
  if evaluate and needs_corpus and not corpus:
    raise ValueError(
        f'data.evaluate={evaluate!r} needs search.corpus, but that is empty. '
        'Give the corpus that its questions are answered from.')
  if evaluate:
    return _sets(evaluate, _corpus(corpus), functools.partial(
        questions_lib.read, needs_golds=golds, question_mark=question_mark,
        admit=admit))
  if own_train or not needs_corpus:
    return []
  sets: dict[str, Dataset] = {}
  for source in FRESH:
    common = [kind for kind in COMMON if source == 'known' and kind in kinds]
    if not common and source not in kinds:
      continue
    whole = generated(
        folder / f'eval_{source}', name=source, source=source,
        world_seed=world_seed, per_hop=[questions_per_hop] * max_hops,
        world=world, admit=admit, abouts=[_About(
            kind, (kind,), COMMON[kind],
            (common_per_hop or questions_per_hop,) * max_hops)
                                          for kind in common])
    for name, part in zip([source, *common], whole.files):
      sets[name] = Dataset(
          name, part, whole.corpus, is_common=name in COMMON,
          few=_few(part, sampled_per_hop, world_seed))
  return [sets[kind] for kind in kinds]


def _few(questions: Sequence[Question], per_hop: int, seed: int
        ) -> list[Question]:
  """Returns `per_hop` random questions of each hop count; all if it is 0."""
  by_hops = collections.defaultdict(list)
  for question in questions:
    by_hops[question.hops].append(question)
  return [question for group in by_hops.values() for question in
          questions_lib.subset(group, per_hop or len(group), seed)]


def _sets(evaluate: str, corpus: Any, read: Callable[..., list[Question]]
         ) -> list[Dataset]:
  """Returns the evaluation sets of the files that `evaluate` names.

  Each file is a set. If its questions have several data sources, each of these
  is a set instead.
  """
  sets = []
  for file in question_files.named(
      evaluate, 'data.evaluate', may_be_folder=True):
    by_source = collections.defaultdict(list)
    for question in _read(file, read):  # worlds add the hop count to the source
      source = question.data_source.removesuffix(f'_{question.hops}hop')
      by_source[source].append(question)
    alone = file.name or question_files.stem(file.path)
    sets += [Dataset(name if len(by_source) > 1 else alone, group, corpus)
             for name, group in by_source.items()]
  titles = [dataset.name for dataset in sets]
  question_files.check_differ(titles, 'data.evaluate')
  if len(sets) > 1 and MEAN in titles:
    raise ValueError(
        f'data.evaluate must not call a set {MEAN!r}, which the mean over all '
        'sets is called. Write name=path.')
  return sets


def _corpus(path: str) -> Corpus | None:
  return mapped_corpus.load(path) if path else None


def shared(read: Callable[[], Any]) -> Any:
  """Calls `read` once on every process, and returns this process's result.

  The first process calls it before all others, because `read` may write files
  that the other processes then read.
  """
  results: list[Any] = []
  with progress.phase('Reading questions and passages'):
    processes.on_first('data', lambda: results.append(read()))
    return results[0] if results else read()


def generated(folder: pathlib.Path, *, name: str, source: names.NameSource,
              world_seed: int, per_hop: Sequence[int],
              world: WorldOptions = WorldOptions(),
              abouts: Sequence[_About] = (),
              admit: questions_lib.Admit = questions_lib.admit_all) -> Dataset:
  """Returns a generated world's questions, and its passages as their corpus.

  The world is generated and written as files, unless they exist already.
  Several processes may do so at the same time: one writes a new folder, which
  replaces the old one, and the others wait.

  Args:
    folder: Directory of the files, and of nothing else.
    name: Name of the data set, and of the data source of its fresh questions.
    source: Source of the names of fresh entities.
    world_seed: Seed of the facts.
    per_hop: Numbers of fresh questions of 1, 2, ... hops.
    world: Other options of the world.
    abouts: Further sets of questions, about common knowledge. Each set becomes
      a file.
    admit: Function that is called with each question and its place in a file.
      It raises a ValueError for a question that cannot be asked.

  Returns:
    All questions over one corpus. The file of fresh questions is the first.

  Raises:
    ValueError: Another process has written another world there meanwhile.
  """
  facts_of_files: dict[str, Any] = {
      'name': name, 'source': source, 'world_seed': world_seed,
      'per_hop': list(per_hop)}  # defaults of the others are not written
  if world != WorldOptions():
    facts_of_files['world'] = dataclasses.asdict(world)
  if abouts:
    facts_of_files['abouts'] = [dataclasses.asdict(about) for about in abouts]
  recipe = json.dumps(facts_of_files)
  if not _has(folder, recipe):
    with _locked(folder):
      if not _has(folder, recipe):
        with atomic_files.new_folder(folder) as new:
          made = world.make(world_seed, source)
          corpora.write(new / 'corpus.jsonl', text.passages(made))
          questions_lib.write(new / 'questions.jsonl', text.questions(
              made, per_hop, data_source=name))
          for about in abouts:
            questions_lib.write(new / f'{about.name}.jsonl', text.questions(
                made, about.per_hop, data_source=about.name,
                topics=about.topics, split=about.split))
          (new / _RECIPE).write_text(recipe)
  files = [questions_lib.read(folder / f'{stem}.jsonl', admit=admit)
           for stem in ('questions', *(about.name for about in abouts))]
  corpus = corpora.read(folder / 'corpus.jsonl')
  if not _has(folder, recipe):
    raise ValueError(
        f'{folder} must be written by one command at a time, but another has '
        'written another world there. Use another --workdir.')
  return Dataset(name, [q for file in files for q in file], corpus, files)


def _has(folder: pathlib.Path, recipe: str) -> bool:
  """Returns whether the files in a directory were made by a recipe."""
  try:
    return (folder / _RECIPE).read_text() == recipe
  except FileNotFoundError:
    return False


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """Runs a `with` body while no other process writes the same directory."""
  folder.parent.mkdir(parents=True, exist_ok=True)
  lock = filelock.FileLock(folder.with_name(f'.{folder.name}.lock'),
                           fallback_to_soft=False)
  with contextlib.suppress(OSError):  # the file system may have no locks
    lock.acquire()
  try:
    yield
  finally:
    lock.release()
