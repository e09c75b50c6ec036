# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Dr. Zero: a proposer writes questions, a solver learns to answer them.

  python -m searchrl.main --config=configs/drzero.py
  python -m searchrl.main --config=configs/drzero.py:qwen2.5-3b --plan \
      --config.plan.devices=h200-8

Each of two iterations has three steps. First the proposer learns with HRPO to
write questions that the previous iteration's solver answers sometimes. Then its
best proposals are written to a file. Last, the solver learns from this file
with GRPO. Neither of them is given questions like those of the evaluation. On
the laptop the proposer starts as tiny_proposer, which has learned the form of a
proposal from lessons, and writes questions of one or two hops.

Hardware: a core of an AMD EPYC (family 25). Time: 255 to 284 CPU seconds.
Result: exact match of greedy answers, 1 to 4 hops, .94 .00 .00 .00 before and
.96 .75 .57 .41 after (means of five seeds; names of known parts); with shuffled
answers .84 .04 .00 .00, with as many questions of the world .96 .83 .69 .49.
The untrained proposer's questions teach as much (BENCHMARKS.md says why). At
the size of Qwen2.5: not yet measured.

Source: Dr. Zero, arXiv:2601.07055. Differs: proposals are dropped if they are
ill-formed, ungrounded, duplicates or contain their answer; the proposer's
prompt is our own; its optimizer starts anew in each iteration.
"""

import copy

import ml_collections

from configs import arguments
from configs import common
from configs import grpo
from configs import hrpo
from searchrl.experiment.rules import field, seed
from searchrl.papers.dr_zero import roles


def share(default: float):
  return field(default, at_least=0, at_most=1)


def get_config(text: str = '') -> ml_collections.ConfigDict:
  """Returns the config of self-play: shared options and a run of each role.

  Args:
    text: A size or a model, as in configs/arguments.py.
  """
  args = arguments.parse(text, setting=())
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.papers.dr_zero.selfplay:run'
  # Seed of both roles, of the drawn documents and of the world.
  config.seed = seed(0)
  config.allow_changes = False  # set by --allow_changes
  config.selfplay = dict(
      iterations=field(2, at_least=1),
      hops=(2, 1),  # shares of proposals with 1, 2, ... hops
      # Documents drawn from the corpus per iteration.
      seeds=field(576, at_least=1),
      documents=True,  # the proposer reads a document; False: the hops only
      # Tokens of a document; longer ones are cut.
      document_tokens=field(90, at_least=1),
      # Documents on which a proposer is evaluated.
      examined=field(96, at_least=1),
      one_model=False,  # True: proposer and solver are one model, as in SQLM
  )
  config.proposing = dict(  # writing of questions for the solver
      seeds=288,  # number of the iteration's documents used, the first ones
      # Proposals per document; the best by its form is taken.
      samples=field(3, at_least=1),
      # Documents per round; a kill loses one round.
      seeds_a_round=field(96, at_least=1),
      shuffle_answers=False,  # True, a control: answers of other questions
      # Answers of the frozen solver in place of the proposer's.
      majority=dict(
          # Attempts at each question, of which the most common answer is taken.
          attempts=field(0, zero="the proposer's answers"),
          least=share(0.0),  # least share of attempts that agree with it
          most=share(1.0),  # largest share
      ),
      check=dict(  # the solver must be right with the evidence, never without
          # Attempts with and without evidence each.
          attempts=field(0, zero='no check'),
          from_documents='searchrl.agent.dialogue:laptop_read',
          from_memory='searchrl.agent.dialogue:laptop_answer',
          max_prompt_tokens=440,  # tokens of the prompt; longer evidence is cut
      ),
  )
  config.alarms = dict(  # signs of a collapse, as shares except for entropy
      gate=share(0.2),  # least share of proposals that pass the gate
      unique=share(0.5),  # least share of different questions
      leaking=share(0.3),  # largest share of proposals with their answer
      unfinished=share(0.5),  # largest share of proposals that end at a limit
      entropy=share(0.01),  # least entropy of a proposal, in nats per token
  )
  if args.size:
    config.proposer, config.solver = (
        _laptop_proposer(args.size), _laptop_solver(args.size))
  else:
    config.proposer = hrpo.get_config(f'drzero_proposer/{args.model}')
    config.solver = grpo.get_config(f'drzero_solver/{args.model}')
    _as_published(config)
  if args.size == 'smoke':
    config.selfplay.update(seeds=24, examined=12)
    config.proposing.update(seeds=12, samples=2, seeds_a_round=6)
  _share(config)
  return config


def _laptop_proposer(size: str) -> ml_collections.ConfigDict:
  config = hrpo.get_config(size)
  config.model.path = 'tiny_proposer'
  config.dialogue = 'searchrl.papers.dr_zero.dialogues:laptop'
  config.reward = 'searchrl.papers.dr_zero.proposals:judge'
  config.reward_options = dict(
      attempts=5,  # attempts of the solver per question
      format_weight=0.5,
      difficulty='difficulty',  # difficulty, parabola, uncertainty or mixed
      golds='proposer',  # right answers: the proposer's, or the majority's
      repetition=0.0,  # weight of the share of similar questions of a round
  )
  solver = common.get_config(size)
  config.solver = dict(  # frozen solver that answers for the reward
      path='tiny_base',
      run='',  # run of the previous iteration's solver
      dialogue='searchrl.agent.dialogue:laptop',
      budgets=solver.rollout.budgets.to_dict(),
      temperature=1.0,
  )
  config.rollout.questions_per_step = 48
  config.rollout.budgets.update(
      max_turns=5, max_new_tokens=96, max_prompt_tokens=128)
  config.optimizer.learning_rate = 1e-4
  config.train.update(num_steps=12, stop_after=4)
  if size == 'smoke':
    config.rollout.questions_per_step = 8
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
  """Sets section 4's and appendix A's values: 3 iterations, 50 steps a role."""
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
  """Moves the options that both roles share to the top level of the config."""
  for name in ('data', 'world', 'search', 'plan'):
    config[name] = copy.deepcopy(config.solver[name])
  for role in (config.proposer, config.solver):
    for name in roles.SHARED:
      del role[name]
