# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The host-side driver of the engine's slots: requests in, trajectories out.

A slot is a row of the engine, with its part of the KV cache. It holds one
trajectory. When the trajectory is finished, the slot goes to the next request
in the queue. A search, or a call of another tool, pauses its slot while others
decode.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tag_parser
from searchrl.models.inference import engine as engines
from searchrl.rollouts import context_rules
from searchrl.rollouts import pending_searches
from searchrl.rollouts import unfinished
from searchrl.rollouts.pending_searches import Results
from searchrl.rollouts.unfinished import Unfinished
from searchrl.runtime import option_rules
from searchrl.search import call_metrics as calls_lib
from searchrl.trajectory import (
    Action, Query, Request, SearchError, SearchFn, StopReason, ToolCall,
    ToolResult, Trajectory, Turn)

SEARCH_ORDERS = ('deterministic', 'arrival')


@dataclasses.dataclass(frozen=True)
class Budgets:
  """Limits of a trajectory; lengths are in tokens.

  A search in the last turn is not carried out. A prompt that is too long is an
  error; it is never cut.
  """

  max_turns: int = 5  # maximum number of actions, including the answer
  max_new_tokens: int = 48  # maximum length of one action
  max_prompt_tokens: int = 128  # maximum length of a prompt
  passage_tokens: int = 96  # length to which each passage is cut
  top_k: int = 2  # passages per query
  when_full: str = 'stop'  # one of context_rules.RULES
  max_contexts: int = 4  # contexts per trajectory, unless when_full is 'stop'

  @property
  def contexts(self) -> int:
    """Maximum number of contexts of a trajectory."""
    return 1 if self.when_full == 'stop' else self.max_contexts

  @property
  def result_tokens(self) -> int:
    """Length, in tokens, to which a tool's result is cut: `top_k` passages."""
    return self.top_k * self.passage_tokens

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

  In the search order 'deterministic', search results are used after a fixed
  number of decodes, so that a repeated run does the same in the same order. In
  the order 'arrival', they are used as soon as they come. Each search call
  answers all queries that were submitted since the call before it.
  """

  search_order: str = 'deterministic'  # one of SEARCH_ORDERS
  async_decode: bool = False  # True: decode while the host reads earlier tokens
  search_timeout_secs: float = 60.0  # a search that takes longer has failed
  search_calls: int = 4  # search calls at a time

  def __post_init__(self):
    order, timeout = self.search_order, self.search_timeout_secs
    option_rules.check(
        'rollout.',
        ('search_order', order, order in SEARCH_ORDERS,
         f'one of {SEARCH_ORDERS}'),
        ('async_decode', self.async_decode, self.async_decode in (0, 1),
         'False or True'),
        ('search_timeout_secs', timeout, timeout > 0, 'above 0'))
    option_rules.at_least(1, 'rollout.', search_calls=self.search_calls)


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
    enough: Callable[[Sequence[Trajectory]], bool] = lambda finished: False,
    watch: Callable[[Trajectory], None] = lambda grown: None,
    agree: Callable[[Results], Results] = lambda results: results,
    routing: bool = False,
) -> tuple[list[Trajectory | None], list[calls_lib.Call]]:
  """Samples a trajectory for every request.

  Args:
    requests: The samples to draw. Samples of one question differ in their
      randomness.
    engine: The engine, with its weights loaded.
    search: Search engine, or an `engine_wrappers.toolset` of the dialogue's
      tools. It answers all queries of a pass in one call, in a thread.
    dialogue: Dialogue that writes prompts and observations, and reads actions.
    tokenizer: The tokenizer; see `agent.tokenizer`.
    budgets: Limits of the trajectories.
    step: Step of the run, from which random numbers are derived.
    policy_step: Step of the policy, which is written into the trajectories.
    schedule: The order in which slots are served.
    enough: Predicate that is called after each pass with the finished
      trajectories. If it returns True, the sampling ends, because the other
      trajectories are not needed.
    watch: Callback that receives a trajectory after each new action and each
      new observation, and when the trajectory has ended.
    agree: Function that maps this process's search results, by slot, to the
      results that are used. If several processes run the same slots in
      lockstep, it must return equal results on all of them. The search order of
      the schedule must then be 'deterministic'.
    routing: True: the trajectories record the experts that the engine's
      mixture-of-experts layers chose for each token.

  Returns:
    A list and the search calls. The list has, in the order of `requests`, a
    trajectory without rewards, or None if the trajectory was not needed.

  Raises:
    ValueError: A prompt is longer than max_prompt_tokens, or the dialogue's
      `parse` does not return an Action.
  """
  queue = unfinished.queue(
      requests, policy_step, dialogue, tokenizer, budgets.max_prompt_tokens)
  searches = pending_searches.PendingSearches(
      search, timeout_secs=schedule.search_timeout_secs,
      calls=schedule.search_calls)
  slots = _Slots(engine, dialogue, tokenizer, budgets, schedule, searches, step,
                 watch, agree, routing, list(range(engine.slots))[::-1])
  ready = slots.assign(queue)
  while slots.active:
    slots.feed(ready)  # appends prompts and observations
    ready = slots.advance()  # decodes, takes turns, receives passages
    if enough(list(slots.finished.values())):
      engine.abandon()
      break
    ready += slots.assign(queue)
  else:
    slots.clear()
  slots.read_routing()
  return ([slots.finished.get(row) for row in range(len(requests))],
          searches.finished)


def _actions(trajectory: Trajectory) -> int:
  """Returns the number of turns that are not summaries."""
  return sum(turn.action.kind != 'summary' for turn in trajectory.turns)


@dataclasses.dataclass
class _Slots:
  """The trajectories in the engine's slots, and the steps of each.

  An entry is an `Unfinished`: a trajectory that is being sampled.
  """

  engine: engines.Engine
  dialogue: dialogues.Dialogue
  tokenizer: Any
  budgets: Budgets
  schedule: Schedule
  searches: pending_searches.PendingSearches
  step: int
  watch: Callable[[Trajectory], None]
  agree: Callable[[Results], Results]
  routing: bool
  free: list[int]  # slots without a trajectory
  active: dict[int, Unfinished] = dataclasses.field(default_factory=dict)
  finished: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
  decoding: set[int] = dataclasses.field(default_factory=set)  # slots
  # Trajectories that wait for room in the cache.
  waiting: Sequence[Unfinished] = ()
  unread: int = 0  # dispatched decodes that the host has not read
  # Entries, each with a function that returns the experts of its last context.
  unread_routing: list[tuple[Unfinished, Callable[[], np.ndarray]]] = (
      dataclasses.field(default_factory=list))

  def assign(self, queue: list[Unfinished]) -> list[Unfinished]:
    """Gives free slots to the next queue entries and returns these entries."""
    assigned = []
    while queue and self.free:
      entry = queue.pop()
      entry.slot = self.free.pop()
      self.active[entry.slot] = entry
      assigned.append(entry)
    return assigned

  def feed(self, ready: Sequence[Unfinished]) -> None:
    """Appends the pending tokens of trajectories to their slots.

    From then on these slots decode. A trajectory is finished instead if its
    slot has no room for a token of its next action. If the shared cache has no
    room for a trajectory, it waits until the next call. New trajectories are
    served last.
    """
    entries, appends = [], []
    for entry in sorted([*self.waiting, *ready], key=lambda entry: entry.fresh):
      self._keep_room(entry)
      budget = min(self.budgets.max_new_tokens, self._room(entry))
      if budget < 1:  # not one token could be sampled
        entry.forget_unread()
        self._finish(entry, 'length_limit')
        continue
      entries.append(entry)
      appends.append(self._append(entry, budget))
    granted = self.engine.admit(appends)
    self.waiting = [entry for entry, may in zip(entries, granted) if not may]
    for entry in itertools.compress(entries, granted):
      if not (entry.fresh or entry.lead):
        self._observed(entry)
      entry.fresh = False
      self.decoding.add(entry.slot)
    if any(granted):
      self.engine.append([*itertools.compress(appends, granted)])

  def _observed(self, entry: Unfinished) -> None:
    """Records the entry's pending tokens as the last turn's observation."""
    entry.amend(observation_tokens=entry.pending,
                observation=self.tokenizer.decode(entry.pending))
    self.watch(entry.trajectory)

  def _room(self, entry: Unfinished) -> int:
    """Returns how many tokens a slot can hold after its pending tokens."""
    used = 0 if entry.fresh else self.engine.used(entry.slot)
    return self.engine.length - used - len(entry.pending)

  def _keep_room(self, entry: Unfinished) -> None:
    """Makes room in a slot if the last observation leaves too little.

    The rule 'drop' begins a shorter context. The rule 'summarise' asks the
    policy for a summary first. With 'stop', nothing is done here. There must be
    room for the next action and, with 'summarise', for a later request for a
    summary and the summary itself.
    """
    trajectory, rule = entry.trajectory, self.budgets.when_full
    opened = 1 + sum(turn.opens_context for turn in trajectory.turns)
    if opened >= self.budgets.contexts or entry.fresh or entry.lead:
      return
    needed = self.budgets.max_new_tokens
    request: tuple[int, ...] = ()
    if rule == 'summarise':
      request = dialogues.ask_for_summary(
          self.dialogue, self.tokenizer, trajectory.turns[-1].action_tokens)
      needed += len(request) + self.budgets.max_new_tokens
    if self._room(entry) >= needed:
      return
    self._observed(entry)
    if request:
      entry.follow(request, opens_context=False)
    else:
      self._open_context(entry, context_rules.without_oldest(
          trajectory, entry.pending, dialogue=self.dialogue,
          tokenizer=self.tokenizer, target=self.engine.length // 2))

  def _open_context(self, entry: Unfinished, tokens: tuple[int, ...]) -> None:
    """Empties an entry's slot, and begins a new context with `tokens` in it."""
    self._release(entry)
    entry.follow(tokens, opens_context=True)

  def _append(self, entry: Unfinished, budget: int) -> engines.Append:
    """Returns an Append of pending tokens, with the next turn's randomness."""
    trajectory = entry.trajectory
    return engines.Append(
        slot=entry.slot, tokens=entry.pending, budget=budget, fresh=entry.fresh,
        row_ids=engines.row_ids(self.step, trajectory.question.uid,
                                trajectory.sample, len(trajectory.turns)))

  def advance(self) -> list[Unfinished]:
    """Decodes, handles slots that stopped, and returns entries to feed next."""
    while self.decoding and self.unread <= self.schedule.async_decode:
      self.engine.dispatch()
      self.unread += 1
    stopped = self._read()
    self.decoding -= {s.slot for s in stopped}
    ready = [entry for s in stopped if (entry := self._take_turn(s))]
    self.searches.start()
    return ready + self._admit(bool(ready))

  def clear(self) -> None:
    """Waits for decodes still running after the last trajectory has ended."""
    while self.unread:
      self._read()

  def _read(self) -> list[engines.Stopped]:
    if not self.unread:
      return []
    self.unread -= 1
    stopped = self.engine.read()
    self.read_routing()  # it was computed before the next decode
    return stopped

  def read_routing(self) -> None:
    """Adds the chosen experts of released slots to their trajectories."""
    for entry, wait in self.unread_routing:
      entry.routing += (wait(),)
      if entry.row in self.finished:
        self.finished[entry.row] = dataclasses.replace(
            self.finished[entry.row], routing=entry.routing)
    self.unread_routing.clear()

  def _release(self, entry: Unfinished) -> None:
    """Empties an entry's slot; first requests its experts, if recorded."""
    if self.routing and not entry.fresh:
      self.unread_routing.append((entry, self.engine.routing(entry.slot)))
    self.engine.release(entry.slot)

  def _take_turn(self, stopped: engines.Stopped) -> Unfinished | None:
    """Adds the turn of a stopped slot to its trajectory, and acts on the turn.

    Returns:
      The slot's entry if it has tokens to append next; None if its trajectory
      has ended, or waits for a search or another tool.
    """
    entry = self.active[stopped.slot]
    text = tag_parser.until_stop(self.tokenizer.decode(stopped.tokens),
                                self.dialogue.stop_strings)
    is_asked = entry.lead and not entry.opens_context
    action = (context_rules.summary(self.dialogue, text) if is_asked
              else self.dialogue.parse(text))
    if not isinstance(action, Action):
      raise ValueError(
          'parse of the dialogue must return an Action, but returned '
          f'{action!r} for the turn {text!r}.')
    turn = Turn(stopped.tokens, stopped.logprobs, action, text=text)
    if entry.lead:
      turn = dataclasses.replace(
          turn, lead_tokens=entry.lead, lead=self.tokenizer.decode(entry.lead),
          opens_context=entry.opens_context)
      entry.lead, entry.opens_context = (), False
    entry.trajectory = dataclasses.replace(
        entry.trajectory, turns=(*entry.trajectory.turns, turn))
    self.watch(entry.trajectory)
    if action.kind == 'answer':
      self._finish(entry, 'answer')
    elif action.kind == 'summary':
      self._open_context(entry, context_rules.after_summary(
          entry.trajectory, dialogue=self.dialogue, tokenizer=self.tokenizer))
      return entry
    elif self.engine.used(entry.slot) >= self.engine.length:
      self._finish(entry, 'length_limit')
    elif _actions(entry.trajectory) >= self.budgets.max_turns:
      self._finish(entry, 'turn_limit')  # without the search, if it is one
    elif action.is_call:
      self.searches.submit(entry.slot, self._queries(entry.trajectory),
                           action.kind)
    else:
      entry.pending = dialogues.retry(
          self.dialogue, self.tokenizer, stopped.tokens)
      return entry
    return None

  def _queries(self, trajectory: Trajectory) -> list[Query] | list[ToolCall]:
    """Returns the queries, or the call of a tool, in the last turn."""
    turns = trajectory.turns
    action = turns[-1].action
    caller = (trajectory.question, self.step, trajectory.sample,
              len(turns) - 1, turns)
    if not action.is_search:
      return [ToolCall(action.kind, action.arguments, *caller)]
    return [Query(text, self.budgets.top_k, *caller) for text in action.texts]

  def _admit(self, others: bool) -> list[Unfinished]:
    """Gives entries their search results, and returns the entries to feed next.

    In the deterministic order it waits for all searches. Otherwise it takes the
    results that have arrived. If there is nothing else to do (nothing decodes,
    and no `others` are to be fed), it waits until a search returns.
    """
    if self.schedule.search_order == 'deterministic':
      results = self.agree(self.searches.all()) if len(self.searches) else {}
    elif self.decoding or self.unread or others:
      results = self.searches.ready()
    else:  # there is nothing else to do
      results = self.searches.some()
    return self._observe(results)

  def _observe(self, results: Results) -> list[Unfinished]:
    """Gives trajectories the results of their calls, and returns them.

    The observations become tokens that `feed` will append. A call that failed
    ends its trajectory, which is then not returned.
    """
    entries: list[Unfinished] = []
    calls: list[tuple[dialogues.Outcome, tuple[int, ...]]] = []
    for slot, of_slot in results.items():
      entry = self.active[slot]
      error = next((x for x in of_slot if isinstance(x, SearchError)), None)
      if error:
        self._finish(entry, 'search_error', search_error=error)
        continue
      found: Any = next(  # a tool's only result, or the passages of each query
          (x for x in of_slot if isinstance(x, ToolResult)), of_slot)
      entries.append(entry)
      calls.append((found, entry.trajectory.turns[-1].action_tokens))
    observations = dialogues.observations(
        self.dialogue, calls, self.tokenizer,
        passage_tokens=self.budgets.passage_tokens,
        result_tokens=self.budgets.result_tokens)
    for entry, (outcome, _), observation in zip(entries, calls, observations):
      if isinstance(outcome, ToolResult):
        entry.amend(is_tool_error=outcome.is_error)
        outcome = [outcome.passages]
      entry.amend(passages=tuple(itertools.chain.from_iterable(outcome)),
                  passages_cut=observation.passages_cut)
      entry.pending = observation.tokens
    return entries

  def _finish(self, entry: Unfinished, reason: StopReason, **fields) -> None:
    self.finished[entry.row] = dataclasses.replace(
        entry.trajectory, stop_reason=reason, **fields)
    self.watch(self.finished[entry.row])
    del self.active[entry.slot]
    self._release(entry)
    self.free.append(entry.slot)
