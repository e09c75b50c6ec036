# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The full evaluation of a run: 200 questions of each hop count, greedily.

  python -m searchrl.main --config=configs/evaluate.py \
      --config.evaluate.run=runs/dspo
  python -m searchrl.main --config=configs/evaluate.py:suite=methods \
      --workdir=runs/methods
  python -m searchrl.main --config=configs/evaluate.py:suite=trained \
      --seeds=0,1,2 --workdir=runs/trained
  python -m searchrl.main \
      --config=configs/evaluate.py:methods/qwen2.5-7b-instruct \
      --config.data.evaluate=data/test.jsonl --config.search.corpus=data/wiki-18.jsonl

All that no flag names is as in that run. The run may also stand after a colon,
as in --config=configs/evaluate.py:runs/dspo. Without a run, it evaluates the
model of `model.path`, by default the shipped tiny base model. Sampled answers,
random passages and common knowledge have 50 questions of each hop count. The
suite `methods` compares methods, each with the model that its line below names.
With a model after the colon, there are the six methods that need no training. A
run that does not exist has a row that says so. The suite `trained` compares the
methods that train, over the seeds of runs/NAME/seed_N. The job writes
runs/evaluate/table.json and records/.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 121 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, names of known parts, after
dspo.py: .93 .85 .78 .55 (seed 0); sampled, .82 .62 .50 .26. Methods: 124 CPU
seconds, 107 of time; trained, three seeds: 150 CPU seconds (BENCHMARKS.md).
"""

from configs import arguments
from configs import common
from searchrl.experiment.rules import field
import ml_collections


def get_config(text: str = ''):
  run, config = arguments.with_run(text, _evaluation)
  config.evaluate.run = run
  return config


def _evaluation(text: str) -> ml_collections.ConfigDict:
  """Returns the config of a size, a model or a suite."""
  args = arguments.parse(text, suite=('methods', 'trained'))
  config = common.as_evaluated(common.get_config(args.base))
  config.job = 'searchrl.jobs.evaluate:run'
  for name in ('limit', 'mix', 'weights'):
    del config.data[name]  # they draw questions of training
  config.evaluate.update(
      run='',  # run at its newest step, or 'run@12'; '': the model itself
      # Number that is part of the sampling seed: another one draws other
      # samples. It chooses no checkpoint; 'run@12' does.
      step=field(0, at_least=0, below=2**32),
      # Sampled answers per question, for pass@k and the majority.
      samples=field(1, at_least=1),
      methods={},  # method, model and run of each row; {}: only the agent
      order=(),  # order of the rows; the others are compared with the last
      prompts='plain' if args.model else 'laptop',
  )
  if not args.model:  # with a model, the setting's values stay
    config.search.engine = ''  # '': the run's with its options; no run: bm25
  if args.is_laptop:
    config.evaluate.worlds.update(
        questions_per_hop=200, common_per_hop=50, sampled_per_hop=50)
  if suite := args.others['suite']:
    is_untrained = suite == 'methods'
    if args.model and not is_untrained:
      raise ValueError(
          "suite=trained compares the laptop's runs, so that it must not have a "
          f'model, but has {args.model!r}. Name your runs in evaluate.methods.')
    config.evaluate.update(decodings=('greedy',), noise=False)
    methods = _untrained(bool(args.model)) if is_untrained else {}
    if not args.model:
      config.search.engine = 'bm25'
      config.evaluate.worlds.update(kinds=('known', 'famous'), max_hops=3)
      methods |= _trained('' if is_untrained else '/seed_{seed}')
    config.evaluate.update(order=tuple(methods), methods=methods)
  return config


def _untrained(taught: bool) -> dict[str, dict]:
  """Returns the methods that only prompt a model."""
  return {name: _method(
      name, taught=taught or name in ('direct', 'rag', 'ra_agent'))
          for name in ('direct', 'cot', 'rag', 'ircot', 'search_o1', 'ra_agent')}


def _trained(seed: str) -> dict[str, dict]:
  """Returns the methods that train, with the laptop's runs of a seed."""
  return {
      'r1': _method('agent', run=f'runs/r1{seed}'),
      'sft': _method('agent', path=f'runs/sft{seed}/model'),
      'rejection': _method(
          'agent', path=f'runs/rejection{seed}/iteration_2/tuned/model'),
      'dspo': _method('agent', run=f'runs/dspo{seed}')}


def _method(name: str, run: str = '', path: str = '', taught: bool = True
           ) -> dict:
  return dict(
      method=name,  # one of evaluation.baselines, or agent: as it was trained
      path=path,  # path of the model; '': that of the config, model.path
      run=run,  # run at its newest step, or 'run@12'; '': the model itself
      # Whether the model can follow the method's prompt: it was trained on it,
      # or is no tiny base.
      taught=taught,
  )
