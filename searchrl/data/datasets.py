# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""`config.data` in; questions, corpora and evaluation sets out.

Without paths, worlds are generated and written as the same jsonl files that
own data comes in, then read back: nothing downstream knows the difference.
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
  corpus: corpora.Corpus | mapped_corpus.MappedCorpus | None  # None: elsewhere


def train_set(folder: pathlib.Path, *, train: str, corpus: str, world_seed: int,
              per_hop: Sequence[int], is_remote: bool = False) -> Dataset:
  """What a policy is trained on.

  Args:
    folder: where generated files go.
    train: a questions file; '' generates a world.
    corpus: a corpus file; '' generates a world.
    world_seed: of the generated world.
    per_hop: how many questions of 1, 2, ... hops to generate.
    elsewhere: the engine has a corpus of its own; then none is needed here.

  Raises:
    ValueError: one path without the other.
  """
  if bool(train) != bool(corpus) and not (train and is_remote):
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
                    is_remote: bool = False) -> list[Dataset]:
  """What a policy is judged on: unseen worlds, or a file.

  Args:
    folder: where generated files go.
    evaluate: a questions file, answered from `corpus`; '' generates worlds.
    corpus: a corpus file.
    own_train: training has its own data; then nothing is generated.
    world_seed: of the generated worlds; never that of training.
    kinds: 'known' and 'unseen' name parts; one world each.
    questions_per_hop: how many of each hop count.
    max_hops: the longest.
    elsewhere: the engine has a corpus of its own, so it knows no other world.

  Raises:
    ValueError: a questions file without a corpus to answer them from.
  """
  if evaluate and not (corpus or is_remote):
    raise ValueError(
        f'data.evaluate={evaluate!r} needs search.corpus, but that is empty. '
        'Give the corpus that its questions are answered from.')
  if evaluate:
    return [Dataset('eval', questions_lib.read(evaluate), _corpus(corpus))]
  if own_train or is_remote:
    return []
  return [generated(folder / f'eval_{kind}', name=kind, source=kind,
                    world_seed=world_seed, per_hop=[questions_per_hop] * max_hops)
          for kind in kinds]


def _corpus(path: str):
  return mapped_corpus.load(path) if path else None


def shared(read: Callable[[], Any]) -> Any:
  """What `read` gives, on every process; the first one makes the files."""
  processes.on_first('data', lambda: read() and None)
  return read()


def generated(folder: pathlib.Path, *, name: str, source: str, world_seed: int,
              per_hop: Sequence[int]) -> Dataset:
  """A world's files, written once for what is asked, and read back."""
  asked = json.dumps(dict(name=name, source=source, world_seed=world_seed,
                          per_hop=list(per_hop)))
  recipe = folder / 'recipe.json'
  if not recipe.exists() or recipe.read_text() != asked:
    folder.mkdir(parents=True, exist_ok=True)
    recipe.unlink(missing_ok=True)
    world = facts.make(world_seed, source=source)
    corpora.write(folder / 'corpus.jsonl', text.passages(world))
    drawn = text.questions(world, per_hop, data_source=name)
    questions_lib.write(folder / 'questions.jsonl', drawn)
    recipe.write_text(asked)  # last: without it the files are made again
  return Dataset(name, questions_lib.read(folder / 'questions.jsonl'),
             corpora.read(folder / 'corpus.jsonl'))
