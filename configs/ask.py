# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Asks a trained policy one question and shows each turn as it happens.

  python -m searchrl.main --config=configs/ask.py --config.ask.run=runs/dspo \
      --question "Who wrote The Naflirsong Garden?"

Without --question it proposes some questions. Only the answer goes to stdout.
With --config=configs/ask.py:runs/mine or --config.ask.run=runs/mine, the model,
the dialogue, the budgets and the engine come from that run, and flags can change
any of them.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 7 seconds, start included.
Result: after dspo.py, seed 0, the right answer in 3 turns to "What is the city
of birth of the person who wrote The Naflirsong Garden?".
"""

from configs import arguments
from configs import common
import ml_collections
from searchrl.experiment.rules import field, seed

_ROLLOUT = ('max_num_seqs', 'max_length', 'dtype', 'attention', 'cache_tokens',
            'tensor', 'search_order', 'async_decode', 'search_timeout_secs',
            'search_calls', 'budgets')


def get_config(text: str = '') -> ml_collections.ConfigDict:
  run, base = arguments.with_run(
      text, lambda text: common.as_evaluated(common.get_config(text)))
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.ask:run'
  config.seed = seed(0)  # seed of sampling and of the noise engine
  config.model = dict(
      path=base.model.path,  # a Hugging Face folder or hub id; '': tiny base
      dtype=base.model.get_ref('dtype'),  # dtype of the parameters
      # Dtype to which operands of products are rounded. Unset: the run's.
      matmul_dtype=base.model.get_ref('matmul_dtype'),
  )
  # Dialogue that the policy was trained with. '': the run's; without a run, as
  # in configs/common.py.
  config.dialogue = base.dialogue
  # Tools of the policy. Unset: the run's.
  config.tools, config.tool_options = base.get_ref('tools'), base.tool_options
  # Without a corpus, the run's corpus or a generated world is searched.
  config.search = base.search
  if run or not arguments.parse(text).model:
    config.search.engine = ''  # '': the run's with its options; no run: bm25
  config.data = dict(
      world_seed=base.data.get_ref('world_seed'),  # seed of the generated world
      # Number of questions, some of them proposed.
      per_hop=base.data.get_ref('per_hop'),
      # Above 0: also asks about common knowledge.
      common=base.data.get_ref('common'),
  )
  config.world = base.world  # options: common knowledge, hard worlds
  config.rollout = base.rollout
  for name in {*config.rollout} - {*_ROLLOUT}:
    del config.rollout[name]
  config.mesh = base.mesh
  config.ask = dict(
      question='',  # question to ask, set by --question; '': proposes some
      # File of questions to propose. '': the run's, or those beside the corpus.
      examples='',
      run=run,  # run at its newest step, or 'run@12'; '': the model itself
      # Answers sampled; 1 is greedy, and more take a vote.
      samples=field(1, at_least=1),
      # Temperature, if there are several samples.
      temperature=field(1.0, above=0),
  )
  return config
