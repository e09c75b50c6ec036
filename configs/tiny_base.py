# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The tiny base model of the embedded default, made from nothing.

  python -m searchrl.main --config=configs/tiny_base.py

Writes runs/tiny_base/model, a Hugging Face folder; the one in
searchrl/assets/tiny_base was made so. Its README.md has its data and digests.

Hardware: 2 CPU cores. Time: 2,117 CPU seconds, for 2,061 updates.
(The shipped one was packed into rows of 256 and of 512 tokens.)
Result: exact match, 1 to 4 hops, names of known parts: .94 .86 .86 .68 greedy,
.31 .10 .04 .01 sampled (200 questions of each hop count; BENCHMARKS.md).
"""

import ml_collections


def get_config(size: str = 'laptop'):
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.make_tiny_base:run'
  config.seed = 0
  config.tokenizer = dict(
      vocab_size=1792,  # ids, tags and end of text included
      worlds=24,  # worlds of known names that it is trained on
      fresh_worlds=6,  # and of words that no other world has
  )
  config.model = dict(  # the keys of config.json
      hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
      num_key_value_heads=2, head_dim=32, intermediate_size=352,
      rope_theta=10_000.0, max_position_embeddings=1024)
  config.lessons = dict(
      seed=1_000_000,  # of the first world; worlds of runs are far below
      stages=(
          dict(worlds=0, echoes=3600),
          dict(worlds=150, echoes=100, drills=14, readings=24,
               demonstrations=(4,)),
          dict(worlds=600, echoes=200, drills=3, readings=10,
               demonstrations=(11, 10, 7, 5)),
      ),
      row_length=512,  # tokens; longer lessons are left out
      batch_tokens=3072,  # an update, without padding
  )
  config.optimizer = dict(
      learning_rate=1.5e-3, b2=0.98, weight_decay=0.05, warmup_steps=50,
      schedule='cosine', final_fraction=0.05, save_every=200)
  config.learner = dict(
      microbatch_rows=2,
      row_places=16,  # lessons a row, at most
  )
  if size == 'smoke':  # a minute, for tests
    config.tokenizer.update(worlds=1, fresh_worlds=1, vocab_size=512)
    config.model.update(hidden_size=32, num_hidden_layers=2, head_dim=8,
                        intermediate_size=64)
    config.lessons.update(
        stages=(dict(worlds=2, echoes=2, drills=4, readings=4, demonstrations=(2, 1)),),
        batch_tokens=1024)
    config.optimizer.update(warmup_steps=2, save_every=2)
  return config
