# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts from many threads in, pieces of what a model says out: one loop over slots.

A thread of its own feeds and decodes. What is asked while others decode joins
them at the next pass. Every choice draws in its own way; stop strings are found
here, in the bytes, and what was sampled beyond one is thrown away.
"""

from collections.abc import Iterator, Sequence
import codecs
import collections
import dataclasses
import queue
import threading
import time

from searchrl.models.inference import engine as engines
from searchrl.models.inference import sampling


class Full(Exception):
  """Too much waits already."""


class Closed(Exception):
  """Nothing more is generated: it is being ended, or has failed."""


@dataclasses.dataclass(frozen=True)
class Choice:
  """One continuation of one prompt."""

  prompt: tuple[int, ...]
  budget: int  # tokens that may be sampled; with the prompt at most a slot's
  row_ids: tuple[int, ...]  # what its randomness is folded from
  draw: sampling.Draw = sampling.Draw()
  stops: tuple[bytes, ...] = ()  # none empty; they are no part of the text


@dataclasses.dataclass(frozen=True)
class Piece:
  """What was added to a choice."""

  choice: int  # its place in the request
  text: str
  tokens: tuple[int, ...]  # sampled, those of a stop string included
  logprobs: tuple[float, ...]  # nats, of the distribution drawn from
  finish: str | None = None  # 'stop' or 'length', with the last piece


class Stream:
  """The pieces of one request's choices, as they come."""

  def __init__(self, choices: Sequence[Choice]):
    self._back = queue.SimpleQueue()
    self._left = len(choices)
    self.cancelled = False

  def put(self, piece: Piece | None) -> None:
    """A piece; None: there will be no more."""
    self._back.put(piece)

  def cancel(self) -> None:
    """Nobody listens any more: its slots become free."""
    self.cancelled = True

  def pieces(self, deadline: float) -> Iterator[Piece]:
    """All pieces, until every choice is finished.

    Raises:
      TimeoutError: time.monotonic() has passed the deadline; it is cancelled.
      Closed: the loop has ended before.
    """
    while self._left:
      try:
        piece = self._back.get(timeout=max(deadline - time.monotonic(), 0))
      except queue.Empty:
        self.cancel()
        raise TimeoutError from None
      if piece is None:
        raise Closed
      self._left -= piece.finish is not None
      yield piece


class Text:
  """A choice's text as its tokens come, up to a stop string.

  Args:
    token_bytes: what each id adds; see `Tokenizer.token_bytes`.
    stops: any of them ends the text before it.
  """

  def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[bytes]):
    self._token_bytes, self._stops = token_bytes, stops
    self._longest = max(map(len, stops), default=1)
    self._raw, self._sent = bytearray(), 0
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')

  def add(self, tokens: Sequence[int], last: bool) -> tuple[str, int, bool]:
    """The text that can be shown, the tokens taken, whether a stop was met.

    What may be the beginning of a stop string, or of a character, is held back
    until more is known; with the last tokens it is let go.
    """
    for count, token in enumerate(tokens, start=1):
      begin = max(len(self._raw) - self._longest + 1, 0)
      self._raw += self._token_bytes[token]
      met = [at for stop in self._stops
             if (at := self._raw.find(stop, begin)) >= 0]
      if met:
        return self._show(min(met), True), count, True
    held = 0 if last else self._beginning_of_a_stop()
    return self._show(len(self._raw) - held, last), len(tokens), False

  def _show(self, end: int, last: bool) -> str:
    shown = bytes(self._raw[self._sent:end])
    self._sent = end
    return self._decoder.decode(shown, final=last)

  def _beginning_of_a_stop(self) -> int:
    tail = bytes(self._raw[max(len(self._raw) - self._longest + 1, 0):])
    return next((len(tail) - i for i in range(len(tail))
                 if any(s.startswith(tail[i:]) for s in self._stops)), 0)


@dataclasses.dataclass
class _Speaker:
  """A choice that has a slot."""

  stream: Stream
  number: int  # among the request's choices
  choice: Choice
  text: Text
  heard: int = 0  # tokens


class Generator:
  """One engine for many threads.

  Args:
    engine: loaded with a temperature of None; nobody else may use it.
    token_bytes: see `Text`.
    eos_ids: that end a choice, as the engine has them.
    waiting: choices that may wait for a slot.
  """

  def __init__(self, engine: engines.Engine, *, token_bytes: Sequence[bytes],
               eos_ids: Sequence[int], waiting: int):
    self._engine, self._token_bytes = engine, token_bytes
    self._eos_ids, self._most = frozenset(eos_ids), waiting
    self._queue = collections.deque()  # (stream, number, choice)
    self._speaking = {}  # slot -> _Speaker
    self._free = list(range(engine.slots))[::-1]
    self._changed = threading.Condition()
    self._closing = False
    self.error = None  # what ended the loop, if it failed
    self._thread = threading.Thread(
        target=self._run, name='generate', daemon=True)
    self._thread.start()

  @property
  def waiting(self) -> int:
    """Choices without a slot."""
    return len(self._queue)

  @property
  def speaking(self) -> int:
    """Choices with one."""
    return len(self._speaking)

  @property
  def is_open(self) -> bool:
    return not self._closing

  def submit(self, choices: Sequence[Choice]) -> Stream:
    """Asks for choices.

    Raises:
      Full: there is no room for so many to wait.
      Closed: nothing is taken any more.
    """
    stream = Stream(choices)
    with self._changed:
      if self._closing:
        raise Closed
      if len(self._queue) + len(choices) > self._most:
        raise Full
      self._queue.extend(
          (stream, n, choice) for n, choice in enumerate(choices))
      self._changed.notify()
    return stream

  def close(self, within_secs: float) -> None:
    """Takes no more, finishes what it has, ends."""
    with self._changed:
      self._closing = True
      self._changed.notify()
    self._thread.join(within_secs)

  def _run(self) -> None:
    try:
      while (seated := self._next()) is not None:
        self._pass(seated)
    except Exception as error:  # the engine's state is lost
      self.error = error
    with self._changed:
      self._closing = True
      left = [stream for stream, *_ in self._queue]
      self._queue.clear()
    for stream in [*left, *(s.stream for s in self._speaking.values())]:
      stream.put(None)

  def _next(self) -> list[engines.Append] | None:
    """Waits for work; who is newly seated, or None at the end."""
    with self._changed:
      while not (self._queue or self._speaking):
        if self._closing:
          return None
        self._changed.wait()
      self._leave([slot for slot, its in self._speaking.items()
                   if its.stream.cancelled], decoding=True)
      seated = []
      while self._queue and self._free:
        stream, number, choice = self._queue.popleft()
        if not stream.cancelled:
          seated.append(self._seat(stream, number, choice))
      return seated

  def _seat(self, stream, number: int, choice: Choice) -> engines.Append:
    slot = self._free.pop()
    self._speaking[slot] = _Speaker(
        stream, number, choice, Text(self._token_bytes, choice.stops))
    return engines.Append(slot, choice.prompt, choice.budget, choice.row_ids,
                          fresh=True, draw=choice.draw)

  def _pass(self, seated: list[engines.Append]) -> None:
    if seated:
      self._engine.append(seated)
    if not self._speaking:
      return
    over = {said.slot: said for said in self._engine.decode()}
    for slot in list(self._speaking):
      if slot in over:
        self._tell(slot, over[slot].tokens, over[slot].logprobs, True)
      else:
        self._tell(slot, *self._engine.partial(slot), False)

  def _tell(self, slot: int, tokens, logprobs, over: bool) -> None:
    """Passes on what a slot has said since the last time."""
    its = self._speaking[slot]
    new = tuple(tokens[its.heard:])
    text, taken, stopped = its.text.add(new, over)
    finish = None
    if over or stopped:
      by_itself = stopped or new[-1] in self._eos_ids
      finish = 'stop' if by_itself else 'length'
      self._leave([slot], decoding=not over)
    its.stream.put(Piece(
        its.number, text, new[:taken],
        tuple(logprobs[its.heard:its.heard + taken]), finish))
    its.heard += taken

  def _leave(self, slots: Sequence[int], *, decoding: bool) -> None:
    """Frees slots, in the middle of a turn or after it."""
    if slots and decoding:
      self._engine.cut(slots)
    for slot in slots:
      self._engine.release(slot)
      del self._speaking[slot]
      self._free.append(slot)
