# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rollout metrics: scalars of trajectories, with the field's usual names."""

import collections
from collections.abc import Iterable, Sequence
import itertools

import numpy as np

from searchrl.agent import rewards
from searchrl.trajectory import STOP_REASONS, Trajectory


def describe(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Returns metrics {name: value} of the trajectories of one training step.

  Lengths are in tokens; a response includes the environment's text. A
  trajectory that a failed search ended is left out of rewards, scores, em,
  subem and f1, but counts in all other metrics. The mean of no values is 0.

  The names `critic/`, `response_length/`, `prompt_length/`, `num_turns/` and
  `tool_call_counts/` are those of verl; `env/` is that of Search-R1.
  """
  return (_outcomes(trajectories) | _lengths(trajectories) |
          _actions(trajectories) | _searches(trajectories))


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Returns rewards, scores and their parts, and fractions of stop reasons."""
  values = _spread('critic/score', [
      t.outcome_reward for t in trajectories if t.outcome_reward is not None])
  values |= _spread('critic/rewards', [
      t.reward for t in trajectories if t.reward is not None])
  for source in sorted({t.question.data_source for t in trajectories}):
    scored = [t for t in trajectories if t.question.data_source == source and
              t.stop_reason != 'search_error']
    for score in (rewards.em, rewards.subem, rewards.f1):
      values[f'{score.__name__}/{source}'] = _mean(map(score, scored))
  parts = collections.defaultdict(list)
  for trajectory in trajectories:
    for part, value in trajectory.parts.items():
      parts[part].append(value)
  for part, numbers in sorted(parts.items()):
    values[f'reward/{part}/mean'] = _mean(numbers)
    values[f'reward/{part}/sum'] = float(sum(numbers))
  errors = _mean(t.judge_error is not None for t in trajectories)
  if errors:
    values['reward/judge_error_rate'] = errors
  of_turns = [[reward for reward in t.turn_rewards if reward is not None]
              for t in trajectories if t.turn_rewards is not None]
  if of_turns:
    values |= _spread('reward/turns', [
        reward for rewards in of_turns for reward in rewards])
    values['reward/turns/sum_per_traj'] = _mean(map(sum, of_turns))
  for reason in STOP_REASONS:
    values[f'train/stop_{reason}'] = _mean(
        t.stop_reason == reason for t in trajectories)
  return values


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Returns lengths, and the fraction of tokens that were not sampled."""
  sampled = sum(sum(t.loss_mask) for t in trajectories)
  tokens = sum(len(t.tokens) for t in trajectories)
  return {
      **_spread('prompt_length', [len(t.prompt_tokens) for t in trajectories]),
      **_spread('response_length', [
          len(t.tokens) - len(t.prompt_tokens) for t in trajectories]),
      'response_length/clip_ratio': _mean(
          t.stop_reason == 'length_limit' for t in trajectories),
      'actor/masked_token_frac': 1 - sampled / tokens if tokens else 0.0,
  }


def _actions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Returns metrics of the numbers of turns and of valid actions.

  A summary, which opens a new context, does not count as a turn.
  """
  valid = [[turn.action.kind != 'invalid' for turn in t.turns
            if turn.action.kind != 'summary'] for t in trajectories]
  turns = [*map(len, valid)]
  contexts = [len(t.contexts) for t in trajectories]
  valid_rate = _mean(itertools.chain.from_iterable(valid))
  return {
      **_spread('num_turns', turns),
      **_spread('env/number_of_actions', turns),
      'env/finish_ratio': _mean(
          t.stop_reason == 'answer' for t in trajectories),
      'env/number_of_valid_action': _mean(map(sum, valid)),
      'env/ratio_of_valid_action': valid_rate,
      'format/valid_rate': valid_rate,
      **(_spread('env/number_of_contexts', contexts)
         if max(contexts, default=1) > 1 else {}),
  }


def _searches(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Returns metrics of the searches, and of the passages that were read."""
  searches = [t.searches for t in trajectories]
  turns = [turn for t in trajectories for turn in t.turns]
  read = [turn for turn in turns if turn.observation_tokens]
  passages = sum(len(turn.passages) for turn in read)
  return {
      **_spread('tool_call_counts', searches),
      'env/number_of_valid_search': _mean(searches),
      'search/calls_per_traj': _mean(searches),
      'search/error_rate': _mean(
          t.stop_reason == 'search_error' for t in trajectories),
      'search/retries': _mean(t.retries for t in trajectories),
      'search/obs_tokens': _mean(
          sum(len(turn.observation_tokens) for turn in t.turns)
          for t in trajectories),
      'search/obs_truncated_rate': sum(
          turn.passages_cut for turn in read) / max(passages, 1),
      'search/answer_in_context_rate': _mean(
          rewards.found_gold(t) for t in trajectories),
      **_by_hop(trajectories),
      **_other_tools(trajectories),
  }


def _other_tools(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Returns the numbers of calls and of wrong calls per trajectory, by tool.

  Searches are left out. A call is wrong if the tool says so.
  """
  calls = [(turn.action.kind, turn.is_tool_error) for t in trajectories
           for turn in t.turns if turn.observation_tokens
           and turn.action.is_call and not turn.action.is_search]
  count, values = max(len(trajectories), 1), {}
  for tool in sorted({tool for tool, _ in calls}):
    errors = [is_error for name, is_error in calls if name == tool]
    values[f'tool/{tool}/calls_per_traj'] = len(errors) / count
    values[f'tool/{tool}/wrong_per_traj'] = sum(errors) / count
  return values


def _by_hop(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Returns fractions of the searches that find a gold answer.

  A hop is one of the facts that an answer needs. There is a fraction for the
  last hop, and one for all earlier hops. The nth search of a trajectory counts
  as the search for the nth hop.
  """
  searches = [(_finds_answer(t), t.question.hops) for t in trajectories]
  return {
      'search/answer_rate_last_hop': _mean(
          hit for hits, hops in searches for hit in hits[hops - 1:hops]),
      'search/leak_rate': _mean(
          hit for hits, hops in searches for hit in hits[:hops - 1]),
  }


def _finds_answer(trajectory: Trajectory) -> list[bool]:
  """Returns for each search whether one of its passages has a gold answer."""
  return [any(rewards.cover_match(f'{p.title} {p.text}',
                                  trajectory.question.answers)
              for p in turn.passages)
          for turn in trajectory.turns
          if turn.observation_tokens and turn.action.is_search]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
  """Returns the metrics NAME/mean, NAME/max and NAME/min; 0 without values."""
  return {f'{name}/mean': _mean(values), f'{name}/max': max(values, default=0),
          f'{name}/min': min(values, default=0)}


def _mean(values: Iterable[float]) -> float:
  values = list(values)
  return float(np.mean(values)) if values else 0.0
