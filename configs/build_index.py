# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Builds an index of a corpus: vectors on disk, with ScaNN or HNSW over them.

  python -m searchrl.main --config=configs/build_index.py --workdir=runs/index \
      --config.corpus=my_corpus.jsonl --config.build="('scann',)" \
      --config.encoder.path=intfloat/e5-base-v2

With several processes (see launch/), each encodes a share. After a kill, the
same command continues. A run then searches the index with

  --config.search.corpus=my_corpus.jsonl --config.search.engine=dense \
  --config.search.options="{'index': 'runs/index', 'backend': 'auto'}"

To import Search-R1's own vectors, use --config.imports=e5_Flat.index. The
settings of the papers name three indexes, of which the first has the vectors,
the second adds the Study's HNSW64 to it, and the third is BM25 alone:

  python -m searchrl.main --config=configs/build_index.py --workdir=runs/e5 \
      --config.corpus=data/wiki-18.jsonl --config.encoder.path=intfloat/e5-base-v2
  python -m searchrl.main --config=configs/build_index.py:hnsw64 \
      --workdir=runs/e5 --config.corpus=data/wiki-18.jsonl \
      --config.encoder.path=intfloat/e5-base-v2
  python -m searchrl.main --config=configs/build_index.py:bm25 \
      --workdir=runs/bm25 --config.corpus=data/wiki-18.jsonl

Hardware: 2 CPU cores, no accelerator. Time: 16 CPU ms to encode one of
Debian's descriptions with MiniLM-L6; 344 CPU seconds for ScaNN of 480,000 rows.
Result: recall@3 of .99 at 3,303 queries a CPU second (BENCHMARKS.md).
"""

import ml_collections

from configs import arguments
from searchrl.experiment.rules import field
from searchrl.search.index import approximate


def get_config(text: str = ''):
  kind = arguments.parse(text, size=(), model=(), setting=(), index=(
      'bm25', 'hnsw64')).others['index']
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.build_index:run'
  config.allow_changes = False  # set by --allow_changes
  config.corpus = field(  # above 256 MB it must be uncompressed
      '', bool, 'a jsonl file of passages: --config.corpus=my_corpus.jsonl')
  config.imports = ''  # existing vectors: e5_Flat.index or emb_e5.memmap
  config.encoder = dict(
      path='',  # BERT folder or hub id; '': hashed n-grams, without weights
      query_prefix='query: ',
      passage_prefix='passage: ',
      pooling='mean',  # mean or cls
      max_length=256,  # tokens of a text; longer ones are cut
      # Data type of the activations.
      dtype=field('float32', one_of=('float32', 'bfloat16')),
      batch_tokens=8192,  # tokens per device call; at least max_length
  )
  config.ngrams = dict(dim=512, n=3)  # n-gram vectors, if encoder.path is ''
  config.store = dict(
      dtype='float16',  # on disk: float16, float32, bfloat16, int8 with scales
      shard_rows=65_536,  # passages per shard; a kill loses one per process
  )
  # Exact search needs none. BM25 alone has no vectors without an encoder.path.
  config.build = field({'bm25': ('bm25',), 'hnsw64': ('hnsw',)}.get(kind, ()),
                       some_of=(*approximate.KINDS, 'bm25'))
  config.scann = dict(
      leaves=0,  # leaves of a part; 0: the square root of its rows
      part_rows=2_500_000,  # rows per part; three times their bytes are held
      soar=1.5,  # weight of the second choice's direction
  )
  config.hnsw = dict(
      links=32,  # links per row (M)
      construction=200,  # candidates while building (efConstruction)
  )
  if kind == 'hnsw64':  # as faiss makes its "HNSW64"
    config.hnsw.update(links=64, construction=40)
  config.bm25 = dict(k1=0.9, b=0.4)  # parameters of BM25; Anserini's values
  config.recall = dict(
      target=0.99,  # recall@3 against exact search, to which settings are tuned
      queries='',  # jsonl of questions; '': the first words of passages
      count=1000,  # largest number of queries
  )
  config.progress = True
  return config
