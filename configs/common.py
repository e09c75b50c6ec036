# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Every option of a training run, with its unit and its range.

A recipe's config starts from this one and states only its differences. The
default size is the laptop run.

  python -m searchrl.main --config=configs/dspo.py:smoke   # or any recipe
  python -m searchrl.main \
      --config=configs/grpo.py:model=qwen2.5-7b,setting=study

Results: the recipes have them; for the papers' models, not yet measured.
"""

from typing import Any

import ml_collections

from configs import arguments
from searchrl.data import datasets
from searchrl.data import questions
from searchrl.evaluation import scores
from searchrl.experiment.rules import field, seed, tracked
from searchrl.models import attention
from searchrl.models.inference import layouts
from searchrl.rollouts import context_rules
from searchrl.runtime import alerts

DTYPES = ('float32', 'bfloat16')
KERNELS = ('auto', *attention.IMPLEMENTATIONS)
REMAT = ('', 'nothing', 'dots', 'auto')
KINDS = (*datasets.FRESH, *datasets.COMMON)


def get_config(text: str = '') -> ml_collections.ConfigDict:
  """Returns the config of a size or a model, which recipes then change.

  Args:
    text: Text after the colon, as in configs/arguments.py. The setting of a
      model alone is Search-R1's, or the one that the recipe names at its end.
  """
  args = arguments.parse(text)
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.train:run'
  config.seed = seed(0)  # random seed of the data order and of all sampling
  config.allow_changes = False  # set by the flag --allow_changes

  config.model = dict(
      path='',  # Hugging Face folder or hub id; '': the shipped tiny base
      # Kernel for whole rows: auto, xla, cudnn (GPUs since Hopper),
      # cudnn_padded (older GPUs) or splash (TPU).
      attention=field('auto', one_of=KERNELS),
      # Tokens per block, to bound memory.
      attention_block=field(0, zero='the default'),
      dtype=field('float32', one_of=DTYPES),  # dtype of stored parameters
      # Dtype to which operands of float32 products are rounded; '': none, auto:
      # bfloat16 on CPUs with AMX, and AMD's with AVX512_BF16 (much faster).
      matmul_dtype=field('', one_of=('', 'auto', 'bfloat16')),
      lora=dict(
          # Rank of the adapters.
          rank=field(0, zero='no LoRA, all parameters train'),
          alpha=16.0,  # scale: adapters are multiplied by alpha / rank
          targets=('q', 'k', 'v', 'o', 'gate', 'up', 'down'),
      ),
  )
  config.data = dict(
      train='',  # question files: path, or name=path,...; '': generated world
      weights=(),  # shares of training files, instead of mix; (): by size
      limit=field(0, zero='all'),  # training questions, drawn by the seed
      golds=True,  # False: the reward needs no gold answers in training
      # True: adds a missing '?' to questions (Search-R1).
      question_mark=tracked(False),
      # Evaluation questions: path, folder or name=path,..., with search.corpus,
      # or 'worlds': generated ones. '': worlds if training generates its own.
      evaluate='',
      world_seed=seed(1),  # random seed of the generated training world
      # Numbers of generated questions of 1, 2, ... hops.
      per_hop=field((500, 500, 400), at_least=0, whole=True),
      # Share of common knowledge per step, if questions are generated.
      common=field(0.4, at_least=0, below=1),
      # Shares of 1, 2, ... hops per step; (): no fixed shares. Equal shares are
      # ignored for your questions if these have other hop counts.
      # ((0, (0, 2, 1)), (10, (1, 2, 1))): from step 0 the first shares, from
      # step 10 the second.
      mix=field((1, 1, 1), questions.is_mix, 'numbers of at least 0, or pairs '
                '(step, such numbers) from step 0 on, equally many in each',
                nests=True),
  )
  config.world = dict(  # generated worlds for training and for evaluation
      # True: adds common knowledge, facts that all worlds share.
      common=tracked(True),
      # Share of these facts that each world replaces by its own.
      outdated=field(0.15, above=0, below=1),
      # True: namesakes, several passages per entity, other words.
      hard=tracked(False),
      scale=field(1.0, above=0),  # factor on the number of entities
  )
  config.search = dict(
      # Name: bm25, noise, dense (n-grams; or an index, see build_index.py), ...
      engine='bm25',
      corpus='',  # passage file, jsonl; '': a generated world
      options={},  # keyword arguments of the engine
  )
  # Function that makes the dialogue from a tokenizer, module:function, such as
  # searchrl.agent.dialogue:search_r1. '': the tiny bases' own; for other models
  # Search-R1's, in the chat template if there is one.
  config.dialogue = ''
  # Tools of the policy: search, open, calculate, python, search_NAME (another
  # engine), mcp, or your 'module:function'. More than the search need a dialogue
  # that lists them (docs/tools.md).
  config.tools = field(('search',), bool, 'at least one name')
  config.tool_options = {}  # keyword arguments of each tool, by its name
  config.reward = 'searchrl.agent.rewards:em'  # reward, module:function
  config.reward_options = {}  # keyword arguments of the reward
  # Score, module:function, by which groups count as mixed; also critic/score.
  config.outcome = 'searchrl.agent.rewards:em'
  # Reward of each turn, module:function, for algorithms that read it; '': none.
  config.turn_reward = ''
  config.turn_reward_options = {}  # keyword arguments of the turn reward
  config.rollout = dict(
      # Number of questions per round of a step.
      questions_per_step=field(12, at_least=1),
      group_size=field(6, at_least=1),  # number of samples per question
      # Most rounds per step. There are fewer if the groups that the algorithm
      # keeps fill the batch sooner.
      max_rounds=field(1, at_least=1),
      # True: drops unfinished trajectories once the batch is full. Biases
      # toward short ones.
      stop_when_full=False,
      temperature=field(1.0, above=0),  # sampling temperature
      top_k=field(0, zero='all'),  # number of likeliest tokens to draw from
      # Probability mass of the likeliest tokens kept.
      top_p=field(1.0, above=0, at_most=1),
      # Share of the top probability that a token needs.
      min_p=field(0.0, at_least=0, at_most=1),
      # Rule for top_k, top_p and min_p where a loss has an importance ratio:
      # 'refuse' (an error), or 'renormalise': the sampler's log-probs are over
      # the tokens kept, and the learner's over all.
      truncation=field('refuse', one_of=('refuse', 'renormalise')),
      # Concurrent conversations, a multiple of data * fsdp. This number and the
      # lengths and budgets below are the tiny bases'. For another model, those
      # that nothing sets follow the model, the data and the memory
      # (docs/data.md).
      max_num_seqs=field(72, at_least=1),
      # Most tokens per conversation, prompt included.
      max_length=field(512, at_least=1),
      dtype=field('float32', one_of=DTYPES),  # dtype of weights and KV cache
      # Kernel: auto, xla, cudnn, triton or cudnn+triton (GPU), or ragged (TPU).
      attention=field('auto', one_of=('auto', *layouts.IMPLEMENTATIONS)),
      # Tokens in the KV cache, for ragged.
      cache_tokens=field(0, zero='as many as all slots could fill'),
      # Devices per copy of the weights; may span several hosts.
      tensor=field(1, at_least=1),
      # Order of results.
      search_order=field('auto', one_of=('auto', 'deterministic', 'arrival')),
      # True: decodes while the host reads the last decode, as GPUs and TPUs
      # always do.
      async_decode=tracked(False),
      # Seconds until a search counts as failed.
      search_timeout_secs=field(60.0, above=0),
      search_calls=field(4, at_least=1),  # number of concurrent search calls
      mask_truncated=False,  # True: no loss if a limit was hit (DAPO)
      budgets=dict(
          # Most actions per conversation, the answer included.
          max_turns=field(6, at_least=1),
          # Most tokens that the policy writes per turn.
          max_new_tokens=field(48, at_least=1),
          # Most tokens; longer prompts are refused.
          max_prompt_tokens=field(96, at_least=1),
          # Most tokens per passage; longer ones are cut.
          passage_tokens=field(96, at_least=1),
          top_k=field(2, at_least=1),  # number of passages per search
          # Rule for a conversation whose max_length is reached: it stops, or
          # goes on in a new context (docs/tools.md).
          when_full=field('stop', one_of=context_rules.RULES),
          # Most contexts per conversation, unless when_full is stop.
          max_contexts=field(4, at_least=2),
      ),
  )
  config.algorithm = dict(
      name='searchrl.rl.algorithms:grpo',
      mask_observations=True,  # True: trains only on the policy's tokens
  )
  config.optimizer = dict(
      # Peak learning rate. Without LoRA, 1e-5 for other models than tiny ones.
      learning_rate=tracked(2e-4),
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
      # Critic updates before the policy's first update.
      warmup_updates=field(0, at_least=0),
  )
  config.importance_correction = dict(  # weights for sampler-learner mismatch
      # Rule: truncate is TIS, mask is IcePop.
      method=field('none', one_of=('none', 'truncate', 'mask')),
      # Scope of a weight; GSPO has one per sequence.
      level=field('token', one_of=('token', 'sequence')),
      low=0.5,  # smallest weight that mask keeps
      high=2.0,  # largest weight
  )
  config.learner = dict(
      minibatches=field(2, at_least=1),  # optimizer updates per batch
      # Packed rows per micro-batch.
      microbatch_rows=field(0, zero='2, or data * fsdp'),
      # Tokens per packed row, at least rollout.max_length.
      pack_length=field(0, zero='rollout.max_length'),
      max_segments=field(16, at_least=1),  # most trajectories per packed row
      # Activations saved for the backward pass; '': all; auto: by memory, which
      # also chooses microbatch_rows if it is 0.
      remat=field('', one_of=REMAT),
      dtype=field('float32', one_of=DTYPES),  # dtype of activations
      # True: AdamW's moments are in the hosts' memory between updates.
      offload_optimizer=False,
      # Coefficient of the loss that balances experts.
      router_aux_loss_coef=field(0.0, at_least=0),
      # True: the policy uses the experts that the sampler chose (R3).
      router_replay=tracked(False),
  )
  config.mesh = mesh()
  config.train = dict(
      num_steps=field(24, at_least=0),  # number of training steps
      init_from='',  # run whose newest checkpoint this run starts from
      max_rollouts=field(0, zero='no limit'),  # rollouts that end the run
      checkpoint_every=field(10, at_least=1),  # steps between checkpoints
      keep_checkpoints=field(2, at_least=1),  # number of newest ones kept
      # True: also keeps the checkpoint with the best evaluate.score, if
      # evaluate.every is above 0.
      keep_best=True,
      # Steps in a row without a mixed group until a warning.
      warn_after=field(5, at_least=1),
      # Such steps in a row until the run fails.
      stop_after=field(0, zero='never'),
      # Steps that a rollout thread may run ahead.
      max_staleness=field(0, zero='no thread'),
      # Devices, the last ones of each process, that sample while the others
      # train.
      rollout_devices=field(0, zero='all devices do both'),
      # Check that processes agree.
      lockstep=field('phase', one_of=('off', 'phase', 'call')),
      # Least seconds of silence that end a process.
      watchdog_secs=field(0, zero='never'),
      # Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, or
      # your 'module:function'.
      loggers=('tensorboard',),
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
          judge_errors='warn',
          unmixed='off',  # off: train.warn_after already warns
          slow_step='warn',  # warn or off
      ),
      limits=alerts.default_limits(),  # limit of each rule
      # Steps before an alert of a rule that notices late, whose checkpoints a
      # rollback does not trust.
      trusted_steps=field(3, at_least=0),
      # Number of rollbacks after which the run ends.
      most_rollbacks=field(3, at_least=0),
      # Factor on the learning rate per rollback.
      rollback_rate=field(1.0, above=0, at_most=1),
  )
  config.plan = plan()
  config.evaluate = dict(
      initial=True,  # True: also evaluates before training
      # Steps between evaluations in training.
      every=field(0, zero='none in training'),
      # Questions per set in training, drawn by the seed.
      limit=field(0, zero='all'),
      num_sets_during=field(0, zero='all'),  # first sets, in training
      # Decodings of answers.
      decodings=field(
          ('greedy', 'sampled'), lambda names: names and {*names} <= {
              'greedy', 'sampled'}, "'greedy', 'sampled', or both"),
      # Score of intervals, paired tests and the best checkpoint.
      score=field('em', one_of=scores.ANSWERS),
      # True: the first set and famous also get random passages.
      noise=tracked(True),
      search=dict(engine='', options={}),  # engine; '': as in training
      # Judge of the answers beside the score, module:function; '': none.
      judge=dict(name='', options={}),
      # Engines by name, each dict(engine=..., options=...); {}: search alone.
      engines={},
      worlds=dict(
          world_seed=seed(101),  # random seed, never that of training
          # Sets: two about fresh facts, then two about common knowledge.
          kinds=field(KINDS, some_of=KINDS),
          # Questions about fresh facts per hop count.
          questions_per_hop=field(16, at_least=1),
          # Most questions about common knowledge per hop count.
          common_per_hop=field(8, zero='questions_per_hop'),
          # Questions per hop count for sampled answers and random passages.
          sampled_per_hop=field(8, zero='all'),
          max_hops=field(4, at_least=1),  # most hops per question
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


def mesh() -> dict[str, Any]:
  """Returns the number of devices on each axis of a mesh."""
  return {axis: field(ways, lambda ways: ways == -1 or ways >= 1,
                      'at least 1, or -1 for the rest of the devices')
          for axis, ways in dict(data=-1, fsdp=1, tensor=1).items()} | {
              axis: field(1, at_least=1) for axis in ('sequence', 'expert')}


def plan() -> dict[str, Any]:
  """Returns the settings of --plan."""
  return dict(
      devices='',  # KIND-COUNT, such as v5e-64 or h200-8; '': this machine
      compile=True,  # True: compiles if possible, exact but takes minutes
  )


def as_evaluated(config: ml_collections.ConfigDict
                ) -> ml_collections.ConfigDict:
  """Returns the config without the fields that only training reads.

  It is for jobs that do not train, or that train by another config, as rejection
  sampling does. The engine of evaluation, if there is one, becomes
  config.search.
  """
  for name in ('learner', 'optimizer', 'critic', 'importance_correction',
               'guards', 'train'):
    del config[name]
  for name in ('initial', 'every', 'limit', 'num_sets_during'):
    del config.evaluate[name]
  search = config.evaluate.search
  if search.engine:
    config.search.engine = search.engine
    config.search.options = search.options
  del config.evaluate.search
  return config


def as_sweep(config: ml_collections.ConfigDict, runs: dict[str, dict],
             across: str, recipe: str = '') -> ml_collections.ConfigDict:
  """Returns the config as a sweep: a run for each change, and one table.

  Args:
    config: Config of the runs.
    runs: Changes to the config, by the name of the run.
    across: Name of the table's columns: 'hops', 'set' or 'engine'.
    recipe: Name that begins the names of the runs, or ''.
  """
  runs = {f'{recipe}_{name}' if recipe else name: run
          for name, run in runs.items()}
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
