# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Builds an index of a corpus: vectors on disk, and ScaNN or HNSW of them.

  python -m searchrl.main --config=configs/build_index.py --workdir=runs/index \
      --config.corpus=my_corpus.jsonl --config.encoder.path=intfloat/e5-base-v2 \
      --config.build="('scann',)"

Several processes (see launch/) encode a share each. The same command goes on
after a kill. A run then searches the index with

  --config.search.corpus=my_corpus.jsonl --config.search.engine=dense \
  --config.search.options="{'index': 'runs/index', 'backend': 'auto'}"

Search-R1's own vectors are imported with --config.imports=e5_Flat.index.

Hardware: 2 CPU cores, no accelerator. Time: 16 CPU ms to encode one of
Debian's descriptions with MiniLM-L6; 344 CPU seconds for ScaNN of 480,000 rows.
Result: recall@3 of .99 at 3,303 queries a CPU second (BENCHMARKS.md).
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.build_index:run'
  config.allow_changes = False  # set by --allow_changes
  config.corpus = ''  # passages, jsonl; above 256 MB not compressed
  config.imports = ''  # vectors made already: e5_Flat.index or emb_e5.memmap
  config.encoder = dict(
      path='',  # a BERT folder or hub id; '' is hashed n-grams, without weights
      query_prefix='query: ',
      passage_prefix='passage: ',
      pooling='mean',  # or cls
      max_length=256,  # tokens of a text; longer ones are cut
      dtype='float32',  # of activations: or bfloat16
      batch_tokens=8192,  # a device call; at least max_length
  )
  config.ngrams = dict(dim=512, n=3)  # where there is no encoder.path
  config.store = dict(
      dtype='float16',  # on disk: or float32, bfloat16, int8 with scales
      shard_rows=65_536,  # passages that a kill may cost, at most, a process
  )
  config.build = ()  # of 'scann', 'hnsw' and 'bm25'; exact search needs none
  config.scann = dict(
      leaves=0,  # of a part; 0: the square root of its rows
      part_rows=2_500_000,  # memory: three times so many float32 rows
      soar=1.5,  # weight of the second choice's direction
  )
  config.hnsw = dict(
      links=32,  # of a row (M)
      construction=200,  # efConstruction
  )
  config.bm25 = dict(k1=0.9, b=0.4)  # Anserini's
  config.recall = dict(
      target=0.99,  # recall@3 against exact search that settings are tuned to
      queries='',  # questions, jsonl; '': the first words of passages
      count=1000,  # queries, at most
  )
  config.progress = True
  return config
