# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Dr. Zero: a proposer writes questions, a solver learns to answer them.

  python -m searchrl.main --config=configs/drzero.py
  python -m searchrl.main --config=configs/drzero.py:qwen2.5-3b --plan \
      --config.plan.devices=h200-8

Two iterations of: the proposer learns (HRPO) to write what the solver of the
iteration before answers now and then, the best of its proposals become a file,
and the solver learns from it (GRPO). No question of the kind that is evaluated
is read. On the laptop the proposer begins as tiny_proposer, which lessons have
taught the form, and is asked for one or two hops.

Hardware: a core of an AMD EPYC (family 25). Time: 255 to 284 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and .96
.75 .57 .41 after (means of five seeds; names of known parts); with shuffled
answers .84 .04 .00 .00, with as many questions of the world .96 .83 .69 .49. The
untrained proposer's questions teach as much (BENCHMARKS.md says why). At the size
of Qwen2.5: not yet measured.

Source: Dr. Zero, arXiv:2601.07055. Differs: proposals that are ill-formed,
ungrounded, duplicates or tell their answer are dropped; the proposer's prompt
is our own; its optimizer begins anew in each iteration.
"""

import ml_collections

from configs import common
from configs import grpo
from configs import hrpo
from configs import settings
from searchrl.experiment import roles


def get_config(size: str = 'laptop') -> ml_collections.ConfigDict:
  """The config of self-play: what is shared, and a run of each role.

  Args:
    size: 'laptop', 'smoke', or a model of configs/models.py.
  """
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.selfplay:run'
  config.seed = 0  # of both roles, of the seeds and of the world
  config.allow_changes = False  # set by --allow_changes
  is_tiny = settings.is_laptop(size) or size == 'smoke'
  config.selfplay = dict(
      iterations=2,
      hops=(2, 1),  # shares of 1, 2, ... hops asked for
      seeds=576,  # an iteration: documents, drawn from the corpus
      documents=True,  # shown to the proposer; else the hops alone
      document_tokens=90,  # longer documents are cut
      examined=96,  # documents on which a proposer is examined
      one_model=False,  # proposer and solver are one, as in SQLM
  )
  config.proposing = dict(  # of questions for the solver
      seeds=288,  # of the iteration's, from the first on
      samples=3,  # of which the best by its form is taken
      seeds_a_round=96,  # a round is lost where it is killed
      shuffle_answers=False,  # a control: answers of other questions
      check=dict(  # by the solver: right with the evidence, never without
          attempts=0,  # of either; 0: no such check
          from_documents='searchrl.agent.dialogue:laptop_read',
          from_memory='searchrl.agent.dialogue:laptop_answer',
          max_prompt_tokens=440,  # longer evidence is cut
      ),
  )
  config.alarms = dict(  # shares, but for entropy; what speaks for a collapse
      gate=0.2,  # the least that passes
      unique=0.5,  # the least of different questions
      leaking=0.3,  # the most that tell their answer
      unfinished=0.5,  # the most that end at a limit
      entropy=0.01,  # the least of a proposal, in nats a token
  )
  if is_tiny:
    config.proposer, config.solver = _laptop_proposer(size), _laptop_solver(size)
  else:
    config.proposer = hrpo.get_config(f'drzero_proposer/{size}')
    config.solver = grpo.get_config(f'drzero_solver/{size}')
    _as_published(config)
  if size == 'smoke':
    config.selfplay.update(seeds=24, examined=12)
    config.proposing.update(seeds=12, samples=2, seeds_a_round=6)
  _share(config)
  return config


def _laptop_proposer(size: str) -> ml_collections.ConfigDict:
  config = hrpo.get_config(size)
  config.model.path = 'tiny_proposer'
  config.dialogue = 'searchrl.agent.dialogue:laptop_proposer'
  config.reward = 'searchrl.agent.proposals:judge'
  config.reward_options = dict(
      attempts=5,  # of the solver, at a question
      format_weight=0.5,
      difficulty='difficulty',  # or parabola, uncertainty, mixed
  )
  solver = common.get_config(size)
  config.solver = dict(  # who plays for the reward; frozen
      path='tiny_base',
      run='',  # the solver of the iteration before
      dialogue=solver.dialogue,
      budgets=solver.rollout.budgets.to_dict(),
      temperature=1.0,
  )
  config.rollout.questions = 48
  config.rollout.budgets.update(
      max_turns=5, max_turn_tokens=96, max_prompt_tokens=128)
  config.optimizer.learning_rate = 1e-4
  config.train.update(num_steps=12, stop_after=4)
  if size == 'smoke':
    config.rollout.questions = 8
    config.train.num_steps = 2
  return config


def _laptop_solver(size: str) -> ml_collections.ConfigDict:
  config = grpo.get_config(size)
  config.data.evaluate = 'worlds'
  config.search.engine, config.search.options = 'bm25', {}
  config.train.update(num_steps=12, stop_after=8)
  config.evaluate.update(every=0, noise=False, decodings=('greedy',))
  if size == 'smoke':
    config.train.num_steps = 2
  return config


def _as_published(config: ml_collections.ConfigDict) -> None:
  """Section 4 and appendix A: three iterations of 50 steps a role."""
  config.selfplay.update(
      iterations=3, hops=(4, 3, 2, 1), seeds=33_923, document_tokens=256,
      examined=256)
  config.proposing.update(seeds=12_800, samples=5, seeds_a_round=512)
  plain = config.solver.dialogue.startswith('searchrl.agent.dialogue:')
  module = f'searchrl.agent.{"dialogue" if plain else "chat"}'
  config.proposing.check.update(
      from_documents=f'{module}:from_documents',
      from_memory=f'{module}:from_memory', max_prompt_tokens=2048)


def _share(config: ml_collections.ConfigDict) -> None:
  """Takes what both roles share out of them, to the one place that it has."""
  for name in ('data', 'world', 'search', 'plan'):
    config[name] = config.solver[name].copy_and_resolve_references()
  for role in (config.proposer, config.solver):
    for name in ('job', *roles.SHARED):
      del role[name]
