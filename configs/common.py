# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every option of a training run, one per line, with unit and constraint.

A recipe's config starts from this one and states only its differences. The
default size is the laptop run.

  python -m searchrl.main --config=configs/dspo.py:smoke   # or any recipe
  python -m searchrl.main --config=configs/grpo.py:study/qwen2.5-7b

Results: the recipes have them; for the papers' models, not yet measured.
"""

import ml_collections

from configs import settings
from searchrl.runtime import alerts


def get_config(size: str = 'laptop') -> ml_collections.ConfigDict:
  """Returns the config of a size, which recipes then change.

  Args:
    size: Name of the size: 'laptop', 'smoke', 'stress_1' to 'stress_3' (the
      laptop run with larger updates), a model of configs/models.py, or
      SETTING/MODEL with a setting of configs/settings.py. The setting of a
      model alone is Search-R1's, or the one that the recipe names at its end.
  """
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.train:run'
  config.seed = 0  # seed of the data order and of all sampling
  config.allow_changes = False  # set by --allow_changes

  config.model = dict(
      path='',  # a Hugging Face folder or hub id; '' is the shipped tiny base
      attention='auto',  # xla, cudnn (GPU) or splash (TPU), for whole rows
      attention_block=0,  # tokens; bounds its memory; 0: the usual
      dtype='float32',  # as it is kept: or bfloat16, like most folders' files
      lora=dict(
          rank=0,  # rank of the adapters; 0 trains all parameters
          alpha=16.0,  # adapters count alpha / rank
          targets=('q', 'k', 'v', 'o', 'gate', 'up', 'down'),
      ),
  )
  config.data = dict(
      train='',  # questions: path, or name=path,name=path; '' makes a world
      weights=(),  # shares of the training files, instead of mix; (): by sizes
      limit=0,  # train on so many questions, drawn by the seed; 0: all
      golds=True,  # questions of training need them; False: the reward does not
      question_mark=False,  # append the ? that a question lacks (Search-R1)
      # Path, folder, or name=path,..., answered from search.corpus; or worlds:
      # generated ones. '': worlds, if training generates its own.
      evaluate='',
      world_seed=1,  # of the generated training world
      per_hop=(500, 500, 400),  # generated questions of 1, 2, ... hops
      common=0.4,  # the share of common knowledge in every step, if generated
      mix=(1, 1, 1),  # shares of 1, 2, ... hops in every step; (): any
  )
  config.world = dict(  # generated worlds, of training and of evaluation
      common=True,  # also common knowledge, the same in every world
      outdated=0.15,  # the share of it that has changed in a world, in (0, 1)
      hard=False,  # several passages an entity, namesakes, other wordings
      scale=1.0,  # factor on the number of entities; above 0
  )
  config.search = dict(
      engine='bm25',  # dense (n-grams; or an index, see build_index.py), noise ...
      corpus='',  # passages, jsonl; '' generates a world
      options={},  # keyword arguments of the engine
  )
  # Made of the tokenizer; or dialogue:search_r1, chat:search_r1, tools:dspo.
  config.dialogue = 'searchrl.agent.dialogue:laptop'
  config.reward = 'searchrl.agent.rewards:em'  # trained on; module:function
  config.reward_options = {}  # keyword arguments of the reward
  config.outcome = 'searchrl.agent.rewards:em'  # read by the dynamic filter
  config.rollout = dict(
      questions_per_step=12,  # questions asked in each round of a step
      group_size=6,  # samples a question
      max_rounds=1,  # rounds per step, until `keep` has filled the batch
      stop_when_full=False,  # what still plays is dropped: favours the short
      temperature=1.0,  # above 0
      top_k=0,  # tokens that may be drawn, the likeliest; 0: all
      top_p=1.0,  # the fewest likeliest with this probability; in (0, 1]
      min_p=0.0,  # those with this share of the largest; in [0, 1]
      # The three, where a loss has an importance ratio: 'refuse', or
      # 'renormalise': log-probs are over the tokens that could be drawn.
      truncation='refuse',
      max_num_seqs=72,  # concurrent conversations; a multiple of data * fsdp
      max_length=512,  # tokens per conversation, prompt included
      dtype='float32',  # dtype of the engine's weights and cache; or bfloat16
      attention='auto',  # xla, cudnn, triton, cudnn+triton (GPU) or ragged (TPU)
      cache_tokens=0,  # cached tokens of all slots (ragged); 0: all can be full
      tensor=1,  # devices that share a copy of its weights, of several hosts too
      search_order='auto',  # or deterministic, or arrival, of search results
      async_decode=False,  # decode while the host reads the decode before
      search_timeout_secs=60.0,
      search_calls=4,  # at a time
      mask_truncated=False,  # leave out of the loss what hit a limit (DAPO)
      budgets=dict(
          max_turns=6,  # actions, the answer included
          max_new_tokens=48,
          max_prompt_tokens=96,  # longer prompts are refused
          passage_tokens=96,  # longer passages are cut
          top_k=2,  # passages a search
      ),
  )
  config.algorithm = dict(
      name='searchrl.rl.algorithms:grpo',
      mask_observations=True,  # train on the policy's own tokens alone
  )
  config.optimizer = dict(
      learning_rate=2e-4,
      b2=0.99,
      weight_decay=0.0,
      max_grad_norm=1.0,
      warmup_steps=5,  # updates
      mu_dtype='float32',  # first moment's dtype; or bfloat16, to save memory
  )
  config.critic = dict(  # of recipes that need values: ppo
      optimizer=dict(
          learning_rate=1e-5,
          b2=0.99,
          weight_decay=0.0,
          max_grad_norm=1.0,
          warmup_steps=0,  # updates
      ),
      warmup_updates=0,  # critic updates before the policy's first
  )
  config.importance_correction = dict(  # for sampler-learner mismatch
      method='none',  # or truncate (TIS), or mask (IcePop)
      level='token',  # or sequence, as recipes with a ratio a sequence need
      low=0.5,  # the smallest weight that mask keeps
      high=2.0,  # the largest weight
  )
  config.learner = dict(
      minibatches=2,  # optimiser steps a batch
      microbatch_rows=0,  # on the devices at a time; 0: 2, or data * fsdp
      pack_length=0,  # tokens a row; 0: rollout.max_length, which is the least
      max_segments=16,  # trajectories a row, at most
      remat='',  # recompute in the backward pass: nothing or dots are saved
      dtype='float32',  # dtype of activations; or bfloat16
  )
  config.mesh = dict(data=-1, fsdp=1, tensor=1)  # -1: all remaining devices
  config.train = dict(
      num_steps=24,
      init_from='',  # a run whose newest checkpoint this one starts from
      max_rollouts=0,  # ends the run, too; 0: no such limit
      checkpoint_every=10,  # steps
      keep_checkpoints=2,  # the newest
      keep_best=True,  # and that with the best validation (evaluate.every)
      warn_after=5,  # steps without a mixed group
      stop_after=0,  # as many, which end the run with an error; 0: never
      max_staleness=0,  # steps that rollouts run ahead, in a thread; 0: none
      lockstep='phase',  # how processes are compared: off, phase, or call
      watchdog_secs=0,  # the least silence that ends a stuck process; 0: never
      tensorboard=True,
      progress=True,
  )
  config.guards = dict(  # what a run does about alerts: docs/guards.md
      actions=dict(  # off, warn, skip (the update), rollback, or stop
          state='rollback',  # or stop
          not_finite='rollback',
          left_out='warn',
          critic_left_out='warn',
          empty_batch='skip',
          score='warn',
          format='warn',
          entropy='warn',
          entropy_rise='warn',
          gradient='warn',
          clip_fraction='warn',
          mismatch='warn',
          search_errors='warn',
          search_timeouts='warn',
          searches_empty='warn',
          unmixed='off',  # see train.warn_after
          slow_step='warn',  # or off
      ),
      limits=alerts.usual(),  # of the same rules
      trusted_steps=3,  # a checkpoint so long before an alert is good
      most_rollbacks=3,  # then the run ends
      rollback_rate=1.0,  # times the learning rate, at each; in (0, 1]
  )
  config.plan = dict(  # what --plan is about
      devices='',  # KIND-COUNT, such as v5e-64 or h200-8; '': this machine's
      compile=True,  # where there is a compiler: exact, and takes minutes
  )
  config.evaluate = dict(
      initial=True,  # also before training
      every=0,  # steps, during training; 0: not then
      limit=0,  # questions of a set during training, by the seed; 0: all
      num_sets_during=0,  # sets during training, from the first on; 0: all
      decodings=('greedy', 'sampled'),  # decodings of answers; or one of them
      noise=True,  # the first set, and famous, also with random passages
      search=dict(engine='', options={}),  # of evaluation; '': that of training
      engines={},  # several: name in tables -> as search above; {}: that one
      worlds=dict(
          world_seed=101,  # never that of training
          # Fresh facts, by name parts; common knowledge, by whether it holds.
          kinds=('known', 'unseen', 'famous', 'outdated'),
          questions_per_hop=16,  # questions about fresh facts per hop count
          common_per_hop=8,  # most about common knowledge; 0: as of fresh
          sampled_per_hop=8,  # those sampled or with random passages; 0: all
          max_hops=4,
      ),
  )
  if settings.is_laptop(size):
    config.evaluate.update(every=6, limit=24, num_sets_during=1)
  if size in settings.STRESS:
    rate, config.learner.minibatches = settings.STRESS[size]
    config.optimizer.learning_rate = rate
  if size == 'smoke':  # a minute or two: does everything, learns nothing
    config.train.update(num_steps=3, checkpoint_every=1)
    config.rollout.update(questions_per_step=4, group_size=4, max_num_seqs=16)
    config.evaluate.worlds.update(
        questions_per_hop=4, common_per_hop=2, sampled_per_hop=2)
  settings.apply(config, size, 'search_r1')
  return config


def as_evaluated(config: ml_collections.ConfigDict
                ) -> ml_collections.ConfigDict:
  """Returns the config with evaluation's engine moved to config.search.

  It is for jobs that do not train.
  """
  own = config.evaluate.search
  if own.engine:
    config.search.engine, config.search.options = own.engine, own.options
  del config.evaluate.search
  return config


def one_sample_a_question(config: ml_collections.ConfigDict) -> None:
  """Sets one sample per question, with as many trajectories per step."""
  config.rollout.questions_per_step *= config.rollout.group_size
  config.rollout.group_size = 1


def most_tokens(config: ml_collections.ConfigDict) -> int:
  """Returns the most tokens that a policy may write in all turns together."""
  budgets = config.rollout.budgets
  return min(budgets.max_turns * budgets.max_new_tokens,
             config.rollout.max_length)
