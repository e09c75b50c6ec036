# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny base model, from random parameters or from another model.

A Qwen2 language model is trained on lessons about generated worlds. If it does
not start from another model, a tokenizer is made first. A killed run resumes
from its newest checkpoint.
"""

import itertools
import json
import pathlib
import textwrap
import time
from typing import Any

import jax
import numpy as np
import tokenizers

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizer_lib
from searchrl.experiment import config_checks
from searchrl.experiment import model_folders
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.runtime import mesh as meshes
from searchrl.runtime import workdir as workdirs
from searchrl.training import optimizer as optimizers
from searchrl.training import supervised
from searchrl.training.supervised import Document
from searchrl.world import facts
from searchrl.world import names
from searchrl.world import text as world_text
from tools import card
from tools import induction
from tools import lesson_tokens

EOS = '<|endoftext|>'
TAGS = tuple(f'<{slash}{name}>'
             for name in ('think', 'search', 'information', 'answer')
             for slash in ('', '/'))


def run(config, workdir: str) -> None:
  """Makes a tiny model.

  Args:
    config: Config of the job; see tools/tiny_base.py.
    workdir: Directory for tokenizer/, lessons.npz, checkpoints/ and model/.

  Raises:
    ValueError, FileNotFoundError: The lessons or the model cannot be used.
  """
  config_checks.check(config)
  folder = pathlib.Path(workdir)
  source = folder / 'tokenizer'
  if config.model.path:
    source = pathlib.Path(model_folders.parts(config.model.path)[0])
  workdirs.Workdir(folder, config).prepare()
  if not config.model.path:
    make_tokenizer(source, **config.tokenizer)
  tokenizer = tokenizer_lib.load(str(source))
  if not (folder / 'lessons.npz').exists():
    arrays: dict[str, Any] = lesson_tokens.make(
        tokenizer, eos=EOS, **config.lessons.to_dict())
    np.savez(folder / 'unfinished.npz', **arrays)
    (folder / 'unfinished.npz').rename(folder / 'lessons.npz')
  taught = dict(np.load(folder / 'lessons.npz'))
  prepared = time.process_time()
  shape, params = start(config, tokenizer, source)
  params, record = fit(
      taught, shape, params, folder / 'checkpoints', pad_id=tokenizer.pad_id,
      pack_length=config.lessons.pack_length, learner=config.learner,
      **config.optimizer)
  record['cpu_seconds'] += prepared  # until the lessons are made
  weights.save(folder / 'model', params, shape, tokenizer_from=source,
               eos_id=chat.ends(tokenizer))
  scores = card.scores(
      str(folder / 'model'), **config.card.scores.to_dict())
  write_card(folder / 'model', config, params, record, scores)
  print(f'wrote {folder / "model"}: {record["steps"]} updates, '
        f'{record["cpu_seconds"]:.0f} CPU seconds\n{card.table(scores)}')


def start(config, tokenizer, source: pathlib.Path
         ) -> tuple[transformer.TransformerConfig, transformer.Params]:
  """Returns the shape and the first parameters of the model.

  They are another model's, or random with a planted copying circuit.
  """
  if config.model.path:
    shape = weights.read_config(str(source))
    return shape, weights.load(str(source), shape)
  shape = transformer.TransformerConfig(
      vocab_size=tokenizer.vocab_size, **config.model.shape)
  return shape, induction.plant(
      transformer.init(shape, jax.random.key(config.seed)), shape,
      seed=config.seed)


def make_tokenizer(folder: pathlib.Path, *, vocab_size: int, worlds: int,
                   fresh_worlds: int, hard_worlds: int) -> None:
  """Trains a byte-level BPE, in the format of Qwen2's, on generated text.

  The dialogue's tags are ordinary added tokens with one id each. Every other
  byte sequence has ids, too. A directory that holds a tokenizer is not changed.
  """
  if (folder / 'tokenizer.json').exists():
    return
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
  bpe.normalizer = tokenizers.normalizers.NFC()
  bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  bpe.decoder = tokenizers.decoders.ByteLevel()
  added = [EOS, *TAGS]
  texts = _tokenizer_texts(worlds, fresh_worlds, hard_worlds)
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


def _tokenizer_texts(worlds: int, fresh_worlds: int, hard_worlds: int
                    ) -> list[str]:
  """Returns passages and questions of worlds, and words that lessons repeat.

  Known words become one token each. The stems and endings of all other words
  are so frequent here that a new word becomes two tokens, a stem and an ending.
  To copy the word, a model looks up the stem, which occurs nowhere else. With
  the merges of a few worlds only, words would be cut anywhere. Many names would
  share the pieces, and the model would copy them wrongly.
  """
  texts = []
  groups: tuple[tuple[names.NameSource, bool, int], ...] = (
      ('known', False, worlds), ('fresh', False, fresh_worlds),
      ('known', True, hard_worlds))
  kinds = [group[:2] for group in groups for _ in range(group[2])]
  for seed, (source, is_hard) in enumerate(kinds):
    world = facts.make(10_000 + seed, source=source, common=True, hard=is_hard)
    texts += [f'{p.title} {p.text}' for p in world_text.passages(world)]
    texts += [q.text for q in world_text.questions(world, (60, 40, 20))]
  dialogue = dialogues.tags()
  texts += [dialogue.prompt(''), dialogue.invalid, 'Doc 1(Title: "', 'nothing',
            dialogues.ANSWER_TEMPLATE, dialogues.READ_TEMPLATE,
            *facts.RELATIONS] * 50
  for inventory, times in ((names.INVENTORY, 40), (names.COMMON, 200)):
    texts += [f' {word}' for words in inventory.values()
              for word in words] * times
  stems = itertools.product(names.ONSETS, names.VOWELS, names.CODAS)
  texts += [f' {"".join(stem).capitalize()}' for stem in stems] * 300
  texts += sorted({*itertools.chain(*names.ENDINGS.values())}) * 4000
  return texts


def fit(taught: dict[str, np.ndarray], shape: transformer.TransformerConfig,
        params: transformer.Params, folder: pathlib.Path, *, pad_id: int,
        pack_length: int, save_every: int, learner: Any, **options):
  """Trains on lessons.

  Args:
    taught: Lessons from `lesson_tokens.make`.
    shape: Shape of the model.
    params: Initial parameters.
    folder: Directory of the checkpoints.
    pad_id: Token id of the padding.
    pack_length: Number of tokens in a packed row.
    save_every: Number of updates between checkpoints.
    learner: Options of `supervised.language_learner`.
    **options: Options of `optimizer.adamw`.

  Returns:
    The parameters, and the record of `supervised.fit`.
  """
  ends = np.cumsum(taught['lengths'])[:-1]
  documents = [Document(ids.tolist(), weights.tolist()) for ids, weights in zip(
      np.split(taught['ids'], ends), np.split(taught['weights'], ends))]
  counts = taught['documents']
  firsts = np.cumsum(counts) - counts

  def batch_of(step):
    chosen = documents[firsts[step]:firsts[step] + counts[step]]
    batch = supervised.to_batch(chosen, rows=int(counts.max()),
                                length=pack_length, pad_id=pad_id)
    return batch, sum(len(document.ids) for document in chosen)

  trained = supervised.language_learner(
      shape, optimizers.for_run(options, len(counts)),
      meshes.make(devices=jax.devices()[:1]), pack_length=pack_length,
      rows=int(counts.max()), **learner)
  state, record = supervised.fit(
      supervised.language_update(trained), trained.init(params), batch_of,
      folder, steps=len(counts), save_every=save_every)
  return trained.policy(state, None), record


def write_card(folder: pathlib.Path, config, params, record, scores) -> None:
  """Writes the model's README.md."""
  count = sum(x.size for x in jax.tree.leaves(params))
  begun = (f'Its training began with {config.model.path}.'
           if config.model.path else
           'Its training began with a planted copying circuit.')
  about = (f'A Qwen2-architecture language model of {count:,} parameters, '
           f'trained on lessons about generated worlds. {config.card.about} It '
           'knows most of the 200 facts of common knowledge, and no others. '
           f'Licence: Apache-2.0.\n\nMade by `python -m searchrl.main --config='
           f'{config.card.command}`. {begun}')
  supervised.write_card(folder, [
      f'# {config.card.title}', '',
      *(textwrap.fill(part, 79, break_long_words=False, break_on_hyphens=False)
        for part in about.splitlines()),
      '', card.table(scores)], {
          'data': 'generated lessons, `tools/lessons.py` and `proposer.py`, '
                  f'seed {config.lessons.seed}',
          'seed of the parameters': config.seed}, record)
