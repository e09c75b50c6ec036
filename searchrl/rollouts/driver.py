# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The host-side driver of the engine's slots: requests in, trajectories out.

A slot holds one trajectory. When the trajectory is finished, the slot goes to
the next request in the queue. A search pauses its slot while others decode.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.models.inference import engine as engines
from searchrl.rollouts import pending_searches
from searchrl.rollouts.pending_searches import Found
from searchrl.search import call_metrics as calls_lib
from searchrl.trajectory import (Query, Request, SearchError, SearchFn,
                                 Trajectory, Turn)

SEARCH_ORDERS = ('deterministic', 'arrival')


@dataclasses.dataclass(frozen=True)
class Budgets:
  """Limits of a trajectory; lengths are in tokens.

  Attributes:
    max_turns: Maximum number of actions, including the answer. A search in the
      last turn is not carried out.
    max_new_tokens: Maximum length of one action.
    max_prompt_tokens: Maximum length of a prompt. A longer one is an error; it
      is never cut.
    passage_tokens: Length to which each passage is cut.
    top_k: Number of passages per query.
  """

  max_turns: int = 5
  max_new_tokens: int = 48
  max_prompt_tokens: int = 128
  passage_tokens: int = 96
  top_k: int = 2

  def check(self, length: int) -> None:
    """Raises a ValueError unless a prompt and a turn fit `length` tokens."""
    if self.max_prompt_tokens + self.max_new_tokens > length:
      raise ValueError(
          f'rollout.max_length must hold a prompt and a turn, '
          f'{self.max_prompt_tokens} + {self.max_new_tokens} tokens, but is '
          f'{length}. Raise it, or lower the budgets.')


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The order in which slots are served; no trajectory depends on it.

  Attributes:
    search_order: Time at which search results enter. With 'deterministic', they
      enter after a fixed number of decodes, so a repeated run does the same in
      the same order. With 'arrival', they enter as soon as they come.
    async_decode: Whether a decode runs while the host reads the one before.
    search_timeout_secs: Seconds after which a search counts as failed.
    search_calls: Number of search calls at a time. Each answers all queries
      submitted since the call before it.
  """

  search_order: str = 'deterministic'
  async_decode: bool = False
  search_timeout_secs: float = 60.0
  search_calls: int = 4

  def __post_init__(self):
    if self.search_order not in SEARCH_ORDERS:
      raise ValueError(
          f'rollout.search_order must be one of {SEARCH_ORDERS}, but is '
          f"{self.search_order!r}. 'auto' becomes one of them by the device.")
    for name, legal, rule in (
        ('async_decode', self.async_decode in (0, 1), 'False or True'),
        ('search_timeout_secs', self.search_timeout_secs > 0, 'above 0'),
        ('search_calls', self.search_calls >= 1, 'at least 1')):
      if not legal:
        raise ValueError(
            f'rollout.{name} must be {rule}, but is {getattr(self, name)}.')


@dataclasses.dataclass
class _Unfinished:
  """A trajectory that is being sampled."""

  row: int  # index of its request, and of its place in the result
  trajectory: Trajectory
  pending: tuple[int, ...]  # tokens to append to its slot next
  slot: int | None = None
  fresh: bool = True

  def amend(self, **fields) -> None:
    """Replaces fields of the last turn."""
    *earlier, last = self.trajectory.turns
    self.trajectory = dataclasses.replace(self.trajectory, turns=(
        *earlier, dataclasses.replace(last, **fields)))


def run(
    requests: Sequence[Request],
    *,
    engine: engines.Engine,
    search: SearchFn,
    dialogue: dialogues.Dialogue,
    tokenizer: Any,
    budgets: Budgets,
    step: int,
    policy_step: int,
    schedule: Schedule = Schedule(),
    enough: Callable[[Mapping[int, Trajectory]], bool] = lambda finished: False,
    watch: Callable[[Trajectory], None] = lambda grown: None,
    agree: Callable[[Found], Found] = lambda found: found,
) -> tuple[list[Trajectory | None], list[calls_lib.Call]]:
  """Samples a trajectory for every request.

  Args:
    requests: The samples to draw. Samples of one question differ in their
      randomness.
    engine: The engine, with its weights loaded.
    search: Search engine that answers all queries of a pass in one call, in a
      thread of its own.
    dialogue: The protocol.
    tokenizer: The tokenizer; see `agent.tokenizer`.
    budgets: Limits of the trajectories.
    step: Step of the run; a part of every row's randomness.
    policy_step: Step of the policy, which is written into the trajectories.
    schedule: The order in which slots are served.
    enough: Predicate that is called after each pass with the finished
      trajectories by request index. True means that the rest is not needed.
    watch: Callback that receives each trajectory whenever it has grown: by an
      action, by an observation, and by its end.
    agree: Function from search results by slot to the ones to use. Processes
      that share their slots agree on them; search_order must be deterministic
      then.

  Returns:
    Trajectories without rewards in the order of `requests`, or None where one
    was not needed; and the search calls.

  Raises:
    ValueError: A prompt is longer than max_prompt_tokens.
  """
  queue = _unfinished(requests, policy_step, dialogue, tokenizer, budgets)
  searches = pending_searches.PendingSearches(
      search, timeout_secs=schedule.search_timeout_secs,
      calls=schedule.search_calls)
  slots = _Slots(engine, dialogue, tokenizer, budgets, schedule, searches, step,
                 watch, agree)
  ready = slots.assign(queue)
  while slots.active:
    slots.feed(ready)
    ready = slots.advance()
    if enough(slots.finished):
      engine.abandon()
      break
    ready += slots.assign(queue)
  else:
    slots.clear()
  return ([slots.finished.get(row) for row in range(len(requests))],
          searches.finished)


def _unfinished(requests, policy_step, dialogue, tokenizer, budgets
               ) -> list[_Unfinished]:
  """Returns the queue in reverse order; each question is encoded once."""
  prompts, queue = {}, []
  for row, request in enumerate(requests):
    question = request.question
    if question.text not in prompts:
      prompt = dialogues.opening(dialogue, question.text, tokenizer)
      prompts[question.text] = prompt, tokenizer.decode(prompt)
    prompt, text = prompts[question.text]
    if len(prompt) > budgets.max_prompt_tokens:
      raise ValueError(
          f'a prompt may have rollout.budgets.max_prompt_tokens='
          f'{budgets.max_prompt_tokens} tokens, but that of question '
          f'{question.uid!r} has {len(prompt)}. Raise the limit, or leave the '
          'question out.')
    queue.append(_Unfinished(row, Trajectory(
        question, request.sample, policy_step, prompt, group=request.group,
        prompt=text), prompt))
  return queue[::-1]


class _Slots:
  """The trajectories in the engine's slots, and the transitions of each."""

  def __init__(self, engine, dialogue, tokenizer, budgets, schedule, searches,
               step, watch, agree):
    self._engine, self._dialogue, self._tokenizer = engine, dialogue, tokenizer
    self._budgets, self._schedule = budgets, schedule
    self._searches, self._step = searches, step
    self._watch, self._agree = watch, agree
    self._free = list(range(engine.slots))[::-1]
    self._decoding = set()  # slots that decode
    self._waiting = []  # unfinished trajectories that wait for cache room
    self._unread = 0  # dispatched decodes that the host has not read
    self.active = {}  # slot -> unfinished
    self.finished = {}  # row -> trajectory

  def assign(self, queue: list[_Unfinished]) -> list[_Unfinished]:
    """Gives free slots to the next queue entries and returns these entries."""
    assigned = []
    while queue and self._free:
      one = queue.pop()
      one.slot = self._free.pop()
      self.active[one.slot] = one
      assigned.append(one)
    return assigned

  def feed(self, ready: Sequence[_Unfinished]) -> None:
    """Appends pending tokens to their slots; ends trajectories that do not fit.

    Trajectories for which the cache has no room now wait for the next call.
    New trajectories are served last.
    """
    fed, appends = [], []
    for one in sorted([*self._waiting, *ready], key=lambda one: one.fresh):
      used = 0 if one.fresh else self._engine.used(one.slot)
      budget = min(self._budgets.max_new_tokens,
                   self._engine.length - used - len(one.pending))
      if budget < 1:  # not one token could be sampled
        self._finish(one, 'length_limit')
        continue
      fed.append(one)
      appends.append(self._append(one, budget))
    granted = self._engine.admit(appends)
    self._waiting = [one for one, may in zip(fed, granted) if not may]
    for one in itertools.compress(fed, granted):
      if not one.fresh:  # the tokens observe the last turn's action
        one.amend(observation_tokens=one.pending,
                  observation=self._tokenizer.decode(one.pending))
        self._watch(one.trajectory)
      one.fresh = False
      self._decoding.add(one.slot)
    if any(granted):
      self._engine.append([*itertools.compress(appends, granted)])

  def _append(self, one: _Unfinished, budget: int) -> engines.Append:
    """Returns a slot's pending tokens with the randomness of its next turn."""
    trajectory = one.trajectory
    return engines.Append(
        slot=one.slot, tokens=one.pending, budget=budget, fresh=one.fresh,
        row_ids=engines.row_ids(self._step, trajectory.question.uid,
                                trajectory.sample, len(trajectory.turns)))

  def advance(self) -> list[_Unfinished]:
    """Decodes and handles stopped slots; returns the entries to feed next."""
    while self._decoding and self._unread <= self._schedule.async_decode:
      self._engine.dispatch()
      self._unread += 1
    stopped = self._read()
    self._decoding -= {s.slot for s in stopped}
    ready = [one for s in stopped if (one := self._take_turn(s)) is not None]
    self._searches.start()
    return ready + self._admit(bool(ready))

  def clear(self) -> None:
    """Reads the empty decodes after the last trajectory's end."""
    while self._unread:
      self._read()

  def _read(self) -> list[engines.Stopped]:
    if not self._unread:
      return []
    self._unread -= 1
    return self._engine.read()

  def _take_turn(self, stopped: engines.Stopped) -> _Unfinished | None:
    """Adds a stopped slot's action; returns its entry if it is fed next."""
    one = self.active[stopped.slot]
    text = self._tokenizer.decode(stopped.tokens)
    action = self._dialogue.parse(text)
    turn = Turn(stopped.tokens, stopped.logprobs, action, text=text)
    one.trajectory = dataclasses.replace(
        one.trajectory, turns=(*one.trajectory.turns, turn))
    self._watch(one.trajectory)
    reason = 'answer' if action.kind == 'answer' else self._limit(one)
    if reason is not None:
      self._finish(one, reason)
      return None
    if action.kind == 'search':
      self._searches.submit(one.slot, self._queries(one.trajectory))
      return None
    one.pending = dialogues.retry(
        self._dialogue, self._tokenizer, stopped.tokens)
    return one

  def _queries(self, trajectory: Trajectory) -> list[Query]:
    """Returns the queries of the last turn of a trajectory."""
    turns = trajectory.turns
    return [Query(text, self._budgets.top_k, trajectory.question, self._step,
                  trajectory.sample, len(turns) - 1, turns)
            for text in turns[-1].action.texts]

  def _limit(self, one: _Unfinished) -> str | None:
    """Returns the limit that was reached, after which not even a search runs.
    """
    if self._engine.used(one.slot) >= self._engine.length:
      return 'length_limit'
    if len(one.trajectory.turns) >= self._budgets.max_turns:
      return 'turn_limit'
    return None

  def _admit(self, others: bool) -> list[_Unfinished]:
    """Returns the entries whose search results enter now, by `search_order`."""
    if self._schedule.search_order == 'deterministic':
      waiting = len(self._searches) > 0
      found = self._agree(self._searches.all()) if waiting else {}
    elif self._decoding or self._unread or others:
      found = self._searches.ready()
    else:  # there is nothing else to do
      found = self._searches.some()
    return [one for slot, results in found.items()
            if (one := self._observe(self.active[slot], results)) is not None]

  def _observe(self, one: _Unfinished, results) -> _Unfinished | None:
    """Prepares the observation of a search, or ends its trajectory."""
    errors = [r for r in results if isinstance(r, SearchError)]
    if errors:
      self._finish(one, 'search_error', search_error=errors[0])
      return None
    shown = dialogues.observation(
        self._dialogue, results, self._tokenizer,
        passage_tokens=self._budgets.passage_tokens,
        action_tokens=one.trajectory.turns[-1].action_tokens)
    one.amend(passages=tuple(p for result in results for p in result),
              passages_cut=shown.passages_cut)
    one.pending = shown.tokens
    return one

  def _finish(self, one: _Unfinished, reason: str, **fields) -> None:
    self.finished[one.row] = dataclasses.replace(
        one.trajectory, stop_reason=reason, **fields)
    self._watch(self.finished[one.row])
    del self.active[one.slot]
    self._engine.release(one.slot)
    self._free.append(one.slot)
