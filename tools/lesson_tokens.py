# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Lessons as token ids with loss weights, grouped by update.

`tools.lessons` writes the lessons. A config gives the kinds of lessons, their
prompts, options and counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from searchrl.agent import dialogue as dialogues
from searchrl.runtime import plugins
from searchrl.search import corpus
from searchrl.search import engines
from searchrl.training import supervised
from searchrl.training.supervised import Document
from searchrl.world import teacher
from tools import lessons
from tools import proposer


def make(tokenizer, *, seed: int, kinds: Mapping[str, Mapping[str, Any]],
         stages: Sequence[Mapping[str, Any]], worlds: Mapping[str, Any],
         batch_tokens: int, pack_length: int, eos: str
         ) -> dict[str, np.ndarray]:
  """Makes lessons in the order of training, as flat arrays.

  Args:
    tokenizer: Tokenizer of the model.
    seed: Seed of the first world. Each further world adds one.
    kinds: Options by kind of lesson: `lesson` ('module:function'), `prompt` (if
      it has one), and options of the lesson; see `tools.lessons`.
    stages: Dicts with the numbers of `echoes` and `worlds`, and `counts`, which
      gives the number of lessons of each kind per world.
    worlds: Options of `tools.lessons.documents`.
    batch_tokens: Number of tokens in an update, without padding.
    pack_length: Largest number of tokens of a lesson. Longer ones are dropped.
    eos: Text of the token that ends a turn.

  Returns:
    'ids' and 'weights' of all tokens, 'lengths' of the documents, and the
    number of 'documents' of each update.

  Raises:
    ValueError: A lesson's function or option does not exist, or a stage counts
      an unknown kind.
  """
  taught = {name: _lesson(name, dict(kind)) for name, kind in kinds.items()}
  rng = np.random.default_rng(seed)
  updates = []
  for number, stage in enumerate(stages):
    _check_counts(number, stage.get('counts', {}), taught)
    documents = echoes(stage.get('echoes', 0), tokenizer.vocab_size, rng)
    for _ in tqdm.trange(stage['worlds'], desc='lessons', leave=False,
                         mininterval=5):
      documents += [
          encode(document, tokenizer) for document in lessons.documents(
              seed, _bm25, taught, stage.get('counts', {}), eos=eos, **worlds)]
      seed += 1
    documents = [x for x in documents if len(x.ids) <= pack_length]
    chosen = list(supervised.cut(
        range(len(documents)), [len(x.ids) for x in documents],
        tokens=batch_tokens))
    updates += [[documents[i] for i in chosen[n]]
                for n in rng.permutation(len(chosen))]
  documents = [x for update in updates for x in update]
  return {
      'ids': np.concatenate([x.ids for x in documents]).astype(np.int32),
      'weights': np.concatenate([x.weights for x in documents]).astype(
          np.float32),
      'lengths': np.array([len(x.ids) for x in documents]),
      'documents': np.array([len(update) for update in updates])}


def _lesson(name: str, kind: dict[str, Any]):
  """Returns the function, dialogue and options of a kind of lesson."""
  lesson = plugins.resolve(
      kind.pop('lesson'), field=f'lessons.kinds.{name}.lesson',
      ours='tools.lessons:drill, :reading, :recall, :given and :search, and '
      'tools.proposer:propose')
  prompt = kind.pop('prompt', dialogues.LAPTOP_TEMPLATE)
  if 'habits' in kind:
    module = proposer if lesson is proposer.propose else teacher
    kind['habits'] = module.Habits(**kind['habits'])
  return lesson, dialogues.tags(prompt), kind


def _check_counts(stage: int, counts: Mapping[str, int], kinds) -> None:
  unknown = sorted(set(counts) - set(kinds))
  if unknown:
    raise ValueError(
        f'lessons.stages[{stage}].counts may name {", ".join(kinds)}, but '
        f'names {", ".join(unknown)}. Add it to lessons.kinds, or correct it.')


def _bm25(passages):
  return engines.make('bm25', corpus.Corpus(tuple(passages)))


def echoes(count: int, vocab_size: int, rng) -> list[Document]:
  """Returns documents of repeated random ids, which only copying predicts."""
  documents = []
  for _ in range(count):
    motif = rng.integers(0, vocab_size, rng.integers(8, 40))
    ids = np.resize(motif, 128).tolist()
    documents.append(Document(
        ids, [0.0] * len(motif) + [1.0] * (128 - len(motif))))
  return documents


def encode(document, tokenizer) -> Document:
  """Encodes a lesson to ids and loss weights, piece by piece like a rollout."""
  ids, weight = [], []
  for piece in document:
    piece_ids = tokenizer.encode(piece.text)
    ids += piece_ids
    weight += [piece.weight] * len(piece_ids)
  return Document(ids, weight)
