# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data of rollouts: questions, passages, tools, turns, trajectories, batches.

A trajectory is token ids with the log-probs at which they were sampled. Every
mask follows from the origin of a token: the prompt, the policy (an action) or
the environment (an observation). A trajectory whose context is full may go on
in a new context. Nothing here decodes or encodes tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, Literal

import jax
from jaxtyping import Array, Bool, Float, Int
import numpy as np

StopReason = Literal['answer', 'turn_limit', 'length_limit', 'search_error']
STOP_REASONS = ('answer', 'turn_limit', 'length_limit', 'search_error')


@dataclasses.dataclass(frozen=True)
class Question:
  """A question and its gold answers."""

  uid: str  # unique in the whole data set; seeds the question's randomness
  text: str
  answers: tuple[str, ...]  # gold answers; any is right, the first is canonical
  hops: int = 1  # facts that the answer needs; HRPO groups questions by it
  data_source: str = 'unknown'  # name of the data set in evaluation reports
  gold_passages: tuple[str, ...] = ()  # ids or titles; empty if not known


@dataclasses.dataclass(frozen=True)
class Request:
  """A request to sample one trajectory for a question."""

  question: Question
  sample: int = 0  # index among the question's samples; part of the randomness
  # Number shared by samples that are requested together. It does not affect
  # randomness.
  group: int = 0


@dataclasses.dataclass(frozen=True)
class Passage:
  """One document of a corpus, as an engine returns it."""

  id: str
  title: str
  text: str
  score: float = 0.0  # float32 for any storage dtype; higher is better


@dataclasses.dataclass(frozen=True)
class Query:
  """The policy's query to an engine, and the trajectory that contains it."""

  text: str
  top_k: int  # maximum number of passages
  # Most engines read only the fields above. Whatever else an answer depends on
  # must be in the fields below, so that the answer is the same after a resume
  # and on any host.
  question: Question
  step: int = 0  # step of the run
  sample: int = 0  # index of the sample among the question's
  turn: int = 0  # index of the turn that asks, from 0
  turns: tuple[Turn, ...] = ()  # turns so far; the last is the one that asks


@dataclasses.dataclass(frozen=True)
class SearchError:
  """The result of a failed search or tool; the policy never reads it."""

  kind: str  # 'timeout', 'unavailable', 'bad_response', ...
  detail: str = ''


Passages = tuple[Passage, ...]
SearchFn = Callable[[Sequence[Query]], Sequence[Passages | SearchError]]


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call of a tool other than a search, and the trajectory with the call."""

  tool: str
  arguments: Mapping[str, Any]
  question: Question
  step: int = 0  # step of the run
  sample: int = 0  # index of the sample among the question's
  turn: int = 0  # index of the turn that calls, from 0
  turns: tuple[Turn, ...] = ()  # turns so far; the last is the one that calls


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """The text that a tool returns; the policy reads it as data.

  A tool that is out of service returns a SearchError instead.
  """

  text: str
  is_error: bool = False  # True: the policy's call was wrong
  passages: Passages = ()  # passages that the text shows


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool that a policy may call: search, or another one.

  A tool whose name is 'search' or begins with 'search_' is a search engine: its
  function gets Queries and returns Passages. The function of any other tool
  gets ToolCalls and returns a ToolResult for each, in order. Any function runs
  in a thread of its own, and raises an error or returns SearchErrors when out
  of service. It may have `pop` and `wait` (see `search.engine_wrappers`).
  """

  name: str
  description: str  # one sentence for the policy
  # JSON schema of the arguments, which is an object.
  parameters: Mapping[str, Any] = dataclasses.field(hash=False)
  call: Callable[[Sequence[Any]], Sequence[Any]] | None = None
  # Function that returns `call`, for a tool that needs something of the run. It
  # has some of the keywords corpus, tokenizer, result_tokens and seed.
  bind: Callable[..., Callable[[Sequence[Any]], Sequence[Any]]] | None = None

  @property
  def first_parameter(self) -> str:
    """Name of the first argument, which a call without JSON sets, or ''."""
    return next(iter(self.parameters.get('properties', ())), '')


@dataclasses.dataclass(frozen=True)
class Action:
  """The action that is parsed from a turn's sampled text."""

  # 'answer', 'invalid', 'summary', or the name of the tool that is called.
  kind: str
  # Queries of a search, the single answer, or the text of a call or summary;
  # stripped.
  texts: tuple[str, ...] = ()
  arguments: Mapping[str, Any] = dataclasses.field(  # arguments of a tool's call
      default_factory=dict, hash=False)

  @property
  def is_call(self) -> bool:
    """True for a call of a tool, searches included."""
    return self.kind not in ('answer', 'invalid', 'summary')

  @property
  def is_search(self) -> bool:
    """True for a search, by any engine."""
    return is_search(self.kind)


def is_search(tool: str) -> bool:
  """Returns whether a tool with this name is a search engine."""
  return tool == 'search' or tool.startswith('search_')


@dataclasses.dataclass(frozen=True)
class Turn:
  """One action of the policy and the environment's observation after it."""

  action_tokens: tuple[int, ...]  # sampled tokens, with the stop token
  action_logprobs: tuple[float, ...]  # nats, at the sampling temperature
  action: Action  # action parsed from the action tokens only
  observation_tokens: tuple[int, ...] = ()  # from the environment; (): none
  passages: Passages = ()  # passages that the search returned, in order
  passages_cut: int = 0  # number of passages cut to fit the token budget
  is_tool_error: bool = False  # True: a tool said that the call was wrong
  # For rewards and readers; '' in records that are older than these fields.
  # Action tokens, decoded without special tokens, up to the first stop string.
  text: str = ''
  observation: str = ''  # observation tokens, decoded without special tokens
  # Only after a context was full; see `rollouts.context_rules`. Tokens that the
  # policy read before this action in place of the last turn's observation.
  lead_tokens: tuple[int, ...] = ()
  lead: str = ''  # lead tokens, decoded without special tokens
  opens_context: bool = False  # True: lead tokens replace all earlier tokens


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """The whole conversation of one sample about one question."""

  question: Question
  sample: int  # index among the question's samples, from 0
  policy_step: int  # number of updates of the policy that sampled this
  prompt_tokens: tuple[int, ...]
  turns: tuple[Turn, ...] = ()
  stop_reason: StopReason | None = None  # None while it is being sampled
  reward: float | None = None  # reward to train on; None: not computable
  outcome_reward: float | None = None  # reward that the dynamic filter reads
  retries: int = 0  # number of times it was resampled after a failed search
  group: int = 0  # number shared by samples that were requested together
  search_error: SearchError | None = None  # cause, if a failed search ended it
  prompt: str = ''  # prompt tokens, decoded without special tokens
  parts: Mapping[str, float] = dataclasses.field(  # parts of the scores
      default_factory=dict, hash=False)
  turn_rewards: tuple[float | None, ...] | None = None  # see `Scores.turns`
  judge_error: str | None = None  # kind and detail, if its judge failed
  # Experts of the tokens, by context (`Engine.routing`); (): not recorded.
  routing: tuple[np.ndarray, ...] = dataclasses.field(default=(), compare=False)

  @property
  def response(self) -> str:
    """The text after the prompt: all actions and observations."""
    return ''.join(turn.text + turn.observation for turn in self.turns)

  @property
  def tokens(self) -> tuple[int, ...]:
    """Token ids of all contexts: prompt, then actions and observations."""
    return tuple(itertools.chain.from_iterable(
        tokens for tokens, _ in self._pieces()))

  @property
  def loss_mask(self) -> tuple[bool, ...]:
    """True where the policy sampled the token; aligned with `tokens`."""
    return tuple(itertools.chain.from_iterable(
        (logprobs is not None,) * len(tokens)
        for tokens, logprobs in self._pieces()))

  @property
  def behavior_logprobs(self) -> tuple[float, ...]:
    """Log-prob of each of `tokens` when sampled, in nats; 0 if it was not."""
    return tuple(itertools.chain.from_iterable(
        (0.0,) * len(tokens) if logprobs is None else logprobs
        for tokens, logprobs in self._pieces()))

  def _pieces(self) -> Iterator[tuple[
      tuple[int, ...], tuple[float, ...] | None]]:
    """Yields consecutive tokens and their log-probs (None: not sampled)."""
    unread = self.prompt_tokens
    for turn in self.turns:
      yield turn.lead_tokens or unread, None
      yield turn.action_tokens, turn.action_logprobs
      unread = turn.observation_tokens
    yield unread, None

  @property
  def contexts(self) -> tuple[Trajectory, ...]:
    """A trajectory per context; its prompt is the start of the context.

    There are several only if a context was full and another one followed. Each
    has the question, reward and stop reason of the whole, but no turn_rewards.
    """
    if not any(turn.lead_tokens for turn in self.turns):
      return (self,)
    prompts, parts = [(self.prompt_tokens, self.prompt)], [list[Turn]()]
    for turn in self.turns:
      if turn.lead_tokens and parts[-1]:  # the observation was not read there
        parts[-1][-1] = dataclasses.replace(
            parts[-1][-1],
            observation_tokens=() if turn.opens_context else turn.lead_tokens,
            observation='' if turn.opens_context else turn.lead)
      if turn.opens_context:
        prompts.append((turn.lead_tokens, turn.lead))
        parts.append([])
      parts[-1].append(dataclasses.replace(
          turn, lead_tokens=(), lead='', opens_context=False))
    return tuple(
        dataclasses.replace(self, prompt_tokens=tokens, prompt=text,
                            turns=tuple(turns), turn_rewards=None,
                            routing=self.routing[number:number + 1])
        for number, ((tokens, text), turns) in enumerate(zip(prompts, parts)))

  @property
  def is_void(self) -> bool:
    """True if the trajectory has no reward: a search or the judge failed."""
    return self.stop_reason == 'search_error' or self.judge_error is not None

  @property
  def searches(self) -> int:
    """Number of turns whose search gave results that the policy read."""
    return sum(turn.action.is_search for turn in self.turns
               if turn.observation_tokens)

  @property
  def answer(self) -> str | None:
    """The text of the answer action, or None if there is none."""
    return next((turn.action.texts[-1] for turn in reversed(self.turns)
                 if turn.action.kind == 'answer'), None)


@dataclasses.dataclass(frozen=True)
class Scores:
  """The scores of a trajectory, as a reward function returns them."""

  reward: float  # reward to train on
  outcome: float | None = None  # filter's reward; None: config.outcome gives it
  # Parts of the scores by name, which are plotted.
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  # Reward of each turn (None: the turn has none), for algorithms that read it.
  # None: config.turn_reward gives the rewards of all turns.
  turns: Sequence[float | None] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Arrays of B rows: trajectories or their contexts, padded to T tokens.

  Column t of an array [B T] belongs to tokens[:, t]. Rows that only fill the
  batch have an empty loss mask and are neither in a baseline nor in the loss.
  """

  tokens: Int[Array, 'B T']  # token ids, right-padded with the pad id
  loss_mask: Bool[Array, 'B T']  # True where the policy sampled the token
  behavior_logprobs: Float[Array, 'B T']  # nats, from the sampler; 0 elsewhere
  rewards: Float[Array, 'B']  # rewards to train on
  outcome_rewards: Float[Array, 'B']  # rewards that the dynamic filter reads
  question_ids: Int[Array, 'B']  # equal for rows of one question; in [0, B)
  group_ids: Int[Array, 'B']  # equal for rows that share a baseline; in [0, B)
  in_baseline: Bool[Array, 'B']  # True if in its group's mean and spread
  in_loss: Bool[Array, 'B']  # True if the row is trained on
  on_policy: Bool[Array, 'B']  # True if sampled by the policy to update
  old_logprobs: Float[Array, 'B T'] | None = None  # nats; NaN: update fills it
  ref_logprobs: Float[Array, 'B T'] | None = None  # nats; from learner.score
  values: Float[Array, 'B T'] | None = None  # critic's; from learner.score
  weights: Float[Array, 'B T'] | None = None  # weights of SFT; None: all 1
  # Only for algorithms that read turns; see `rl.turn_fields`. Number of the
  # token's turn, from 1; 0 if the policy did not sample the token.
  turn_ids: Int[Array, 'B T'] | None = None
  # Reward of a turn at its last token; NaN there: the turn has none.
  turn_rewards: Float[Array, 'B T'] | None = None
  # Equal for tokens of turns that began in the same state: in rows of one
  # baseline, after the same prompt and observations; in [0, B * T).
  state_ids: Int[Array, 'B T'] | None = None
  # Experts that the sampler chose, if it recorded them: `Engine.routing`.
  routing: Int[Array, 'B T X'] | None = None

  @property
  def lengths(self) -> Int[Array, 'B']:
    """Number of tokens of each row up to its last sampled one, [B], or 0."""
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
    contexts: int = 1,
) -> Batch:
  """Makes a Batch: copies trajectories, in order, into arrays of fixed shape.

  Args:
    trajectories: Finished trajectories with rewards. Void ones need no reward,
      and are not trained on. Observations after the last action are cut.
    group_ids: Hashable key of each trajectory. Equal keys share a baseline.
    policy_step: Number of updates so far of the policy that this batch will
      train. Rows of an earlier policy are marked off-policy.
    length: Number T of tokens per row.
    rows: Number B of rows; some may be empty. None: `contexts` per trajectory.
    pad_id: Token id of the padding.
    mask_truncated: True to leave trajectories without an answer, which reached
      a limit, out of the loss (DAPO's overlong filter). They stay in baselines.
    contexts: Number of rows per trajectory, one for each of its contexts. Only
      the first is in the baseline, so that a trajectory counts once.

  Returns:
    A Batch of numpy arrays on the host, [B] and [B T].

  Raises:
    ValueError: A trajectory is too long, unfinished or without a reward, or has
      too many contexts, or the trajectories need more rows than `rows`.
  """
  rows = len(trajectories) * contexts if rows is None else rows
  _check(trajectories, group_ids, rows, length, contexts)
  uids: dict[str, int] = {}
  groups: dict[Any, int] = {}
  zeros = lambda dtype, *names: {name: np.zeros(rows, dtype) for name in names}
  batch: dict[str, Any] = dict(
      tokens=np.full((rows, length), pad_id, np.int32),
      loss_mask=np.zeros((rows, length), bool),
      behavior_logprobs=np.zeros((rows, length), np.float32),
      **zeros(np.float32, 'rewards', 'outcome_rewards'),
      **zeros(np.int32, 'question_ids', 'group_ids'),
      **zeros(bool, 'in_baseline', 'in_loss', 'on_policy'))
  for number, (trajectory, group) in enumerate(zip(trajectories, group_ids)):
    first = number * contexts
    question = uids.setdefault(trajectory.question.uid, len(uids))
    group = groups.setdefault(group, len(groups))
    for row, context in enumerate(trajectory.contexts, start=first):
      used, mask = _used(context)
      batch['tokens'][row, :used] = context.tokens[:used]
      batch['question_ids'][row] = question
      batch['group_ids'][row] = group
      if trajectory.is_void:  # reported, never trained on
        continue
      batch['loss_mask'][row, :used] = mask[:used]
      batch['behavior_logprobs'][row, :used] = context.behavior_logprobs[:used]
      batch['rewards'][row] = trajectory.reward
      batch['outcome_rewards'][row] = trajectory.outcome_reward
      batch['in_baseline'][row] = row == first
      batch['in_loss'][row] = used and not (
          mask_truncated and trajectory.stop_reason != 'answer')
      batch['on_policy'][row] = trajectory.policy_step == policy_step
  batch['loss_mask'] &= batch['in_loss'][:, None]
  return Batch(**batch)


def _used(context: Trajectory) -> tuple[int, tuple[bool, ...]]:
  """Returns the number of tokens up to the last sampled one, and the mask."""
  mask = context.loss_mask
  sampled = np.flatnonzero(mask)
  return int(sampled[-1]) + 1 if sampled.size else 0, mask


def _check(trajectories, group_ids, rows, length, contexts) -> None:
  """Raises the ValueErrors of `collate`."""
  if len(trajectories) * contexts > rows:
    raise ValueError(
        f'rows must be at least the number of trajectories, {len(trajectories)}'
        f' times contexts, {contexts}, but is {rows}. Raise it, or pack fewer.')
  if len(group_ids) != len(trajectories):
    raise ValueError(
        f'group_ids must have one entry a trajectory, {len(trajectories)}, but '
        f'has {len(group_ids)}.')
  for trajectory in trajectories:
    parts = trajectory.contexts
    problem, tokens = '', max(_used(context)[0] for context in parts)
    if trajectory.stop_reason is None:
      problem = 'has no stop_reason'
    elif tokens > length:
      problem = f'has {tokens} tokens. Raise length, or lower the budgets'
    elif len(parts) > contexts:
      problem = f'has {len(parts)} contexts. Raise contexts, which is {contexts}'
    elif not trajectory.is_void and None in (
        trajectory.reward, trajectory.outcome_reward):
      problem = 'has no reward or no outcome_reward'
    elif any(len(turn.action_tokens) != len(turn.action_logprobs)
             for turn in trajectory.turns):
      problem = 'has action_logprobs that are not one per action token'
    if problem:
      raise ValueError(
          'every trajectory must be finished and scored, with at most '
          f'{length} tokens, but that of question {trajectory.question.uid!r}, '
          f'sample {trajectory.sample}, {problem}.')
