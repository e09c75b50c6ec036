# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the tiny base model of the embedded default, tokenizer included.

A Qwen2 language model is trained on lessons about generated worlds. A run that
was killed resumes from its newest checkpoint.
"""

import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
import tokenizers
import tqdm

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizer_lib
from searchrl.models import induction
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.runtime import mesh as meshes
from searchrl.search import corpus
from searchrl.search import factory
from searchrl.training import optimizer as optimizers
from searchrl.training import supervised
from searchrl.training.supervised import Document
from searchrl.world import facts
from searchrl.world import lessons
from searchrl.world import names
from searchrl.world import text as world_text

EOS = '<|endoftext|>'
TAGS = tuple(f'<{slash}{name}>'
             for name in ('think', 'search', 'information', 'answer')
             for slash in ('', '/'))


def run(config, workdir: str) -> None:
  """Makes the tiny base model.

  Args:
    config: see configs/tiny_base.py.
    workdir: gets tokenizer/, lessons.npz, checkpoints/ and model/.
  """
  folder = pathlib.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  make_tokenizer(folder / 'tokenizer', **config.tokenizer)
  tokenizer = tokenizer_lib.load(str(folder / 'tokenizer'))
  if not (folder / 'lessons.npz').exists():
    np.savez(folder / 'unfinished.npz',
             **make_lessons(tokenizer, **config.lessons))
    (folder / 'unfinished.npz').rename(folder / 'lessons.npz')
  taught = dict(np.load(folder / 'lessons.npz'))
  prepared = time.process_time()
  shape = transformer.TransformerConfig(
      vocab_size=tokenizer.vocab_size, **config.model)
  params, record = fit(
      taught, shape, folder / 'checkpoints', seed=config.seed,
      pad_id=tokenizer.pad_id, row_length=config.lessons.row_length,
      learner=config.learner, **config.optimizer)
  if supervised.stopped(record, len(taught['documents']), folder):
    return
  record['cpu_seconds'] += prepared  # of this process, until the lessons
  weights.save(folder / 'model', params, shape,
               tokenizer_from=folder / 'tokenizer', eos_id=tokenizer.eos_ids[0])
  write_card(folder / 'model', params, record, seed=config.seed,
             lessons_seed=config.lessons.seed)
  print(f'wrote {folder / "model"}: {json.dumps(record)}')


def make_tokenizer(folder: pathlib.Path, *, vocab_size: int, worlds: int,
                   fresh_worlds: int) -> None:
  """A byte-level BPE in the format of Qwen2's, trained on generated text.

  The dialogue's tags are ordinary added tokens, one id each; every other byte
  sequence has ids, too. A folder that holds a tokenizer is left as it is.
  """
  if (folder / 'tokenizer.json').exists():
    return
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
  bpe.normalizer = tokenizers.normalizers.NFC()
  bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  bpe.decoder = tokenizers.decoders.ByteLevel()
  added = [EOS, *TAGS]
  texts = _tokenizer_texts(worlds, fresh_worlds)
  bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size - len(added), show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
  bpe.add_special_tokens([EOS])
  bpe.add_tokens([tokenizers.AddedToken(tag, normalized=False)
                  for tag in TAGS])
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'tokenizer_config.json').write_text(json.dumps({
      'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': EOS,
      'pad_token': EOS, 'clean_up_tokenization_spaces': False}, indent=2))
  bpe.save(str(folder / 'tokenizer.json'))


def _tokenizer_texts(worlds: int, fresh_worlds: int) -> list[str]:
  """Passages and questions of worlds, and the words that lessons repeat."""
  texts = []
  for seed in range(worlds + fresh_worlds):
    source = 'known' if seed < worlds else 'fresh'
    world = facts.make(10_000 + seed, source=source)
    texts += [f'{p.title} {p.text}' for p in world_text.passages(world)]
    texts += [q.text for q in world_text.questions(world, (60, 40, 20))]
  dialogue = dialogues.tags()
  texts += [dialogue.prompt(''), dialogue.invalid, 'Doc 1(Title: "', 'nothing',
            *facts.RELATIONS] * 50
  texts += [f' {word}' for words in names.INVENTORY.values()
            for word in words] * 40
  return texts


def make_lessons(tokenizer, *, seed: int, stages, batch_tokens: int,
                 row_length: int) -> dict[str, np.ndarray]:
  """Lessons in the order of training, as flat arrays.

  Args:
    tokenizer: of the model.
    seed: of the first world; each world takes one seed more.
    stages: dicts of `echoes`, of `worlds` and of counts for
      `lessons.documents`.
    batch_tokens: of an update, without padding.
    row_length: a longer lesson is left out.

  Returns:
    'ids' and 'weights' of all tokens, 'lengths' of the documents that they
    make, and how many 'documents' each update has.
  """
  rng = np.random.default_rng(seed)
  updates = []
  for stage in stages:
    stage = dict(stage)
    documents = echoes(stage.pop('echoes', 0), tokenizer.vocab_size, rng)
    for _ in tqdm.trange(stage.pop('worlds'), desc='lessons', leave=False):
      documents += _lessons(tokenizer, seed, stage)
      seed += 1
    documents = [x for x in documents if len(x.ids) <= row_length]
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


def _lessons(tokenizer, seed: int, counts: dict[str, Any]) -> list[Document]:
  """Token ids and loss weights of each lesson about a world."""
  make_search = lambda ps: factory.make('bm25', corpus.Corpus(tuple(ps)))
  return [encode(document, tokenizer) for document in lessons.documents(
      seed, make_search, dialogues.tags(), sloppiness=lessons.Sloppiness(),
      eos=EOS, **counts)]


def echoes(count: int, vocab_size: int, rng) -> list[Document]:
  """Random ids, repeated again and again: only copying predicts them."""
  documents = []
  for _ in range(count):
    motif = rng.integers(0, vocab_size, rng.integers(8, 40))
    ids = np.resize(motif, 128).tolist()
    documents.append(Document(
        ids, [0.0] * len(motif) + [1.0] * (128 - len(motif))))
  return documents


def encode(document, tokenizer) -> Document:
  """Ids and loss weights of a lesson, piece by piece, as a rollout would."""
  ids, weight = [], []
  for piece in document:
    piece_ids = tokenizer.encode(piece.text)
    ids += piece_ids
    weight += [piece.weight] * len(piece_ids)
  return Document(ids, weight)


def fit(taught: dict[str, np.ndarray], shape: transformer.TransformerConfig,
        folder: pathlib.Path, *, seed: int, pad_id: int, row_length: int,
        save_every: int, learner: Any, **options):
  """Trains on lessons from random parameters with a planted circuit.

  Args:
    taught: from `make_lessons`.
    shape: of the model.
    folder: of the checkpoints.
    seed: of the parameters.
    pad_id: of the padding.
    row_length: tokens of a packed row.
    save_every: updates from one checkpoint to the next.
    learner: options of `supervised.language_learner`.
    **options: of `optimizer.adamw`.

  Returns:
    The parameters, and the record of `supervised.fit`.
  """
  ends = np.cumsum(taught['lengths'])[:-1]
  documents = [Document(*x) for x in zip(
      np.split(taught['ids'], ends), np.split(taught['weights'], ends))]
  counts = taught['documents']
  firsts = np.cumsum(counts) - counts

  def batch_of(step):
    chosen = documents[firsts[step]:firsts[step] + counts[step]]
    batch = supervised.to_batch(chosen, rows=int(counts.max()),
                                length=row_length, pad_id=pad_id)
    return batch, sum(len(document.ids) for document in chosen)

  trained = supervised.language_learner(
      shape, optimizers.adamw(total_steps=len(counts), **options),
      meshes.make(devices=jax.devices()[:1]), row_length=row_length,
      rows=int(counts.max()), **learner)
  params = induction.plant(
      transformer.init(shape, jax.random.key(seed)), shape, seed=seed)
  state, record = supervised.fit(
      supervised.language_update(trained), trained.init(params), batch_of,
      folder, steps=len(counts), save_every=save_every)
  return trained.policy(state, None), record


def write_card(folder: pathlib.Path, params, record, *, seed: int,
               lessons_seed: int) -> None:
  """Writes the model's README.md."""
  count = sum(x.size for x in jax.tree.leaves(params))
  supervised.write_card(folder, [
      '# The tiny base model of searchrl', '',
      f'A Qwen2-architecture language model of {count:,} parameters that can',
      'read, copy and search, but has no discipline. It knows no facts: its',
      'world is made up anew from a seed. Licence: Apache-2.0.', '',
      'Made by `python -m searchrl.main --config=configs/tiny_base.py`.'], {
          'data': 'generated lessons, `searchrl/world/lessons.py`, seed '
                  f'{lessons_seed}',
          'seed of the parameters': seed}, record)
