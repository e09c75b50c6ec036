# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""generation: a choice is the same alone and in company; texts end at stops."""

import dataclasses
import queue
import threading
import time

import chats
import fakes
from hypothesis import given, settings, strategies
import jax
import numpy as np
import pytest
import tiny

from searchrl.agent import chat
from searchrl.models.inference import engine as engines
from searchrl.models.inference import sampling
from searchrl.models import transformer
from searchrl.rollouts import generation

TOKENIZER = tiny.Tokenizer()
PIECES = TOKENIZER.token_bytes
NEVER = generation.no_stops(tiny.CONFIG.vocab_size, TOKENIZER.eos_ids)


def text_oracle(tokens, stops):
  """The text before the first stop string, and the tokens up to it."""
  for count in range(1, len(tokens) + 1):
    raw = b''.join(PIECES[t] for t in tokens[:count])
    found = [raw.find(stop) for stop in stops if stop in raw]
    if found:
      return raw[:min(found)].decode(errors='replace'), count, True
  raw = b''.join(PIECES[t] for t in tokens)
  return raw.decode(errors='replace'), len(tokens), False


@settings(deadline=None, max_examples=400)
@given(
    strategies.lists(strategies.sampled_from(
        TOKENIZER.encode('the aab') + (32, 33)), min_size=1, max_size=14),
    strategies.lists(strategies.sampled_from(
        [b'thethe', b'aab', b' a a', 'éb'.encode()]), max_size=2),
    strategies.lists(strategies.integers(1, 2), min_size=14, max_size=14))
def test_text_in_parts_is_the_text_before_the_first_stop(tokens, stops, sizes):
  reader = generation.Text(PIECES, stops)
  shown, used, stopped, left = '', 0, False, list(tokens)
  for size in sizes:
    if not left or stopped:
      break
    part, left = left[:size], left[size:]
    text, count, stopped = reader.add(part, not left)
    shown, used = shown + text, used + count
  assert (shown, used, stopped) == text_oracle(tokens, stops)


def test_nothing_is_shown_that_a_stop_string_may_take_back():
  reader = generation.Text(PIECES, (b'</search>', b'rch!'))
  parts = [reader.add(TOKENIZER.encode(part), False)[0]
           for part in ('a</', 'sea', 'rch', 'x', '</')]
  assert parts == ['a', '', '', '</searchx', '']
  assert reader.add((), True) == ('</', 0, False)


@pytest.fixture(scope='module')
def params():
  return tiny.params()


@pytest.fixture(scope='module')
def engine():
  return engines.Engine(tiny.CONFIG, slots=4, length=64, stop_table=NEVER,
                        tile=16, block=16, steps=5, seed=4)


@pytest.fixture
def generator(engine, params):
  engine.load(params, None)
  made = generation.Generator(engine, token_bytes=PIECES,
                              eos_ids=TOKENIZER.eos_ids, waiting=20)
  yield made
  made.close(20)
  assert made.error is None and not made.running and not made.waiting
  assert sorted(made._free) == [0, 1, 2, 3]


def choice(seed, budget=20, temperature=1.0, stops=(), **truncation):
  rng = np.random.default_rng(seed)
  prompt = tuple(rng.integers(0, 95, rng.integers(1, 30)).tolist())
  return generation.Choice(
      prompt, budget, engines.row_ids(0, f'{seed}', 0, 0), sampling.Draw(
          temperature, sampling.Truncation(**truncation)), stops)


class Received:
  """The pieces of one request."""

  def __init__(self, generator, choices):
    self.count, self.queue = len(choices), queue.SimpleQueue()
    self.stream = generator.submit(choices, self.queue.put)

  def pieces(self):
    left = self.count
    while left:
      piece = self.queue.get(timeout=60)
      yield piece
      left -= piece is None or piece.finish is not None

  def all(self):
    """number -> (text, tokens, log-probs, finish)."""
    received = {}
    for piece in self.pieces():
      text, tokens, logprobs, finish = received.get(
          piece.choice, ('', (), (), None))
      assert finish is None and len(piece.tokens) == len(piece.logprobs)
      received[piece.choice] = (
          text + piece.text, tokens + piece.tokens,
          logprobs + piece.logprobs, piece.finish)
    return received


CHOICES = [choice(0), choice(1, temperature=0.0), choice(2, top_k=3),
           choice(3, 9, stops=(b'e',)), choice(4, temperature=2.0, top_p=0.9),
           choice(5, 1), choice(6, 30, min_p=0.05, stops=(b'a', b'in')),
           choice(7, 3, temperature=0.0), choice(1, temperature=0.0)]


@pytest.fixture(scope='module')
def alone(engine, params):
  """The results of each choice alone in the engine."""
  results = []
  for one in CHOICES:
    engine.load(params, None)
    engine.append([engines.Append(0, one.prompt, one.budget, one.row_ids, True,
                                  one.draw)])
    stopped = []
    while not stopped:
      stopped = engine.decode()
    text, count, is_stopped = text_oracle(stopped[0].tokens, one.stops)
    tokens = stopped[0].tokens[:count]
    by_itself = is_stopped or tokens[-1] in TOKENIZER.eos_ids
    results.append((text, tokens, stopped[0].logprobs[:count],
                    'stop' if by_itself else 'length'))
  return results


def test_choices_of_one_request_are_as_if_each_were_alone(generator, alone):
  received = Received(generator, CHOICES).all()
  assert [received[n] for n in range(len(CHOICES))] == alone
  assert {finish for *_, finish in alone} == {'stop', 'length'}
  assert received[1] == received[8]  # of one prompt, greedy


def test_requests_that_come_while_others_decode_join_them(generator, alone):
  first = Received(generator, CHOICES[6:7])
  begun = next(first.pieces())  # it decodes
  streams = [Received(generator, [one]) for one in CHOICES]
  for stream, expected in zip(streams, alone):
    assert stream.all()[0] == expected
  assert alone[6][1][:len(begun.tokens)] == begun.tokens


def test_greedy_is_the_argmax_of_a_full_forward(generator, params):
  one = choice(1, temperature=0.0)
  _, tokens, logprobs, _ = Received(generator, [one]).all()[0]
  whole = np.array([[*one.prompt, *tokens]])
  logits = transformer.logits(
      params, transformer.forward(params, whole, tiny.CONFIG))[0]
  at = np.arange(len(one.prompt) - 1, whole.shape[1] - 1)
  np.testing.assert_array_equal(np.argmax(logits[at], -1), tokens)
  expected = jax.nn.log_softmax(logits[at])[np.arange(len(at)), list(tokens)]
  np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.fixture
def held(engine, params):
  engine.load(params, None)
  slow = fakes.GatedEngine(engine)
  made = generation.Generator(
      slow, token_bytes=PIECES, eos_ids=TOKENIZER.eos_ids, waiting=6)
  yield slow, made
  slow.go.release(1000)
  made.close(20)
  assert made.error is None and len(made._free) == 4


def wait_for(condition):
  end = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.001)


def test_too_much_is_refused_whole_and_the_rest_is_served(held, alone):
  slow, generator = held
  first = Received(generator, CHOICES[:4])
  wait_for(lambda: generator.running == 4)
  second = Received(generator, CHOICES[4:9])
  with pytest.raises(generation.Full):
    Received(generator, CHOICES[:2])
  assert generator.waiting == 5
  slow.go.release(1000)
  received = first.all() | {n + 4: x for n, x in second.all().items()}
  assert received == dict(enumerate(alone))


def test_a_cancelled_stream_leaves_its_slots(held, alone):
  slow, generator = held
  left = Received(generator, [choice(seed, 34) for seed in range(20, 24)])
  wait_for(lambda: generator.running == 4)
  dropped = Received(generator, [choice(30)])
  following = Received(generator, CHOICES[:1])
  left.stream.cancel()
  dropped.stream.cancel()
  slow.go.release(1)  # the pass that was under way
  wait_for(lambda: generator.running == 1 and not generator.waiting)
  slow.go.release(1000)
  assert following.all()[0] == alone[0]


def test_cancelled_choices_leave_their_places_in_the_queue(held, alone):
  slow, generator = held
  Received(generator, CHOICES[:4])
  wait_for(lambda: generator.running == 4)
  dropped = Received(generator, CHOICES[4:9])
  with pytest.raises(generation.Full):
    Received(generator, CHOICES[:2])
  dropped.stream.cancel()
  following = Received(generator, CHOICES[:2])
  assert generator.waiting == 2
  slow.go.release(1000)
  assert following.all() == dict(enumerate(alone[:2]))


def test_closing_finishes_what_was_asked_and_takes_no_more(held, alone):
  slow, generator = held
  stream = Received(generator, CHOICES[:6])
  closing = threading.Thread(target=generator.close, args=(20,))
  closing.start()
  wait_for(lambda: not generator.is_open)
  with pytest.raises(generation.Closed):
    Received(generator, CHOICES[:1])
  slow.go.release(1000)
  assert stream.all() == dict(enumerate(alone[:6]))
  closing.join(20)
  assert not closing.is_alive()


def test_a_pass_computes_few_rows_unless_a_choice_must_be_alike():
  """The same choice by one row and by all of them."""
  shape = dataclasses.replace(tiny.CONFIG, num_hidden_layers=1)
  few = engines.Engine(
      shape, slots=4, length=64, stop_table=NEVER, tile=16, tiles=(4,),
      block=16, steps=5, seed=4, few_rows=(1, 2))
  few.load(tiny.params(shape), None)
  generator = generation.Generator(
      few, token_bytes=PIECES, eos_ids=TOKENIZER.eos_ids, waiting=20)
  results, rows = [], []
  for is_alike in (False, True):
    before = few.decoded_tokens, few.slot_steps
    asked = dataclasses.replace(CHOICES[0], alike=is_alike)
    results += Received(generator, [asked]).all().values()
    rows.append((few.slot_steps - before[1]) / (few.decoded_tokens - before[0]))
  generator.close(20)
  (text, tokens, logprobs, finish), (*others, last) = results
  assert rows == [1, 4] and len(tokens) > 5
  assert (text, tokens, finish) == (others[0], others[1], last)
  np.testing.assert_allclose(logprobs, others[2], atol=1e-5)


def test_a_failing_engine_ends_every_stream_once_and_is_named(engine, params):
  engine.load(params, None)
  slow = fakes.GatedEngine(engine)
  slow.decode = lambda **_: time.sleep(0.1) or 1 / 0
  generator = generation.Generator(
      slow, token_bytes=PIECES, eos_ids=(), waiting=20)
  streams = [Received(generator, CHOICES[:4]), Received(generator, CHOICES[4:])]
  for stream in streams:  # all end, without another piece
    assert stream.queue.get(timeout=20) is None and stream.queue.empty()
  assert isinstance(generator.error, ZeroDivisionError)
  assert not generator.is_open
  with pytest.raises(generation.Closed):
    Received(generator, CHOICES[:1])


def test_what_ends_a_turn_of_the_template_ends_a_choice():
  tokenizer = chats.byte_level(chats.QWEN2, eos='<|endoftext|>')
  assert chat.turn_ends(tokenizer) == tokenizer.encode('<|im_end|>')
  assert chat.turn_ends(chats.byte_level()) == ()  # no template


def test_a_table_that_stops_at_an_end_alone():
  table = generation.no_stops(7, (2, 5))
  assert np.flatnonzero(table.hit[0]).tolist() == [2, 5]
  assert not np.any(table.next_state)
