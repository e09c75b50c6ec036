# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data sets: questions with their corpora, from files or generated worlds.

Without paths, worlds are generated and written as the jsonl files that your own
data comes in, then read back: downstream there is no difference.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from searchrl.data import questions as questions_lib
from searchrl.runtime import processes
from searchrl.search import corpus as corpora
from searchrl.search import mapped_corpus
from searchrl.trajectory import Question
from searchrl.world import facts
from searchrl.world import text


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Questions and the corpus that they are answered from."""

  name: str
  questions: Sequence[Question]
  corpus: corpora.Corpus | mapped_corpus.MappedCorpus | None  # None: remote


def train_set(folder: pathlib.Path, *, train: str, corpus: str, world_seed: int,
              per_hop: Sequence[int], needs_corpus: bool = True) -> Dataset:
  """Returns the questions that a policy is trained on, and their corpus.

  Args:
    folder: of generated files.
    train: a questions file; '' generates a world.
    corpus: a corpus file; '' generates a world.
    world_seed: of the generated world.
    per_hop: how many questions of 1, 2, ... hops to generate.
    needs_corpus: False if the engine does without one.

  Raises:
    ValueError: one path is given without the other.
  """
  if bool(train) != bool(corpus) and (needs_corpus or not train):
    raise ValueError(
        'own data needs both data.train and search.corpus, but they are '
        f'{train!r} and {corpus!r}. Give both paths, or neither for the '
        'generated world.')
  if not train:
    return generated(folder / 'train', name='train', source='known',
                     world_seed=world_seed, per_hop=per_hop)
  return Dataset('train', questions_lib.read(train), _corpus(corpus))


def evaluation_sets(folder: pathlib.Path, *, evaluate: str, corpus: str,
                    own_train: bool, world_seed: int, kinds: Sequence[str],
                    questions_per_hop: int, max_hops: int,
                    needs_corpus: bool = True) -> list[Dataset]:
  """Returns the data sets of an evaluation: unseen worlds, or a file.

  Args:
    folder: of generated files.
    evaluate: a questions file, answered from `corpus`; '' generates worlds.
    corpus: a corpus file.
    own_train: training has its own data; then nothing is generated.
    world_seed: of the generated worlds; never that of training.
    kinds: 'known' or 'unseen' name parts; one world each.
    questions_per_hop: how many of each hop count.
    max_hops: the most hops of a question.
    needs_corpus: False if the engine does without one; then no world is
      generated, because it would not find that world's passages.

  Raises:
    ValueError: a questions file is given without a corpus.
  """
  if evaluate and needs_corpus and not corpus:
    raise ValueError(
        f'data.evaluate={evaluate!r} needs search.corpus, but that is empty. '
        'Give the corpus that its questions are answered from.')
  if evaluate:
    return [Dataset('eval', questions_lib.read(evaluate), _corpus(corpus))]
  if own_train or not needs_corpus:
    return []
  return [generated(folder / f'eval_{kind}', name=kind, source=kind,
                    world_seed=world_seed,
                    per_hop=[questions_per_hop] * max_hops)
          for kind in kinds]


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
