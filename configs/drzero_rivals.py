# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Dr. Zero's rivals and ablations, as changes to configs/drzero.py.

  python -m searchrl.main --config=configs/drzero_rivals.py:rival=nested_grpo \
      --workdir=runs/nested_grpo
  python -m searchrl.main \
      --config=configs/drzero_rivals.py:rival=r_zero,model=qwen2.5-3b --plan

It takes the sizes and models of drzero.py, too. All proposers see documents,
unless the rival's name says otherwise. The answers are those of the proposer,
except for r_zero and sqlm. With a model, the ablations of Table 7 have one
iteration, and one_iteration is its first row.

Hardware: a core of an AMD EPYC (family 25). Time: 215 to 510 CPU seconds.
Result: except for sqlm (.37) none differs separably from drzero.py (.76, mean
of 1 to 4 hops) by .05 in greedy exact match; without_document loses .18 of
sampled. Three seeds each; BENCHMARKS.md has the tables. r_zero and sqlm were
measured with the proposer's answers, and reinforce_plus_plus was not measured.

Source: Dr. Zero, arXiv:2601.07055, Tables 2, 4, 7 and 8; R-Zero, arXiv:
2508.05004; SQLM, arXiv:2508.03682. Differs: both search, as in Table 2; their
proposers see documents, and their questions are filtered as Dr. Zero's.
"""

from configs import arguments
from configs import drzero
from searchrl.papers import settings
from searchrl.papers.dr_zero import roles
from searchrl.papers.known_models import MODELS


def nested_grpo(config) -> None:
  """Asks 4 questions per document, each tried 4 times: 20 rollouts, not 6."""
  config.proposer.algorithm.name = 'searchrl.rl.algorithms:grpo'
  config.proposer.rollout.group_size = 4
  config.proposer.reward_options.attempts = 4


def nested_grpo_equal(config) -> None:
  """Makes `nested_grpo` on fewer documents, which takes no more rollouts."""
  nested_grpo(config)
  config.proposer.rollout.questions_per_step = (
      config.proposer.rollout.questions_per_step * 6 // 20)


def r_zero(config) -> None:
  """Makes R-Zero with search: uncertain majorities, less repeated questions.

  The solver learns the majority of ten attempts, if three to seven agree.
  """
  nested_grpo_equal(config)
  config.proposer.reward_options.update(
      difficulty='uncertainty', format_weight=0.0, golds='majority',
      repetition=1.0)
  config.proposing.majority.update(attempts=10, least=0.25, most=0.75)


def sqlm(config) -> None:
  """Makes SQLM with search: one model, rewarded where attempts disagree.

  Its answers are right where they are those of the majority of their group.
  """
  nested_grpo_equal(config)
  config.proposer.reward_options.update(
      difficulty='mixed', format_weight=0.0, golds='majority')
  config.solver.reward = 'searchrl.papers.dr_zero.rivals:agreement'
  config.selfplay.one_model = True
  config.solver.model.path = config.proposer.model.path
  config.proposer.solver.path = ''  # the proposer itself, as it starts


def reinforce_plus_plus(config) -> None:
  """Trains the proposer with one baseline for all questions, not per hops."""
  config.proposer.algorithm.name = 'searchrl.rl.algorithms:reinforce_plus_plus'


def one_iteration(config) -> None:
  """Makes the first row of Table 7: all as in drzero.py, but once."""
  config.selfplay.iterations = 1


def parabola(config) -> None:
  """Makes the reward highest where half of the attempts are right."""
  config.proposer.reward_options.difficulty = 'parabola'


def without_format(config) -> None:
  """Makes difficulty the whole reward of proposals that pass the gate."""
  config.proposer.reward_options.format_weight = 0.0


def without_document(config) -> None:
  """Shows the proposer only the number of hops."""
  config.selfplay.documents = False


def longer(config) -> None:
  """Doubles the documents and the steps of an iteration.

  At the paper's size, these are 100 steps instead of 50, with 3 of warm-up.
  """
  config.selfplay.seeds *= 2
  config.proposing.seeds *= 2
  for phase in (config.proposer, config.solver):
    phase.train.num_steps *= 2


def ratio_1111(config) -> None:
  """Asks for as many questions of four hops as of one."""
  config.selfplay.hops = (1, 1, 1, 1)


def ratio_2111(config) -> None:
  """Asks for twice as many questions of one hop as of two, three or four."""
  config.selfplay.hops = (2, 1, 1, 1)


def untrained(config) -> None:
  """Makes a control: the proposer is not trained."""
  config.proposer.train.num_steps = 0


def shuffled(config) -> None:
  """Makes a control: each question has another's answer; none can be right."""
  config.proposing.shuffle_answers = True
  config.solver.train.stop_after = config.proposer.train.stop_after = 0


RIVALS = {function.__name__: function for function in (
    nested_grpo, nested_grpo_equal, r_zero, sqlm, reinforce_plus_plus,
    one_iteration, parabola, without_format, without_document, longer,
    ratio_1111, ratio_2111, untrained, shuffled)}
TABLE_7 = ('parabola', 'without_format', 'without_document', 'longer')


def get_config(text: str = ''):
  args = arguments.parse(text, setting=(), rival=tuple(RIVALS))
  config = drzero.get_config(args.base)
  rival = args.others['rival'] or 'nested_grpo'
  RIVALS[rival](config)
  if args.model and rival in TABLE_7:
    one_iteration(config)
  for role in roles.ROLES if args.model else ():
    settings.follow_steps(
        config[role], f'drzero_{role}', MODELS[args.model])
  return config
