# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trajectories in, scalars out, under the names that the field plots."""

from collections.abc import Sequence

import numpy as np

from searchrl.agent import rewards
from searchrl.trajectory import STOP_REASONS, Trajectory


def describe(games: Sequence[Trajectory]) -> dict[str, float]:
  """What the trajectories of a step were like, under the field's names."""
  scores = [g.outcome_reward for g in games if g.outcome_reward is not None]
  earned = [g.reward for g in games if g.reward is not None]
  lengths = [len(g.tokens) - len(g.prompt_tokens) for g in games]
  turns = [len(g.turns) for g in games]
  searches = [g.searches for g in games]
  actions = [t.action for g in games for t in g.turns]
  valid = np.mean([a.kind != 'invalid' for a in actions]) if actions else 0.0
  reasons = [g.stop_reason for g in games]
  sampled = sum(sum(g.loss_mask) for g in games)
  return {
      'critic/score/mean': np.mean(scores) if scores else 0.0,
      'critic/rewards/mean': np.mean(earned) if earned else 0.0,
      'response_length/mean': np.mean(lengths),
      'response_length/max': np.max(lengths),
      'response_length/clip_ratio': reasons.count('length_limit') / len(games),
      'num_turns/mean': np.mean(turns),
      'env/number_of_actions/mean': np.mean(turns),
      'env/number_of_actions/max': np.max(turns),
      'env/number_of_actions/min': np.min(turns),
      'env/finish_ratio': reasons.count('answer') / len(games),
      'env/number_of_valid_action': np.mean(
          [sum(t.action.kind != 'invalid' for t in g.turns) for g in games]),
      'env/ratio_of_valid_action': valid,
      'env/number_of_valid_search': np.mean(searches),
      'search/calls_per_traj': np.mean(searches),
      'search/error_rate': reasons.count('search_error') / len(games),
      'search/answer_in_context_rate': np.mean([_answer_seen(g) for g in games]),
      'format/valid_rate': valid,
      'actor/masked_token_frac': 1 - sampled / max(
          sum(len(g.tokens) for g in games), 1),
  } | {f'train/stop_{reason}': reasons.count(reason) / len(games)
       for reason in STOP_REASONS}


def _answer_seen(game: Trajectory) -> bool:
  """Whether a gold stands in a passage that the policy was shown."""
  shown = rewards.normalise(' '.join(
      f'{p.title} {p.text}' for turn in game.turns for p in turn.passages))
  golds = map(rewards.normalise, game.question.answers)
  return any(gold and gold in shown for gold in golds)
