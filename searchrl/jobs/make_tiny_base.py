# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Documents in, a model folder out: supervised training.

Today one job lives here, `tiny_base`: it makes the tiny Qwen2 policy of the
embedded default, tokenizer included, from generated lessons. One run, any
number of interruptions: it resumes from its own checkpoints.
"""

import functools
import hashlib
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
import tqdm

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizer_lib
from searchrl.models import induction
from searchrl.models import policy
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.runtime import checkpoint
from searchrl.search import corpus
from searchrl.search import factory
from searchrl.training import optimizer as optimizers
from searchrl.world import facts
from searchrl.world import lessons
from searchrl.world import names
from searchrl.world import text as world_text

EOS = '<|endoftext|>'
TAGS = tuple(f'<{slash}{name}>' for name in
             ('think', 'search', 'information', 'answer') for slash in ('', '/'))


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
    batches = make_batches(tokenizer, **config.lessons)
    np.savez(folder / 'unfinished.npz', **batches)
    (folder / 'unfinished.npz').rename(folder / 'lessons.npz')
  batches = dict(np.load(folder / 'lessons.npz'))
  prepared = time.process_time()
  shape = transformer.TransformerConfig(
      vocab_size=tokenizer.vocab_size, **config.model)
  params, record = fit(
      batches, shape, folder / 'checkpoints', seed=config.seed,
      **config.optimizer)
  record['cpu_seconds'] += prepared  # of this process, start to lessons
  weights.save(folder / 'model', params, shape,
               tokenizer_from=folder / 'tokenizer', eos_id=tokenizer.eos_ids[0])
  _write_card(folder / 'model', config, shape, record)
  print(f'wrote {folder / "model"}: {json.dumps(record)}')


def make_tokenizer(folder: pathlib.Path, *, vocab_size: int, worlds: int,
                   fresh_worlds: int) -> None:
  """A byte-level BPE in the format of Qwen2's, trained on generated text.

  The dialogue's tags are ordinary added tokens, one id each; every other byte
  sequence can be written, too.
  """
  if (folder / 'tokenizer.json').exists():
    return
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
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
  bpe.normalizer = tokenizers.normalizers.NFC()
  bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  bpe.decoder = tokenizers.decoders.ByteLevel()
  added = [EOS, *TAGS]
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


def make_batches(tokenizer, *, seed: int, stages, widths, batch_tokens: int):
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
  dialogue = dialogues.tags()
  rng = np.random.default_rng(seed)
  rows = {w: [] for w in widths}
  order = []
  make_search = lambda ps: factory.make('bm25', corpus.Corpus(tuple(ps)))
  for stage in stages:
    stage = dict(stage)
    documents = echoes(stage.pop('echoes', 0), tokenizer.vocab_size, rng)
    for _ in tqdm.trange(stage.pop('worlds'), desc='lessons', leave=False):
      documents += [
          encode(d, tokenizer) for d in lessons.documents(
              seed, make_search, dialogue, sloppiness=lessons.Sloppiness(),
              eos=EOS, **stage)]
      seed += 1
    packed = pack_documents(documents, widths, tokenizer.pad_id)
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
    for i, field in enumerate(('tokens', 'weights', 'segment_ids')):
      result[f'width{width}/{field}'] = stacked[:, :, i].astype(
          np.float32 if field == 'weights' else np.int32)
  return result


def echoes(count: int, vocab_size: int, rng):
  """Random ids, said again and again: nothing but copying predicts them."""
  documents = []
  for _ in range(count):
    said = rng.integers(0, vocab_size, rng.integers(8, 40))
    ids = np.resize(said, 128).tolist()
    documents.append((ids, [0.0] * len(said) + [1.0] * (128 - len(said))))
  return documents


def encode(document, tokenizer) -> tuple[list[int], list[float]]:
  """Ids and loss weights of a lesson, piece by piece, as a rollout would."""
  ids, weight = [], []
  for piece in document:
    piece_ids = tokenizer.encode(piece.text)
    ids += piece_ids
    weight += [piece.weight] * len(piece_ids)
  return ids, weight


def pack_documents(documents, widths, pad_id: int):
  """Fills rows with documents in their order; {width: list of [3, width]}.

  A row holds tokens, weights and segment ids (0 is padding). A document longer
  than the longest width is left out.
  """
  packed = {w: [] for w in widths}
  open_rows = {}
  for ids, weight in documents:
    width = next((w for w in widths if len(ids) <= w), None)
    if width is None:
      continue
    row, used, segment = open_rows.get(width, (None, width, 0))
    if row is None or used + len(ids) > width:
      row = np.zeros((3, width), np.float64)
      row[0] = pad_id
      packed[width].append(row)
      used, segment = 0, 0
    span = slice(used, used + len(ids))
    row[0, span], row[1, span], row[2, span] = ids, weight, segment + 1
    row[1, used] = 0.0  # nothing of its document precedes the first token
    open_rows[width] = (row, used + len(ids), segment + 1)
  return packed


def fit(batches, shape, folder, *, seed: int, save_every: int, **options):
  """Trains from random parameters, or from the newest checkpoint.

  Returns:
    Params, and a record of what it took.
  """
  order = batches['order']
  adam = optimizers.adamw(total_steps=len(order), **options)
  params = induction.plant(
      transformer.init(shape, jax.random.key(seed)), shape, seed=seed)
  state = {'params': params, 'opt_state': adam.init(params)}
  record = {'steps': 0, 'tokens': 0, 'cpu_seconds': 0.0, 'losses': []}
  found = checkpoint.restore(folder, state)
  if found:
    _, state, record = found
  update = jax.jit(functools.partial(_update, shape=shape, adam=adam),
                   donate_argnums=0)
  clock = time.process_time()
  with tqdm.tqdm(total=len(order), initial=record['steps']) as bar:
    for step in range(record['steps'], len(order)):
      width = int(order[step])
      index = int((order[:step] == width).sum())
      batch = {field: batches[f'width{width}/{field}'][index]
               for field in ('tokens', 'weights', 'segment_ids')}
      state, loss = update(state, batch)
      record['tokens'] += int((batch['segment_ids'] > 0).sum())
      record['steps'] = step + 1
      if step % 20 == 0:
        bar.set_postfix(loss=f'{float(loss):.3f}')
      bar.update()
      if (step + 1) % save_every == 0 or step + 1 == len(order):
        record['losses'].append(round(float(loss), 4))
        record['cpu_seconds'] += time.process_time() - clock
        clock = time.process_time()
        checkpoint.save(folder, step + 1, state, record)
  return state['params'], record


def _update(state, batch, *, shape, adam):
  """One step on packed rows; weighted mean of the negative log-likelihood."""
  segments, weight = batch['segment_ids'], batch['weights']
  starts = jnp.concatenate(
      [jnp.ones_like(segments[:, :1], bool),
       segments[:, 1:] != segments[:, :-1]], 1)
  index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
  positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)

  def loss(params):
    logprobs, _ = policy.token_logprobs(
        params, batch['tokens'], shape, segment_ids=segments,
        positions=positions, chunk=segments.shape[1])
    return -jnp.sum(logprobs * weight) / jnp.maximum(jnp.sum(weight), 1)

  value, grads = jax.value_and_grad(loss)(state['params'])
  updates, opt_state = adam.update(grads, state['opt_state'], state['params'])
  return {'params': optax.apply_updates(state['params'], updates),
          'opt_state': opt_state}, value


def _write_card(folder: pathlib.Path, config, shape, record) -> None:
  """README.md of the model: data, steps, seed, time, digests."""
  digests = {
      name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
      for name in ('model.safetensors', 'tokenizer.json', 'config.json')}
  count = sum(int(np.prod(s)) for s in weights._shapes(shape).values())
  lines = [
      '# The tiny base model of searchrl', '',
      f'A Qwen2-architecture language model of {count:,} parameters that can',
      'read, copy and search, but has no discipline. It knows no facts: its',
      'world is made up anew from a seed. Licence: Apache-2.0.', '',
      'Made by `python -m searchrl.main --config=configs/tiny_base.py`.', '',
      '| | |', '|---|---|',
      f'| data | generated lessons, `searchrl/world/lessons.py`, seed '
      f'{config.lessons.seed} |',
      f'| updates, tokens | {record["steps"]:,}, {record["tokens"]:,} |',
      f'| seed of the parameters | {config.seed} |',
      f'| CPU seconds | {record["cpu_seconds"]:.0f} |',
      f'| last loss (nats, weighted) | {record["losses"][-1]:.3f} |',
      f'| jax | {jax.__version__} |',
      *(f'| sha256 of {n} | `{d}` |' for n, d in digests.items()), '']
  (folder / 'README.md').write_text('\n'.join(lines))
