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
from searchrl.search import corpus
from searchrl.search import factory
from searchrl.training import optimizer as optimizers
from searchrl.training import supervised
from searchrl.training.train_step import TrainState
from searchrl.world import facts
from searchrl.world import lessons
from searchrl.world import names
from searchrl.world import text as world_text

EOS = '<|endoftext|>'
TAGS = tuple(f'<{slash}{name}>'
             for name in ('think', 'search', 'information', 'answer')
             for slash in ('', '/'))
_FIELDS = {'tokens': np.int32, 'weights': np.float32, 'segment_ids': np.int32}


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
             **make_batches(tokenizer, **config.lessons))
    (folder / 'unfinished.npz').rename(folder / 'lessons.npz')
  batches = dict(np.load(folder / 'lessons.npz'))
  prepared = time.process_time()
  shape = transformer.TransformerConfig(
      vocab_size=tokenizer.vocab_size, **config.model)
  params, record = fit(
      batches, shape, folder / 'checkpoints', seed=config.seed,
      **config.optimizer)
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


def make_batches(tokenizer, *, seed: int, stages, widths, batch_tokens: int
                ) -> dict[str, np.ndarray]:
  """Lessons as packed rows, one array a field, in the order of training.

  Args:
    tokenizer: of the model.
    seed: of the first world; each world takes one seed more.
    stages: dicts of `echoes`, of `worlds` and of counts for
      `lessons.documents`.
    widths: row lengths; a document goes to the shortest that holds it.
    batch_tokens: of a batch, padding included.

  Returns:
    {'width<w>/<field>': [batches, rows, w]} for the fields tokens, weights
    and segment_ids, and 'order': [batches] of widths.
  """
  rng = np.random.default_rng(seed)
  rows = {w: [] for w in widths}
  order = []
  for stage in stages:
    stage = dict(stage)
    documents = echoes(stage.pop('echoes', 0), tokenizer.vocab_size, rng)
    for _ in tqdm.trange(stage.pop('worlds'), desc='lessons', leave=False):
      documents += _lessons(tokenizer, seed, stage)
      seed += 1
    packed = supervised.pack_documents(documents, widths, tokenizer.pad_id)
    turns = []
    for width in widths:
      size = batch_tokens // width
      count = len(packed[width]) // size
      rows[width] += packed[width][:count * size]
      turns += [width] * count
    order += list(rng.permutation(turns))
  result = {'order': np.array(order, np.int32)}
  for width in widths:
    stacked = np.array(rows[width]).reshape(
        -1, batch_tokens // width, 3, width)
    for i, (field, dtype) in enumerate(_FIELDS.items()):
      result[f'width{width}/{field}'] = stacked[:, :, i].astype(dtype)
  return result


def _lessons(tokenizer, seed: int, counts: dict[str, Any]):
  """Token ids and loss weights of each lesson about a world."""
  make_search = lambda ps: factory.make('bm25', corpus.Corpus(tuple(ps)))
  return [encode(document, tokenizer) for document in lessons.documents(
      seed, make_search, dialogues.tags(), sloppiness=lessons.Sloppiness(),
      eos=EOS, **counts)]


def echoes(count: int, vocab_size: int, rng):
  """Random ids, repeated again and again: only copying predicts them."""
  documents = []
  for _ in range(count):
    motif = rng.integers(0, vocab_size, rng.integers(8, 40))
    ids = np.resize(motif, 128).tolist()
    documents.append((ids, [0.0] * len(motif) + [1.0] * (128 - len(motif))))
  return documents


def encode(document, tokenizer) -> tuple[list[int], list[float]]:
  """Ids and loss weights of a lesson, piece by piece, as a rollout would."""
  ids, weight = [], []
  for piece in document:
    piece_ids = tokenizer.encode(piece.text)
    ids += piece_ids
    weight += [piece.weight] * len(piece_ids)
  return ids, weight


def fit(batches: dict[str, np.ndarray], shape: transformer.TransformerConfig,
        folder: pathlib.Path, *, seed: int, save_every: int, **options):
  """Trains on lessons from random parameters with a planted circuit.

  Args:
    batches: from `make_batches`.
    shape: of the model.
    folder: of the checkpoints.
    seed: of the parameters.
    save_every: updates from one checkpoint to the next.
    **options: of `optimizer.adamw`.

  Returns:
    The parameters, and the record of `supervised.fit`.
  """
  order = batches['order']

  def batch_of(step):
    width = int(order[step])
    index = int((order[:step] == width).sum())
    batch = {field: batches[f'width{width}/{field}'][index]
             for field in _FIELDS}
    return batch, int((batch['segment_ids'] > 0).sum())

  adam = optimizers.adamw(total_steps=len(order), **options)
  params = induction.plant(
      transformer.init(shape, jax.random.key(seed)), shape, seed=seed)
  state, record = supervised.fit(
      supervised.make_update(supervised.language_model_loss(shape), adam),
      TrainState(params, adam.init(params)), batch_of, folder,
      steps=len(order), save_every=save_every)
  return state.params, record


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
