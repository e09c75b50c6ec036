# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trajectories in, scalars out, under the names that the field plots."""

from collections.abc import Iterable, Sequence

import numpy as np

from searchrl.agent import rewards
from searchrl.trajectory import STOP_REASONS, Trajectory


def describe(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """What the trajectories of a step were like, under the field's names.

  Lengths are in tokens; what the environment inserted counts in a response.
  A trajectory whose search failed has no score and no em, but counts in all
  else. The mean of nothing is 0.

  Names: verl's `critic/`, `response_length/`, `prompt_length/`, `num_turns/`
    and `tool_call_counts/`; Search-R1's `env/`.
  """
  return (_outcomes(trajectories) | _lengths(trajectories) | _actions(trajectories) |
          _searches(trajectories))


def _outcomes(trajectories) -> dict[str, float]:
  """Scores, and why trajectories ended."""
  values = _spread('critic/score', [
      g.outcome_reward for g in trajectories if g.outcome_reward is not None])
  values |= _spread('critic/rewards', [
      g.reward for g in trajectories if g.reward is not None])
  for source in sorted({g.question.data_source for g in trajectories}):
    judged = [g for g in trajectories if g.question.data_source == source and
              g.stop_reason != 'search_error']
    for score in (rewards.em, rewards.subem, rewards.f1):
      values[f'{score.__name__}/{source}'] = _mean(map(score, judged))
  for reason in STOP_REASONS:
    values[f'train/stop_{reason}'] = _mean(
        g.stop_reason == reason for g in trajectories)
  return values


def _lengths(trajectories) -> dict[str, float]:
  """Tokens, and the share of them that the policy did not sample."""
  sampled = sum(sum(g.loss_mask) for g in trajectories)
  tokens = sum(len(g.tokens) for g in trajectories)
  return {
      **_spread('prompt_length', [len(g.prompt_tokens) for g in trajectories]),
      **_spread('response_length', [
          len(g.tokens) - len(g.prompt_tokens) for g in trajectories]),
      'response_length/clip_ratio': _mean(
          g.stop_reason == 'length_limit' for g in trajectories),
      'actor/masked_token_frac': 1 - sampled / tokens if tokens else 0.0,
  }


def _actions(trajectories) -> dict[str, float]:
  """Turns, and how many of them said something that could be parsed."""
  turns = [len(g.turns) for g in trajectories]
  valid = [[t.action.kind != 'invalid' for t in g.turns] for g in trajectories]
  valid_rate = _mean(v for its in valid for v in its)
  return {
      **_spread('num_turns', turns),
      **_spread('env/number_of_actions', turns),
      'env/finish_ratio': _mean(g.stop_reason == 'answer' for g in trajectories),
      'env/number_of_valid_action': _mean(map(sum, valid)),
      'env/ratio_of_valid_action': valid_rate,
      'format/valid_rate': valid_rate,
  }


def _searches(trajectories) -> dict[str, float]:
  """Searches that were carried out, and what the policy was shown."""
  searches = [g.searches for g in trajectories]
  read = [t for g in trajectories for t in g.turns if t.observation_tokens]
  shown = sum(len(t.passages) for t in read)
  return {
      **_spread('tool_call_counts', searches),
      'env/number_of_valid_search': _mean(searches),
      'search/calls_per_traj': _mean(searches),
      'search/error_rate': _mean(
          g.stop_reason == 'search_error' for g in trajectories),
      'search/retries': _mean(g.retries for g in trajectories),
      'search/obs_tokens': _mean(
          sum(len(t.observation_tokens) for t in g.turns) for g in trajectories),
      'search/obs_truncated_rate': sum(
          t.passages_cut for t in read) / max(shown, 1),
      'search/answer_in_context_rate': _mean(map(_answer_seen, trajectories)),
  }


def _answer_seen(trajectory: Trajectory) -> bool:
  """Whether a gold stands in a passage that the policy was shown."""
  shown = rewards.normalise(' '.join(
      f'{p.title} {p.text}' for turn in trajectory.turns if turn.observation_tokens
      for p in turn.passages))
  golds = map(rewards.normalise, trajectory.question.answers)
  return any(gold and gold in shown for gold in golds)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
  """{name/mean, name/max, name/min} of the values; of none, 0."""
  return {f'{name}/mean': _mean(values), f'{name}/max': max(values, default=0),
          f'{name}/min': min(values, default=0)}


def _mean(values: Iterable[float]) -> float:
  values = list(values)
  return float(np.mean(values)) if values else 0.0
