# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Questions in, finished trajectories out: the host-side driver of the slots.

The engine, the search and the dialogue arrive as arguments. A slot plays one
trajectory; a finished one's slot goes to the next in the queue, and a search
pauses its slot while others decode.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.rollouts import pending_searches
from searchrl.trajectory import (Passages, Query, Question, SearchError,
                                 SearchFn, Trajectory, Turn)

ADMISSIONS = ('deterministic', 'arrival')
Found = dict[int, list[Passages | SearchError]]  # by slot


@dataclasses.dataclass(frozen=True)
class Budgets:
  """Where a trajectory must end; lengths in tokens.

  Attributes:
    max_turns: actions, the answer included; a search in the last one is not
      carried out.
    max_turn_tokens: of one action.
    max_prompt_tokens: a longer prompt is refused, never cut.
    passage_tokens: each passage is cut to this many.
    top_k: passages a search.
  """

  max_turns: int = 5
  max_turn_tokens: int = 48
  max_prompt_tokens: int = 128
  passage_tokens: int = 96
  top_k: int = 2


@dataclasses.dataclass(frozen=True)
class Schedule:
  """How play proceeds; no trajectory depends on it.

  Attributes:
    admission: 'deterministic': results of a search enter after a fixed number
      of decodes, so that a repeated run takes the same course; 'arrival': when
      they come.
    decodes_in_flight: that run while the host reads an earlier one: 0 or 1.
    search_timeout_secs: until a search counts as failed.
    search_calls: of the search at a time; each answers all that was asked
      since the one before.
  """

  admission: str = 'deterministic'
  decodes_in_flight: int = 0
  search_timeout_secs: float = 60.0
  search_calls: int = 4

  def __post_init__(self):
    if self.admission not in ADMISSIONS:
      raise ValueError(
          f'rollout.admission must be one of {ADMISSIONS}, but is '
          f"{self.admission!r}. 'auto' becomes one of them by the device.")
    for name, legal, rule in (
        ('decodes_in_flight', self.decodes_in_flight in (0, 1), '0 or 1'),
        ('search_timeout_secs', self.search_timeout_secs > 0, 'above 0'),
        ('search_calls', self.search_calls >= 1, 'at least 1')):
      if not legal:
        raise ValueError(
            f'rollout.{name} must be {rule}, but is {getattr(self, name)}.')


@dataclasses.dataclass
class _Game:
  """A trajectory being played."""

  row: int  # its place in the result
  trajectory: Trajectory
  pending: tuple[int, ...]  # what its slot is fed next
  slot: int | None = None
  fresh: bool = True

  def amend(self, **fields) -> None:
    """Changes the last turn."""
    *earlier, last = self.trajectory.turns
    self.trajectory = dataclasses.replace(self.trajectory, turns=(
        *earlier, dataclasses.replace(last, **fields)))


def play(
    requests: Sequence[tuple[Question, int]],
    *,
    engine: Any,
    search: SearchFn,
    dialogue: dialogues.Dialogue,
    tokenizer: Any,
    budgets: Budgets,
    row_ids: Callable[[int, str, int, int], Sequence[int]],
    append: Callable[..., Any],
    step: int,
    policy_step: int,
    schedule: Schedule = Schedule(),
    progress: Callable[[int], None] = lambda finished: None,
    enough: Callable[[Mapping[int, Trajectory]], bool] = lambda finished: False,
    watch: Callable[[Trajectory], None] = lambda grown: None,
    agree: Callable[[Found], Found] = lambda found: found,
) -> list[Trajectory | None]:
  """Plays every (question, sample) to its end.

  Args:
    requests: what to play; a question's samples differ in their randomness.
    engine: `slots`, `length`, `append`, `dispatch`, `read`, `used`, `release`,
      `abandon`; see `models.engine.Engine`. It must have been given weights.
    search: answers all queries of a pass in one call, in a thread of its own.
    dialogue: the protocol.
    tokenizer: see `agent.tokenizer`.
    budgets: limits.
    row_ids: (step, uid, sample, turn) -> what the row's key is folded from.
    append: makes what `engine.append` takes, from keyword arguments.
    step: of the run; part of every row's randomness.
    policy_step: written into the trajectories.
    schedule: how play proceeds.
    progress: told how many have finished, after each pass.
    enough: asked after each pass, with what has finished by its place among
      the requests, whether the rest is not needed any more.
    watch: shown a trajectory whenever it has grown: by what the policy said,
      by what it then reads, and by its end.
    agree: what searches found, by slot -> what is taken for it. Processes that
      play the same slots agree on it; admission must be deterministic then.

  Returns:
    Trajectories in the order of `requests`, without rewards; None for those
    that were not needed.

  Raises:
    ValueError: a prompt longer than max_prompt_tokens.
  """
  queue = _new_games(requests, policy_step, dialogue, tokenizer, budgets)
  table = _Table(
      engine, dialogue, tokenizer, budgets, schedule,
      pending_searches.Searches(search, timeout_secs=schedule.search_timeout_secs,
                        calls=schedule.search_calls), watch, agree)

  def feed_of(trajectory: _Game, budget: int):
    played = trajectory.trajectory
    return append(
        slot=trajectory.slot, tokens=trajectory.pending, budget=budget, fresh=trajectory.fresh,
        row_ids=row_ids(step, played.question.uid, played.sample,
                        len(played.turns)))

  ready = table.seat(queue)
  while table.playing:
    table.feed(ready, feed_of)
    ready = table.go_on()
    progress(len(table.finished))
    if enough(table.finished):
      engine.abandon()
      break
    ready += table.seat(queue)
  else:
    table.clear()
  return [table.finished.get(row) for row in range(len(requests))]


def _new_games(requests, policy_step, dialogue, tokenizer, budgets
              ) -> list[_Game]:
  """What is to be played, the first last; each question is encoded once."""
  prompts, trajectories = {}, []
  for row, (question, sample) in enumerate(requests):
    prompt = prompts.get(question.text)
    if prompt is None:
      prompt = dialogues.opening(dialogue, question.text, tokenizer)
      prompts[question.text] = prompt
    if len(prompt) > budgets.max_prompt_tokens:
      raise ValueError(
          f'a prompt may have rollout.max_prompt_tokens='
          f'{budgets.max_prompt_tokens} tokens, but that of question '
          f'{question.uid!r} has {len(prompt)}. Raise the limit, or leave the '
          'question out.')
    trajectories.append(_Game(
        row, Trajectory(question, sample, policy_step, prompt), prompt))
  return trajectories[::-1]


class _Table:
  """Who sits in which slot, and what happens to them."""

  def __init__(self, engine, dialogue, tokenizer, budgets, schedule, asked,
               watch, agree):
    self._engine, self._dialogue, self._tokenizer = engine, dialogue, tokenizer
    self._budgets, self._schedule, self._asked = budgets, schedule, asked
    self._watch, self._agree = watch, agree
    self._free = list(range(engine.slots))[::-1]
    self._decoding = set()  # slots
    self._unread = 0  # decodes
    self.playing = {}  # slot -> game
    self.finished = {}  # row -> trajectory

  def seat(self, queue: list[_Game]) -> list[_Game]:
    """Gives free slots to the next in the queue."""
    seated = []
    while queue and self._free:
      trajectory = queue.pop()
      trajectory.slot = self._free.pop()
      self.playing[trajectory.slot] = trajectory
      seated.append(trajectory)
    return seated

  def feed(self, trajectories: Sequence[_Game], feed_of) -> None:
    """Feeds slots and lets them decode, or ends what does not fit."""
    feeds = []
    for trajectory in trajectories:
      used = 0 if trajectory.fresh else self._engine.used(trajectory.slot)
      budget = min(self._budgets.max_turn_tokens,
                   self._engine.length - used - len(trajectory.pending))
      if budget < 1:  # not one token could be sampled
        self._finish(trajectory, 'length_limit')
        continue
      feeds.append(feed_of(trajectory, budget))
      if not trajectory.fresh:  # it belongs to the turn that asked for it
        trajectory.amend(observation_tokens=trajectory.pending)
        self._watch(trajectory.trajectory)
      trajectory.fresh = False
      self._decoding.add(trajectory.slot)
    if feeds:
      self._engine.append(feeds)

  def go_on(self) -> list[_Game]:
    """Decodes until something has happened; games that can be fed again."""
    while self._decoding and self._unread <= self._schedule.decodes_in_flight:
      self._engine.dispatch()
      self._unread += 1
    stopped = self._read()
    self._decoding -= {s.slot for s in stopped}
    ready = [trajectory for s in stopped if (trajectory := self._hear(s)) is not None]
    self._asked.start()
    return ready + self._admit(bool(ready))

  def clear(self) -> None:
    """Reads what was decoded ahead of the last trajectory's end: nothing."""
    while self._unread:
      self._read()

  def _read(self):
    if not self._unread:
      return []
    self._unread -= 1
    return self._engine.read()

  def _hear(self, said) -> _Game | None:
    """Reads what a stopped slot said; its game, if it is fed next."""
    trajectory = self.playing[said.slot]
    action = self._dialogue.parse(self._tokenizer.decode(said.tokens))
    turn = Turn(said.tokens, said.logprobs, action)
    trajectory.trajectory = dataclasses.replace(
        trajectory.trajectory, turns=(*trajectory.trajectory.turns, turn))
    self._watch(trajectory.trajectory)
    reason = 'answer' if action.kind == 'answer' else self._limit(trajectory)
    if reason is not None:
      self._finish(trajectory, reason)
      return None
    if action.kind == 'search':
      self._asked.ask(trajectory.slot, [
          Query(text, self._budgets.top_k, trajectory.trajectory.question)
          for text in action.texts])
      return None
    trajectory.pending = dialogues.retry(self._dialogue, self._tokenizer, said.tokens)
    return trajectory

  def _limit(self, trajectory: _Game) -> str | None:
    """The limit after which nothing, a search neither, is carried out."""
    if self._engine.used(trajectory.slot) >= self._engine.length:
      return 'length_limit'
    if len(trajectory.trajectory.turns) >= self._budgets.max_turns:
      return 'turn_limit'
    return None

  def _admit(self, others: bool) -> list[_Game]:
    """Games whose searches are back, as the admission has it."""
    if self._schedule.admission == 'deterministic':
      waiting = len(self._asked) > 0
      found = self._agree(self._asked.all()) if waiting else {}
    elif self._decoding or self._unread or others:
      found = self._asked.ready()
    else:  # nothing else is left to do
      found = self._asked.some()
    return [trajectory for slot, results in found.items()
            if (trajectory := self._show(self.playing[slot], results)) is not None]

  def _show(self, trajectory: _Game, results) -> _Game | None:
    """Prepares what a search found for the policy; its game, if it goes on."""
    if any(isinstance(result, SearchError) for result in results):
      self._finish(trajectory, 'search_error')
      return None
    shown = dialogues.observation(
        self._dialogue, results, self._tokenizer,
        passage_tokens=self._budgets.passage_tokens,
        said=trajectory.trajectory.turns[-1].action_tokens)
    trajectory.amend(passages=tuple(p for result in results for p in result),
               passages_cut=shown.passages_cut)
    trajectory.pending = shown.tokens
    return trajectory

  def _finish(self, trajectory: _Game, reason: str) -> None:
    self.finished[trajectory.row] = dataclasses.replace(
        trajectory.trajectory, stop_reason=reason)
    self._watch(self.finished[trajectory.row])
    del self.playing[trajectory.slot]
    self._engine.release(trajectory.slot)
    self._free.append(trajectory.slot)
