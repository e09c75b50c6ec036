# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""train_encoder: the encoder is trained, resumes exactly, and can be used."""

import hashlib
import json
import os
import shutil

from configs import tiny_encoder
import numpy as np
import pytest

from searchrl.encoders import embedder
from searchrl.jobs import train_encoder
from searchrl.models import encoder
from searchrl.runtime import checkpoint
from searchrl.runtime import processes
from searchrl.search import corpus as corpora
from searchrl.search import engines
from searchrl.trajectory import Query, Question
from searchrl.world import facts
from searchrl.world import text
import tiny_bert

PAIRS = [{'query': f'{word} fruit', 'positive': f'{word}\nIt grows on trees.'}
         for word in ('apple', 'pear', 'plum', 'fig', 'lime', 'kiwi')]


def smoke(**changes):
  config = tiny_encoder.get_config('smoke')
  config.update(changes)
  return config


def own(tmp_path, **changes):
  """A config of a few pairs of one's own, and two updates."""
  file = tmp_path / 'pairs.jsonl'
  file.write_text('\n'.join(map(json.dumps, PAIRS)))
  config = smoke(steps=2, save_every=1, **changes)
  config.data.pairs = str(file)
  return config


def digest(folder):
  return hashlib.sha256(
      (folder / 'model' / 'model.safetensors').read_bytes()).hexdigest()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('encoder')
  train_encoder.run(smoke(), str(folder))
  return folder


def test_several_processes_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(processes, 'count', lambda: 2)
  with pytest.raises(ValueError, match='needs one process, but there are 2'):
    train_encoder.run(smoke(), str(tmp_path))
  assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupted_making_ends_in_the_same_bytes(whole, tmp_path):
  again = tmp_path / 'again'
  shutil.copytree(whole, again)
  newest = checkpoint.steps(again / 'checkpoints')[-1]
  shutil.rmtree(again / 'checkpoints' / str(newest))
  shutil.rmtree(again / 'model')
  train_encoder.run(smoke(), str(again))
  assert digest(again) == digest(whole)


@pytest.mark.slow
def test_what_was_made_is_an_encoder_with_its_card(whole):
  encode = embedder.load(str(whole / 'model'), embedder.Settings())
  rows = encode(['Zinina Rilson birthplace', ''], 'query')
  np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
  card = (whole / 'model' / 'README.md').read_text()
  assert digest(whole) in card and '| updates, tokens | 6, ' in card


@pytest.mark.slow
def test_it_goes_on_from_a_model_with_pairs_of_ones_own(tmp_path):
  start = tiny_bert.make(tmp_path / 'bert')
  config = own(tmp_path, lengths=dict(query=32, passage=48))
  config.model.path = str(start)
  train_encoder.run(config, str(tmp_path / 'run'))
  model = tmp_path / 'run' / 'model'
  shape = encoder.read_config(str(model))
  assert shape == encoder.read_config(str(start))
  old, new = (encoder.load(str(f), shape) for f in (start, model))
  gap = np.abs(np.asarray(old['layers']['q']['kernel'])
               - np.asarray(new['layers']['q']['kernel'])).max()
  assert 0 < gap < .05
  assert (model / 'tokenizer.json').read_bytes() == (
      start / 'tokenizer.json').read_bytes()
  (tmp_path / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, PAIRS[:5])))
  with pytest.raises(ValueError, match='whose data was another: sha256'):
    train_encoder.run(config, str(tmp_path / 'run'))


@pytest.mark.slow
def test_half_a_surrogate_pair_is_read_as_a_question_mark(tmp_path):
  digests = []
  for half in ('\ud800', '?'):
    config = own(tmp_path)
    pairs = [{key: f'{half} {text}' for key, text in pair.items()}
             for pair in PAIRS]
    (tmp_path / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, pairs)))
    folder = tmp_path / f'run {len(digests)}'
    train_encoder.run(config, str(folder))
    digests.append(digest(folder))
  assert digests[0] == digests[1]


@pytest.mark.parametrize('change, message', [
    (dict(steps=0), 'steps must be at least 1, but is 0'),
    (dict(batch=dict(queries=1)), 'batch.queries must be at least 2'),
    (dict(batch=dict(hard_negatives=-1)), 'hard_negatives must be at least 0'),
    (dict(data=dict(fresh=2.0)),
     'data.fresh must be at least 0 and at most 1, but is 2.0'),
    (dict(lengths=dict(passage=999)), r'lengths.passage must lie in \[8, 256'),
    (dict(temperature=0.0), 'temperature must be above 0, but is 0'),
])
def test_options_are_checked(change, message, tmp_path):
  config = own(tmp_path)
  config.update(change)
  with pytest.raises(ValueError, match=message):
    train_encoder.run(config, str(tmp_path / 'run'))


def test_a_missing_model_or_size_is_named(tmp_path):
  config = own(tmp_path)
  config.model.path = str(tmp_path / 'nowhere')
  with pytest.raises(FileNotFoundError, match='must be a folder'):
    train_encoder.run(config, str(tmp_path / 'run'))
  with pytest.raises(ValueError, match='size=laptop.smoke, but is .huge'):
    tiny_encoder.get_config('huge')


def test_the_tokenizer_has_every_ascii_letter_and_sign(tmp_path):
  train_encoder.make_tokenizer(tmp_path / 't', 200, ['Zinina Rilson was born.'])
  found = embedder.load_tokenizer(tmp_path / 't', 256)
  printed = ''.join(map(chr, range(33, 127)))
  for word in (printed, printed[::-1], 'Quxly', 'born'):
    pieces = found.encode(word).tokens
    assert pieces[0] == '[CLS]' and pieces[-1] == '[SEP]'
    assert '[UNK]' not in pieces
    assert ''.join(p.removeprefix('##') for p in pieces[1:-1]) == word.lower()


def test_a_tokenizer_that_could_not_be_written_is_made_again(
    tmp_path, monkeypatch):
  folder, texts = tmp_path / 't', ['Zinina Rilson was born.']

  def full(descriptor):
    raise OSError('No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match='No space left'):
      train_encoder.make_tokenizer(folder, 200, texts)
  assert not (folder / 'tokenizer.json').exists()
  train_encoder.make_tokenizer(folder, 200, texts)
  assert embedder.load_tokenizer(folder, 256).encode('born').tokens


@pytest.mark.slow
@pytest.mark.parametrize('source', ['known', 'unseen'])
def test_the_shipped_encoder_finds_what_agents_ask_for(source):
  """The world is new; training has seen its names, or has not."""
  world = facts.make(77, source=source)
  corpus = corpora.Corpus(tuple(text.passages(world)))
  search = engines.make('dense', corpus, encoder='tiny_e5',
                        load_encoder=embedder.cached_loader())
  rng = np.random.default_rng(0)
  chains = [c for c, _ in zip(facts.chains(world, 1, rng), range(100))]
  for ask in (lambda c: f'{c.start} {c.relations[0]}',
              lambda c: text.ask(c, rng)):
    found = search([Query(ask(c), 2, Question('', '', ())) for c in chains])
    right = [any(p.title == c.start for p in passages)
             for c, passages in zip(chains, found)]
    assert np.mean(right) >= .95


@pytest.mark.slow
@pytest.mark.parametrize('source', ['known', 'unseen'])
def test_the_shipped_encoder_tells_namesakes_and_facts_apart(source):
  """The world is hard: one passage states the fact; BM25 finds .7 of them."""
  world = facts.make(78, source=source, hard=True)
  corpus = corpora.Corpus(tuple(text.passages(world)))
  search = engines.make('dense', corpus, encoder='tiny_e5',
                        load_encoder=embedder.cached_loader())
  stated = text.stated(world)
  rng = np.random.default_rng(0)
  chains = [c for c, _ in zip(facts.chains(world, 1, rng), range(100))]
  for ask in (lambda c: f'{c.start} {c.relations[0]}',
              lambda c: text.ask(c, rng)):
    found = search([Query(ask(c), 2, Question('', '', ())) for c in chains])
    right = [stated[c.facts[0]].id in {p.id for p in passages}
             for c, passages in zip(chains, found)]
    assert np.mean(right) >= .95
