# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""serve_model: what is refused before anything is built, and how it ends."""

import os
import signal
import socket
import threading
import types

import chats
import numpy as np
import pytest
import tiny

from configs import serve_model as serve_config
from searchrl.jobs import serve_model
from searchrl.models.inference import engine as engines
from searchrl.models.inference import sampling
from searchrl.rollouts import generation
from searchrl.serving import model_server


def config_of(**fields):
  config = serve_config.get_config()
  config.serve.update(fields)
  return config


def test_the_name_is_that_of_the_folder():
  name = lambda config: serve_model._options(config).name
  config = config_of()
  assert name(config) == 'tiny_base'
  config.model.path = '/models/some-7b/'
  assert name(config) == 'some-7b'
  config.ask.run = 'runs/dspo'
  assert name(config) == 'dspo'
  assert name(config_of(name='mine')) == 'mine'


def test_a_token_comes_from_the_environment_alone(monkeypatch):
  monkeypatch.setenv('ITS_TOKEN', 'secret')
  options = serve_model._options(config_of(token_env='ITS_TOKEN'))
  assert options.token == 'secret' and 'secret' not in repr(options)
  with pytest.raises(ValueError, match='serve.token_env must name a variable'):
    serve_model._options(config_of(token_env='NOT_SET_ANYWHERE'))


@pytest.mark.parametrize('fields, message', [
    (dict(steps=0), 'serve.steps must be at least 1, but is 0'),
    (dict(waiting=3), 'serve.waiting must hold one request'),
    (dict(limits=dict(body_bytes=0)), 'serve.limits.body_bytes must be above'),
])
def test_what_is_refused(fields, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    serve_model.run(config_of(**fields), str(tmp_path))


def test_a_run_that_is_none_and_slots_that_no_devices_share(tmp_path):
  config = config_of()
  config.ask.run = str(tmp_path)
  with pytest.raises(FileNotFoundError, match='ask.run must be the folder'):
    serve_model.run(config, str(tmp_path))
  config = config_of()
  config.rollout.slots = 12
  with pytest.raises(ValueError, match='rollout.slots must be a multiple of the '
                                       '8 copies .* but is 12'):
    serve_model.run(config, str(tmp_path))


def test_what_ends_a_turn_of_the_template_ends_a_choice():
  tokenizer = chats.byte_level(chats.QWEN2, eos='<|endoftext|>')
  assert serve_model.turn_ends(tokenizer) == tokenizer.encode('<|im_end|>')
  assert serve_model.turn_ends(chats.byte_level()) == ()  # no template


class Idle:
  """An engine that nobody asks, or that fails when it is."""

  slots = 2
  append = release = cut = lambda *_: None

  def decode(self):
    raise ZeroDivisionError


def idle_generator():
  return generation.Generator(
      Idle(), token_bytes=(b'',), eos_ids=(), waiting=64), tiny.Tokenizer()


def test_a_port_that_is_taken_is_told(monkeypatch, tmp_path):
  monkeypatch.setattr(serve_model, 'generate', lambda config: idle_generator())
  with socket.create_server(('127.0.0.1', 0)) as other:
    port = other.getsockname()[1]
    with pytest.raises(ValueError, match=f'port {port}, cannot be had'):
      serve_model.run(config_of(port=port), str(tmp_path))


def test_a_signal_ends_it_and_its_neighbours_handlers_come_back(
    monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(serve_model, 'generate', lambda config: idle_generator())
  before = signal.getsignal(signal.SIGTERM)
  timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
  timer.start()
  serve_model.run(config_of(port=0, host='0.0.0.0'), str(tmp_path))
  assert signal.getsignal(signal.SIGTERM) is before
  err = capsys.readouterr().err
  assert 'Serving tiny_base at http://0.0.0.0:' in err
  assert 'Warning: whoever reaches 0.0.0.0 may ask' in err
  assert 'Stopping' in err


def test_a_failing_engine_ends_the_job_with_its_error(monkeypatch, tmp_path):
  generator, tokenizer = idle_generator()
  monkeypatch.setattr(
      serve_model, 'generate', lambda config: (generator, tokenizer))
  timer = threading.Timer(0.3, generator.submit, (
      [generation.Choice((1,), 3, engines.row_ids(0, 'a', 0, 0))],))
  timer.start()
  with pytest.raises(ZeroDivisionError):
    serve_model.run(config_of(port=0), str(tmp_path))


def test_a_request_becomes_choices_each_with_a_name_of_its_own():
  asked = types.SimpleNamespace(
      seed=4, prompts=((1, 2), (3,)), budgets=(5, 6), n=2,
      draw=sampling.Draw(0.5), stops=('é',))
  found = model_server.choices(asked)
  assert [c.prompt for c in found] == [(1, 2), (1, 2), (3,), (3,)]
  assert [c.budget for c in found] == [5, 5, 6, 6]
  assert [c.row_ids for c in found] == [
      engines.row_ids(0, 'seed 4', number, 0) for number in range(4)]
  assert found == model_server.choices(asked)
  assert {c.stops for c in found} == {('é'.encode(),)}
  asked.seed = None
  one, other = (model_server.choices(asked)[0].row_ids for _ in range(2))
  assert one != other


def test_a_table_that_never_stops():
  table = serve_model.never(7)
  assert not np.any(table.hit) and not np.any(table.next_state)
  assert table.hit.shape == table.next_state.shape == (1, 7)
