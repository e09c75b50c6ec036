# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Compares a simulated engine with the real one that it was tuned on.

  python -m searchrl.main --config=configs/collect_simulation_data.py \
      --workdir=runs/simulation_test --config.collect.run=runs/dspo \
      --config.data.world_seed=90 --config.collect.worlds=1 \
      --config.data.per_hop="(300,300,300)" --config.collect.validation_share=0
  python -m searchrl.main --config=configs/evaluate_simulator.py \
      --config.search.options.path=runs/finetune_simulator/model

These commands use a world that the tuning has not seen. Each collected query is
asked twice, for useful documents and for noise. The report says how often the
documents contain the answer, by the hop that is searched for (before the last
hop, this is a leak). It also says how long they are, and whether a classifier
tells them from the documents of the real engine. samples.md shows twenty
queries side by side.

With writer=oracle it evaluates the writer that knows the world. For the model
of a server use --config.search.options="{'writer': 'served', ...}", as in
docs/search.md.

Hardware: 2 CPU cores. Time: 2 minutes for 1,997 queries, beside other work.
Result: with a tuned tiny base, .78 of the searches for the last hop find an
answer (BM25: .90), and .11 of the searches before it (.01). The untuned base
writes no documents (BENCHMARKS.md).
"""

from configs import arguments
from configs import collect_simulation_data as collect
from configs import common

TEST = 'runs/simulation_test'


def get_config(text: str = ''):
  args = arguments.parse(
      text, laptop_only=('writer',), writer=('model', 'oracle'))
  config = common.as_evaluated(common.get_config(args.base))
  is_oracle = args.others['writer'] == 'oracle'
  config.job = 'searchrl.papers.zerosearch.evaluate_simulator:run'
  config.search.engine = 'searchrl.papers.zerosearch.simulated:make'
  config.search.options = dict(writer='oracle', titled=True) if is_oracle else (
      dict(writer='model',
           # Path of a tuned model; by default the model itself, untuned.
           path=config.model.path,
           prompts='zerosearch' if args.model else collect.LAPTOP,
           max_prompt_tokens=512 if args.model else 96,
           max_tokens=600 if args.model else 112))
  if is_oracle:
    config.search.corpus = f'{TEST}/world_0/data/train/corpus.jsonl'
  config.simulator = dict(
      data=f'{TEST}/train.jsonl',  # jsonl of collected queries
      limit=0,  # number of queries, drawn by the seed; 0: all
      samples=20,  # queries that samples.md shows side by side
  )
  return config
