# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a search engine at /retrieve, until it is stopped."""

from collections.abc import Mapping
import pathlib
from typing import Any

from searchrl.data import datasets
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import search as searches
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.search import mapped_corpus
from searchrl.search.remote import wire
from searchrl.serving import asgi
from searchrl.serving import search_server
from searchrl.trajectory import Query, Question, SearchError, SearchFn


def run(config, workdir: str) -> None:
  """Serves `config.search` at /retrieve until Ctrl-C or SIGTERM.

  If the engine needs a corpus and the config names none, a world is generated
  in `workdir`/data, and its corpus is searched.

  Raises:
    ValueError: The config cannot be served, or the engine does not answer.
  """
  config_checks.check(config)
  config_checks.check_worlds(config)
  options, name = make_options(config.serve), config.search.engine
  corpus: Any = None
  if searches.spec(config.search).needs_corpus:
    with progress.phase('Reading the corpus'):
      file, folder = config.search.corpus, pathlib.Path(workdir) / 'data'
      corpus = mapped_corpus.load(file) if file else datasets.train_set(
          folder, train='', corpus='', world_seed=config.data.world_seed,
          per_hop=config.data.per_hop, common=config.data.common,
          world=build.world(config)).corpus
  engine = searches.engine(config.search, corpus, seed=config.seed)
  _check(engine, name)
  with progress.phase('Computing the digests of corpus and index'):
    about = shown(searches.describe(config.search, corpus))
  server = search_server.Server(
      engine, options, about=about, warn=processes.say)
  over = f' over {len(corpus)} passages' if corpus else ''
  asgi.serve(server, f'{name}{over} at {server.address}/retrieve', options.http)


def make_options(serve: Mapping[str, Any]) -> search_server.Options:
  """Returns the checked options of config.serve."""
  http, rest = asgi.take_options(serve)
  limits = wire.Limits(**rest.pop('limits'))
  return search_server.Options(http, limits=limits, **rest)


def shown(facts: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the public facts about an engine: its name and digests, no paths.

  Args:
    facts: Facts from `experiment.search.describe`.
  """
  public = {name: facts[name] for name in ('engine', 'passages', 'corpus')
            if name in facts}
  index = facts['index']['fingerprint'] if 'index' in facts else ','.join(
      shown(inner).get('index', '') for inner in facts.get('engines', ()))
  return public | ({'index': index} if index.strip(',') else {})


def _check(engine: SearchFn, name: str) -> None:
  """Raises a ValueError unless the engine answers a first query.

  The query also warms up the engine.
  """
  result, = engine([Query('test', 1, Question('', '', ()))])
  if isinstance(result, SearchError) and not search_server.is_answer(result):
    raise ValueError(
        f'search.engine must answer before it is served, but {name!r} failed '
        f'with {result.kind}: {result.detail}.')
