# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Dr. Zero's rivals and ablations: what each changes in configs/drzero.py.

  python -m searchrl.main --config=configs/drzero_rivals.py:nested_grpo \
      --workdir=runs/nested_grpo
  python -m searchrl.main --config=configs/drzero_rivals.py:r_zero/qwen2.5-3b --plan

After the name of a rival stands a size of drzero.py; laptop, if there is none.
All see documents, unless their name says otherwise, and have their answers from
the proposer.

Hardware: a core of an AMD EPYC (family 25). Time: 215 to 510 CPU seconds. Result:
but for sqlm (.37) none differs separably from drzero.py (.76, mean of 1 to 4 hops)
by .05 in greedy exact match; without_document loses .18 of sampled. Three seeds
each; BENCHMARKS.md has the tables.

Source: Dr. Zero, arXiv:2601.07055, Tables 2, 4, 7 and 8; R-Zero, arXiv:
2508.05004; SQLM, arXiv:2508.03682. Differs: R-Zero has no penalty of
repetitions, and neither it nor SQLM takes the answers of most solvers for right.
"""

from configs import drzero


def nested_grpo(config) -> None:
  """Four questions a document, each tried four times: 20 rollouts, not 6."""
  config.proposer.algorithm.name = 'searchrl.rl.algorithms:grpo'
  config.proposer.rollout.group_size = 4
  config.proposer.reward_options.attempts = 4


def nested_grpo_equal(config) -> None:
  """The same on fewer documents, so that it spends no more rollouts."""
  nested_grpo(config)
  config.proposer.rollout.questions = config.proposer.rollout.questions * 6 // 20


def r_zero(config) -> None:
  """R-Zero with search: uncertainty is the whole reward."""
  nested_grpo_equal(config)
  config.proposer.reward_options.update(
      difficulty='uncertainty', format_weight=0.0)


def sqlm(config) -> None:
  """SQLM with search: one model is both, rewarded where attempts disagree."""
  nested_grpo_equal(config)
  config.proposer.reward_options.update(difficulty='mixed', format_weight=0.0)
  config.selfplay.one_model = True
  config.solver.model.path = config.proposer.model.path
  config.proposer.solver.path = ''  # itself, as it starts


def parabola(config) -> None:
  """The reward is highest where half of the attempts are right."""
  config.proposer.reward_options.difficulty = 'parabola'


def without_format(config) -> None:
  """Difficulty is the whole reward, of what passes the gate."""
  config.proposer.reward_options.format_weight = 0.0


def without_document(config) -> None:
  """The proposer is told no more than the hops."""
  config.selfplay.documents = False


def longer(config) -> None:
  """Twice the steps an iteration: 100 for 50."""
  config.selfplay.seeds *= 2
  config.proposing.seeds *= 2
  for phase in (config.proposer, config.solver):
    phase.train.num_steps *= 2


def ratio_1111(config) -> None:
  """As many questions of four hops as of one."""
  config.selfplay.hops = (1, 1, 1, 1)


def ratio_2111(config) -> None:
  """Twice as many of one hop as of two, three or four."""
  config.selfplay.hops = (2, 1, 1, 1)


def untrained(config) -> None:
  """A control: the proposer stays as it is."""
  config.proposer.train.num_steps = 0


def shuffled(config) -> None:
  """A control: each question has the answer of another; nothing can be right."""
  config.proposing.shuffle_answers = True
  config.solver.train.stop_after = config.proposer.train.stop_after = 0


RIVALS = {function.__name__: function for function in (
    nested_grpo, nested_grpo_equal, r_zero, sqlm, parabola, without_format,
    without_document, longer, ratio_1111, ratio_2111, untrained, shuffled)}


def get_config(size: str = 'nested_grpo'):
  name, _, size = size.partition('/')
  if name not in RIVALS:
    raise ValueError(
        f'size must be one of {", ".join(RIVALS)}, perhaps with a size of '
        f'drzero.py after a slash, but is {name!r}.')
  config = drzero.get_config(size or 'laptop')
  RIVALS[name](config)
  return config
