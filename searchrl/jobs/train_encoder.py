# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Queries and their passages in, an encoder's folder out: contrastive training.

A killed run goes on from its newest checkpoint as if nothing had happened.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import hashlib
import json
import pathlib
import string
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
import tqdm

from searchrl.data import encoder_pairs
from searchrl.encoders import embedder
from searchrl.models import contrastive
from searchrl.models import encoder as encoders
from searchrl.models import weights
from searchrl.runtime import checkpoint
from searchrl.runtime import workdir as workdirs
from searchrl.training import optimizer as optimizers

SPECIAL = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
_STEP = 32  # rows are as wide as a multiple of it: few programs


def run(config, workdir: str) -> None:
  """Trains an encoder and writes it to model/.

  Args:
    config: see configs/tiny_encoder.py.
    workdir: gets tokenizer/, checkpoints/ and model/.

  Raises:
    FileNotFoundError, ValueError: data, model or an option cannot be used.
  """
  folder = pathlib.Path(workdir)
  _check(config)
  workdirs.prepare(folder, config.to_dict(), free=('save_every',),
                   allow_changes=config.allow_changes)
  pages = config.batch.queries * config.data.batches_a_world
  read = (encoder_pairs.own_book(config.data.pairs) if config.data.pairs else
          functools.partial(encoder_pairs.world_book, seed=config.data.world_seed,
                            count=pages, fresh=config.data.fresh))
  if config.data.pairs:
    workdirs.note(folder, 'data', {'sha256': _sha256(config.data.pairs)},
                  allow_changes=config.allow_changes)
  book_of = functools.lru_cache(maxsize=2)(read)  # the first, and today's
  source, shape, params = _start(config, folder, book_of)
  prepared = time.process_time()
  params, record = fit(
      params, shape, source, folder / 'checkpoints',
      lambda step: encoder_pairs.batch(
          book_of, step, seed=config.seed, **config.batch),
      rows=_rows(config, book_of), lengths=dict(config.lengths),
      temperature=config.temperature, steps=config.steps,
      save_every=config.save_every, **config.optimizer)
  record['cpu_seconds'] += prepared  # of this process, start to first update
  encoders.save(folder / 'model', params, shape, tokenizer_from=source)
  _write_card(folder / 'model', config, params, record)
  print(f'wrote {folder / "model"}: {json.dumps(record)}')


def _check(config) -> None:
  for name, least in (('queries', 2), ('hard_negatives', 0), ('depth', 1)):
    if config.batch[name] < least:
      raise ValueError(f'batch.{name} must be at least {least}, but is '
                       f'{config.batch[name]}.')
  for name in ('steps', 'save_every'):
    if config[name] < 1:
      raise ValueError(f'{name} must be at least 1, but is {config[name]}.')
  if config.data.batches_a_world < 1 or not 0 <= config.data.fresh <= 1:
    raise ValueError(
        'data.batches_a_world must be at least 1 and data.fresh lie in [0, 1], '
        f'but they are {config.data.batches_a_world} and {config.data.fresh}.')


def _sha256(path: str | pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _rows(config, book_of) -> int:
  """Passages of a batch."""
  return min(config.batch.queries, len(book_of(0).queries)) * (
      1 + config.batch.hard_negatives)


def _start(config, folder: pathlib.Path, book_of):
  """Where the tokenizer is, the shape, and the parameters to begin with."""
  if config.model.path:
    source = pathlib.Path(weights.locate(config.model.path))
    shape = encoders.read_config(str(source))
    params = encoders.load(str(source), shape)
  else:
    source = folder / 'tokenizer'
    count = 1 if config.data.pairs else config.tokenizer.worlds
    make_tokenizer(source, config.tokenizer.vocab_size, (
        encoders.QUERY_PREFIX + encoders.PASSAGE_PREFIX + text  # words, too
        for i in range(count) for text in book_of(i).texts))
    coder = embedder.load_tokenizer(source, config.lengths.passage)
    shape = encoders.EncoderConfig(
        vocab_size=coder.get_vocab_size(), **config.model.shape)
    params = encoders.init(shape, jax.random.key(config.seed))
  for kind, length in config.lengths.items():
    if not 8 <= length <= shape.max_position_embeddings:
      raise ValueError(
          f'lengths.{kind} must lie in [8, {shape.max_position_embeddings}], '
          f'the positions of the encoder, but is {length}.')
  return source, shape, params


def make_tokenizer(folder: pathlib.Path, vocab_size: int,
                   texts: Iterable[str]) -> None:
  """A lower-casing WordPiece tokenizer in BERT's format, unless it is there.

  Letters and digits are pieces wherever they stand, so that any name has some.
  Equal texts make equal files: that letters inside a word are there from the
  start fixes the numbers by which the trainer breaks ties.
  """
  if (folder / 'tokenizer.json').exists():
    return
  first = [*SPECIAL, *map(chr, range(33, 127)),
           *(f'##{x}' for x in string.ascii_lowercase + string.digits)]
  learner = _wordpiece(tokenizers.models.WordPiece(unk_token='[UNK]'))
  learner.train_from_iterator(texts, tokenizers.trainers.WordPieceTrainer(
      vocab_size=vocab_size, special_tokens=first, show_progress=False))
  pieces = _wordpiece(tokenizers.models.WordPiece(
      learner.get_vocab(), unk_token='[UNK]'))
  pieces.add_special_tokens(list(SPECIAL))
  pieces.decoder = tokenizers.decoders.WordPiece()
  pieces.post_processor = tokenizers.processors.BertProcessing(
      *((name, pieces.token_to_id(name)) for name in ('[SEP]', '[CLS]')))
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'tokenizer_config.json').write_text(json.dumps({
      'tokenizer_class': 'PreTrainedTokenizerFast', 'pad_token': '[PAD]',
      'unk_token': '[UNK]', 'cls_token': '[CLS]', 'sep_token': '[SEP]',
      'mask_token': '[MASK]', 'clean_up_tokenization_spaces': False}, indent=2))
  pieces.save(str(folder / 'tokenizer.json'))


def _wordpiece(model) -> tokenizers.Tokenizer:
  """A tokenizer that sees text as BERT's uncased ones do."""
  result = tokenizers.Tokenizer(model)
  result.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
  result.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  return result


def fit(params, shape: encoders.EncoderConfig, source: pathlib.Path,
        folder: pathlib.Path, batch_of: Callable[[int], encoder_pairs.Batch], *,
        rows: int, lengths, temperature: float, steps: int, save_every: int,
        **options):
  """Trains from these parameters, or from the newest checkpoint.

  Args:
    params: to begin with.
    shape: of the encoder.
    source: holds its tokenizer.
    folder: of the checkpoints.
    batch_of: number of an update -> its texts.
    rows: passages of a batch; fewer are filled up.
    lengths: of a query and of a passage, in tokens at most.
    temperature: see `contrastive.info_nce`.
    steps: updates.
    save_every: updates a checkpoint.
    **options: of `optimizer.adamw`.

  Returns:
    Params, and a record of what it took.
  """
  adam = optimizers.adamw(total_steps=steps, **options)
  state = {'params': params, 'opt_state': adam.init(params)}
  record = {'steps': 0, 'tokens': 0, 'cpu_seconds': 0.0, 'losses': [],
            'hits': []}
  found = checkpoint.restore(folder, state)
  if found:
    _, state, record = found
  coders = {kind: embedder.load_tokenizer(source, length)
            for kind, length in lengths.items()}
  update = jax.jit(
      functools.partial(_update, shape=shape, adam=adam,
                        temperature=temperature), donate_argnums=0)
  clock, kept = time.process_time(), []
  with tqdm.tqdm(total=steps, initial=record['steps']) as bar:
    for step in range(record['steps'], steps):
      arrays = _arrays(batch_of(step), coders, rows)
      state, values = update(state, arrays)
      kept.append(values)
      record['tokens'] += int(arrays['query_mask'].sum()
                              + arrays['passage_mask'].sum())
      record['steps'] = step + 1
      if step % 20 == 0:
        bar.set_postfix({k: f'{float(v):.3f}' for k, v in values.items()})
      bar.update()
      if (step + 1) % save_every == 0 or step + 1 == steps:
        for name, ours in (('loss', 'losses'), ('hits', 'hits')):
          record[ours].append(round(float(np.mean(
              [v[name] for v in kept])), 4))
        record['cpu_seconds'] += time.process_time() - clock
        clock, kept = time.process_time(), []
        checkpoint.save(folder, step + 1, state, record)
  return state['params'], record


def _arrays(texts: encoder_pairs.Batch, coders, rows: int) -> dict[str, np.ndarray]:
  """Token ids and masks; missing passages are blank and excluded."""
  blank = rows - len(texts.passages)
  queries = [encoders.QUERY_PREFIX + text for text in texts.queries]
  passages = [encoders.PASSAGE_PREFIX + text for text in texts.passages]
  query_tokens, query_mask = _padded(coders['query'], queries, len(queries))
  passage_tokens, passage_mask = _padded(coders['passage'], passages, rows)
  return {
      'query_tokens': query_tokens, 'query_mask': query_mask,
      'passage_tokens': passage_tokens, 'passage_mask': passage_mask,
      'excluded': np.pad(texts.excluded, [(0, 0), (0, blank)],
                         constant_values=True)}


def _padded(coder: tokenizers.Tokenizer, texts: Sequence[str], rows: int):
  """Token ids and mask [rows, a multiple of _STEP]."""
  coded = [c.ids for c in coder.encode_batch_fast(
      [text.encode(errors='replace').decode() for text in texts])]
  width = -(-max(map(len, coded)) // _STEP) * _STEP
  tokens = np.zeros((rows, width), np.int32)
  mask = np.zeros((rows, width), bool)
  for i, ids in enumerate(coded):
    tokens[i, :len(ids)], mask[i, :len(ids)] = ids, True
  return tokens, mask


def _update(state, arrays, *, shape, adam, temperature: float):
  """One step; the mean of the queries' losses."""
  def loss(params):
    queries, passages = (
        encoders.embed(params, arrays[f'{kind}_tokens'],
                       arrays[f'{kind}_mask'], shape)
        for kind in ('query', 'passage'))
    each, hits = contrastive.info_nce(
        queries, passages, jnp.arange(len(queries)), arrays['excluded'],
        temperature=temperature)
    return jnp.mean(each), jnp.mean(hits)

  (value, hits), grads = jax.value_and_grad(loss, has_aux=True)(
      state['params'])
  updates, opt_state = adam.update(grads, state['opt_state'], state['params'])
  return {'params': optax.apply_updates(state['params'], updates),
          'opt_state': opt_state}, {'loss': value, 'hits': hits}


def _write_card(folder: pathlib.Path, config, params, record) -> None:
  """README.md of the model: data, steps, seed, time, digests."""
  digests = {
      name: _sha256(folder / name)
      for name in ('model.safetensors', 'tokenizer.json', 'config.json')}
  count = sum(x.size for x in jax.tree.leaves(params))
  data = config.data.pairs or (
      'queries about generated worlds, `searchrl/data/encoder_pairs.py`, seed '
      f'{config.data.world_seed}')
  lines = [
      '# A text encoder made by searchrl', '',
      f'A BERT of {count:,} parameters, used as E5 is: `query: ` and',
      '`passage: ` before a text, mean of the hidden states, length 1.', '',
      'Made by `python -m searchrl.main --config=configs/tiny_encoder.py`.', '',
      '| | |', '|---|---|',
      f'| data | {data} |',
      f'| begun from | {config.model.path or "random parameters"} |',
      f'| updates, tokens | {record["steps"]:,}, {record["tokens"]:,} |',
      f'| queries a batch, hard negatives | {config.batch.queries}, '
      f'{config.batch.hard_negatives} |',
      f'| temperature | {config.temperature} |',
      f'| seed | {config.seed} |',
      f'| CPU seconds | {record["cpu_seconds"]:.0f} |',
      f'| last loss (nats), first hits | {record["losses"][-1]:.3f}, '
      f'{record["hits"][-1]:.3f} |',
      f'| jax | {jax.__version__} |',
      *(f'| sha256 of {n} | `{d}` |' for n, d in digests.items()), '']
  (folder / 'README.md').write_text('\n'.join(lines))
