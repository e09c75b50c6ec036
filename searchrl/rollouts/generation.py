# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: prompts of many callers share one engine.

A choice is one continuation of one prompt. A slot is a row of the engine that
decodes one choice. A dedicated thread compiles, prefills and decodes in passes.
Choices that arrive while others decode join them at the next pass. Each choice
has its own randomness. Stop strings are found here, in the bytes. All tokens
that were sampled after a stop string are dropped.
"""

from collections.abc import Callable, Sequence
import codecs
import collections
import dataclasses
import functools
import threading
from typing import Any

from jax.sharding import Mesh

from searchrl.agent import chat
from searchrl.models.inference import engine as engines
from searchrl.models.inference import sampling
from searchrl.models.inference import stops as stops_lib
from searchrl.models import transformer
from searchrl.rollouts import weight_sync
from searchrl.runtime import dispatch
from searchrl.runtime import mesh as meshes
from searchrl.runtime import progress


# Small numbers of slots that a pass may compute on CPUs. On other devices, few
# slots cost as much as many.
_FEW_ROWS = (1, 4, 16)


class Full(Exception):
  """An error: too many choices are already waiting."""


class Closed(Exception):
  """An error: the generator is closing or has failed."""


@dataclasses.dataclass(frozen=True)
class Choice:
  """One continuation of one prompt."""

  prompt: tuple[int, ...]
  budget: int  # max tokens to sample; prompt and budget must fit a slot
  row_ids: tuple[int, ...]  # numbers from which its randomness is derived
  draw: sampling.Draw = sampling.Draw()
  stops: tuple[bytes, ...] = ()  # non-empty stop strings; not in the text
  # True: its result, bit for bit, does not depend on other choices; slower.
  alike: bool = False


@dataclasses.dataclass(frozen=True)
class Piece:
  """The next part of a choice's text."""

  choice: int  # index of the choice in the request
  text: str
  tokens: tuple[int, ...]  # sampled tokens, including those of a stop string
  logprobs: tuple[float, ...]  # nats, under the distribution drawn from
  finish: str | None = None  # 'stop' or 'length' in the last piece


@dataclasses.dataclass(eq=False)
class Stream:
  """The stream of one request's pieces.

  The generator's thread calls `put` with each piece. The pieces of one choice
  come in order. A last call with None means that no more pieces will come.
  """

  put: Callable[[Piece | None], None]
  is_cancelled: bool = False

  def cancel(self) -> None:
    """Drops the remaining pieces, so that their slots become free."""
    self.is_cancelled = True


class Text:
  """The text of an answer, to which `add` adds the bytes of its tokens.

  Args:
    token_bytes: Bytes of each token id, as a sequence; see
      `Tokenizer.token_bytes`.
    stops: Stop strings. The text ends before the first one that is complete.
  """

  def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[bytes]):
    self._token_bytes, self._stops = token_bytes, stops
    self._longest = max(map(len, stops), default=1)
    self._raw, self._sent = bytearray(), 0
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')

  def add(self, tokens: Sequence[int], last: bool) -> tuple[str, int, bool]:
    """Appends tokens to the text, and returns the part that can now be shown.

    Bytes that may begin a stop string or a character are held back until the
    next tokens decide it.

    Args:
      tokens: Ids of the new tokens.
      last: True if no more tokens follow, so that nothing is held back.

    Returns:
      The new text, the number of `tokens` up to the end of a stop string (or of
      all of them), and True if a stop string was found.
    """
    for count, token in enumerate(tokens, start=1):
      begin = max(len(self._raw) - self._longest + 1, 0)
      self._raw += self._token_bytes[token]
      ends = [self._raw.find(stop, begin) for stop in self._stops]
      end = min((end for end in ends if end >= 0), default=-1)
      if end >= 0:
        return self._show(end, True), count, True
    held = 0 if last else self._begun_stop()
    return self._show(len(self._raw) - held, last), len(tokens), False

  def _show(self, end: int, last: bool) -> str:
    data = bytes(self._raw[self._sent:end])
    self._sent = end
    return self._decoder.decode(data, final=last)

  def _begun_stop(self) -> int:
    """Returns how many last bytes may be the beginning of a stop string."""
    tail = bytes(self._raw[max(len(self._raw) - self._longest + 1, 0):])
    return next((len(tail) - i for i in range(len(tail))
                 if any(stop.startswith(tail[i:]) for stop in self._stops)), 0)


@dataclasses.dataclass
class _Running:
  """A choice, one continuation of a prompt, that a slot is decoding."""

  stream: Stream
  number: int  # index among the request's choices
  text: Text
  alike: bool
  sent: int = 0  # number of tokens that were put into the stream


class Generator:
  """A generator that lets many threads use one engine.

  Args:
    engine: The engine, loaded with a temperature of None, so that each choice
      has its own. Nothing else may use it.
    token_bytes: Bytes of each token id, as a sequence.
    eos_ids: Token ids that end a choice; the same as in the engine.
    waiting: Maximum number of choices that wait for a slot.
  """

  def __init__(self, engine: engines.Engine, *, token_bytes: Sequence[bytes],
               eos_ids: Sequence[int], waiting: int):
    self._engine, self._token_bytes = engine, token_bytes
    self._eos_ids, self._room = frozenset(eos_ids), waiting
    self._queue: collections.deque[tuple[Stream, int, Choice]] = (
        collections.deque())
    self._running: dict[int, _Running] = {}  # by slot
    self._free = list(range(engine.slots))[::-1]
    self._changed = threading.Condition()
    self._closing = False
    self.is_compiled = False  # until then, choices wait
    self.error: Exception | None = None  # error that ended the loop
    self._thread = threading.Thread(
        target=self._run, name='generate', daemon=True)
    self._thread.start()

  @property
  def waiting(self) -> int:
    """Number of choices without a slot."""
    return len(self._queue)

  @property
  def running(self) -> int:
    """Number of choices with a slot."""
    return len(self._running)

  @property
  def is_open(self) -> bool:
    """True if new choices may be submitted."""
    return not self._closing

  def submit(self, choices: Sequence[Choice],
             put: Callable[[Piece | None], None]) -> Stream:
    """Puts choices into the queue, and returns the stream of their text.

    Args:
      choices: Continuations to sample.
      put: Function that the stream calls with each piece of text, and with None
        at the end.

    Raises:
      Full: The queue has no room for all choices. None of them is queued.
      Closed: The generator is closing or has failed.
    """
    stream = Stream(put)
    with self._changed:
      if self._closing:
        raise Closed
      self._queue = collections.deque(
          entry for entry in self._queue if not entry[0].is_cancelled)
      if len(self._queue) + len(choices) > self._room:
        raise Full
      self._queue.extend(
          (stream, n, choice) for n, choice in enumerate(choices))
      self._changed.notify()
    return stream

  def close(self, within_secs: float) -> None:
    """Accepts no more choices, and waits until the present ones have finished.

    It returns after `within_secs` at the latest.
    """
    with self._changed:
      self._closing = True
      self._changed.notify()
    self._thread.join(within_secs)

  def _run(self) -> None:
    try:
      with progress.phase('Compiling the programs that sample'):
        self._engine.compile()
      self.is_compiled = True
      while (appends := self._next()) is not None:
        self._pass(appends)
    except Exception as error:  # the engine's state is lost
      self.error = error
    with self._changed:
      self._closing = True
      streams = [stream for stream, *_ in self._queue]
      self._queue.clear()
    streams += [running.stream for running in self._running.values()]
    for stream in dict.fromkeys(streams):
      stream.put(None)

  def _next(self) -> list[engines.Append] | None:
    """Waits for work, and returns the prompts to append to free slots.

    It returns None if the generator is closing and has no work left. Slots of
    cancelled choices are freed first.
    """
    with self._changed:
      while not (self._queue or self._running):
        if self._closing:
          return None
        self._changed.wait()
      self._release([slot for slot, running in self._running.items()
                     if running.stream.is_cancelled], decoding=True)
      appends = []
      while self._queue and self._free:
        stream, number, choice = self._queue.popleft()
        if not stream.is_cancelled:
          appends.append(self._assign(stream, number, choice))
      return appends

  def _assign(self, stream, number: int, choice: Choice) -> engines.Append:
    slot = self._free.pop()
    self._running[slot] = _Running(
        stream, number, Text(self._token_bytes, choice.stops), choice.alike)
    return engines.Append(slot, choice.prompt, choice.budget, choice.row_ids,
                          fresh=True, draw=choice.draw)

  def _pass(self, appends: list[engines.Append]) -> None:
    if appends:
      self._engine.append(appends)
    if not self._running:
      return
    stopped = {turn.slot: (turn.tokens, turn.logprobs)
               for turn in self._engine.decode(alike=any(
                   running.alike for running in self._running.values()))}
    for slot in list(self._running):
      tokens, logprobs = stopped.get(slot) or self._engine.partial(slot)
      self._deliver(slot, tokens, logprobs, slot in stopped)

  def _deliver(self, slot: int, tokens, logprobs, last: bool) -> None:
    """Puts the tokens sampled in a slot since the last pass into its stream."""
    running = self._running[slot]
    new = tuple(tokens[running.sent:])
    text, used, is_stopped = running.text.add(new, last)
    finish = None
    if last or is_stopped:
      ends_itself = is_stopped or new[-1] in self._eos_ids
      finish = 'stop' if ends_itself else 'length'
      self._release([slot], decoding=not last)
    end = running.sent + used
    running.stream.put(Piece(running.number, text, new[:used],
                             tuple(logprobs[running.sent:end]), finish))
    running.sent = end

  def _release(self, slots: Sequence[int], *, decoding: bool) -> None:
    """Frees slots. `decoding` is True if their turns have not ended yet."""
    if slots and decoding:
      self._engine.cut(slots)
    for slot in slots:
      self._engine.release(slot)
      del self._running[slot]
      self._free.append(slot)


def build(shape: transformer.TransformerConfig, tokenizer: Any, params: Any,
          mesh: Mesh, *, slots: int, length: int, tensor: int, seed: int,
          steps: int, dtype: str, attention: str, waiting: int) -> Generator:
  """Builds a Generator, which starts at once, with an engine of its own.

  Args:
    shape: Shape of the decoder.
    tokenizer: The tokenizer; see `agent.tokenizer`.
    params: Weights in the engine's layout, on `mesh`.
    mesh: The engine's devices.
    slots: Number of choices (continuations of a prompt) decoded in parallel.
    length: Maximum number of tokens of a prompt with its continuation.
    tensor: Number of devices that share one copy of the weights.
    seed: Seed of all sampling.
    steps: Number of tokens decoded per pass. New choices join between passes.
    dtype: Dtype of weights, activations and cache.
    attention: Name of the attention implementation, which is already tested.
    waiting: Maximum number of choices that wait for a slot.

  Raises:
    ValueError: The slots cannot be divided among the devices.
  """
  weight_sync.check_slots(slots, weight_sync.copies(mesh.size, tensor))
  eos_ids = chat.ends(tokenizer)
  is_cpu = mesh.devices.flat[0].platform == 'cpu'
  engine = engines.Engine(
      shape, slots=slots, length=length, seed=seed,
      stop_table=no_stops(shape.vocab_size, eos_ids), steps=steps, dtype=dtype,
      attention=attention, few_rows=_FEW_ROWS if is_cpu else (),
      phase=progress.phase,
      ordered=dispatch.Ordered,
      shardings=functools.partial(meshes.shardings, mesh))
  engine.load(params, None)
  return Generator(engine, token_bytes=tokenizer.token_bytes, eos_ids=eos_ids,
                   waiting=waiting)


def no_stops(vocab_size: int, eos_ids: Sequence[int]) -> stops_lib.StopTable:
  """Returns an engine's stop table with end ids, but without stop strings.

  The stop strings differ by request, and the generator looks for them itself.
  """
  return stops_lib.compile_table((), (), vocab_size, eos_ids)
