# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""serve_model: what is refused before anything is built, and how it ends."""

import json
import re
import socket

import chats
import pytest
import servers
import tiny

from configs import serve_model as serve_config
from configs import zerosearch as zerosearch_config
from searchrl.jobs import serve_model
from searchrl.models.inference import engine as engines
from searchrl.papers.zerosearch import simulator_prompts
from searchrl.rollouts import generation
from searchrl.serving import model_server
from searchrl.serving import openai_api

DEVICES = 8

MESSAGES = [{'role': 'system', 'content': ''},
            {'role': 'user', 'content': 'Write documents.'}]


def config_of(**fields):
  config = serve_config.get_config()
  config.serve.update(fields)
  return config


def test_the_name_is_that_of_the_folder():
  name = lambda config: serve_model.make_options(
      config.serve, config.ask.run, config.model.path).name
  config = config_of()
  assert name(config) == 'tiny_base'
  config.model.path = '/models/some-7b/'
  assert name(config) == 'some-7b'
  config.ask.run = 'runs/dspo'
  assert name(config) == 'dspo'
  assert name(config_of(name='mine')) == 'mine'


@pytest.mark.parametrize('simulator', serve_config.SIMULATORS)
def test_a_run_finds_the_simulator_that_one_line_serves(simulator):
  config = serve_config.get_config(f'simulator={simulator}')
  served = serve_model.make_options(
      config.serve, config.ask.run, config.model.path)
  run = zerosearch_config.get_config('qwen2.5-3b').search.options
  url, = run.urls
  assert url == f'http://{served.http.host}:{served.http.port}/v1/chat/completions'
  assert run.simulator == 'google_14b'  # the paper's default
  asked = simulator_prompts.of_simulator(simulator, 'served')['model']
  openai_api.read(
      json.dumps({'model': asked, 'messages': MESSAGES}).encode(),
      is_chat=True, name=served.name, tokenizer=chats.qwen(), length=2048,
      limits=openai_api.Limits())
  assert config.rollout.max_length >= run.max_tokens + 512


def test_a_token_comes_from_the_environment_alone(monkeypatch):
  monkeypatch.setenv('ITS_TOKEN', 'secret')
  serve = config_of(token_env='ITS_TOKEN').serve
  options = serve_model.make_options(serve, '', '')
  assert options.http.token == 'secret' and 'secret' not in repr(options)
  with pytest.raises(ValueError, match='serve.token_env must name a variable'):
    serve_model.make_options(config_of(token_env='NOT_SET').serve, '', '')


def test_the_config_has_the_defaults_of_the_options():
  assert serve_model.make_options(
      config_of().serve, '', '') == model_server.Options('tiny_base')


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
  config.rollout.max_num_seqs = 12
  with pytest.raises(ValueError, match='rollout.max_num_seqs must be a multiple of '
                                       'the 8 copies .* but is 12'):
    serve_model.run(config, str(tmp_path))


class Failing:
  """An engine that nobody asks, or that fails when it is asked."""

  slots = 2
  compile = append = release = cut = lambda *_: None

  def decode(self, **_):
    raise ZeroDivisionError


@pytest.fixture
def generator(monkeypatch):
  """Generator that the job gets instead of one whose engine compiles."""
  made = generation.Generator(
      Failing(), token_bytes=tiny.Tokenizer().token_bytes, eos_ids=(),
      waiting=64)
  monkeypatch.setattr(generation, 'build', lambda *_, **__: made)
  return made


def test_a_port_in_use_is_named(generator, tmp_path):
  with socket.create_server(('127.0.0.1', 0)) as other:
    port = other.getsockname()[1]
    with pytest.raises(ValueError, match=f'must be free, but: .* {port}'):
      serve_model.run(config_of(port=port), str(tmp_path))
  assert not generator.is_open


def test_a_failing_engine_ends_the_job_with_its_error(generator, tmp_path):
  generator.submit([generation.Choice((1,), 3, engines.row_ids(0, 'a', 0, 0))],
                   lambda piece: None)
  with pytest.raises(ZeroDivisionError):
    serve_model.run(config_of(port=0), str(tmp_path))


def test_budgets_of_a_search_agent_do_not_limit_the_length_of_a_server(
    generator, tmp_path):
  generator.submit([generation.Choice((1,), 3, engines.row_ids(0, 'a', 0, 0))],
                   lambda piece: None)
  config = config_of(port=0)
  config.rollout.max_length = 512
  config.rollout.budgets.update(max_prompt_tokens=448, max_new_tokens=128)
  with pytest.raises(ZeroDivisionError):  # the engine's, so that it was built
    serve_model.run(config, str(tmp_path))


@pytest.mark.slow
def test_the_job_serves_the_tiny_base_model_and_ends_in_order(tmp_path):
  with servers.served('configs/serve_model.py', f'--workdir={tmp_path}') as line:
    assert 'tiny_base at http://127.0.0.1:' in line
    address = re.search(r'at (\S+)/v1;', line)[1]
    server = type('Remote', (), {'address': address})
    status, _, found = servers.ask(
        server, '/v1/completions', model='tiny_base', temperature=0,
        max_tokens=40, stop=['</search>'],
        prompt=' Search, then answer: What is the river of Zeston?\n')
    assert status == 200 and '<search>' in found['choices'][0]['text']
    assert servers.ask(server, '/v1/chat/completions', model='tiny_base',
                       messages=[])[0] == 400
