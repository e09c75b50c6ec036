# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""A laptop world that needs tools: long documents, sums and differences.

  python -m searchrl.main --config=configs/archive.py
  python -m searchrl.main --config=configs/archive.py:arm=no_open \
      --workdir=runs/archive

The phases, each in a folder of runs/archive and each with a config of its own:

  data     documents about towns, questions, demonstrations of other archives
  tune     the tiny base on the demonstrations (configs/sft.py)
  all      RL with every tool from the tuned model, or another arm
  report   one page of the run (configs/report.py)

A search shows the first sentence of a document, which has the numbers of a
town's people and houses. Facts are on the first page of the document (near) or
on later ones (deep). Other questions ask for the sum or the difference of the
two numbers. Demonstrations show every skill, but their agent opens documents,
reads on and calculates only sometimes (habits), and else guesses. RL has to
find out that tools pay.

An arm changes the RL alone: without a tool, with random outputs of tools, or
with tools of which a quarter of the calls fails. ARMS says what each changes.

Hardware: 2 CPU cores. Results: benchmarks/archive/README.md.
"""

from typing import Any

import ml_collections

from configs import arguments
from configs import grpo
from configs import report
from configs import sft
from searchrl.experiment.rules import field
from searchrl.jobs.archive_data import SETS

_DATA = '{workdir}/data'
_WINDOW = 40  # tokens per page; two or three sentences
# What an arm changes in the config of RL.
ARMS: dict[str, dict[str, Any]] = dict(
    all={},
    no_open=dict(tools=('search', 'calculate'), tool_options={}),
    no_calculate=dict(tools=('search', 'open')),
    random=dict(
        tools=('search', 'open', 'calculate'),
        tool_options=dict(
            open=dict(tool='searchrl.toolbox.controls:random_document',
                      window_tokens=_WINDOW),
            calculate=dict(tool='searchrl.toolbox.controls:random_number'))),
    failing=dict(
        tools=('search', 'open', 'calculate'),
        tool_options=dict(
            open=dict(tool='searchrl.toolbox.controls:failing', of='open',
                      options=dict(window_tokens=_WINDOW)),
            calculate=dict(tool='searchrl.toolbox.controls:failing',
                           of='calculate'))))


def get_config(text: str = '') -> ml_collections.ConfigDict:
  args = arguments.parse(
      text, size=('laptop',), model=(), setting=(), arm=tuple(ARMS),
      phase=('data', 'tune', *ARMS, 'report'))
  phase = args.others['phase']
  arm = args.others['arm'] or (phase if phase in ARMS else 'all')
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.phases:run'
  config.seed = 0  # random seed of all phases
  config.allow_changes = False  # set by the flag --allow_changes
  phases = {'data': _data(), 'tune': _tune(), arm: _rl(arm),
            'report': report.get_config(f'{{workdir}}/{arm}')}
  config.order = (phase,) if phase else tuple(phases)
  config.phases = phases
  for part in phases.values():  # one field sets those of all phases
    if 'seed' in part:
      part.seed = config.get_ref('seed')
  return config


def _converses(config: ml_collections.ConfigDict) -> None:
  """Gives a config the conversation that all phases share."""
  config.dialogue = 'searchrl.agent.dialogue:laptop'
  config.tools = ('search', 'open', 'calculate')
  config.tool_options = dict(open=dict(window_tokens=_WINDOW))
  config.search.engine = 'snippets'
  config.search.options = dict(engine=dict(name='bm25'))
  config.rollout.max_length = 512
  config.rollout.budgets.update(
      max_turns=6, max_new_tokens=48, max_prompt_tokens=64, top_k=1,
      passage_tokens=72)


def _data() -> ml_collections.ConfigDict:
  config = grpo.get_config()
  for name in {*config} - {'seed', 'allow_changes', 'model', 'search',
                           'dialogue', 'rollout', 'tools', 'tool_options'}:
    del config[name]
  config.job = 'searchrl.jobs.archive_data:run'
  _converses(config)
  config.archive = dict(
      towns=field(250, at_least=20),
      # Share of the towns that only test questions ask about.
      test_share=field(0.4, above=0, below=1),
      train_per_kind=field(140, at_least=1),  # questions of each of four kinds
      test_per_kind=field(60, at_least=1),
      demonstrations=field(6000, at_least=1),
      # Probabilities that the demonstrations' agent uses a tool.
      habits=dict(opens=field(0.5, at_least=0, at_most=1),
                  reads_on=field(0.5, at_least=0, at_most=1),
                  calculates=field(0.4, at_least=0, at_most=1)))
  return config


def _tune() -> ml_collections.ConfigDict:
  config = sft.get_config()
  del config.dialogue, config.data['demonstrations']
  config.data.update(train=f'{_DATA}/demonstrations.jsonl',
                     validation_share=0.04)
  config.train.update(epochs=1, validate_every=0)
  config.batch.documents = 16
  config.optimizer.learning_rate = 1.5e-3  # digits are new to the tiny base
  return config


def _rl(arm: str) -> ml_collections.ConfigDict:
  """Returns the config of an arm: reinforcement learning from the tuned model.
  """
  config = grpo.get_config()
  _converses(config)
  config.model.path = '{workdir}/tune/model'
  config.search.corpus = f'{_DATA}/corpus.jsonl'
  config.data.train = f'{_DATA}/train.jsonl'
  config.data.mix = ()
  config.data.evaluate = ','.join(
      f'{name}={_DATA}/test_{name}.jsonl' for name in SETS)
  config.evaluate.update(noise=False, decodings=('greedy',), every=0, limit=0,
                         num_sets_during=0, initial=arm in ('all', 'random'))
  config.train.num_steps = 24
  for name, value in ARMS[arm].items():
    config[name] = value
  return config
