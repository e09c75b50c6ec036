# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config in, a server of its engine out, until it is told to stop."""

import pathlib
import signal
import sys
import threading

from searchrl.data import datasets
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.search import factory
from searchrl.search import mapped_corpus
from searchrl.search import wrapped
from searchrl.search.remote import wire
from searchrl.serving import search_server
from searchrl.trajectory import Query, Question, SearchError, SearchFn


def run(config, workdir: str) -> None:
  """Serves `config.search` at /retrieve; Ctrl-C or SIGTERM ends it in order.

  Raises:
    ValueError: the config cannot be served, or the engine does not answer.
  """
  options = _options(config.serve)
  corpus = _corpus(config, pathlib.Path(workdir))
  engine = wrapped.with_typed_errors(factory.make(
      config.search.engine, corpus, seed=config.seed,
      load_encoder=embedder.load_again, load_judge=reranker.load,
      **config.search.options))
  _check(engine, config.search.engine)
  try:
    server = search_server.Server(engine, options, warn=_say)
  except OSError as error:
    raise ValueError(
        f'serve.host and serve.port must be free, but {options.host}, port '
        f'{options.port}, cannot be had: {error.strerror}. Choose another '
        'port, or end what listens there.') from error
  run_until_told(server, config.search.engine + (
      f' over {len(corpus)} passages' if corpus else ''))


def run_until_told(server: search_server.Server, what: str) -> None:
  """Serves until SIGINT or SIGTERM; answers then what it has begun."""
  told = threading.Event()
  previous = {number: signal.signal(number, lambda *_: told.set())
              for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    server.start()
    _say(f'Serving {what} at {server.address}/retrieve; Ctrl-C ends it.')
    if not server.options.token and not _is_loopback(server.options.host):
      _say(f'Warning: whoever reaches {server.options.host} may ask. Name a '
           'variable in serve.token_env that holds a token.')
    told.wait()
    _say('Stopping; what was asked is answered first.')
    server.stop()
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def _options(serve) -> search_server.Options:
  """config.serve, checked."""
  fields = dict(serve)
  fields['limits'] = wire.Limits(**fields['limits'])
  variable = fields.pop('token_env')
  if variable:
    fields['token'] = wire.secret(variable, 'serve.token_env')
  return search_server.Options(**fields)


def _corpus(config, workdir: pathlib.Path):
  """That of a file, or of the generated training world; None if elsewhere."""
  if not factory.needs_corpus(config.search.engine, config.search.options):
    return None
  if config.search.corpus:
    return mapped_corpus.load(config.search.corpus)
  return datasets.train_set(
      workdir / 'data', train='', corpus='',
      world_seed=config.data.world_seed, per_hop=config.data.per_hop).corpus


def _check(engine: SearchFn, name: str) -> None:
  """Raises a ValueError unless the engine answers; also warms it up."""
  found, = engine([Query('test', 1, Question('', '', ()))])
  if isinstance(found, SearchError):
    raise ValueError(
        f'search.engine must answer before it is served, but {name!r} failed '
        f'with {found.kind}: {found.detail}.')


def _is_loopback(host: str) -> bool:
  return host in ('localhost', '::1') or host.startswith('127.')


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
