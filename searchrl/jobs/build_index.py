# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A corpus and an encoder in, an index folder out: vectors, and their searchers.

Each process encodes shards of its own on its own devices; a shard is finished
or not there, so that a killed job goes on where it was. Approximate indexes are
built of the vectors by the first process. See configs/build_index.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import json
import pathlib
import shutil
import sys
from typing import Any

import numpy as np
import tqdm

from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.encoders import embedder as embedders
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.search import corpus as corpora
from searchrl.search.index import approximate
from searchrl.search.index import bm25_files
from searchrl.search.index import dense
from searchrl.search.index import faiss_import
from searchrl.search.index import vector_store
from searchrl.search import mapped_corpus

_A_CALL = 2048  # passages that are sorted and encoded at a time
_SAMPLE = 32  # passages that imported vectors are compared at
_ALIKE = 0.05  # distance of an imported vector from ours; float16 makes 0.01
_PATIENCE_SECS = 7 * 24 * 3600  # the first process waits for the others' shards
_FREE = ('build', 'scann.leaves', 'scann.part_rows', 'scann.soar', 'hnsw.links',
         'hnsw.construction', 'bm25.k1', 'bm25.b', 'recall.target',
         'recall.queries', 'recall.count', 'encoder.batch_tokens', 'progress')


def run(config, workdir: str) -> None:
  """Builds what is missing of an index in `workdir`.

  Raises:
    FileNotFoundError, ValueError: something cannot be built as asked.
  """
  folder = pathlib.Path(workdir)
  _check(config)
  processes.agree('config', config.to_json())
  processes.on_first('workdir', lambda: workdirs.prepare(
      folder, config.to_dict(), free=_FREE, allow_changes=config.allow_changes))
  corpus = datasets.shared(lambda: mapped_corpus.load(config.corpus))
  encode, about, dim = _encoder(config, corpus)
  rows_of = _rows_of(config, corpus, encode, about, dim)
  recipe = vector_store.Recipe(
      corpus.digest, about, len(corpus), dim, **config.store)
  _say(estimate(recipe, config.build, config.scann.part_rows,
                config.hnsw.links))
  processes.on_first('room', lambda: _check_room(recipe, config.build, folder))
  store = fill(folder / 'vectors', recipe, rows_of, progress=config.progress)
  if processes.is_first():
    kinds = [kind for kind in config.build if kind in approximate.KINDS]
    queries = _queries(config.recall, corpus, encode) if kinds else None
    for kind in kinds:
      _build(kind, store, folder / kind, queries, config)
    if 'bm25' in config.build:
      _build_bm25(corpus, folder / 'bm25', config.bm25)
  processes.barrier('built', _PATIENCE_SECS)
  _say(f'{folder}: {store.count} vectors of {store.dim}, fingerprint '
       f'{store.fingerprint}')


def fill(
    folder: pathlib.Path,
    recipe: vector_store.Recipe,
    rows_of: Callable[[int, int], Iterator[np.ndarray]],
    *,
    progress: bool = True,
) -> vector_store.Store:
  """Writes the shards that are missing; each process its own.

  Args:
    folder: of the vectors.
    recipe: what they are made of.
    rows_of: [start, stop) to the rows of these passages, in pieces.
    progress: show a bar with the time that is left.
  """
  processes.on_first(
      'recipe', lambda: vector_store.Writer(folder, recipe) and None)
  writer = vector_store.Writer(folder, recipe)
  missing = set(writer.missing())
  mine = range(processes.index(), recipe.shards, processes.count())
  size = lambda shards: sum(b - a for a, b in map(recipe.span, shards))
  with tqdm.tqdm(
      total=size(mine), initial=size(s for s in mine if s not in missing),
      unit=' passages', disable=not (progress and processes.is_first())) as bar:
    for shard in mine:
      if shard in missing:
        pieces = []
        for piece in rows_of(*recipe.span(shard)):
          pieces.append(piece)
          bar.update(len(piece))
        writer.write(shard, np.concatenate(pieces))
  processes.barrier('shards', _PATIENCE_SECS)
  processes.on_first('manifest', lambda: writer.finish() and None)
  return vector_store.open_(folder)


def estimate(recipe: vector_store.Recipe, kinds, part_rows: int, links: int
            ) -> str:
  """What an index will take on disk and in memory, in words."""
  lines = [f'{recipe.count} passages x {recipe.dim}, {recipe.dtype}: '
           f'{_gib(recipe.disk_bytes)} on disk in {recipe.shards} shards']
  for kind in kinds:
    if kind == 'bm25':
      size = _gib(_bytes_of(kind, recipe, links))
      lines.append(f'bm25: about {size} on disk while it is built')
      continue
    part = min(part_rows, recipe.count)
    built = 3 * 4 * part * recipe.dim if kind == 'scann' else (
        _bytes_of(kind, recipe, links))
    lines.append(
        f'{kind}: {_gib(_bytes_of(kind, recipe, links))} on disk, about '
        f'{_gib(built)} of memory while it is built')
  return '\n'.join(lines)


def _bytes_of(kind: str, recipe: vector_store.Recipe, links: int) -> int:
  """Of an index: codes twice (SOAR), int8 and exact rows; a graph; postings."""
  exact = np.dtype(recipe.exact_dtype).itemsize
  a_row = {'scann': recipe.dim * (2 * .25 + 1 + exact) + 8,
           'hnsw': recipe.dim * 4 + 8 * links + 16,
           'bm25': 60 * 20}[kind]  # 60 postings, spilt and put together
  return int(a_row * recipe.count)


def _gib(size: float) -> str:
  return f'{size / 2**30:.2f} GiB'


def _say(text: str) -> None:
  processes.say(text, sys.stdout)


def _check(config) -> None:
  """Raises a ValueError for what no corpus could make right."""
  if not config.corpus:
    raise ValueError('corpus must be a jsonl file of passages, but is empty. '
                     'Add --config.corpus=my_corpus.jsonl.')
  for kind in config.build:
    if kind not in (*approximate.KINDS, 'bm25'):
      raise ValueError(
          f'build must name some of {", ".join(approximate.KINDS)}, bm25, but has '
          f'{kind!r}. Exact search needs nothing besides the vectors.')
  if config.imports and not config.encoder.path:
    raise ValueError('imported vectors need encoder.path, the encoder that made '
                     'them, for the queries. Add --config.encoder.path=...')


def _check_room(recipe: vector_store.Recipe, kinds, folder: pathlib.Path) -> None:
  needed = sum(_bytes_of(kind, recipe, 32) for kind in kinds
               if not (folder / kind / 'manifest.json').exists())
  if not (folder / 'vectors' / 'manifest.json').exists():
    written = sum(file.stat().st_size for file in (
        folder / 'vectors').rglob('*') if file.is_file())
    needed += max(recipe.disk_bytes - written, 0)
  free = shutil.disk_usage(folder).free
  if needed > free:
    raise ValueError(f'{folder} must have room for {_gib(needed)}, but its disk '
                     f'has {_gib(free)}. Free some, or take another --workdir.')


def _encoder(config, corpus) -> tuple[dense.EncodeFn, dict[str, Any], int]:
  """The encoder, what to note of it, and the width of its vectors."""
  options = config.encoder.to_dict()
  path = options.pop('path')
  if path:
    found = embedders.load(path, embedders.Settings(**options))
    return found, found.about, found.dim
  ngrams = dict(config.ngrams)
  return (dense.ngram_encoder(corpus, **ngrams),
          dense.ngram_recipe(corpus, **ngrams), ngrams['dim'])


def _rows_of(config, corpus, encode, about, dim):
  """What gives the rows of passages: the encoder, or a file of others'."""
  def encoded(start, stop):
    for first in range(start, stop, _A_CALL):
      texts = [corpora.text_of(corpus[i])
               for i in range(first, min(first + _A_CALL, stop))]
      yield dense.encoded(encode, texts, 'passage')

  if not config.imports:
    return encoded
  if not corpus.ids_are_positions:
    raise ValueError(
        'a corpus whose vectors are imported must have the ids 0, 1, 2, ... line '
        f'by line, for row i is passage i, but {config.corpus} has not. Give the '
        'corpus that the vectors were made of.')
  found = faiss_import.open_(config.imports, count=len(corpus), dim=dim)
  _check_alike(found, corpus, encode)
  about['imported'] = pathlib.Path(config.imports).name
  return lambda start, stop: (
      found.read(first, min(first + _A_CALL, stop))
      for first in range(start, stop, _A_CALL))


def _check_alike(found: faiss_import.Foreign, corpus, encode) -> None:
  """Raises a ValueError unless a sample of rows is what our encoder makes."""
  places = np.unique(np.linspace(0, found.count - 1, _SAMPLE).astype(int))
  ours = dense.encoded(
      encode, [corpora.text_of(corpus[int(i)]) for i in places], 'passage')
  theirs = np.concatenate([found.read(i, i + 1) for i in places])
  gaps = np.nan_to_num(np.linalg.norm(ours - theirs, axis=1), nan=np.inf)
  apart = np.median(np.linalg.norm(ours - np.roll(ours, 1, 0), axis=1))
  limit = min(_ALIKE, max(apart / 5, 1e-3))  # some encoders crowd all texts
  worst = int(np.argmax(gaps))
  if gaps[worst] > limit:
    raise ValueError(
        'imported vectors must be those of this corpus and encoder, but row '
        f'{places[worst]} of {found.path} lies {gaps[worst]:.3f} from our own '
        f'vector of that passage, above {limit:.3f}. Give the corpus and the '
        'encoder that they were made of, with its prefixes, pooling and '
        'max_length.')


def _queries(options, corpus, encode) -> np.ndarray:
  """Vectors to measure recall by: of questions, or of passages' first words."""
  if options.queries:
    texts = [q.text for q in questions_lib.read(options.queries)]
    texts = texts[:options.count]
  else:
    places = np.unique(np.linspace(
        0, len(corpus) - 1, min(options.count, len(corpus))).astype(int))
    drawn = [corpus[int(i)] for i in places]
    texts = [' '.join((p.text or p.title).split()[:10]) for p in drawn]
  vectors = dense.encoded(encode, texts, 'query')
  return vectors[vectors.any(1)]


def _build_bm25(corpus, folder: pathlib.Path, options) -> None:
  """Builds a BM25 index, unless just this one is there."""
  options = dict(options)
  if (folder / 'manifest.json').exists():
    try:
      bm25_files.load(folder, corpus)
      told = json.loads((folder / 'manifest.json').read_text())
      if all(told[name] == value for name, value in options.items()):
        _say('bm25: as it is there')
        return
    except ValueError as error:
      _say(f'bm25 is built again: {error}')
  told = bm25_files.build(corpus.texts, folder, corpus=corpus.digest, **options)
  _say(f'bm25: {told["terms"]} terms')


def _build(kind: str, store: vector_store.Store, folder: pathlib.Path,
           queries: np.ndarray, config) -> None:
  """Builds an index, unless just this one is there."""
  options = dict(config[kind])
  if (folder / 'manifest.json').exists():
    try:
      manifest = approximate.read_manifest(folder, store)
      if manifest['options'] == options:
        _say(f'{kind}: recall@3 {manifest["recall@3"]:.4f}, as it is there')
        return
    except ValueError as error:
      _say(f'{kind} is built again: {error}')
  manifest = approximate.build(
      kind, store, folder, queries, recall=config.recall.target, say=_say,
      **options)
  if manifest['recall@3'] < config.recall.target:
    _say(f'Warning: {kind} reaches recall@3 {manifest["recall@3"]:.4f}, below '
         f'recall.target={config.recall.target}.')
