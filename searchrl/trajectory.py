# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Question, Passage, Turn, Trajectory, Scores and Batch; `pack` makes the last.

A trajectory is token ids, born with their log-probs; every mask derives from
who wrote a token: the prompt, the policy (an action) or the environment (an
observation). Nothing here decodes or encodes text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Literal

import jax
from jaxtyping import Array, Bool, Float, Int
import numpy as np

ActionKind = Literal['search', 'answer', 'invalid']
StopReason = Literal['answer', 'turn_limit', 'length_limit', 'search_error']
STOP_REASONS = ('answer', 'turn_limit', 'length_limit', 'search_error')


@dataclasses.dataclass(frozen=True)
class Question:
  """What is asked, and what counts as right."""

  uid: str  # unique over the whole data set; names the question's randomness
  text: str
  answers: tuple[str, ...]  # any of them is right; the first is the canonical
  hops: int = 1  # facts that the answer takes; a baseline's group in HRPO
  data_source: str = 'unknown'  # the data set, as evaluation reports it


@dataclasses.dataclass(frozen=True)
class Request:
  """One trajectory that is asked for."""

  question: Question
  sample: int = 0  # which of the question's samples; part of the randomness
  group: int = 0  # of the samples asked for together; no part of it


@dataclasses.dataclass(frozen=True)
class Passage:
  """One document of a corpus, as an engine returns it."""

  id: str
  title: str
  text: str
  score: float = 0.0  # float32 whatever the storage; higher is better


@dataclasses.dataclass(frozen=True)
class Query:
  """What the policy asked an engine, and on whose behalf."""

  text: str
  top_k: int
  # Most engines read no more than the text. Those that do are functions of
  # what follows, so that they answer alike after a resume and on any host.
  question: Question
  step: int = 0  # of the run
  sample: int = 0  # of the question
  turn: int = 0  # of the trajectory that asks, from 0
  turns: tuple[Turn, ...] = ()  # of that trajectory, the one that asks the last


@dataclasses.dataclass(frozen=True)
class SearchError:
  """A search that failed: a typed outcome, never text that the policy reads."""

  kind: str  # 'timeout', 'unavailable', 'bad_response', ...
  detail: str = ''


Passages = tuple[Passage, ...]
SearchFn = Callable[[Sequence[Query]], Sequence[Passages | SearchError]]


@dataclasses.dataclass(frozen=True)
class Action:
  """What a turn's sampled text means."""

  kind: ActionKind
  texts: tuple[str, ...] = ()  # the queries, or the one answer; stripped


@dataclasses.dataclass(frozen=True)
class Turn:
  """What the policy wrote, and what the environment answered."""

  action_tokens: tuple[int, ...]  # sampled, the stop token included; trained on
  action_logprobs: tuple[float, ...]  # nats, as drawn, at the temperature
  action: Action  # parsed from the action tokens alone
  observation_tokens: tuple[int, ...] = ()  # inserted by the environment
  passages: Passages = ()  # what the search returned, in order
  passages_cut: int = 0  # of them, cut to the token budget
  # For rewards and readers; '' in records that are older than these fields.
  text: str = ''  # the action tokens, decoded without special tokens
  observation: str = ''  # the observation tokens, likewise


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One sample's whole conversation about one question."""

  question: Question
  sample: int  # which of the question's group, from 0
  policy_step: int  # updates the policy had seen when it sampled this
  prompt_tokens: tuple[int, ...]
  turns: tuple[Turn, ...] = ()
  stop_reason: StopReason | None = None  # None while it is being sampled
  reward: float | None = None  # what is trained on; None: none can be computed
  outcome_reward: float | None = None  # what the filter reads
  retries: int = 0  # times it was sampled again after a failed search
  group: int = 0  # of the request: samples that were asked for together
  search_error: SearchError | None = None  # why, if a search ended it
  prompt: str = ''  # the prompt tokens, decoded without special tokens
  parts: Mapping[str, float] = dataclasses.field(  # of the scores
      default_factory=dict, hash=False)

  @property
  def response(self) -> str:
    """The text after the prompt: what the policy said, and what it read."""
    return ''.join(turn.text + turn.observation for turn in self.turns)

  @property
  def tokens(self) -> tuple[int, ...]:
    """Prompt, then each turn's action and observation: what the policy saw."""
    ids = list(self.prompt_tokens)
    for turn in self.turns:
      ids += turn.action_tokens
      ids += turn.observation_tokens
    return tuple(ids)

  @property
  def loss_mask(self) -> tuple[bool, ...]:
    """True where the policy sampled the token; aligned with `tokens`."""
    mask = [False] * len(self.prompt_tokens)
    for turn in self.turns:
      mask += [True] * len(turn.action_tokens)
      mask += [False] * len(turn.observation_tokens)
    return tuple(mask)

  @property
  def behavior_logprobs(self) -> tuple[float, ...]:
    """Nats at sampled tokens, 0 elsewhere; aligned with `tokens`."""
    logprobs = [0.0] * len(self.prompt_tokens)
    for turn in self.turns:
      logprobs += turn.action_logprobs
      logprobs += [0.0] * len(turn.observation_tokens)
    return tuple(logprobs)

  @property
  def searches(self) -> int:
    """Turns whose search was carried out."""
    return sum(turn.action.kind == 'search' for turn in self.turns
               if turn.observation_tokens)

  @property
  def answer(self) -> str | None:
    """The text of the answer action, or None where none was given."""
    for turn in reversed(self.turns):
      if turn.action.kind == 'answer':
        return turn.action.texts[-1]
    return None


@dataclasses.dataclass(frozen=True)
class Scores:
  """What a trajectory is worth."""

  reward: float  # what is trained on
  outcome: float | None = None  # what the filter reads; None: config.outcome
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # plotted


def to_json(trajectory: Trajectory) -> dict[str, Any]:
  """A plain dict that `from_json` reads back without loss."""
  return dataclasses.asdict(trajectory)


def from_json(record: dict[str, Any]) -> Trajectory:
  """The inverse of `to_json`, also after a round trip through JSON text.

  Fields that a record lacks, being older than they, get their defaults.
  """
  question = dict(record['question'])
  question['answers'] = tuple(question['answers'])
  turns = []
  for turn in record['turns']:
    action = Action(turn['action']['kind'], tuple(turn['action']['texts']))
    turns.append(Turn(**{
        **turn,
        'action_tokens': tuple(turn['action_tokens']),
        'action_logprobs': tuple(turn['action_logprobs']),
        'action': action,
        'observation_tokens': tuple(turn['observation_tokens']),
        'passages': tuple(Passage(**p) for p in turn['passages']),
    }))
  error = record.get('search_error')
  return Trajectory(**{
      **record,
      'search_error': SearchError(**error) if error else None,
      'question': Question(**question),
      'prompt_tokens': tuple(record['prompt_tokens']),
      'turns': tuple(turns),
  })


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Trajectories side by side; entry t of every row belongs to tokens[:, t].

  Rows that only fill the batch have an empty loss mask and are neither in a
  baseline nor in the loss.
  """

  tokens: Int[Array, 'B T']  # right-padded with the tokenizer's pad id
  loss_mask: Bool[Array, 'B T']  # True where the policy sampled the token
  behavior_logprobs: Float[Array, 'B T']  # nats, from the sampler; 0 elsewhere
  rewards: Float[Array, 'B']  # what is trained on
  outcome_rewards: Float[Array, 'B']  # what the filter reads
  question_ids: Int[Array, 'B']  # rows of one question, in [0, B)
  group_ids: Int[Array, 'B']  # rows that share a baseline, in [0, B)
  in_baseline: Bool[Array, 'B']  # counts in its group's mean and spread
  in_loss: Bool[Array, 'B']  # is trained on
  on_policy: Bool[Array, 'B']  # sampled by the policy this batch updates
  old_logprobs: Float[Array, 'B T'] | None = None  # nats; learner.score
  ref_logprobs: Float[Array, 'B T'] | None = None  # nats; learner.score
  values: Float[Array, 'B T'] | None = None  # of the critic; learner.score
  weights: Float[Array, 'B T'] | None = None  # in `algorithms.sft`; None: 1

  @property
  def lengths(self) -> Int[Array, 'B']:
    """Index of the last sampled token plus one; 0 for an empty row."""
    last = self.loss_mask.shape[1] - self.loss_mask[:, ::-1].argmax(1)
    return last * self.loss_mask.any(1)


def collate(
    trajectories: Sequence[Trajectory],
    *,
    group_ids: Sequence[Any],
    policy_step: int,
    length: int,
    rows: int | None = None,
    pad_id: int = 0,
    mask_truncated: bool = False,
) -> Batch:
  """Copies trajectories into arrays of fixed shapes, on the host, in order.

  Args:
    trajectories: finished, with rewards. Observations after the last action
      are cut, because nothing is learned from them.
    group_ids: one hashable per trajectory; equal ones share a baseline.
    policy_step: number of updates of the policy that this batch will train;
      rows of an earlier policy are marked off-policy.
    length: T, in tokens.
    rows: B; missing rows are empty. Default: one per trajectory.
    pad_id: the id of padding in `tokens`.
    mask_truncated: leave trajectories that reached a limit out of the loss
      (DAPO's overlong filter); they stay in the baseline.

  Returns:
    A Batch of numpy arrays.

  Raises:
    ValueError: a trajectory is longer than `length`, unfinished or without a
      reward, or there are more of them than `rows`.
  """
  rows = len(trajectories) if rows is None else rows
  _check_packable(trajectories, group_ids, rows, length)
  uids = {}
  groups = {}
  batch = dict(
      tokens=np.full((rows, length), pad_id, np.int32),
      loss_mask=np.zeros((rows, length), bool),
      behavior_logprobs=np.zeros((rows, length), np.float32),
      rewards=np.zeros(rows, np.float32),
      outcome_rewards=np.zeros(rows, np.float32),
      question_ids=np.zeros(rows, np.int32),
      group_ids=np.zeros(rows, np.int32),
      in_baseline=np.zeros(rows, bool),
      in_loss=np.zeros(rows, bool),
      on_policy=np.zeros(rows, bool),
  )
  for row, (trajectory, group) in enumerate(zip(trajectories, group_ids)):
    used = _used(trajectory)
    batch['tokens'][row, :used] = trajectory.tokens[:used]
    batch['question_ids'][row] = uids.setdefault(
        trajectory.question.uid, len(uids))
    batch['group_ids'][row] = groups.setdefault(group, len(groups))
    if trajectory.stop_reason == 'search_error':  # counted, never trained on
      continue
    batch['loss_mask'][row, :used] = trajectory.loss_mask[:used]
    batch['behavior_logprobs'][row, :used] = trajectory.behavior_logprobs[:used]
    batch['rewards'][row] = trajectory.reward
    batch['outcome_rewards'][row] = trajectory.outcome_reward
    batch['in_baseline'][row] = True
    batch['in_loss'][row] = used and not (
        mask_truncated and trajectory.stop_reason != 'answer')
    batch['on_policy'][row] = trajectory.policy_step == policy_step
  batch['loss_mask'] &= batch['in_loss'][:, None]
  return Batch(**batch)


def _used(trajectory: Trajectory) -> int:
  """Tokens up to the last sampled one."""
  sampled = np.flatnonzero(trajectory.loss_mask)
  return int(sampled[-1]) + 1 if sampled.size else 0


def _check_packable(trajectories, group_ids, rows: int, length: int) -> None:
  """Raises the errors of `pack`."""
  if len(trajectories) > rows:
    raise ValueError(
        'rows must be at least the number of trajectories, '
        f'{len(trajectories)}, but is {rows}. Raise it, or pack fewer '
        'trajectories at a time.')
  if len(group_ids) != len(trajectories):
    raise ValueError(
        f'group_ids must have one entry a trajectory, {len(trajectories)}, but '
        f'has {len(group_ids)}.')
  for trajectory in trajectories:
    who = (f'that of question {trajectory.question.uid!r}, '
           f'sample {trajectory.sample},')
    if trajectory.stop_reason is None:
      raise ValueError(
          f'every trajectory must be finished, but {who} has no stop_reason.')
    if _used(trajectory) > length:
      raise ValueError(
          f'length must hold every trajectory, but {who} has '
          f'{_used(trajectory)} tokens and length is {length}. Raise length, '
          'or lower the rollout budgets.')
    if trajectory.stop_reason != 'search_error' and (
        trajectory.reward is None or trajectory.outcome_reward is None):
      raise ValueError(
          f'every trajectory must be scored, but {who} has no reward. Set '
          'reward and outcome_reward first.')
