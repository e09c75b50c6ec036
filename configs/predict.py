# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Answers questions that have no golden answers.

  python -m searchrl.main --config=configs/predict.py \
      --config.evaluate.run=runs/dspo --config.data.evaluate=questions.jsonl \
      --config.search.corpus=corpus.jsonl

The run may also stand after a colon: --config=configs/predict.py:runs/dspo.
Without a corpus, the run's is searched. A line of the file is
{"id": ..., "question": ...}. Each question is answered once, greedily, or with
each of evaluate.engines and evaluate.decodings, and evaluate.samples times. In
that case, the lines say which it was. The job writes
runs/predict/predictions.jsonl, and the whole trajectories under records/.

Hardware and time: per question as configs/evaluate.py. Result: answers but no
scores, because there are no golds.
"""

from configs import evaluate


def get_config(text: str = ''):
  config = evaluate.get_config(text)
  config.job = 'searchrl.jobs.predict:run'
  config.evaluate.update(decodings=('greedy',), noise=False)
  config.evaluate.worlds.kinds = ()
  return config
