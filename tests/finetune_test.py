# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""finetune: its loss falls, its model loads, a kill changes no byte of it."""

import json
import pathlib
import signal
import time

from configs import sft
import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors
import transformers

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import prompts
from searchrl.agent import tokenizer as tokenizers
from searchrl.data import conversations
from searchrl.experiment import policy
from searchrl.jobs import finetune
from searchrl.models import weights
from searchrl.runtime import atomic_files
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics
import loopback
import question_files_test

DEVICES = 8
OPTIMIZATION_LEVEL = 1

PATIENCE = 300  # seconds; the machine may do much else
QUIET = ('--config.train.loggers=()', '--config.train.progress=False',
         '--config.mesh.data=1')


def smoke(**changes):
  config = sft.get_config('smoke')
  config.train.update(loggers=(), progress=False)
  config.mesh.update(data=8)
  config.learner.microbatch_rows = 8
  config.update(changes)
  return config


def own(tmp_path, **changes):
  """A config of a few conversations of one's own."""
  file = tmp_path / 'my.jsonl'
  file.write_text('\n'.join(json.dumps({
      'prompt': f'Say {n}: ', 'completion': str(n)}) for n in range(20)))
  config = smoke(**changes)
  config.data.train = str(file)
  return config


def digest(folder):
  return atomic_files.sha256(folder / 'model' / 'model.safetensors')


def losses_of(folder):
  return [line['sft/loss'] for line in metrics.read(folder / metrics.FILE)
          if 'sft/loss' in line]


def start(folder):
  """The smoke run on one device, in a process of its own."""
  return loopback.start(
      1, 'searchrl.main', '--config=configs/sft.py:smoke', *QUIET,
      f'--workdir={folder}', devices=1)


def end(folder):
  with start(folder) as group:
    assert not group.wait(PATIENCE)[0].returncode, group.logs()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sft')
  end(folder)
  return folder


@pytest.mark.slow
def test_the_validation_loss_falls_and_all_is_recorded(whole):
  lines = metrics.read(whole / metrics.FILE)
  validated = {line['sft/step']: line['sft/val_loss'] for line in lines
               if 'sft/val_loss' in line}
  assert list(validated) == [0, 3, 6]
  assert validated[6] < 0.6 * validated[0]
  card = (whole / 'model' / 'README.md').read_text()
  assert digest(whole) in card
  assert '| begun from | the tiny base model |' in card
  assert f'{validated[0]:.3f} -> {validated[6]:.3f}' in card
  assert (whole / 'config.json').exists()


@pytest.mark.slow
def test_transformers_reads_what_is_written(whole):
  model = whole / 'model'
  theirs = transformers.AutoConfig.from_pretrained(model)
  assert theirs.model_type == 'qwen2'
  tokenizer = transformers.AutoTokenizer.from_pretrained(model)
  assert tokenizer('Search').input_ids
  tensors = safetensors.load_file(model / 'model.safetensors')
  assert tensors['model.embed_tokens.weight'].shape == (
      theirs.vocab_size, theirs.hidden_size)
  shape = weights.read_config(str(model))
  ours = weights.load(str(model), shape)
  base = weights.load(str(policy.TINY_BASE), shape)
  gap = np.abs(np.asarray(ours['layers']['q']['kernel'])
               - np.asarray(base['layers']['q']['kernel'])).max()
  assert 0 < gap < 0.05
  torch = pytest.importorskip('torch', reason="pip install -e '.[parity]'")
  loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
  assert torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.slow
def test_on_eight_devices_the_loss_is_that_of_one(whole, tmp_path):
  finetune.run(smoke(), str(tmp_path))
  np.testing.assert_allclose(losses_of(tmp_path), losses_of(whole), rtol=1e-5)


@pytest.mark.slow
def test_adapters_are_trained_and_merged(tmp_path):
  config = smoke()
  config.model.lora.rank = 4
  config.optimizer.learning_rate = 2e-3
  finetune.run(config, str(tmp_path))
  validated = [line['sft/val_loss'] for line in _lines(tmp_path)
               if 'sft/val_loss' in line]
  assert validated[-1] < 0.9 * validated[0]
  model, base = tmp_path / 'model', str(policy.TINY_BASE)
  shape = weights.read_config(base)
  assert weights.read_config(str(model)) == shape
  old, new = (weights.load(str(path), shape) for path in (base, model))
  same = jax.tree.map(lambda a, b: bool((a == b).all()), old, new)
  assert all(jax.tree.leaves(same['embed']))
  assert not same['layers']['q']['kernel']
  assert 'LoRA of rank 4, merged' in (model / 'README.md').read_text()


@pytest.mark.slow
def test_a_run_that_is_killed_ends_in_the_same_bytes(whole, tmp_path):
  with start(tmp_path) as group:
    deadline = time.monotonic() + PATIENCE
    while len(_lines(tmp_path)) < 4:  # after update 3; 2 is saved
      assert time.monotonic() < deadline, group.logs()
      time.sleep(0.02)
    group.popen[0].send_signal(signal.SIGKILL)
    group.popen[0].wait()
  assert not (tmp_path / 'model').exists()
  assert checkpoint.steps(tmp_path / 'checkpoints')
  end(tmp_path)
  assert digest(tmp_path) == digest(whole)
  assert _lines(tmp_path) == _lines(whole)


def _lines(folder):
  file = folder / metrics.FILE
  return metrics.read(file) if file.exists() else []


@pytest.mark.slow
def test_conversations_of_ones_own_are_split_and_may_not_change(
    tmp_path, capsys):
  config = own(tmp_path)
  config.data.validation_share = 0.2
  config.train.update(steps=2)
  finetune.run(config, str(tmp_path / 'run'))
  assert 'wrote' in capsys.readouterr().err
  (tmp_path / 'my.jsonl').write_text('{"prompt": "a", "completion": "b"}\n' * 9)
  with pytest.raises(ValueError, match='whose data was another: train'):
    finetune.run(config, str(tmp_path / 'run'))
  config.seed = 1
  with pytest.raises(ValueError, match='another config: seed: 0 -> 1'):
    finetune.run(config, str(tmp_path / 'run'))


def test_a_split_is_seeded_and_puts_a_share_aside():
  found = list(range(10))
  train, aside = finetune.split(found, 0.3, seed=1)
  assert len(aside) == 3 and sorted(train + aside) == found
  assert (train, aside) == finetune.split(found, 0.3, seed=1)
  assert aside != finetune.split(found, 0.3, seed=2)[1]
  assert finetune.split(found, 0.0, seed=1) == (found, [])
  with pytest.raises(ValueError, match='share must leave .* but is 0.01 of 10'):
    finetune.split(found, 0.01, seed=1)


@pytest.mark.parametrize('templates, mark', [('plain', True), ('laptop', False)])
@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_questions_are_answered_as_the_method_direct_is_judged(
    templates, mark, suffix, tmp_path, capsys):
  tokenizer = tokenizers.load(str(policy.TINY_BASE))
  rows = [{'id': str(n), 'question': f'what is the river of City {n}',
           'golden_answers': [f'River {n}', 'other']} for n in range(2)]
  path = tmp_path / f'nq.{suffix}'
  (question_files_test.write if suffix == 'jsonl' else
   question_files_test.write_parquet)(path, rows)
  config = sft.get_config()
  config.data.update(prompts=templates, question_mark=mark)
  first, second = finetune.read(
      str(path), 'data.train', tokenizer, config.data)
  dialogue = prompts.framed(tokenizer, prompts.SETS[templates]['direct'])
  opening = dialogues.opening(
      dialogue, 'what is the river of City 0' + '?' * mark, tokenizer)
  assert first.ids[:len(opening)] == opening
  assert not any(first.trained[:len(opening)])
  assert all(first.trained[len(opening):])
  written = first.ids[len(opening):]
  assert tokenizer.decode(written[:-1]) == '<answer> River 0 </answer>'
  assert written[-1] in chat.ends(tokenizer)
  assert dialogue.parse(tokenizer.decode(written[:-1])).texts == ('River 0',)
  assert 'River 1' in tokenizer.decode(second.ids)
  assert ('has questions, so the policy learns to answer them at once, without '
          'a search.') in capsys.readouterr().err


def test_too_long_conversations_are_counted_and_all_of_them_refused(
    tmp_path, capsys):
  tokenizer = tokenizers.load(str(policy.TINY_BASE))
  path = tmp_path / 'my.jsonl'
  path.write_text('\n'.join(json.dumps({
      'prompt': 'word ' * n, 'completion': 'x'}) for n in (1, 100, 2)))
  encoded = finetune.read(
      str(path), 'data.train', tokenizer, sft.get_config().data)
  kept = finetune.documents(encoded, str(path), 'data.train', 50)
  assert len(kept) == 2 and max(len(x.ids) for x in kept) <= 50
  assert '1 of 3 conversations of ' in capsys.readouterr().err
  with pytest.raises(ValueError, match=(
      'pack_length must hold a conversation of data.train, but is 2, and the '
      'shortest of .* tokens')):
    finetune.documents(encoded, str(path), 'data.train', 2)


def test_demonstrations_are_seeded_and_of_other_worlds(tmp_path):
  tokenizer = tokenizers.load(str(policy.TINY_BASE))
  config, texts = smoke(), []
  config.dialogue = 'searchrl.agent.dialogue:laptop'
  for name in 'ab':
    files = finetune.demonstrate(config, tmp_path / name, tokenizer)
    texts.append([pathlib.Path(files[x]).read_text()
                  for x in ('train', 'validation')])
  assert texts[0] == texts[1]
  train, validation = (
      conversations.read(files[name]) for name in ('train', 'validation'))
  assert len(train) == 24 and len(validation) == 8
  prompts = [{x.segments[0].text for x in found}
             for found in (train, validation)]
  assert not prompts[0] & prompts[1]
  for conversation in train:
    first, said = conversation.segments[:2]
    assert first.text.startswith('Search, then answer: ') and not first.trained
    assert said.trained and said.text.endswith('</search>')
    assert conversation.segments[-1].text.endswith('</answer>')
    assert not any(piece.trained for piece in conversation.segments
                   if '<information>' in piece.text)


@pytest.mark.parametrize('change, message', [
    (dict(train=dict(epochs=0)), 'train.epochs or train.steps must be above 0'),
    (dict(train=dict(epochs=-1)), r'train.epochs must be at least 0 .*, but is -1'),
    (dict(train=dict(save_every=0)), 'train.save_every must be at least 1'),
    (dict(batch=dict(documents=0)), 'batch.documents or batch.tokens must be'),
    (dict(batch=dict(tokens=-1)), 'batch.tokens must be at least 0'),
    (dict(learner=dict(pack_length=0)), 'learner.pack_length must be more than '
     'learner.max_segments, 16, but is 0'),
    (dict(data=dict(validation='x.jsonl')), 'data.validation needs data.train'),
    (dict(data=dict(validation_share=1.0)),
     r'data.validation_share must be at least 0 and below 1 \(0: no '
     r'validation\), but is 1.0'),
    (dict(data=dict(demonstrations=dict(mix=(0, 0)))), 'shares from 0 on'),
    (dict(data=dict(demonstrations=dict(sloppiness=-0.1))),
     'sloppiness must be at least 0 and at most 2, but is -0.1'),
    (dict(optimizer=dict(warmup_steps=99)),
     'optimizer.warmup_steps must be at most the number of updates, 6, but is '
     '99. Set --config.optimizer.warmup_steps=2, or give more data'),
])
def test_options_are_checked(change, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    finetune.run(smoke(**change), str(tmp_path / 'run'))


def test_missing_files_and_sizes_are_named(tmp_path):
  config = own(tmp_path)
  config.data.validation = str(tmp_path / 'none.jsonl')
  with pytest.raises(FileNotFoundError, match='data.validation must be a js'):
    finetune.run(config, str(tmp_path / 'run'))
  with pytest.raises(ValueError, match=(
      'size=laptop.smoke, model=NAME, but is .huge')):
    sft.get_config('huge')
