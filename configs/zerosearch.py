# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""ZeroSearch: GRPO with documents that a model writes, with growing noise.

  python -m searchrl.main --config=configs/zerosearch.py
  python -m searchrl.main --config=configs/zerosearch.py:qwen2.5-3b --plan \
      --config.plan.devices=h200-8

On the laptop the writer is an oracle that knows the world. It returns a true
passage or, with the curriculum's probability, other ones. Evaluation uses BM25.
With writer=tuned, the writer is the model of configs/finetune_simulator.py, in
the run's process. At a model's size it is one of ZeroSearch's simulators behind
an OpenAI-compatible server.

Hardware: a core of an AMD EPYC (family 25, model 17 or 1), beside other work.
Time: 147 CPU seconds to the last step; tuned, about 300. Result: exact match of
greedy answers through BM25, which it never saw, 1 to 4 hops, .94 .00 .00 .00
before and .95 .88 .78 .59 after (one run, seed 0, 200 questions of each hop
count). Without noise, means of five: with the oracle .96 .87 .77 .62, with the
tuned model .93 .80 .66 .49; GRPO trained with BM25 .96 .86 .77 .54. At the size
of Qwen2.5: not yet measured.

Source: Sun et al. 2025, arXiv:2505.04588. Differs: on the laptop the reward is
exact match, and the noise is other passages, which the oracle chooses.
"""

from configs import arguments
from configs import collect_simulation_data as collect
from configs import grpo


def get_config(text: str = ''):
  args = arguments.parse(
      text, laptop_only=('writer',), writer=('oracle', 'tuned'))
  config = grpo.get_config(args.base)
  config.search.engine = 'searchrl.papers.zerosearch.simulated:make'
  config.search.options = dict(
      writer='oracle',  # oracle, model, or served: an LM behind a server
      titled=True,  # documents have titles, as those tiny_base was trained on
      curriculum=dict(  # curriculum of the probability of noise
          start=0.0,
          end=0.5,
          base=4.0,
          steps=0,  # steps until the end; 0: train.num_steps
      ),
  )
  config.evaluate.search.update(engine='bm25', options={})
  if args.others['writer'] == 'tuned':
    config.search.options.writer = 'model'
    config.search.options.update(
        path='runs/finetune_simulator/model', prompts=collect.LAPTOP,
        max_prompt_tokens=96, max_tokens=112, slots=16)
    # The timeout is long because two cores write documents for all slots.
    config.rollout.search_timeout_secs = 600.0
  arguments.apply_setting(config, args.base, 'zerosearch')
  return config
