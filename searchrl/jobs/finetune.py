# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of a language model on conversations or questions.

A killed run continues from its newest checkpoint, with the same result.
"""

from collections.abc import Mapping, Sequence
import contextlib
import copy
import functools
import json
import pathlib
from typing import Any

import numpy as np

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import prompts
from searchrl.agent import transcripts
from searchrl.data import conversations
from searchrl.data import question_files
from searchrl.data import questions as questions_lib
from searchrl.data import world_demonstrations
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import memory_plan
from searchrl.experiment import model_defaults
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.models import lora as loras
from searchrl.models import weights
from searchrl.runtime import atomic_files
from searchrl.runtime import dispatch
from searchrl.runtime import host_memory
from searchrl.runtime import mesh as meshes
from searchrl.runtime import metrics
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.runtime import workdir as workdirs
from searchrl.training import learner as learners
from searchrl.training import optimizer as optimizers
from searchrl.training import supervised
from searchrl.training.supervised import Document
from searchrl.texts import Segment

_FREE = ('learner.remat', 'learner.microbatch_rows',  # may follow the memory
         'train.save_every', 'train.progress', 'train.loggers',
         'plan.devices', 'plan.compile')


def run(config, workdir: str | pathlib.Path) -> None:
  """Trains a model on conversations or questions, and writes it to model/.

  Args:
    config: Config of the job; see configs/sft.py.
    workdir: Directory for data/, checkpoints/, metrics.jsonl and model/.

  Raises:
    FileNotFoundError, ValueError: The data, the model or an option cannot be
      used.
    Stopped: A signal stopped the run early.
  """
  folder = pathlib.Path(workdir)
  config_checks.check(config)
  config_checks.check_supervised(config)
  config = copy.deepcopy(config)
  if 'dialogue' in config:  # the dialogue of the demonstrations
    config.dialogue = model_defaults.named_dialogue(config, folder)
  config = memory_plan.chosen(config)
  processes.agree('config', json.loads(config.to_json()))
  with progress.phase('Reading the tokenizer'):
    path, shape, tokenizer = model_folders.parts(
        str(config.model.path or policy.TINY_BASE), config.model.matmul_dtype)
  unset = model_defaults.unset_of_tuning(config, folder, path)
  directory = workdirs.Workdir(folder, config, _FREE)
  directory.check()
  files = data_files(config, folder / 'data', tokenizer)
  transcribed = {name: read(file, f'data.{name}', tokenizer, config.data)
                 for name, file in files.items()}
  model_defaults.follow_in_tuning(unset, config, shape, max(
      (len(x.ids) for rows in transcribed.values() for x in rows), default=0))
  config_checks.check_shape(config, shape)
  train, validation = datasets(config, files, transcribed)
  plan = supervised.batches(
      [len(document.ids) for document in train], seed=config.seed,
      epochs=config.train.epochs, steps=config.train.steps, **config.batch)
  check_updates(config, len(plan))
  policy.say_products(shape)
  policy.check_alike(path)
  with progress.phase(f'Loading the weights of {path}'):
    mesh = meshes.make(**config.mesh)
    config_checks.check_dtype(config, mesh)
    base = weights.load(path, shape, dtype=config.model.dtype,
                        sharding_of=functools.partial(meshes.sharding, mesh))
  attention = build.tested_attention(config, shape, mesh)
  learner = build.supervised_learner(
      config, shape, mesh, build.attend(config, attention, mesh),
      rows=max(map(len, plan)), updates=len(plan))
  state = learner.init(base)
  if not learner.needs_base:
    base = None  # makes room
  host_memory.give_back()  # memory of these params, or of earlier rollouts
  directory.prepare()
  digests = lambda: {
      name: atomic_files.sha256(file) for name, file in files.items()}
  directory.note('data', digests, alike=True)
  if config.model.lora.rank:  # else the checkpoints have all weights
    directory.note(policy.BASE, lambda: policy.base_of(config.model.path))
  with contextlib.closing(metrics.Writer(
      folder, log_to=config.train.loggers,
      config=json.loads(config.to_json()), step_field='sft/step',
      enabled=processes.is_first())) as writer:
    state, record = fit(config, folder, base, tokenizer.pad_id, learner, state,
                        plan, train, validation, writer)
  host_memory.give_back()  # memory of the updates
  with progress.phase('Writing the model'):
    params = dispatch.Ordered(loras.merged)(learner.policy(state, base))
    weights.save(
        folder / 'model', params, shape, tokenizer_from=path,
        eos_id=chat.ends(tokenizer), dtype=config.model.save_dtype)
  processes.on_first('card', lambda: write_card(
      folder / 'model', config, record, len(train)))
  processes.say(f'wrote {folder / "model"}: validation loss '
                f'{_ends(record)}')


def check_updates(config, updates: int) -> None:
  """Raises a ValueError if the optimizer does not suit the update count."""
  warmup, schedule = config.optimizer.warmup_steps, config.optimizer.schedule
  if updates < warmup and schedule != 'constant':
    raise ValueError(
        'optimizer.warmup_steps must be at most the number of updates, '
        f'{updates}, but is {warmup}. Set '
        f'--config.optimizer.warmup_steps={updates // 3}, or give more data, '
        'smaller updates (batch.documents) or more passes (train.epochs).')
  optimizers.for_run(config.optimizer, updates)  # the other rules


def data_files(config, folder: pathlib.Path, tokenizer) -> dict[str, str]:
  """Returns the paths of the data files, as {'train': ..., 'validation': ...}.

  'validation' is missing if config.data names only a training file. If it names
  no training file, both are generated in `folder`.
  """
  if not config.data.train:
    return processes.on_first('demonstrations', lambda: demonstrate(
        config, folder, tokenizer))
  return {name: config.data[name] for name in ('train', 'validation')
          if config.data[name]}


def datasets(config, files: Mapping[str, str],
             transcribed: Mapping[str, Sequence[transcripts.Transcript]]
            ) -> tuple[list[Document], list[Document]]:
  """Returns the documents for training, and those for validation.

  Without a validation file, a random share of the training documents is used.

  Args:
    config: Config of the job.
    files: Paths of the data files, by 'train' and 'validation'.
    transcribed: Encoded conversations of these files.

  Raises:
    ValueError: No conversation of a file fits in a row.
  """
  usable = {name: documents(transcribed[name], file, f'data.{name}',
                            config.learner.pack_length)
            for name, file in files.items()}
  if 'validation' in usable:
    return usable['train'], usable['validation']
  return split(usable['train'], config.data.validation_share, seed=config.seed)


def demonstrate(config, folder: pathlib.Path, tokenizer) -> dict[str, str]:
  """Writes demonstrations about generated worlds, unless they exist.

  Returns:
    The paths of the files, by 'train' and 'validation'.
  """
  options = dict(config.data.demonstrations)
  eos = tokenizer.token(chat.last_id(tokenizer))
  recipe = json.dumps([config.dialogue, eos, options])
  counts = {'train': options.pop('count'),
            'validation': options.pop('validation')}
  files = {name: str(folder / f'{name}.jsonl') for name in counts}
  written = folder / 'recipe.json'
  if written.exists() and written.read_text() == recipe:
    return files
  dialogue = model_folders.load_dialogue(config.dialogue, tokenizer)
  written.unlink(missing_ok=True)
  seed = options.pop('world_seed')
  for name, count in counts.items():
    with progress.phase(f'Writing demonstrations for {name}', total=count,
                        unit='conversation') as reach:
      conversations.write(files[name], progress.counted(
          world_demonstrations.generate(
              count, dialogue, seed=seed, eos=eos, **options), reach))
    seed += count  # so that validation has other worlds
  written.write_text(recipe)  # last, as all files are made again without it
  return files


def read(path: str, field: str, tokenizer, options: Any
        ) -> list[transcripts.Transcript]:
  """Returns the encoded conversations of a file of conversations or questions.

  A question and its first gold answer become a conversation in which the policy
  answers at once, without a search. This is Search-R1's fine-tuning.

  Args:
    path: Path of the file; see `data.conversations` and `data.questions`.
    field: Config field that names the file.
    tokenizer: Tokenizer of the model.
    options: `config.data`. Questions use its `prompts` and `question_mark`.

  Raises:
    FileNotFoundError, ValueError: The file cannot be used.
  """
  file = pathlib.Path(path)
  with progress.phase(f'Reading {path}'):
    if not file.is_file() or not question_files.has_questions(file):
      return [_encode(conversation, tokenizer)
              for conversation in conversations.read(path, field=field)]
    processes.say(
        f'{path} has questions, so the policy learns to answer them at once, '
        'without a search. configs/demonstrations.py makes demonstrations of '
        'searches from questions.')
    dialogue = prompts.framed(
        tokenizer, prompts.SETS[options.prompts]['direct'])
    return [transcripts.of_segments((
        Segment('', False, ids=dialogues.opening(
            dialogue, question.text, tokenizer)),
        Segment(f'<answer> {question.answers[0]} </answer>', True,
                special=False)), tokenizer, ends=True)
            for question in questions_lib.read(
                file, question_mark=options.question_mark)]


def documents(encoded: Sequence[transcripts.Transcript], path: str, field: str,
              length: int) -> list[Document]:
  """Returns the conversations of a file that can be trained on, as documents.

  Conversations that are longer than `length` tokens or have no trained token
  are dropped. A warning gives their number.

  Args:
    encoded: Conversations of the file.
    path: Path of the file, for messages.
    field: Config field that names the file.
    length: Number of tokens in a row.

  Raises:
    ValueError: No conversation can be used.
  """
  trained = [x for x in encoded if any(x.trained[1:])]
  if not trained:
    raise ValueError(
        f'{field} must have a token to train on after the first one of a '
        f'conversation, but {path} has none. Add text before it.')
  usable = [Document(*x) for x in trained if len(x.ids) <= length]
  if not usable:
    raise ValueError(
        f'learner.pack_length must hold a conversation of {field}, but is '
        f'{length}, and the shortest of {path} has '
        f'{min(len(x.ids) for x in trained)} tokens. Raise it.')
  for left_out, why in (
      (len(encoded) - len(trained), 'nothing to train on after their first '
       'token'),
      (len(trained) - len(usable),
       f'more than learner.pack_length={length} tokens')):
    if left_out:
      processes.say(f'Warning: {left_out} of {len(encoded)} conversations of '
                    f'{path} are left out: they have {why}.')
  return usable


def _encode(conversation: conversations.Conversation, tokenizer
           ) -> transcripts.Transcript:
  if conversation.messages:
    return transcripts.of_messages(
        conversation.messages, tokenizer, conversation.place,
        conversation.tools)
  for segment in conversation.segments:
    if max(segment.ids, default=0) >= tokenizer.vocab_size:
      raise ValueError(
          f'ids must be of the tokenizer of model.path, which has '
          f'{tokenizer.vocab_size} of them, but {conversation.place} has '
          f'{max(segment.ids)}. Make the file again with this model.')
  return transcripts.of_segments(
      conversation.segments, tokenizer, conversation.ends)


def split(texts: Sequence[Document], share: float, *, seed: int
         ) -> tuple[list[Document], list[Document]]:
  """Returns documents for training and a random fraction for validation.

  Raises:
    ValueError: One of the two parts would be empty, but `share` is not 0.
  """
  count = round(share * len(texts))
  if share and not 0 < count < len(texts):
    raise ValueError(
        'data.validation_share must leave documents to train on and to '
        f'validate, but is {share} of {len(texts)}. Give more data, another '
        'share, or 0 for no validation.')
  aside = set(np.random.default_rng([seed, 0, 1]).permutation(
      len(texts))[:count].tolist())
  return ([x for i, x in enumerate(texts) if i not in aside],
          [x for i, x in enumerate(texts) if i in aside])


def fit(config, folder: pathlib.Path, base: Any, pad_id: int,
        learner: learners.Learner, state: Any, plan: Sequence[Sequence[int]],
        train: Sequence[Document], validation: Sequence[Document],
        writer: metrics.Writer) -> tuple[Any, dict[str, Any]]:
  """Trains on the batches of a plan.

  It continues from the newest checkpoint if there is one.

  Args:
    config: Config of the job.
    folder: Directory of the run, with the checkpoints.
    base: Parameters of the frozen policy, needed only if adapters are trained.
    pad_id: Token id of the padding.
    learner: Learner that makes the updates.
    state: State of the learner before the first update.
    plan: Indices of the training documents of each update.
    train: Documents for training.
    validation: Documents for validation; empty: there is no validation.
    writer: Writer of the metrics.

  Returns:
    The last state, and a record of the training, such as its losses.
  """
  rows = max(map(len, plan))
  pack = functools.partial(
      supervised.to_batch, rows=rows, length=config.learner.pack_length,
      pad_id=pad_id)

  def batch_of(step):
    chosen = [train[i] for i in plan[step]]
    return pack(chosen), sum(len(document.ids) for document in chosen)

  batches = [pack(validation[i:i + rows])
             for i in range(0, len(validation), rows)]
  return supervised.fit(
      supervised.language_update(learner, base), state, batch_of,
      folder / 'checkpoints',
      steps=len(plan), save_every=config.train.save_every,
      validation=supervised.Validation(
          supervised.language_loss(learner, base, batches),
          config.train.validate_every) if batches else None,
      writer=writer, progress=config.train.progress)


def _ends(record) -> str:
  """Returns a text with the first and the last validation loss."""
  losses = [loss for _, loss in record.get('validation', [])]
  return f'{losses[0]:.3f} -> {losses[-1]:.3f}' if losses else 'not computed'


def write_card(folder: pathlib.Path, config, record, count: int) -> None:
  """Writes the model's README.md."""
  supervised.write_card(folder, [
      '# A language model fine-tuned by searchrl', '',
      'Made by `python -m searchrl.main --config=configs/sft.py`.'], {
          'begun from': config.model.path or 'the tiny base model',
          'data': f'{config.data.train or "demonstrations of generated worlds"}'
                  f', {count:,} documents',
          'adapters': f'LoRA of rank {config.model.lora.rank}, merged'
                      if config.model.lora.rank else 'none',
          'seed': config.seed,
          'validation loss (nats a token)': _ends(record)}, record)
