# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Builds an index of a corpus: vectors on disk, and ScaNN, HNSW or BM25.

A build that was killed continues where it stopped. The first process builds the
approximate indexes from the vectors. If only BM25 is built, vectors are written
only if an encoder is named. See configs/build_index.py.
"""

import hashlib
import json
import pathlib
import sys
from typing import Any

from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.encoders import embedder
from searchrl.encoders import encode_corpus
from searchrl.experiment import config_checks
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.runtime import workdir as workdirs
from searchrl.search import mapped_corpus
from searchrl.search.index import approximate
from searchrl.search.index import bm25_files
from searchrl.search.index import dense
from searchrl.search.index import memory_estimate
from searchrl.search.index import vector_store

_FREE = ('build', 'scann.leaves', 'scann.part_rows', 'scann.soar', 'hnsw.links',
         'hnsw.construction', 'bm25.k1', 'bm25.b', 'recall.target',
         'recall.queries', 'recall.count', 'encoder.batch_tokens', 'progress')


def run(config, workdir: str) -> None:
  """Builds the parts of the index that are missing in `workdir`.

  Args:
    config: Config of the job; see configs/build_index.py.
    workdir: Directory for vectors/ and one directory for each index.

  Raises:
    FileNotFoundError, ValueError: The index cannot be built as configured.
  """
  folder = pathlib.Path(workdir)
  config_checks.check(config)
  if config.imports and not config.encoder.path:
    raise ValueError(
        'imported vectors need encoder.path, the encoder that made them, for '
        'the queries. Add --config.encoder.path=...')
  processes.agree('config', config.to_json())
  directory = workdirs.Workdir(folder, config, _FREE)
  directory.check()
  path = config.encoder.path
  if path and not pathlib.Path(embedder.locate(path)).is_dir():
    raise FileNotFoundError('encoder.path must be the folder of a BERT, or a '
                            f'hub id, but {path} is none.')
  with progress.phase(f'Reading {config.corpus}'):
    corpus = datasets.shared(lambda: mapped_corpus.load(config.corpus))
  directory.prepare()
  if tuple(config.build) == ('bm25',) and not config.encoder.path:
    _check_room(config, folder, vector_store.Recipe(
        corpus.digest, {}, len(corpus), config.ngrams.dim), has_vectors=False)
    built = 'BM25'
  else:
    store, encode = _vectors(config, folder, corpus)
    if processes.is_first():
      _build_approximate(config, folder, store, corpus, encode)
    built = (f'{store.count} vectors of {store.dim}, fingerprint '
             f'{store.fingerprint}')
  if 'bm25' in config.build and processes.is_first():
    with progress.phase('Building bm25'):
      bm25_files.build_if_changed(
          corpus, folder / 'bm25', say=_say, **config.bm25)
  processes.barrier('built', encode_corpus.BARRIER_SECS)
  _say(f'{folder}: {built}')


def _vectors(config, folder: pathlib.Path, corpus
            ) -> tuple[vector_store.Store, dense.EncodeFn]:
  """Writes the missing vectors; returns the store and the encoder."""
  encode, about, dim = _encoder(config, corpus)
  rows_of = encode_corpus.encoded_rows(corpus, encode)
  if config.imports:
    rows_of = encode_corpus.imported_rows(config.imports, corpus, encode, dim)
    about = about | {'imported': pathlib.Path(config.imports).name}
  recipe = vector_store.Recipe(
      corpus.digest, about, len(corpus), dim, **config.store)
  _check_room(config, folder, recipe, has_vectors=True)
  return encode_corpus.fill(folder / 'vectors', recipe, rows_of,
                            progress=config.progress), encode


def _check_room(config, folder: pathlib.Path, recipe: vector_store.Recipe, *,
                has_vectors: bool) -> None:
  """Prints the sizes of the index, and checks that the disk has room for it.

  `has_vectors` is False if the index has no vectors, as with BM25 alone.

  Raises:
    ValueError: The disk is too small for the parts that are not written yet.
  """
  _say(memory_estimate.estimate(
      recipe, config.build, links=config.hnsw.links,
      part_rows=config.scann.part_rows, has_vectors=has_vectors))
  processes.on_first('room', lambda: memory_estimate.check_disk(
      recipe, config.build, folder, links=config.hnsw.links,
      has_vectors=has_vectors))


def _encoder(config, corpus) -> tuple[dense.EncodeFn, dict[str, Any], int]:
  """Returns the encoder, a description of it, and its vectors' dimension."""
  options = config.encoder.to_dict()
  path = options.pop('path')
  if path:
    encoder = embedder.load(path, embedder.Settings(**options))
    return encoder, encoder.about, encoder.dim
  ngrams = dict(config.ngrams)
  return (dense.ngram_encoder(corpus, **ngrams),
          dense.ngram_recipe(corpus, **ngrams), ngrams['dim'])


def _build_approximate(config, folder: pathlib.Path, store: vector_store.Store,
                       corpus, encode: dense.EncodeFn) -> None:
  """Builds missing indexes of vectors that the config names."""
  kinds = [kind for kind in config.build if kind in approximate.KINDS]
  if kinds:
    texts = _queries(config.recall, corpus)
    vectors = dense.encoded(encode, texts, 'query')
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
  for kind in kinds:
    with progress.phase(f'Building {kind}'):
      approximate.build_if_changed(
          kind, store, folder / kind, vectors[vectors.any(1)],
          recall=config.recall.target, asked=digest, say=_say, **config[kind])


def _queries(options, corpus) -> list[str]:
  """Returns queries for the measurement of recall; none of them is blank.

  They are questions. Without questions, a query is the first ten words of a
  passage.
  """
  if options.queries:
    texts = [q.text for q in questions_lib.read(
        options.queries, needs_golds=False)[:options.count]]
  else:
    passages = [corpus[int(i)] for i in dense.evenly_spaced(
        len(corpus), options.count)]
    texts = [' '.join((p.text or p.title).split()[:10]) for p in passages]
  return [text for text in texts if text.strip()]


def _say(text: str) -> None:
  processes.say(text, sys.stdout)
