# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""serve_search: what is refused at the start, and a server from its config."""

import socket

import faulty
import pytest
import servers
import tiny

from configs import serve_search as serve_search_config
from searchrl.jobs import serve_search
from searchrl.search import corpus as corpora
from searchrl.search.remote import remote
from searchrl.serving import search_server
from searchrl.trajectory import Passage, Query


def config_of(tmp_path, **changes):
  config = serve_search_config.get_config('smoke')
  (tmp_path / 'c.jsonl').write_text('{"id": "a", "contents": "Tarn"}\n')
  config.search.corpus = str(tmp_path / 'c.jsonl')
  config.search.update(changes)
  return config


def test_a_port_in_use_is_named(tmp_path):
  config = config_of(tmp_path)
  with socket.create_server(('127.0.0.1', 0)) as other:
    config.serve.port = other.getsockname()[1]
    with pytest.raises(ValueError, match='must be free, but: Address alr'):
      serve_search.run(config, str(tmp_path))


def test_an_engine_that_does_not_answer_is_not_served(tmp_path):
  config = config_of(tmp_path, engine='remote', options=dict(
      urls=(faulty.unused_url(),), tries=1))
  with pytest.raises(ValueError, match="'remote' failed with unavailable"):
    serve_search.run(config, str(tmp_path))


def test_a_recorded_tape_is_served(tmp_path, monkeypatch):
  tape = tmp_path / 'tape.jsonl'
  tape.write_text('{"query": "river", "top_k": 3, "passages": ['
                  '{"id": "a", "title": "Tarn", "text": "x", "score": 0}]}\n')
  config = config_of(tmp_path, engine='web', options=dict(
      mode='replay', tape=str(tape)))
  config.serve.port, found = 0, []

  def serve(server, *_):
    server.start()
    try:
      found.append(servers.ask(server, '/health', 'GET')[2]['status'])
      search = remote.remote(urls=(f'{server.address}/retrieve',))
      found.extend(search([Query('river', 3, tiny.question())]))
    finally:
      server.stop()

  monkeypatch.setattr(serve_search.asgi, 'serve', serve)
  serve_search.run(config, str(tmp_path))
  assert found == ['ok', (Passage('a', 'Tarn', 'x'),)]


def test_the_token_comes_from_the_environment(monkeypatch):
  serve = serve_search_config.get_config('smoke').serve
  serve.token_env = 'TOKEN_OF_TEST'
  with pytest.raises(ValueError, match='TOKEN_OF_TEST is not set'):
    serve_search.make_options(serve)
  monkeypatch.setenv('TOKEN_OF_TEST', 'abc')
  assert serve_search.make_options(serve).http.token == 'abc'


def test_the_config_has_the_defaults_of_the_options():
  serve = serve_search_config.get_config('smoke').serve
  assert serve_search.make_options(serve) == search_server.Options()


def test_health_shows_digests_and_no_path():
  dense = {'engine': 'dense', 'corpus': 'c', 'passages': 2, 'index': {
      'fingerprint': 'f', 'encoder': {'path': '/secret'}}}
  bm25 = {'engine': 'bm25', 'corpus': 'c', 'passages': 2}
  assert serve_search.shown(bm25) == bm25
  assert serve_search.shown(dense) == dense | {'index': 'f'}
  assert serve_search.shown(
      {'engine': 'fusion', 'corpus': 'c', 'engines': [bm25, dense]}) == {
          'engine': 'fusion', 'corpus': 'c', 'index': ',f'}
  assert serve_search.shown({'engine': 'web'}) == {'engine': 'web'}


@pytest.mark.slow
def test_the_job_serves_a_file_and_ends_in_order(tmp_path):
  (tmp_path / 'c.jsonl').write_text(
      '{"id": "a", "contents": "\\"Tarn\\"\\nA river."}\n'
      '{"id": "b", "contents": "\\"Alps\\"\\nMountains."}\n')
  with servers.served(
      'configs/serve_search.py',
      f'--config.search.corpus={tmp_path / "c.jsonl"}',
      f'--workdir={tmp_path / "run"}') as line:
    assert 'bm25 over 2 passages at http://127.0.0.1:' in line
    url = line.partition(' at ')[2].partition(';')[0]
    search = remote.remote(urls=(url,))
    found, = search([Query('river', 3, tiny.question())])
    assert [p.id for p in found] == ['a']
    server = type('Elsewhere', (), {'address': url.removesuffix('/retrieve')})
    corpus = corpora.read(tmp_path / 'c.jsonl')
    assert servers.ask(server, '/health', 'GET')[2] == {
        'status': 'ok', 'engine': 'bm25', 'passages': 2,
        'corpus': corpus.digest}
