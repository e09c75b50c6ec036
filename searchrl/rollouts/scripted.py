# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts whose turns a function writes instead of the policy.

The function may be a program or a model on a server. Its turns go through the
code that drives all rollouts, so prompts, passages, budgets and token ids are
those that the policy has in training.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.models.inference import engine as engines
from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.trajectory import Request, SearchFn, Trajectory, Turn

# The request and the turns so far -> the text of the next turn.
Write = Callable[[Request, tuple[Turn, ...]], str]
_STEP = 0  # step of all scripted rollouts
_WAIT_SECS = 0.05  # longest wait for a text while searches may return


class Engine:
  """An engine that gets turns from a function instead of a language model.

  It has the methods of `models.inference.engine.Engine` that the driver of
  rollouts calls. A slot holds one trajectory.

  Args:
    write: Function that returns the text of the next turn, given the request
      and the turns so far. It is called in threads, and its first error ends
      the rollout.
    encode: Function from a text to token ids.
    requests: Requests of the rollout. Each has a slot. The engine needs them to
      find the request of a turn, which the driver names only by its `row_ids`.
    length: Maximum number of tokens of a trajectory.
    max_turns: Maximum number of turns of a trajectory.
    threads: Number of simultaneous calls of `write`. With 1, `read` waits for
      the turns of all slots.
  """

  def __init__(self, write: Write, encode: Callable[[str], tuple[int, ...]], *,
               requests: Sequence[Request], length: int, max_turns: int,
               threads: int):
    self.slots, self.length = len(requests), length
    self._write, self._encode = write, encode
    self._threads = futures.ThreadPoolExecutor(threads, 'scripted-turns')
    self._in_step = threads == 1  # all slots write before any is read
    self._used = [0] * len(requests)
    self._names = {
        engines.row_ids(_STEP, request.question.uid, request.sample, turn):
        request for request in requests for turn in range(max_turns)}
    self._turns: dict[tuple[str, int], tuple[Turn, ...]] = {}
    self._writing: dict[futures.Future[str], engines.Append] = {}

  def watch(self, trajectory: Trajectory) -> None:
    """Stores the turns of a trajectory that has grown; the driver calls it."""
    self._turns[trajectory.question.uid, trajectory.sample] = trajectory.turns

  def load(self, *unused: Any) -> None:
    """Does nothing, because there are no weights."""

  def compile(self) -> None:
    """Does nothing, because there are no programs."""

  def unload(self) -> None:
    """Does nothing, because there are no weights."""

  def admit(self, appends: Sequence[engines.Append]) -> list[bool]:
    """Returns True for every append, because all have room."""
    return [True] * len(appends)

  def append(self, appends: Sequence[engines.Append]) -> None:
    """Adds tokens to slots, and starts to write their next turns in threads."""
    for append in appends:
      request = self._names[tuple(append.row_ids)]
      turns = () if append.fresh else self._turns[
          request.question.uid, request.sample]
      self._used[append.slot] = len(append.tokens) + (
          0 if append.fresh else self._used[append.slot])
      self._writing[self._threads.submit(self._write, request, turns)] = append

  def dispatch(self) -> None:
    """Does nothing, because turns are written in threads."""

  def read(self) -> list[engines.Stopped]:
    """Returns the turns that are finished since the last call, by slot.

    With one thread, it waits for all turns. Otherwise it waits 0.05 s at most,
    and may return none. It raises the error of a `write` that has failed.
    """
    done, _ = futures.wait(
        self._writing, None if self._in_step else _WAIT_SECS,
        futures.ALL_COMPLETED if self._in_step else futures.FIRST_COMPLETED)
    stopped = []
    for future in done:
      append = self._writing.pop(future)
      tokens = self._encode(future.result())[:append.budget]
      self._used[append.slot] += len(tokens)
      stopped.append(engines.Stopped(
          append.slot, tokens, (0.0,) * len(tokens)))
    return sorted(stopped, key=lambda turn: turn.slot)

  def abandon(self) -> None:
    """Drops the turns that are being written."""
    for future in self._writing:
      future.cancel()
    self._writing.clear()

  def close(self) -> None:
    """Ends the threads, and drops turns that are not being written yet."""
    self._threads.shutdown(wait=False, cancel_futures=True)

  def used(self, slot: int) -> int:
    """Returns the number of tokens in a slot."""
    return self._used[slot]

  def release(self, slot: int) -> None:
    """Empties a slot."""
    self._used[slot] = 0


def rollout(write: Write, requests: Sequence[Request], *, tokenizer: Any,
            dialogue: dialogues.Dialogue, budgets: driver.Budgets, length: int,
            search: SearchFn, threads: int = 1,
            search_timeout_secs: float = 60.0) -> list[Trajectory]:
  """Returns a trajectory for each request, whose turns `write` wrote.

  A text that is longer than the budget of a turn is cut, as in any rollout.

  Args:
    write: Function that returns the text of the next turn, given the request
      and the turns so far. It is called in threads.
    requests: The samples to write, all different.
    tokenizer: Tokenizer of the policy; see `agent.tokenizer`.
    dialogue: The protocol, in the tokenizer's tokens.
    budgets: Limits of a trajectory.
    length: Largest number of tokens of a trajectory.
    search: The search engine.
    threads: Number of simultaneous calls of `write`. With one thread, the
      searches are always made in the same order.
    search_timeout_secs: Seconds after which a search has failed.

  Raises:
    ValueError: A prompt is longer than its budget.
    Exception: The first error that `write` raises.
  """
  engine: Any = Engine(
      write, tokenizer.encode_data, requests=requests, length=length,
      max_turns=budgets.max_turns, threads=threads)
  no_model: Any = None
  sampler = samplers.Sampler(
      no_model, tokenizer, dialogue, budgets, engine, no_model, driver.Schedule(
          search_order='deterministic' if threads == 1 else 'arrival',
          search_timeout_secs=search_timeout_secs))
  try:
    return sampler.rollout(
        no_model, requests, search=search, temperature=1.0, step=_STEP,
        watch=engine.watch).trajectories
  finally:
    engine.close()
