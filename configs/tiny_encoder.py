# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""A text encoder for search, trained on queries and their passages.

  python -m searchrl.main --config=configs/tiny_encoder.py

Writes runs/tiny_encoder/model, a BERT in Hugging Face format; the one in
searchrl/assets/tiny_e5 was made so. Its README.md has its data and digests.

From a model and pairs of your own, {"query", "positive", "negatives"?} a line:

  python -m searchrl.main --config=configs/tiny_encoder.py --workdir=runs/mine \
      --config.data.pairs=my_pairs.jsonl \
      --config.model.path=intfloat/e5-base-v2 --config.temperature=0.01 \
      --config.optimizer.learning_rate=2e-5

Hardware: 2 CPU cores. Time: 693 CPU seconds, for 480 updates.
Result: the first passage holds the answer of 1.00 of 200 one-hop questions,
about known and unseen names alike; BM25's of .94 and .92. In hard worlds the
first two hold the fact that an agent asks for in 1.00 of 1,050 cases; BM25's in
.70 (BENCHMARKS.md).

Source: E5, arXiv:2212.03533, for prefixes, pooling and InfoNCE. Differs: the
world is generated, the model tiny, and the temperature .05, not .01.
"""

import ml_collections


def get_config(size: str = 'laptop'):
  if size not in ('laptop', 'smoke'):
    raise ValueError(f"size must be 'laptop' or 'smoke', but is {size!r}.")
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.train_encoder:run'
  config.seed = 0  # of parameters, order and negatives
  config.allow_changes = False  # set by --allow_changes
  config.data = dict(
      pairs='',  # jsonl; '' generates worlds
      world_seed=2_000_000,  # of the first; worlds of runs are far below
      batches_a_world=4,
      fresh=0.5,  # share of worlds of words that no other world has
      hard=0.6,  # share of worlds with namesakes and wordings of their own
  )
  config.model = dict(
      path='',  # a BERT folder or hub id to begin with; '': from nothing
      shape=dict(  # of that from nothing; the keys of config.json
          hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
          intermediate_size=512, max_position_embeddings=256),
  )
  config.tokenizer = dict(  # of a model from nothing
      vocab_size=1536,
      worlds=24,  # that it is trained on
  )
  config.lengths = dict(query=64, passage=128)  # tokens; longer ones are cut
  config.batch = dict(
      queries=48,
      hard_negatives=2,  # a query
      depth=8,  # of BM25's best, from which they are drawn
  )
  config.temperature = 0.05  # E5's: 0.01
  config.steps = 480  # updates
  config.save_every = 100
  config.optimizer = dict(
      learning_rate=1e-3, b2=0.98, weight_decay=0.01, warmup_steps=50,
      schedule='cosine', final_fraction=0.05)
  if size == 'smoke':  # seconds, for tests
    config.data.update(batches_a_world=2)
    config.model.shape.update(hidden_size=32, intermediate_size=64)
    config.tokenizer.update(vocab_size=300, worlds=1)
    config.lengths.update(query=32, passage=64)
    config.batch.update(queries=8)
    config.optimizer.update(warmup_steps=2)
    config.update(steps=6, save_every=2)
  return config
