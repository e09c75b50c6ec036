# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a hurried user: commands, and the words of the answers.

`bad_input_test.py` runs all of them in one process, which this file is, too:

  python tests/bad_inputs.py FOLDER RESULTS < indexes.json
"""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT_SECS = 60  # of a row


@dataclasses.dataclass(frozen=True)
class Row:
  """A command, and what its one line must say.

  Attributes:
    command: of `python -m searchrl.main`; a name before the flags is that of a
      config, {d} a folder of files.
    words: each must be in the line.
    environ: of the command.
    device: it can be found wrong on a device alone, or by sampling.
    slow: it samples.
    as_command: it also runs as a command.
    bytes: the largest file that can be written; 0: any.
  """

  command: str
  words: tuple[str, ...]
  environ: tuple[tuple[str, str], ...] = ()
  device: bool = False
  slow: bool = False
  as_command: bool = False
  bytes: int = 0

  @property
  def name(self) -> str:
    text = re.sub(r"--config\.|--|[{}'\"]|\.jsonl", '', self.command)
    return re.sub(r'[^\w.=:@+-]+', ' ', text)[:64]

  def arguments(self, folder: pathlib.Path, workdir: pathlib.Path) -> list[str]:
    words = shlex.split(self.command.replace('{d}', str(folder)))
    if words and re.match(r'\w', words[0]):
      name, colon, size = words[0].partition(':')
      words[0] = f'--config=configs/{name}.py{colon}{size}'
    if not any(word.startswith('--workdir') for word in words):
      words.append(f'--workdir={workdir}')
    return words


def _row(command: str, *words: str, **fields) -> Row:
  return Row(command, words, **fields)


def _train(changes: str, *words: str, recipe: str = 'grpo:smoke', **fields
          ) -> Row:
  """A row of a recipe, whose changes are fields without --config."""
  return Row(' '.join([recipe, *(shlex.quote(f'--config.{change}').replace(
      "'{d}'", '{d}') for change in changes.split())]), words, **fields)


def _field(change: str, *words: str, recipe: str = 'grpo:smoke', **fields
          ) -> Row:
  """A row of one field, which its line begins with."""
  name, _, _ = change.partition('=')
  return _train(change, f'{name} must ', *words, recipe=recipe, **fields)


def _questions(file: str, *words: str, **fields) -> Row:
  return _row(f'grpo:smoke {OWN} --config.data.train={{d}}/{file}', file,
              *words, **fields)


BM25 = '--config.search.engine=bm25 --config.search.options={}'
OWN = (f'{BM25} --config.search.corpus={{d}}/corpus.jsonl '
       '"--config.data.mix=()"')
ONE_STEP = (  # a second or two
    f'grpo:smoke {BM25} --config.train.num_steps=1 '
    '--config.evaluate.initial=false "--config.evaluate.worlds.kinds=()" '
    '--config.rollout.questions_per_step=2 '
    '--config.rollout.group_size=2 --config.rollout.max_num_seqs=4 '
    '--config.rollout.budgets.max_turns=1 --config.rollout.max_length=160')
RUN = '--config.evaluate.run={d}/run'
MODEL = 'grpo:smoke --config.model.path={d}/'
GRPO = ("grpo:smoke \"--config.algorithm={'name': "
        "'searchrl.rl.algorithms:grpo', ")
SEARCH_R1 = '--config.dialogue=searchrl.agent.dialogue:search_r1'
INDEX = 'build_index --config.corpus={d}/corpus.jsonl '

COMMANDS = (
    _row('', 'a command must have the flag', '--config=FILE'),
    _row('--workdir={d}/w configs/dspo.py', 'must have flags alone',
         'configs/dspo.py', as_command=True),
    _row('--config=configs/nope.py', 'configs/nope.py', 'Did you mean configs/',
         as_command=True),
    _row('--config=grop.py', 'grop.py', 'Did you mean configs/grpo.py?'),
    _row('--config=configs', 'must name a file'),
    _row('--config={d}/no_get_config.py', 'a function get_config', 'has none'),
    _row('--config={d}/key_error.py', 'key_error.py, line 2', "KeyError: 'a'"),
    _row('--config={d}/syntax.py', 'syntax.py', 'SyntaxError'),
    _row('--config=configs/nope.py --help', "'configs/nope.py' is none"),
    _row('--config={d}/no_job.py', "job must be 'module:function'"),
    _row('grpo:huge', 'must be pairs of size=laptop|', "'huge'",
         'docs/settings.md', as_command=True),
    _row('grpo:study', 'a setting needs a model', 'study/qwen2.5-7b-instruct'),
    _row('grpo:study/qwen9', "'qwen9' is no value", 'The nearest: qwen3-8b'),
    _row('grpo:setting=study,model=qwen9', "model cannot be 'qwen9'",
         'model=smollm2-135m-instruct|', 'The nearest: qwen3-8b'),
    _row('grpo:modle=qwen3-4b', "there is no key 'modle'", 'nearest: model'),
    _row('zerosearch:tuned/qwen3-4b', 'writer does not go with a model'),
    _row('sft:huge', 'size=laptop|smoke', "'huge'"),
    _row('build_index:huge', 'index=bm25|hnsw64', "'huge'"),
    _row('search_cost:huge', 'takes no text after a colon', "'huge'"),
    _row('ask:/no/run', 'the folder of a run', "'/no/run'"),
    _row('ask:{d}/empty', 'the folder of a run', 'empty'),
    _row('serve_model:runs/none', 'the folder of a run', 'runs/none'),
    _row('grpo:smoke --seed=1', '--seed is not a flag', '--config.seed'),
    _row('report --runs=runs/a', '--runs is not a flag',
         'Did you mean --config.report.runs?'),
    _row('grpo:smoke --config.sed=1', '--config.sed must be a field',
         'Did you mean --config.seed?', as_command=True),
    _row('grpo:smoke --config.rollout.lenght=1', '--config.rollout.lenght',
         'Did you mean --config.rollout.max_length?'),
    _row('grpo:smoke --config.learning_rate=1', '--config.learning_rate must ',
         'Did you mean --config.optimizer.learning_rate?'),
    _row('grpo:smoke --config.seed.x=1', '--config.seed.x must be a field'),
    _row('evaluate --config.rollout.max_lenght=1',
         '--config.rollout.max_lenght', 'rollout.max_length'),
    _row('evaluate --config.train.num_steps=1', '--config.train.num_steps must '
         'be a field of configs/evaluate.py, but there is none of that name'),
    _row('grpo:smoke --config.train.num_stesp=1', '--config.train.num_stesp',
         'num_steps'),
    _row('grpo:smoke --config.rollout.num_generations=8',
         'num_generations is called rollout.group_size here'),
    _row('grpo:smoke --num_generations=8', '--num_generations is not a flag',
         '--config.rollout.group_size'),
    _row('grpo:smoke --config.algorithm.dual_clp=3',
         'Did you mean --config.algorithm.dual_clip?'),
    _row('grpo:smoke --workdir', '--workdir', 'expected one argument'),
    _row('grpo:smoke --config.seed', '--config.seed must be a whole number'),
    _row('grpo:smoke --config.seed=a', '--config.seed must be a whole number',
         "'a'", as_command=True),
    _row('grpo:smoke --config.rollout.max_num_seqs=1.5',
         '--config.rollout.max_num_seqs must '
         'be a whole number', "'1.5'"),
    _row('grpo:smoke --config.optimizer.learning_rate=fast',
         '--config.optimizer.learning_rate must be a number', "'fast'"),
    _row('grpo:smoke --config.train.progress=maybe', '--config.train.progress '
         'must be true or false', "'maybe'"),
    _row('grpo:smoke --noconfig.world.hard=1', '--noconfig.world.hard=1'),
    _row('grpo:smoke "--config.data.per_hop=(1,"', '--config.data.per_hop must '
         'be a tuple', "'(1,'"),
    _row("grpo:smoke \"--config.data.per_hop=('a',)\"", '--config.data.per_hop '
         'must be a tuple of numbers', "('a',)"),
    _row('report "--config.report.runs=(1,)"', '--config.report.runs must be a '
         'tuple of texts'),
    _row('grpo:smoke "--config.data.per_hop=(1,)" "--config.data.per_hop=(2,)"',
         '--config.data.per_hop must be given once', '2 times'),
    _row('grpo:smoke "--config.search.options=[1]"', '--config.search.options '
         'must be a dict'),
    _row('grpo:smoke --config.rollout=()', '--config.rollout must be a dict'),
    _row("grpo:smoke \"--config.rollout.budgets={'topk': 2}\"",
         '--config.rollout.budgets.topk must be a field',
         'topk is called rollout.budgets.top_k'),
    _row('grpo:smoke --config.rollout.async=1', 'async_decode'),
    _row('grpo:smoke --config.job=searchrl.jobs.train:rum', 'job',
         'did you mean run?'),
    _row('grpo:smoke --seeds=a', '--seeds must be numbers', "'a'"),
    _row('grpo:smoke --seeds=0,0', '--seeds must be different numbers'),
    _row('grpo:smoke --seeds=', '--seeds must be numbers'),
    _row('grpo:smoke --seeds=-1', '--seeds must be numbers', "'-1'"),
    _row('grpo:smoke --question=why', '--question', 'configs/ask.py', 'why'),
    _row('ask --question=" "', '--question must hold a question'),
    _row('grpo:smoke --trajectory=a:1', '--trajectory', 'configs/show.py'),
    _row('show --workdir={d}/corpus.jsonl', '--workdir must be a folder',
         'corpus.jsonl is a file'),
    _row('grpo:smoke --workdir={d}/corpus.jsonl/w', 'Not a directory',
         'corpus.jsonl/w'),
    _row('grpo:smoke --workdir=/proc/searchrl', 'No such file or directory',
         '/proc/searchrl', as_command=True),
    _row('grpo:smoke', 'JAX_COMPILATION_CACHE_DIR must be a folder', '/proc/a',
         environ=(('JAX_COMPILATION_CACHE_DIR', '/proc/a'),), as_command=True),
    _row('grpo:smoke', 'JAX_COMPILATION_CACHE_DIR must be a folder',
         'File exists', environ=(
             ('JAX_COMPILATION_CACHE_DIR', str(ROOT / 'README.md')),)),
    _row('grpo:smoke', 'must be set together', 'JAX_NUM_PROCESSES',
         environ=(('JAX_PROCESS_ID', '0'),)),
    _row(f'grpo:smoke {BM25}', 'File too large', 'in a run whose folder is',
         bytes=10_000),
)

FIELDS = (
    _field('seed=-1', 'from 0 to 2^63 - 1'),
    _field('seed=9223372036854775808', 'from 0 to 2^63 - 1', as_command=True),
    _field('model.attention=fast', "'xla'"),
    _field('model.attention_block=-1', 'at least 0'),
    _field('model.dtype=float16', "'bfloat16'"),
    _field('model.lora.rank=-1', 'at least 0'),
    _train('model.lora.rank=2 model.lora.alpha=0', 'lora.alpha above 0'),
    _train("model.lora.rank=2 model.lora.targets=('query',)",
           'lora.targets must be some of', "'query'"),
    _field('data.per_hop=(5,-5)', 'at least 0'),
    _train('data.per_hop=()', 'data.train and search.corpus must be given'),
    _train('data.mix=(0,0)', 'data.mix needs a share above 0'),
    _field('data.mix=(1,-1)', 'at least 0'),
    _field('data.mix=((1,(1,1)),)', 'pairs (step, such numbers) from step 0'),
    _train('data.mix=((0,(1,1)),(9,(0,0)))', 'a share above 0'),
    _field('data.limit=-1', 'at least 0'),
    _train('data.limit=99999', 'data.limit must be at most the '),
    _field('data.common=1', 'at least 0 and below 1'),
    _field('data.weights=(1,)', 'for each of the 0 files'),
    _field('world.outdated=0', 'above 0 and below 1'),
    _field('world.scale=0', 'above 0'),
    _field('rollout.questions_per_step=0', 'at least 1'),
    _field('rollout.questions_per_step=-2', 'at least 1'),
    _field('rollout.group_size=1', 'at least 2', 'baseline is the group'),
    _field('rollout.max_rounds=0', 'at least 1'),
    _field('rollout.max_num_seqs=0', 'at least 1'),
    _field('rollout.temperature=0', 'above 0'),
    _field('rollout.temperature=-1', 'above 0'),
    _field('rollout.temperature=nan', 'finite'),
    _field('rollout.temperature=inf', 'finite'),
    _field('rollout.top_k=-1', 'at least 0'),
    _train('rollout.top_k=5', 'rollout.top_k, top_p and min_p must be off'),
    _field('rollout.top_p=0', 'above 0'),
    _field('rollout.dtype=int8', "'float32'"),
    _field('rollout.attention=fast', "'auto'"),
    _field('rollout.search_order=random', "'arrival'"),
    _field('rollout.search_order=arrival search.engine=dense '
           "search.options={'index':'x','backend':'mesh'}", "backend='mesh'"),
    _field('rollout.async_decode=2', 'true or false'),
    _field('rollout.search_timeout_secs=0', 'above 0'),
    _field('rollout.max_length=100', 'a prompt and a turn', '96 + 48'),
    _field('rollout.max_length=5000', 'at most 1024',
           'max_position_embeddings'),
    _field('rollout.budgets.max_turns=0', 'at least 1'),
    _field('rollout.budgets.max_new_tokens=0', 'at least 1'),
    _field('rollout.budgets.top_k=0', 'at least 1'),
    _field('rollout.budgets.when_full=forget', "one of 'stop', 'drop'"),
    _field('rollout.budgets.max_contexts=1', 'at least 2'),
    _row('grpo:smoke --config.dialogue=searchrl.agent.dialogue:continuation '
         '--config.rollout.budgets.when_full=summarise',
         "rollout.budgets.when_full must be 'stop' or 'drop'",
         'Give the Dialogue a summary_request'),
    _field('rollout.budgets.passage_tokens=-1', 'at least 1'),
    _field('rollout.budgets.max_prompt_tokens=9', 'prompt of every question',
           'questions.jsonl, line 1 has'),
    _field('optimizer.learning_rate=nan', 'finite'),
    _field('optimizer.learning_rate=inf', 'finite'),
    _field('optimizer.learning_rate=-1', 'at least 0'),
    _field('optimizer.b2=2', 'in [0, 1)'),
    _field('optimizer.weight_decay=-1', 'at least 0'),
    _field('optimizer.max_grad_norm=0', 'positive', 'None'),
    _field('optimizer.b1=1', 'in [0, 1)'),
    _field('optimizer.warmup_steps=-1', 'at least 0'),
    _field('optimizer.mu_dtype=float8', "'bfloat16'"),
    _field('critic.optimizer.b2=1', 'in [0, 1)', recipe='ppo:smoke'),
    _field('learner.minibatches=0', 'at least 1'),
    _field('learner.microbatch_rows=-1', 'at least 0'),
    _field('learner.pack_length=-1', 'at least 0'),
    _field('learner.max_segments=0', 'at least 1'),
    _field('learner.remat=all', "'nothing'"),
    _field('learner.dtype=float16', "'bfloat16'"),
    _field('learner.dtype=bfloat16', 'must be float32 on CPUs', device=True),
    _field('learner.router_replay=True', 'without experts'),
    _field('learner.minibatches=1000', 'divide the rows', device=True),
    _field('learner.pack_length=100', 'at least rollout.max_length',
           device=True),
    _field('mesh.tensor=0', 'at least 1, or -1'),
    _field('mesh.sequence=0', 'at least 1'),
    _train('mesh.sequence=3', 'divide the 4 query heads'),
    _train('mesh.data=3', 'must multiply to the 1 devices', device=True),
    _train('mesh.tensor=2', 'must multiply to the 1 devices', device=True),
    _train('mesh.fsdp=-1', 'at most one mesh axis may be -1', device=True),
    _field('rollout.tensor=3', 'divide', device=True),
    _field('train.num_steps=-3', 'at least 0'),
    _field('train.checkpoint_every=0', 'at least 1', as_command=True),
    _field('train.keep_checkpoints=0', 'at least 1'),
    _field('train.lockstep=never', "'phase'"),
    _field('train.rollout_devices=-1', 'at least 0'),
    _field('train.rollout_devices=1', 'must be 0 where train.max_staleness'),
    _train('rollout.tensor=2 train.rollout_devices=3 train.max_staleness=1',
           'train.rollout_devices must be a multiple of rollout.tensor'),
    _train('train.rollout_devices=1 train.max_staleness=1',
           "of a process's 1 devices, at least 1 and a multiple",
           device=True),
    _field('train.init_from=/no', 'the folder of a run'),
    _field('train.init_from={d}/run@99', 'has kept, one of 2, but is at 99'),
    _field('evaluate.worlds.kinds=(\'knwn\',)', 'known, unseen, famous'),
    _field('evaluate.worlds.world_seed=1', 'not be that of training'),
    _field('evaluate.worlds.questions_per_hop=0', 'at least 1'),
    _field('evaluate.worlds.max_hops=0', 'at least 1'),
    _field('evaluate.decodings=()', "'greedy', 'sampled', or both"),
    _field('evaluate.every=-1', 'at least 0'),
    _field('importance_correction.method=importance', "'truncate'"),
    _train('importance_correction.method=mask importance_correction.low=3',
           '0 <= low < high'),
    _field('dialogue=searchrl.agent.dialogue:lap', 'did you mean laptop?'),
    _field('dialogue=searchrl.agent.dialogue:tags', 'returns a Dialogue'),
    _field('dialogue=json:loads', 'returns a Dialogue', 'json:loads'),
    _train('dialogue=searchrl.agent.chat:search_r1', 'chat template'),
    _row('grpo:smoke --config.seed=7 --workdir={d}/run', 'seed: 0 -> 7',
         'holds a run with another config', '--allow_changes'),
)

ALGORITHMS = (
    _train('algorithm.name=searchrl.rl.algorithms:grop', 'did you mean grpo?'),
    _train('algorithm.name=grpo', "'module:function'"),
    _train('algorithm.name=searchrl.rl.algorithms:rloo',
           'algorithm.clip_high is no option of'),
    _train('algorithm.name=json:loads', 'algorithm.'),
    _field('algorithm.clip_low=nan', 'finite'),
    _field('algorithm.kl_coef=nan', 'finite'),
    _train('algorithm.kl_coef=-1', 'kl_coef must be 0 or more'),
    _train('algorithm.clip_low=2', 'clip_low must lie in [0, 1]'),
    _field('algorithm.dual_clip=0.5', 'above 1'),
    _field('algorithm.kl_estimator=k4', "'k4'"),
    _train('algorithm.aggregation=mean', 'aggregation must be one of'),
    _field('algorithm.mask_observations=me', 'true or false'),
    _field('algorithm.value_clip=nan', 'finite', recipe='ppo:smoke'),
    _train('algorithm.gae_lambda=2', 'gae_lambda must lie in [0, 1]',
           recipe='ppo:smoke'),
    _train('algorithm.clip_low=-1', 'must be 0 nats or more',
           recipe='gmpo:smoke'),
    _train('algorithm.buffer=0', 'algorithm.buffer must be above 0',
           recipe='dapo:smoke'),
    _row(GRPO + "'dual_clip': 1e999}\"", 'algorithm.dual_clip must be finite'),
    _row(GRPO + "'dual_clip': 0.5}\"", 'dual_clip must be above 1'),
    _row(GRPO + "'clip_low': 'a'}\"", 'algorithm must have options'),
    _row(GRPO + "'aggregation': 'sequence_sum_norm', 'length': 0}\"",
         'length must be'),
)

ENGINES = (
    _field('search.engine=bm26', 'bm25, dense', "'bm26'"),
    _field('search.engine=simulated', 'papers.zerosearch.simulated:make'),
    _row('grpo:smoke "--config.search.options={\'encodr\': \'tiny_e5\'}"',
         "'encodr'", 'Did you mean encoder?'),
    _row('grpo:smoke --config.search.engine=bm25 '
         '"--config.search.options={\'dim\': 64}"', "those of 'bm25'",
         "'dim' is given"),
    _row(f'{ONE_STEP} "--config.search.options={{\'k1\': \'a\'}}"',
         "those of 'bm25'", "'a'", device=True),
    _row('grpo:smoke "--config.search.options={\'encoder\': \'none_such\'}"',
         'none_such', device=True),
    _row('grpo:smoke --config.search.engine=fusion "--config.search.options='
         "{'engines': [{'name': 'bm25', 'k2': 1}]}\"", "'k2' is given"),
    _row('grpo:smoke --config.search.engine=cache "--config.search.options='
         "{'engine': {'name': 'noise'}}\"", "of 'cache'"),
    _row('grpo:smoke "--config.evaluate.search.options={\'k1\': 1.0}"',
         'evaluate.search.engine must name the engine of evaluate.search.opt'),
    _row('grpo:smoke --config.evaluate.search.engine=bm25 '
         '"--config.evaluate.search.options={\'k\': 1}"',
         'evaluate.search.options must be'),
    _row('grpo:smoke --config.search.engine=remote --config.search.options={} '
         '--config.data.train={d}/good.jsonl', "'urls'", device=True),
)

REWARDS = (
    _field('reward=none_such:f', 'no module none_such'),
    _field('reward=searchrl.agent.rewards:emm', 'did you mean em?'),
    _field('reward=em', 'another form'),
    _field('reward=bad_rewards:number', "no function 'number'"),
    _field('reward=broken_rewards:f', "No module named 'nothing_there'"),
    _field('reward=syntax_rewards:f', 'SyntaxError'),
    _train('reward=bad_rewards:two', 'reward_options.', 'must be given for'),
    _train('reward=bad_rewards:option', 'reward_options.a must be given'),
    _train('reward=bad_rewards:nothing', 'reward must lead to', 'float'),
    _train("reward_options={'a':1}", 'reward_options.a is no option'),
    _train('outcome=searchrl.agent.rewards:emm', 'outcome must be'),
    *(Row(f'{ONE_STEP} --config.reward=bad_rewards:{name}',
          (f'bad_rewards:{name}', "question 'train-1-", *words), device=True,
          slow=True) for name, *words in (
              ('raises', 'RuntimeError: boom'), ('none', 'is None'),
              ('text', "is 'good'"), ('nan', 'is nan'),
              ('infinite', 'is inf'))),
)

FILES = (
    _questions('missing.jsonl', 'is not a file', 'data.train'),
    _questions('empty', 'is not a file', 'data.train'),
    _questions('empty.jsonl', 'holds no question. Write a question per line'),
    _questions('torn.jsonl', 'line 2', 'JSONDecodeError'),
    _questions('latin.jsonl', 'line 1', 'UTF-8', 'encoding'),
    _questions('zipped.jsonl', 'line 1', '.gz'),
    _questions('torn.jsonl.gz', 'whole gzip file'),
    _questions('zeros.jsonl', 'line 1', 'must be {"id"'),
    _questions('columns.jsonl', 'line 1', 'must be {"id"'),
    _questions('list.jsonl', 'line 1', 'must be {"id"'),
    _questions('null.jsonl', 'line 1', 'null or blank'),
    _questions('blank.jsonl', 'line 1', 'null or blank'),
    _questions('boolean.jsonl', 'line 1', 'write "yes" or "no"'),
    _questions('deep.jsonl', 'line 1', 'write one flat list'),
    _questions('brackets.jsonl', 'line 1', 'RecursionError'),
    _questions('no_golds.jsonl', 'line 1', "'golden_answers'"),
    _questions('null_id.jsonl', 'line 1', 'id must be a text'),
    _questions('hops.jsonl', 'line 1', 'at least 1, but is -1'),
    _questions('surrogate.jsonl', 'line 1', 'surrogates not allowed'),
    _questions('twice.jsonl', "line 2 repeats 'a' of line 1"),
    _questions('long.jsonl', 'line 2', 'rollout.budgets.max_prompt_tokens must '
               'hold', 'but is 96'),
    _questions('text.parquet', 'must be a parquet file'),
    _row(f'grpo:smoke {OWN} --config.data.train={{d}}/good.jsonl '
         '--workdir={d}/changed', 'whose questions was another',
         '--allow_changes', device=True),
    _row(f'grpo:smoke {BM25} --config.data.train={{d}}/good.jsonl',
         'own data needs both data.train and search.corpus'),
    _row(f'grpo:smoke {BM25} --config.search.corpus={{d}}/corpus.jsonl',
         'own data needs both data.train and search.corpus'),
    *(_row(f'grpo:smoke {BM25} --config.data.train={{d}}/good.jsonl '
           f'--config.search.corpus={{d}}/{file}', file, word)
      for file, word in (
          ('missing.jsonl', 'there is none at'),
          ('empty', 'there is none at'), ('empty', 'which is a folder'),
          ('empty.jsonl', 'no passages'), ('latin.jsonl', 'line 1'),
          ('zipped.jsonl', 'line 1'), ('torn.jsonl', 'line 1'),
          ('columns.jsonl', 'line 1'), ('same_id.jsonl', 'id must be unique'))),
    *(_row(f'evaluate --config.data.evaluate={{d}}/{folder} '
           '--config.search.corpus={d}/corpus.jsonl', *words)
      for folder, *words in (
          ('empty', 'holds neither'), ('latins', 'a.jsonl, line 1', 'UTF-8'),
          ('torn', 'a.jsonl, line 1 must be JSON'))),
    _row('grpo:smoke --config.data.evaluate=nq={d}/missing.jsonl',
         'missing.jsonl is not a file', 'data.evaluate'),
    _row(f'grpo:smoke {OWN} --config.data.train=a={{d}}/good.jsonl,a={{d}}/'
         'good.jsonl', "'a' is the name of two"),
)

MODELS = (
    _row(f'{MODEL}missing', 'model.path must be a folder'),
    _row(f'{MODEL}corpus.jsonl', 'model.path must be a folder'),
    _row(f'{MODEL}empty', 'config.json'),
    _row(f'{MODEL}no_tokenizer', 'tokenizer.json'),
    _row(f'{MODEL}torn_tokenizer', 'model.path must hold a tokenizer',
         'torn_tokenizer', as_command=True),
    _row(f'{MODEL}torn_config', 'config.json', 'JSON object'),
    _row(f'{MODEL}gpt', 'GPT2LMHeadModel'),
    _row(f'{MODEL}pickled', 'safetensors', 'pickle is never read', device=True),
    _row(f'{MODEL}torn_weights', 'model.safetensors', device=True),
)

JOBS = (
    _row('evaluate --config.evaluate.run={d}/empty', 'evaluate.run must be'),
    _row('evaluate --config.evaluate.run=/no/run', 'evaluate.run must be'),
    _row(f'evaluate {RUN}@99', 'one of 2, but is at 99'),
    _row(f'evaluate {RUN} {SEARCH_R1}', 'dialogue must be what', 'laptop'),
    _row(f'evaluate {RUN} --config.evaluate.worlds.world_seed=1',
         'evaluate.worlds.world_seed must not be that of training'),
    _row('evaluate --config.evaluate.run={d}/own', 'data.evaluate must name',
         'own', 'good.jsonl'),
    _row('evaluate --config.evaluate.run={d}/own_judged', 'data.evaluate',
         'missing.jsonl is not a file'),
    _row('evaluate --config.evaluate.samples=0', 'evaluate.samples must be'),
    _row('evaluate --config.evaluate.step=-1', 'evaluate.step must be at least '
         '0 and below'),
    _row('evaluate "--config.evaluate.worlds.kinds=()"', 'data.evaluate must'),
    _row("evaluate:methods \"--config.evaluate.order=('nope',)\"",
         'evaluate.order must name rows'),
    _row('evaluate:methods --config.evaluate.methods.cot.method=cott',
         'evaluate.methods.cot.method must be one of', "'cott'"),
    _row('evaluate:methods --config.evaluate.prompts=none', 'evaluate.prompts'),
    _row('predict', 'data.evaluate must name the file'),
    _row('predict --config.data.evaluate={d}/good.jsonl', 'search.corpus'),
    _row('predict --config.data.evaluate={d}/long.jsonl --config.search.corpus='
         '{d}/corpus.jsonl', 'long.jsonl, line 2', 'max_prompt_tokens'),
    _row(f'predict {RUN} {SEARCH_R1} --config.data.evaluate={{d}}/good.jsonl '
         '--config.search.corpus={d}/corpus.jsonl', 'dialogue must be what'),
    _row('ask --question=why? --config.ask.run=/no', 'ask.run must be'),
    _row(f'ask --question="{"why " * 99}"', 'max_prompt_tokens must hold',
         'that of --question has'),
    _row('ask --config.ask.samples=0', 'ask.samples must be at least 1'),
    _row('ask --config.ask.temperature=0', 'ask.temperature must be above 0'),
    _row('ask --config.ask.examples=/no.jsonl', '/no.jsonl is not a file'),
    _row('export', 'export.run must be the folder of a run'),
    _row('export --config.export.run={d}/run --config.export.step=77',
         'one of 2, but is at 77'),
    _row('export --config.export.run={d}/run --config.export.dtype=float16',
         'export.dtype must be'),
    _row('show', '--trajectory must be FILE:LINE'),
    _row('show --trajectory=/no:1', 'no file /no'),
    _row('show --trajectory={d}/run/trajectories/step_000002.jsonl.gz:0',
         '--trajectory must be'),
    _row('show --trajectory={d}/run/trajectories/step_000002.jsonl.gz:2',
         'line 2 is asked for'),
    _row('show --trajectory={d}/good.jsonl:1', 'good.jsonl must be a file of '
         'trajectories'),
    _row('report "--config.report.runs=()"',
         'report.runs must name the folders'),
    _row("report \"--config.report.runs=('{d}/empty',)\"", 'report.runs must'),
    _row('serve_search --config.serve.port=99999999', 'at most 65535'),
    _row('serve_search --config.serve.port=-1', 'serve.port must be'),
    _row('serve_search --config.serve.host=8.8.8.8',
         'serve.host must be a name or address of this machine', '8.8.8.8'),
    _row('serve_search --config.serve.host=no.such.host',
         'serve.host must be a name or address of this machine', 'no.such'),
    _row('grpo:smoke --data.train_batch_size=3',
         '--data.train_batch_size is not a flag',
         '--config.rollout.questions_per_step'),
    _row('serve_search --config.serve.token_env=NOT_SET', 'NOT_SET is not set'),
    _row('serve_search --config.serve.limits.queries=0', 'limits.queries'),
    _row('serve_search --config.search.engine=remote', 'options', 'urls'),
    _row('serve_model --config.serve.port=99999999', 'at most 65535'),
    _row('serve_model --config.serve.steps=0', 'serve.steps must be'),
    _row('serve_model --config.ask.run=/no', 'ask.run must be'),
    _row('serve_model --config.model.path=/no', 'model.path must be a folder'),
    _row(f'serve_model --config.ask.run={{d}}/run {SEARCH_R1}',
         'dialogue must be what'),
    _row('build_index', 'corpus must be a jsonl file'),
    _row('build_index --config.corpus=/no.jsonl', '/no.jsonl'),
    _row(f"{INDEX}\"--config.build=('ivf',)\"", 'build must be some of'),
    _row(f'{INDEX}--config.imports=/no', 'encoder.path'),
    _row(f'{INDEX}--config.encoder.path=/no', 'encoder.path must be', '/no'),
    _row(f'{INDEX}--config.store.dtype=int4', 'store.dtype must be'),
    _row(f'{INDEX}--config.store.shard_rows=0', 'shard_rows'),
    _row(f'{INDEX}--config.ngrams.dim=0', 'at least 1'),
    _row('prepare_data:papers', 'paper=search_r1|empirical_study', "'papers'"),
    _row('prepare_data --config.source=/no', 'source must be a folder', '/no'),
    _row('prepare_data:dspo --config.source={d}',
         'source must hold nq/train.jsonl', 'FlashRAG_datasets'),
    _row("prepare_data --config.files=\"('nq',)\"", 'files must be some of'),
    _row('prepare_data --config.copy_to=ftp://x/y', 'copy_to must be a folder'),
    _row('sft:smoke --config.data.train=/no.jsonl', '/no.jsonl is not a file'),
    _row('sft:smoke --config.data.train={d}/corpus.jsonl', 'corpus.jsonl, line 1',
         'prompt'),
    _row('sft:smoke --config.data.train={d}/brackets.jsonl', 'line 1',
         'RecursionError'),
    _row('sft:smoke --config.mesh.sequence=3', 'divide the 4 query heads'),
    _row('sft:smoke --config.train.epochs=0', 'train.epochs or train.steps'),
    _row('sft:smoke --config.batch.documents=0', 'batch.documents or'),
    _row('sft:smoke --config.data.validation_share=1.0', 'below 1'),
    _row('sft:smoke --config.optimizer.schedule=cos', "'cosine'"),
    _row('sft:smoke --config.optimizer.warmup_steps=1000', 'of updates, 6,'),
    _row('sft:smoke --config.learner.pack_length=17', 'learner.pack_length must '
         'hold a conversation'),
    _row('sft:smoke --config.model.path=/no', 'model.path must be a folder'),
    _row('demonstrations:smoke "--config.data.mix=((0,(1,0)),)"',
         '--config.data.mix must be a field of configs/demonstrations.py'),
    _row('demonstrations:smoke --config.rollout.budgets.when_full=drop',
         "rollout.budgets.when_full must be 'stop' for demonstrations"),
    _row('rejection:smoke --config.rejection.samples=0', 'rejection.samples'),
    _row('rejection:smoke --config.rejection.temperature=0', 'above 0'),
    _row('rejection:smoke --config.tuning.optimizer.b2=3', 'optimizer.b2'),
    _row('rejection:smoke --config.model.path=/no', 'model.path must be'),
    _row('drzero:smoke "--config.selfplay.hops=()"', 'selfplay.hops must have'),
    _row('drzero:smoke --config.selfplay.iterations=0', 'selfplay.iterations'),
    _row('drzero:smoke --config.proposing.seeds=100000', 'proposing.seeds'),
    _row('drzero:smoke --config.proposer.solver.temperature=0',
         'solver.temperature must be above 0'),
    _row('drzero:smoke --config.proposer.solver.dialogue=nope:x',
         'solver.dialogue must be', 'nope:x'),
    _row('drzero:smoke --config.solver.model.path=/no', 'model.path must be'),
    _row('drzero:smoke --config.solver.algorithm.clip_low=2', 'clip_low must'),
    _row('--config=tools/tiny_base.py --config.model.path=/no',
         'model.path must be a folder'),
    _row('--config=tools/tiny_base.py:smoke --config.tokenizer.vocab_size=1',
         'at least 300'),
    _row('tiny_encoder:smoke --config.data.pairs=/no', 'data.pairs must be'),
    _row('tiny_encoder:smoke --config.temperature=0', 'temperature must be'),
    _row('collect_simulation_data:smoke --config.collect.run=/no',
         'collect.run must be'),
    _row('collect_simulation_data:smoke --config.collect.samples=0',
         'collect.samples must be'),
    _row('evaluate_simulator --config.simulator.data=/no', 'simulator.data'),
    _row('evaluate_search "--config.retrieval.top_ks=()"', 'retrieval.top_ks'),
    _row('search_cost --config.cost.run=/no', 'cost.run must be'),
    _row('search_cost "--config.cost.devices=(0,)"', 'cost.devices must be'),
    _row("engines:smoke \"--config.sweep.order=('x',)\"", 'sweep.order must'),
    _row('engines:smoke "--config.sweep.order=()"', 'sweep.order must name'),
    _row('grpo:smoke --plan --config.plan.devices=h201-8', 'plan.devices must'),
    _row('grpo:qwen2.5-7b --plan --config.plan.devices=h200-8 '
         '--config.mesh.tensor=3', 'must multiply to the 8 devices'),
    _row('grpo:qwen2.5-7b --plan --config.plan.devices=h100-6',
         'a parameter must split evenly', 'is 3584', 'fsdp=6',
         device=True),
    _row('grpo:qwen2.5-7b --plan --config.plan.devices=h100-8 '
         '--config.rollout.tensor=8', 'rollout.tensor must', 'the 4 KV heads',
         device=True),
    _row('grpo:qwen2.5-7b --plan --config.plan.devices=h100-8 '
         '--config.rollout.max_num_seqs=33', 'rollout.max_num_seqs must be a '
         'multiple of the 8 copies',
         device=True),
    _row('grpo:qwen2.5-7b --plan --config.plan.devices=h100-8 '
         '--config.mesh.expert=2', 'mesh.expert must be 1',
         device=True),
    _row('grpo:smoke "--config.evaluate.decodings=(\'sampled\',)" '
         '--config.evaluate.every=1', "evaluate.decodings must have 'greedy'"),
    _row('grpo:smoke --config.rollout.top_p=.9 --config.rollout.truncation='
         'renormalise --config.train.max_staleness=1', 'rollout.top_k, top_p',
         'an earlier policy'),
    _row('sft --plan --config.learner.pack_length=0', 'learner.pack_length'),
    _row('tiny_encoder --plan', 'has neither a learner nor a rollout'),
)

ROWS = sorted(  # those that touch a device are the last
    (*COMMANDS, *FIELDS, *ALGORITHMS, *ENGINES, *REWARDS, *FILES, *MODELS,
     *JOBS),
    key=lambda row: row.device)


# The files -------------------------------------------------------------------

_GOOD = dict(id='a', question='Who?', golden_answers=['x'])
_REWARDS = '''
number = 3
def raises(trajectory): raise RuntimeError('boom')
def none(trajectory): return None
def text(trajectory): return 'good'
def nan(trajectory): return float('nan')
def infinite(trajectory): return float('inf')
def two(trajectory, other): return 1.0
def option(*, a): return 1.0
def nothing(): return 1.0
'''


def _line(**changes) -> str:
  return json.dumps(_GOOD | changes) + '\n'


def write(folder: pathlib.Path) -> None:
  """Writes the files that rows name."""
  torn = _line() + _line(id='b')[:20]
  files = {
      'good.jsonl': _line() + _line(id='b'), 'empty.jsonl': '',
      'torn.jsonl': torn,
      'latin.jsonl': _line(question='Caf').encode().replace(b'f"', b'f\xe9"'),
      'zipped.jsonl': gzip.compress(_line().encode()),
      'torn.jsonl.gz': gzip.compress(_line().encode())[:-9],
      'zeros.jsonl': bytes(500), 'columns.jsonl': '{"q": "a"}\n',
      'list.jsonl': '[1, 2]\n', 'null.jsonl': _line(golden_answers=[None]),
      'blank.jsonl': _line(golden_answers=['', ' ']),
      'boolean.jsonl': _line(golden_answers=False),
      'deep.jsonl': _line(golden_answers=[[['x']]]),
      'brackets.jsonl': '[' * 100_000 + '\n',
      'no_golds.jsonl': '{"id": "a", "question": "Who?"}\n',
      'null_id.jsonl': _line(id=None),
      'hops.jsonl': _line(metadata={'hops': -1}),
      'surrogate.jsonl': _line(question='\ud800 who?'),
      'twice.jsonl': _line() * 2,
      'long.jsonl': _line() + _line(id='b', question='why ' * 300),
      'text.parquet': 'hello',
      'corpus.jsonl': ''.join(json.dumps(
          {'id': str(n), 'title': f'T{n}', 'text': 'x'}) + '\n'
                              for n in range(3)),
      'same_id.jsonl': '{"id": "0", "title": "T", "text": "x"}\n' * 2,
      'no_get_config.py': 'x = 1\n', 'syntax.py': 'def f(:\n',
      'no_job.py': 'import ml_collections\ndef get_config():\n  return '
                   'ml_collections.ConfigDict()\n',
      'key_error.py': "def get_config():\n  return {}['a']\n",
      'bad_rewards.py': _REWARDS, 'broken_rewards.py': 'import nothing_there\n',
      'syntax_rewards.py': 'def f(:\n'}
  for name, content in files.items():
    (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode())
  for name, data in (('empty', {}), ('torn', {'a.jsonl': b'{'}),
                     ('latins', {'a.jsonl': files['latin.jsonl']})):
    (folder / name).mkdir()
    for file, content in data.items():
      (folder / name / file).write_bytes(content)
  _write_models(folder)
  _write_runs(folder)


def _write_models(folder: pathlib.Path) -> None:
  """Folders of the tiny base model, each damaged in a way of its own."""
  base = ROOT / 'searchrl/assets/tiny_base'
  for name, file, change in (
      ('no_tokenizer', 'tokenizer.json', None),
      ('torn_tokenizer', 'tokenizer.json', lambda data: data[:1000]),
      ('torn_config', 'config.json', lambda data: data[:9]),
      ('gpt', 'config.json', lambda data: data.replace(
          b'Qwen2ForCausalLM', b'GPT2LMHeadModel')),
      ('pickled', 'model.safetensors', None),
      ('torn_weights', 'model.safetensors', lambda data: data[:5000])):
    shutil.copytree(base, folder / name)
    data = (folder / name / file).read_bytes()
    (folder / name / file).unlink()
    if change:
      (folder / name / file).write_bytes(change(data))
  (folder / 'pickled' / 'pytorch_model.bin').write_bytes(b'\x80')


def _write_runs(folder: pathlib.Path) -> None:
  """Folders of runs, as far as they are read before a device is needed."""
  from configs import grpo
  from searchrl.rollouts import records
  from searchrl.trajectory import Question, Trajectory
  own = dict(train='good.jsonl', per_hop=())
  for name, data in (
      ('run', {}), ('own', own),
      ('own_judged', own | dict(evaluate=f'{folder}/missing.jsonl'))):
    config = grpo.get_config('smoke')
    config.dialogue = 'searchrl.agent.dialogue:laptop'  # as a run records it
    config.data.update(data)
    config.search.corpus = f'{folder}/corpus.jsonl' if data else ''
    shutil.copytree(ROOT / 'tests/golden/checkpoint',
                    folder / name / 'checkpoints')
    (folder / name / 'config.json').write_text(config.to_json())
  config.data.update(train=f'{folder}/good.jsonl', evaluate='', mix=())
  config.data.per_hop = grpo.get_config().data.per_hop
  config.search.engine, config.search.options = 'bm25', {}
  (folder / 'changed').mkdir()
  (folder / 'changed/config.json').write_text(config.to_json())
  (folder / 'changed/questions.json').write_text('{"train": "0123456789ab"}')
  records.write(folder / 'run/trajectories/step_000002.jsonl.gz', [
      Trajectory(Question('a', 'Who?', ('x',)), 0, 0, (1, 2))])


# The process that runs them --------------------------------------------------


class _Hang(BaseException):
  """A row took too long."""


def run(row: Row, folder: pathlib.Path, workdir: pathlib.Path) -> dict:
  """Runs a row and returns its exit code, its output and what it touched."""
  from jax._src import xla_bridge
  from searchrl import main

  def hang(*_):
    raise _Hang

  past = {name: os.environ.get(name) for name, _ in row.environ}
  os.environ.update(row.environ)
  untouched = not xla_bridge.backends_are_initialized()
  files = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (row.bytes or files[0], files[1]))
  signal.signal(signal.SIGALRM, hang)
  signal.alarm(LIMIT_SECS)
  begun, said, printed, raised, code = (
      time.process_time(), io.StringIO(), io.StringIO(), '', None)
  try:
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
      main.run(row.arguments(folder, workdir))
  except SystemExit as error:
    code = error.code
  except _Hang:
    raised = f'more than {LIMIT_SECS} seconds'
  except BaseException as error:
    raised = ''.join(traceback.format_exception(error))
  finally:
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_FSIZE, files)
    for name, value in past.items():
      del os.environ[name]
      os.environ |= {name: value} if value is not None else {}
    shutil.rmtree(workdir, ignore_errors=True)
  if isinstance(code, str):  # what the interpreter would print
    said.write(code + '\n')
    code = 1
  return {'code': code, 'said': said.getvalue(), 'printed': printed.getvalue(),
          'raised': raised, 'secs': time.process_time() - begun,
          'device': untouched and xla_bridge.backends_are_initialized()}


def _main(folder: str, results: str) -> None:
  with open(results, 'w', encoding='utf-8') as file:
    for index in json.load(sys.stdin):
      found = run(ROWS[index], pathlib.Path(folder),
                  pathlib.Path(results + '.w'))
      file.write(json.dumps([index, found]) + '\n')
      file.flush()


if __name__ == '__main__':
  _main(*sys.argv[1:])
