# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Every option of a training run, one per line, with unit and constraint.

A recipe's config starts from this one and states only its differences. The
default size is the laptop run.

  python -m searchrl.main --config=configs/dspo.py:smoke   # or any recipe
  python -m searchrl.main \
      --config=configs/grpo.py:model=qwen2.5-7b,setting=study

Results: the recipes have them; for the papers' models, not yet measured.
"""

import ml_collections

from configs import arguments
from searchrl.runtime import alerts


def get_config(text: str = '') -> ml_collections.ConfigDict:
  """Returns the config of a size or a model, which recipes then change.

  Args:
    text: Text after the colon, as in configs/arguments.py. The setting of a
      model alone is Search-R1's, or the one that the recipe names at its end.
  """
  args = arguments.parse(text)
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.train:run'
  config.seed = 0  # random seed of the data order and of all sampling
  config.allow_changes = False  # set by the flag --allow_changes

  config.model = dict(
      path='',  # Hugging Face folder or hub id; '': the shipped tiny base
      # Kernel for whole rows: auto, xla, cudnn (GPU) or splash (TPU).
      attention='auto',
      attention_block=0,  # tokens per block, to bound memory; 0: the default
      dtype='float32',  # dtype of stored parameters: float32 or bfloat16
      lora=dict(
          rank=0,  # rank of the adapters; 0: no LoRA, all parameters train
          alpha=16.0,  # scale: adapters are multiplied by alpha / rank
          targets=('q', 'k', 'v', 'o', 'gate', 'up', 'down'),
      ),
  )
  config.data = dict(
      train='',  # question files: path, or name=path,...; '': generated world
      weights=(),  # shares of training files, instead of mix; (): by size
      limit=0,  # number of training questions, drawn by the seed; 0: all
      golds=True,  # False: the reward needs no gold answers in training
      question_mark=False,  # True: adds a missing '?' to questions (Search-R1)
      # Evaluation questions: path, folder or name=path,..., with search.corpus,
      # or 'worlds': generated ones. '': worlds if training generates its own.
      evaluate='',
      world_seed=1,  # random seed of the generated training world
      per_hop=(500, 500, 400),  # numbers of generated questions, 1, 2, ... hops
      common=0.4,  # share of common knowledge per step, if generated
      mix=(1, 1, 1),  # shares of 1, 2, ... hops per step; (): no fixed shares
  )
  config.world = dict(  # generated worlds for training and for evaluation
      common=True,  # True: adds common knowledge, the same in all worlds
      outdated=0.15,  # share of it that is changed in each world, in (0, 1)
      hard=False,  # True: namesakes, several passages per entity, other words
      scale=1.0,  # factor on the number of entities, above 0
  )
  config.search = dict(
      # Name: bm25, noise, dense (n-grams; or an index, see build_index.py), ...
      engine='bm25',
      corpus='',  # passage file, jsonl; '': a generated world
      options={},  # keyword arguments of the engine
  )
  # Function that makes the dialogue from a tokenizer, module:function. Others
  # are in agent: dialogue:search_r1, chat:search_r1, tools:dspo.
  config.dialogue = 'searchrl.agent.dialogue:laptop'
  config.reward = 'searchrl.agent.rewards:em'  # reward, module:function
  config.reward_options = {}  # keyword arguments of the reward
  config.outcome = 'searchrl.agent.rewards:em'  # outcome read by the filter
  config.rollout = dict(
      questions_per_step=12,  # number of questions per round of a step
      group_size=6,  # number of samples per question
      max_rounds=1,  # most rounds per step, until `keep` has filled the batch
      # True: drops unfinished trajectories once the batch is full. Biases
      # toward short ones.
      stop_when_full=False,
      temperature=1.0,  # sampling temperature, above 0
      top_k=0,  # number of likeliest tokens that may be drawn; 0: all
      top_p=1.0,  # probability mass of the likeliest tokens kept, in (0, 1]
      min_p=0.0,  # share of the top probability that a token needs, in [0, 1]
      # Rule for top_k, top_p and min_p where a loss has an importance ratio:
      # 'refuse' (an error), or 'renormalise': log-probs over the tokens kept.
      truncation='refuse',
      max_num_seqs=72,  # concurrent conversations, a multiple of data * fsdp
      max_length=512,  # most tokens per conversation, prompt included
      dtype='float32',  # dtype of weights and KV cache: float32 or bfloat16
      # Kernel: auto, xla, cudnn, triton or cudnn+triton (GPU), or ragged (TPU).
      attention='auto',
      cache_tokens=0,  # tokens in the KV cache, for ragged; 0: full slots
      tensor=1,  # devices per copy of the weights; may span several hosts
      search_order='auto',  # order of results: auto, deterministic or arrival
      async_decode=False,  # True: decodes while the host reads the last decode
      search_timeout_secs=60.0,  # seconds until a search counts as failed
      search_calls=4,  # number of concurrent search calls
      mask_truncated=False,  # True: no loss if a limit was hit (DAPO)
      budgets=dict(
          max_turns=6,  # most actions per conversation, the answer included
          max_new_tokens=48,  # most tokens that the policy writes per turn
          max_prompt_tokens=96,  # most tokens; longer prompts are refused
          passage_tokens=96,  # most tokens per passage; longer ones are cut
          top_k=2,  # number of passages per search
      ),
  )
  config.algorithm = dict(
      name='searchrl.rl.algorithms:grpo',
      mask_observations=True,  # True: trains only on the policy's tokens
  )
  config.optimizer = dict(
      learning_rate=2e-4,  # peak learning rate
      b2=0.99,  # decay rate of the second moment
      weight_decay=0.0,  # pull towards 0, times the learning rate
      max_grad_norm=1.0,  # gradient norm above which a gradient is scaled
      warmup_steps=5,  # updates until the full learning rate
      mu_dtype='float32',  # dtype of the first moment; bfloat16 saves memory
  )
  config.critic = dict(  # critic, for recipes that need values: ppo
      optimizer=dict(
          learning_rate=1e-5,
          b2=0.99,
          weight_decay=0.0,
          max_grad_norm=1.0,
          warmup_steps=0,  # updates until the full learning rate
      ),
      warmup_updates=0,  # critic updates before the policy's first update
  )
  config.importance_correction = dict(  # weights for sampler-learner mismatch
      method='none',  # rule: none, truncate (TIS) or mask (IcePop)
      level='token',  # scope of a weight: token, or sequence (as in GSPO)
      low=0.5,  # smallest weight that mask keeps
      high=2.0,  # largest weight
  )
  config.learner = dict(
      minibatches=2,  # optimizer updates per batch
      microbatch_rows=0,  # packed rows per micro-batch; 0: 2, or data * fsdp
      pack_length=0,  # tokens per packed row; 0: rollout.max_length, the least
      max_segments=16,  # most trajectories per packed row
      remat='',  # activations saved for backward: nothing, dots; '': all
      dtype='float32',  # dtype of activations: float32 or bfloat16
  )
  # Devices per axis of the mesh; -1: all remaining devices.
  config.mesh = dict(data=-1, fsdp=1, tensor=1)
  config.train = dict(
      num_steps=24,  # number of training steps
      init_from='',  # run whose newest checkpoint this run starts from
      max_rollouts=0,  # rollouts that end the run; 0: no limit
      checkpoint_every=10,  # steps between checkpoints
      keep_checkpoints=2,  # number of newest checkpoints kept
      keep_best=True,  # True: also keeps the best of validation; evaluate.every
      warn_after=5,  # steps in a row without a mixed group until a warning
      stop_after=0,  # such steps in a row until the run fails; 0: never
      max_staleness=0,  # steps that a rollout thread may run ahead; 0: none
      lockstep='phase',  # check that processes agree: off, phase or call
      watchdog_secs=0,  # least seconds of silence that end a process; 0: never
      tensorboard=True,  # True: writes TensorBoard files
      progress=True,  # True: shows a progress line
  )
  config.guards = dict(  # reactions to alerts; see docs/guards.md
      actions=dict(  # action: off, warn, skip (the update), rollback or stop
          state='rollback',  # rollback or stop
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
          unmixed='off',  # off: train.warn_after already warns
          slow_step='warn',  # warn or off
      ),
      limits=alerts.default_limits(),  # limit of each rule
      trusted_steps=3,  # steps before a late alert that are not trusted
      most_rollbacks=3,  # number of rollbacks after which the run ends
      rollback_rate=1.0,  # factor on the learning rate per rollback, in (0, 1]
  )
  config.plan = dict(  # settings of --plan
      devices='',  # KIND-COUNT, such as v5e-64 or h200-8; '': this machine
      compile=True,  # True: compiles if possible, exact but takes minutes
  )
  config.evaluate = dict(
      initial=True,  # True: also evaluates before training
      every=0,  # steps between evaluations in training; 0: none in training
      limit=0,  # questions per set in training, drawn by the seed; 0: all
      num_sets_during=0,  # number of first sets, in training; 0: all
      decodings=('greedy', 'sampled'),  # decodings of answers, or one of them
      noise=True,  # True: the first set and famous also get random passages
      search=dict(engine='', options={}),  # engine; '': as in training
      engines={},  # engines by name, each like search; {}: search alone
      worlds=dict(
          world_seed=101,  # random seed, never that of training
          # Sets: two about fresh facts, then two about common knowledge.
          kinds=('known', 'unseen', 'famous', 'outdated'),
          questions_per_hop=16,  # questions about fresh facts per hop count
          common_per_hop=8,  # most about common knowledge; 0: questions_per_hop
          sampled_per_hop=8,  # questions when sampled or with noise; 0: all
          max_hops=4,  # most hops per question
      ),
  )
  if args.is_laptop:
    config.evaluate.update(every=6, limit=24, num_sets_during=1)
  if args.size in arguments.STRESS:
    rate, config.learner.minibatches = arguments.STRESS[args.size]
    config.optimizer.learning_rate = rate
  if args.size == 'smoke':  # run of a minute or two that uses every part
    config.train.update(num_steps=3, checkpoint_every=1)
    config.rollout.update(questions_per_step=4, group_size=4, max_num_seqs=16)
    config.evaluate.worlds.update(
        questions_per_hop=4, common_per_hop=2, sampled_per_hop=2)
  arguments.apply_setting(config, text, 'search_r1')
  return config


def as_evaluated(config: ml_collections.ConfigDict
                ) -> ml_collections.ConfigDict:
  """Returns the config with evaluation's engine moved to config.search.

  It is for jobs that do not train.
  """
  search = config.evaluate.search
  if search.engine:
    config.search.engine = search.engine
    config.search.options = search.options
  del config.evaluate.search
  return config


def as_sweep(config: ml_collections.ConfigDict, runs: dict[str, dict],
             across: str) -> ml_collections.ConfigDict:
  """Returns the config as a sweep: a run for each change, and one table.

  Args:
    config: Config of the runs.
    runs: Changes to the config, by the name of the run.
    across: Name of the table's columns: 'hops', 'set' or 'engine'.
  """
  config.sweep = dict(
      job=config.job, order=tuple(runs), runs=runs, across=across)
  config.job = 'searchrl.jobs.sweep:run'
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
