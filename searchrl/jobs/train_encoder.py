# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a text encoder for search, contrastively, on queries and passages.

A killed run continues from its newest checkpoint, with the same result.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import json
import pathlib
import string
import time

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from searchrl.data import encoder_pairs
from searchrl.encoders import embedder
from searchrl.experiment import config_checks
from searchrl.models import contrastive
from searchrl.models import encoder as encoders
from searchrl.models import weights
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.training import optimizer as optimizers
from searchrl.training import supervised
from searchrl.training.train_state import TrainState

SPECIAL = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
_STEP = 32  # tokens; rows have a multiple of this, so that few shapes compile
SourceOf = Callable[[int], encoder_pairs.PairSource]


def run(config, workdir: str) -> None:
  """Trains an encoder and writes it to model/.

  Args:
    config: Config of the job; see configs/tiny_encoder.py.
    workdir: Directory for tokenizer/, checkpoints/ and model/.

  Raises:
    FileNotFoundError, ValueError: The data, the model or an option cannot be
      used, or there are several processes.
  """
  folder, data = pathlib.Path(workdir), config.data
  config_checks.check(config)
  if processes.count() > 1:
    raise ValueError('the training of an encoder needs one process, but '
                     f'there are {processes.count()}. Start it alone.')
  directory = workdirs.Workdir(folder, config, ('save_every',))
  directory.prepare()
  if data.pairs:
    source_of = encoder_pairs.file_pairs(data.pairs)
    directory.note('data', lambda: {'sha256': atomic_files.sha256(data.pairs)})
  else:
    # The cache holds source 0 and the present one.
    source_of = functools.lru_cache(maxsize=2)(functools.partial(
        encoder_pairs.world_pairs, seed=data.world_seed, fresh=data.fresh,
        hard=data.hard, count=config.batch.queries * data.batches_a_world))
  if config.model.path:
    tokenizer = pathlib.Path(weights.locate(config.model.path))
    shape = encoders.read_config(str(tokenizer))
    params = encoders.load(str(tokenizer), shape)
  else:
    tokenizer = folder / 'tokenizer'
    make_tokenizer(tokenizer, config.tokenizer.vocab_size, _tokenizer_texts(
        source_of, 1 if data.pairs else config.tokenizer.worlds))
    coder = embedder.load_tokenizer(tokenizer, config.lengths.passage)
    shape = encoders.EncoderConfig(
        vocab_size=coder.get_vocab_size(), **config.model.shape)
    params = encoders.init(shape, jax.random.key(config.seed))
  _check_lengths(config.lengths, shape)
  prepared = time.process_time()
  params, record = fit(
      config, params, shape, tokenizer, folder / 'checkpoints', source_of)
  record['cpu_seconds'] += prepared  # this process's, until the first update
  encoders.save(folder / 'model', params, shape, tokenizer_from=tokenizer)
  write_card(folder / 'model', config, params, record)
  print(f'wrote {folder / "model"}: {json.dumps(record)}')


def _check_lengths(lengths: Mapping[str, int], shape: encoders.EncoderConfig
                  ) -> None:
  for kind, length in lengths.items():
    if not 8 <= length <= shape.max_position_embeddings:
      raise ValueError(
          f'lengths.{kind} must lie in [8, {shape.max_position_embeddings}], '
          f'the positions of the encoder, but is {length}.')


def _tokenizer_texts(source_of: SourceOf, count: int) -> Iterable[str]:
  """Returns the texts of some sources with the encoder's prefixes.

  The tokenizer is trained on them, so that the prefixes become words.
  """
  return (encoders.QUERY_PREFIX + encoders.PASSAGE_PREFIX + _cleaned(text)
          for i in range(count) for text in source_of(i).texts)


def _cleaned(text: str) -> str:
  """Replaces halves of surrogate pairs, which the tokenizer rejects, by ?."""
  return text.encode(errors='replace').decode()


def make_tokenizer(folder: pathlib.Path, vocab_size: int,
                   texts: Iterable[str]) -> None:
  """Makes a lower-casing WordPiece tokenizer in BERT's format if none exists.

  All ASCII letters and digits are pieces, at the start of a word and inside it,
  so that any name can be encoded. The pieces inside words are added before the
  training. This fixes their ids, by which the trainer breaks ties, so that
  equal texts make equal files.
  """
  if (folder / 'tokenizer.json').exists():
    return
  first = [*SPECIAL, *map(chr, range(33, 127)),
           *(f'##{x}' for x in string.ascii_lowercase + string.digits)]
  trained = _wordpiece(tokenizers.models.WordPiece(unk_token='[UNK]'))
  trained.train_from_iterator(texts, tokenizers.trainers.WordPieceTrainer(
      vocab_size=vocab_size, special_tokens=first, show_progress=False))
  pieces = _wordpiece(tokenizers.models.WordPiece(
      trained.get_vocab(), unk_token='[UNK]'))
  pieces.add_special_tokens(list(SPECIAL))
  pieces.decoder = tokenizers.decoders.WordPiece()
  pieces.post_processor = tokenizers.processors.BertProcessing(
      *((name, SPECIAL.index(name)) for name in ('[SEP]', '[CLS]')))
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'tokenizer_config.json').write_text(json.dumps({
      'tokenizer_class': 'PreTrainedTokenizerFast', 'pad_token': '[PAD]',
      'unk_token': '[UNK]', 'cls_token': '[CLS]', 'sep_token': '[SEP]',
      'mask_token': '[MASK]', 'clean_up_tokenization_spaces': False}, indent=2))
  atomic_files.write(folder / 'tokenizer.json', pieces.to_str(pretty=True))


def _wordpiece(model) -> tokenizers.Tokenizer:
  """Returns a tokenizer that normalises text like BERT's uncased ones."""
  result = tokenizers.Tokenizer(model)
  result.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
  result.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  return result


def fit(config, params, shape: encoders.EncoderConfig, tokenizer: pathlib.Path,
        folder: pathlib.Path, source_of: SourceOf):
  """Trains a text encoder with a contrastive loss on queries and passages.

  It starts from the newest checkpoint in `folder`, or else from `params`.

  Args:
    config: Config of the job.
    params: Parameters before the first update.
    shape: Shape of the encoder.
    tokenizer: Directory of the tokenizer.
    folder: Directory of the checkpoints.
    source_of: Function from a source's number to its queries and passages.

  Returns:
    The parameters, and the record of `supervised.fit`.
  """
  coders = {kind: embedder.load_tokenizer(tokenizer, length)
            for kind, length in config.lengths.items()}
  rows = min(config.batch.queries, len(source_of(0).queries)) * (
      1 + config.batch.hard_negatives)

  def batch_of(step):
    texts = encoder_pairs.batch(
        source_of, step, seed=config.seed, **config.batch)
    arrays = _arrays(texts, coders, rows)
    tokens = arrays['query_mask'].sum() + arrays['passage_mask'].sum()
    return arrays, int(tokens)

  adam = optimizers.for_run(config.optimizer, config.steps)
  loss = _contrastive_loss(shape, config.temperature)
  state, record = supervised.fit(
      supervised.make_update(loss, adam),
      TrainState(params, adam.init(params)), batch_of, folder,
      steps=config.steps, save_every=config.save_every)
  return state.params, record


def _contrastive_loss(shape: encoders.EncoderConfig, temperature: float
                     ) -> supervised.Loss:
  """Returns a function that computes the contrastive loss of a batch (InfoNCE).

  It takes parameters and the arrays of a batch. It returns the mean loss over
  the queries, and a dict with the share of queries whose own passage is ranked
  first ('hits').
  """
  def loss(params, arrays):
    queries, passages = (
        encoders.embed(params, arrays[f'{kind}_tokens'],
                       arrays[f'{kind}_mask'], shape)
        for kind in ('query', 'passage'))
    losses, hits = contrastive.info_nce(
        queries, passages, jnp.arange(len(queries)), arrays['excluded'],
        temperature=temperature)
    return jnp.mean(losses), {'hits': jnp.mean(hits)}

  return loss


def _arrays(texts: encoder_pairs.Batch, coders, rows: int
           ) -> dict[str, np.ndarray]:
  """Returns the arrays of a batch by name: token ids, masks and exclusions.

  Ids and masks are [queries or passages, tokens]. 'excluded' is [queries,
  passages]: True for a passage that is not a negative of the query. Blank
  passages fill the batch, and are excluded.

  Args:
    texts: Texts of one update.
    coders: Tokenizers of a 'query' and of a 'passage'.
    rows: Number of passages in a batch, with the blank ones.
  """
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
  """Returns the token ids of texts and a mask of these tokens.

  Both are [rows, width]. The width is the largest number of tokens of a text,
  rounded up to a multiple of 32. Rows without a text are empty.
  """
  coded = [c.ids for c in coder.encode_batch_fast([*map(_cleaned, texts)])]
  width = -(-max(map(len, coded)) // _STEP) * _STEP
  tokens = np.zeros((rows, width), np.int32)
  mask = np.zeros((rows, width), bool)
  for i, ids in enumerate(coded):
    tokens[i, :len(ids)], mask[i, :len(ids)] = ids, True
  return tokens, mask


def write_card(folder: pathlib.Path, config, params, record) -> None:
  """Writes the README.md of the model, from its params and training record."""
  data, batch = config.data, config.batch
  count = sum(x.size for x in jax.tree.leaves(params))
  supervised.write_card(folder, [
      '# A text encoder made by searchrl', '',
      f'A BERT of {count:,} parameters, used like E5: put `query: ` or',
      '`passage: ` before a text, average the hidden states, and scale the',
      'result to length 1.', '',
      'Made by `python -m searchrl.main --config=configs/tiny_encoder.py`.'], {
          'data': data.pairs or (
              'queries about generated worlds, `searchrl/data/encoder_pairs.py`'
              f', seed {data.world_seed}, {data.hard:.0%} of them hard'),
          'begun from': config.model.path or 'random parameters',
          'queries per batch, hard negatives':
              f'{batch.queries}, {batch.hard_negatives}',
          'temperature': config.temperature,
          'seed': config.seed,
          'last hits at 1': f'{record["hits"][-1]:.3f}'}, record)
