# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Trains a text encoder for search on queries and their passages.

  python -m searchrl.main --config=configs/tiny_encoder.py

It writes runs/tiny_encoder/model, a BERT in Hugging Face format. The model in
searchrl/assets/tiny_e5 was made in this way. Its README.md has its data and
digests.

To start from your own model and pairs, with {"query", "positive", "negatives"?}
in each line:

  python -m searchrl.main --config=configs/tiny_encoder.py --workdir=runs/mine \
      --config.data.pairs=my_pairs.jsonl \
      --config.model.path=intfloat/e5-base-v2 --config.temperature=0.01 \
      --config.optimizer.learning_rate=2e-5

Hardware: 2 CPU cores. Time: 693 CPU seconds, for 480 updates.
Result: the first passage contains the answer of 1.00 of 200 one-hop questions,
both for known and for unseen names; BM25's first passage of .94 and .92. In
hard worlds the first two passages contain the fact that an agent asks for in
1.00 of 1,050 cases; BM25's in .70 (BENCHMARKS.md).

Source: E5, arXiv:2212.03533, for prefixes, pooling and InfoNCE. Differs: the
world is generated, the model tiny, and the temperature .05, not .01.
"""

import ml_collections

from configs import arguments
from searchrl.experiment.rules import field, seed


def get_config(text: str = ''):
  args = arguments.parse(text, size=('laptop', 'smoke'), model=(), setting=())
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.train_encoder:run'
  config.seed = seed(0)  # seed of parameters, order and negatives
  config.allow_changes = False  # set by --allow_changes
  config.data = dict(
      pairs='',  # jsonl of pairs; '' generates worlds
      # Seed of the first world; the seeds of runs are smaller.
      world_seed=seed(2_000_000),
      batches_a_world=field(4, at_least=1),
      # Share of worlds with words that no other world has.
      fresh=field(0.5, at_least=0, at_most=1),
      # Share of worlds with namesakes and their own wordings.
      hard=field(0.6, at_least=0, at_most=1),
  )
  config.model = dict(
      path='',  # BERT folder or hub id to start from; '': random parameters
      shape=dict(  # shape of a new model, with keys of config.json
          hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
          intermediate_size=512, max_position_embeddings=256),
  )
  config.tokenizer = dict(  # tokenizer of a new model
      vocab_size=field(1536, at_least=300),
      worlds=24,  # number of worlds that it is trained on
  )
  config.lengths = dict(query=64, passage=128)  # tokens; longer ones are cut
  config.batch = dict(
      queries=field(48, at_least=2),
      hard_negatives=field(2, at_least=0),  # hard negatives per query
      # Number of BM25's best passages that they are drawn from.
      depth=field(8, at_least=1),
  )
  # Temperature of InfoNCE; E5 has 0.01.
  config.temperature = field(0.05, above=0)
  config.steps = field(480, at_least=1)  # number of updates
  config.save_every = field(100, at_least=1)
  config.optimizer = dict(
      learning_rate=1e-3, b2=0.98, weight_decay=0.01, warmup_steps=50,
      schedule='cosine', final_fraction=0.05)
  if args.size == 'smoke':  # a run of seconds, for tests
    config.data.update(batches_a_world=2)
    config.model.shape.update(hidden_size=32, intermediate_size=64)
    config.tokenizer.update(vocab_size=300, worlds=1)
    config.lengths.update(query=32, passage=64)
    config.batch.update(queries=8)
    config.optimizer.update(warmup_steps=2)
    config.update(steps=6, save_every=2)
  return config
