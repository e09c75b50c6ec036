# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""engine: samples against full forwards; only the row's name decides them."""

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from searchrl import mesh as meshes
from searchrl.models import engine as engines
from searchrl.models import policy
from searchrl.models import stops
from searchrl.models import transformer

LENGTH = 48
TEMPERATURE = 0.8
TOKENIZER = tiny.Tokenizer()


@pytest.fixture(scope='module')
def params():
  return tiny.params()


def build(stop=('th', '>'), eos_ids=TOKENIZER.eos_ids, **options):
  table = stops.compile_table(TOKENIZER.token_bytes, stop)
  options = dict(slots=3, length=LENGTH, chunks=(8,), steps=5, seed=4) | options
  return engines.Engine(tiny.CONFIG, stop_table=table, eos_ids=eos_ids,
                        **options)


@pytest.fixture(scope='module')
def engine():
  return build()


@pytest.fixture(scope='module')
def other():
  """The same sampler in another shape."""
  return build(slots=5, length=160, chunks=(40,), steps=2)


@pytest.fixture(scope='module')
def quiet():
  """One whose turns hardly ever stop by themselves."""
  return build(stop=('never said',), slots=8, length=160)


@functools.partial(jax.jit, static_argnames='temperature')
def full_logprobs(params, tokens, temperature=TEMPERATURE):
  return policy.token_logprobs(
      params, tokens, tiny.CONFIG, temperature=temperature)[0]


def ids(rng, count):
  return tuple(rng.integers(0, tiny.CONFIG.vocab_size, count).tolist())


def talks(seed=0, rows=3):
  """uid -> what its slot is fed, turn by turn; some longer than a chunk."""
  rng = np.random.default_rng(seed)
  return {f'{seed}-{row}': [ids(rng, int(n)) for n in (
      rng.integers(1, 20), rng.integers(1, 11), 1)] for row in range(rows)}


def converse(engine, talks, slots=None, budget=4):
  """Plays talks side by side, each at its own pace.

  Returns:
    uid -> (tokens, log-probs [T], zero at what was fed).
  """
  slots = slots or range(len(talks))
  uid_of = dict(zip(slots, talks))
  said = {uid: ([], []) for uid in talks}
  left = {uid: list(turns) for uid, turns in talks.items()}

  def feed(slot):
    uid = uid_of[slot]
    turn = len(talks[uid]) - len(left[uid])
    tokens = left[uid].pop(0)
    said[uid][0].extend(tokens)
    said[uid][1].extend([0.0] * len(tokens))
    row_ids = engines.row_ids(3, uid, 1, turn)
    return engines.Append(slot, tokens, budget, row_ids, fresh=turn == 0)

  engine.append([feed(slot) for slot in slots])
  while uid_of:
    again = []
    for stopped in engine.decode():
      uid = uid_of[stopped.slot]
      said[uid][0].extend(stopped.tokens)
      said[uid][1].extend(stopped.logprobs)
      assert engine.used(stopped.slot) == len(said[uid][0])
      if left[uid]:
        again.append(feed(stopped.slot))
      else:
        del uid_of[stopped.slot]
        engine.release(stopped.slot)
    if again:
      engine.append(again)
  return said


def padded(rows):
  return np.array([[*r, *[0] * (LENGTH - len(r))] for r in rows])


def test_logprobs_equal_a_full_forward_over_several_turns(engine, params):
  engine.load(params, TEMPERATURE)
  before = engine.prefilled_tokens
  asked = talks()
  said = converse(engine, asked)
  tokens = padded(t for t, _ in said.values())
  logprobs = padded(logprobs for _, logprobs in said.values())
  expected = np.where(logprobs < 0, full_logprobs(params, tokens), 0)
  assert (logprobs < 0).sum() >= 9  # three turns of three rows
  np.testing.assert_allclose(logprobs, expected, atol=1e-4)
  # What was fed was fed once: history is never prefilled again.
  fed = sum(len(turn) for turns in asked.values() for turn in turns)
  assert engine.prefilled_tokens - before == fed - len(asked)


def test_a_row_is_the_same_in_any_slot_company_order_and_shape(
    engine, other, params):
  engine.load(params, TEMPERATURE)
  other.load(params, TEMPERATURE)
  asked = talks(1)
  together = converse(engine, asked)
  for uid, turns in asked.items():
    alone = converse(engine, {uid: turns}, slots=[2])
    assert alone[uid][0] == together[uid][0]
  crowd = talks(2, rows=2) | dict(reversed(asked.items()))
  crowded = converse(other, crowd, slots=[1, 4, 0, 3, 2])
  for uid in asked:
    assert crowded[uid][0] == together[uid][0]
    np.testing.assert_allclose(crowded[uid][1], together[uid][1], atol=1e-5)


def test_step_uid_sample_and_turn_each_give_other_samples(other, params):
  other.load(params, TEMPERATURE)
  prompt = ids(np.random.default_rng(5), 6)
  names = [(0, 'a', 0, 0), (1, 'a', 0, 0), (0, 'b', 0, 0), (0, 'a', 1, 0),
           (0, 'a', 0, 1)]
  other.append([
      engines.Append(slot, prompt, 12, engines.row_ids(*name), fresh=True)
      for slot, name in enumerate(names)])
  said = {}
  while len(said) < len(names):
    said |= {s.slot: s.tokens for s in other.decode()}
  assert len(set(said.values())) == len(names)


def test_row_ids_are_what_every_part_of_the_library_folds_in():
  digest = hashlib.sha256('frage-ü'.encode()).hexdigest()
  step, high, low, sample, turn = engines.row_ids(7, 'frage-ü', 2, 3)
  assert (step, sample, turn) == (7, 2, 3)
  assert f'{high:08x}{low:08x}' == digest[:16]


def test_another_seed_samples_otherwise():
  @jax.jit
  def draw(seed):
    key = jax.random.key_data(jax.random.key(seed))
    return engines.sample(jnp.zeros((32, 50)), jnp.tile(key, (32, 1)),
                          jnp.arange(32), jnp.float32(1))[0]

  assert (draw(0) == draw(0)).all()
  assert (draw(0) != draw(1)).mean() > 0.9


def test_greedy_takes_the_argmax_of_a_full_forward(engine, params):
  engine.load(params, 0.0)
  said = converse(engine, talks(3), budget=6)
  tokens = padded(t for t, _ in said.values())
  forward = jax.jit(lambda p, x: transformer.logits(
      p, transformer.forward(p, x, tiny.CONFIG)))
  best = np.argmax(forward(params, tokens), -1)
  logprobs = full_logprobs(params, tokens, temperature=1.0)
  for row, (of_row, said_logprobs) in enumerate(said.values()):
    sampled = np.flatnonzero(said_logprobs)
    assert len(sampled) >= 3
    np.testing.assert_array_equal(np.array(of_row)[sampled],
                                  best[row, sampled - 1])
    np.testing.assert_allclose(np.array(said_logprobs)[sampled],
                               logprobs[row, sampled], atol=1e-4)


def test_a_turn_ends_at_the_token_that_completes_a_stop_string(engine, params):
  engine.load(params, 2.0)  # hot: every token is met now and then
  ended_by_stop = 0
  for seed in range(10, 16):
    asked = talks(seed)
    turn = []
    for token, logprob in [pair for said in converse(
        engine, asked, budget=6).values() for pair in zip(*said, strict=True)]:
      if not logprob and not turn:
        continue
      if logprob:
        turn.append(token)
      texts = [b''.join(TOKENIZER.token_bytes[t] for t in turn[:n])
               for n in range(len(turn) + 1)]
      over = [b'th' in text or b'>' in text for text in texts]
      assert not any(over[:-1]), texts  # never goes on after a stop string
      ends = over[-1] or len(turn) == 6 or turn[-1] in TOKENIZER.eos_ids
      ended_by_stop += over[-1]
      if not logprob:
        assert ends  # it was fed, so it had stopped
      if ends or not logprob:
        turn = []
  assert ended_by_stop >= 5


def test_a_stop_string_across_tokens_and_an_end_of_sequence_end_a_turn(
    quiet, params):
  rng = np.random.default_rng(0)
  prompts = [ids(rng, 9) for _ in range(8)]

  def greedy(engine):
    engine.load(params, 0.0)
    engine.append([engines.Append(slot, prompt, 14, (0,) * 5, True)
                   for slot, prompt in enumerate(prompts)])
    said = {}
    while len(said) < 8:
      said |= {s.slot: s.tokens for s in engine.decode()}
    return said

  said = greedy(quiet)
  text = {slot: [TOKENIZER.token_bytes[t] for t in tokens]
          for slot, tokens in said.items()}
  # The last byte of one token and the first of the next, deep in a turn.
  stop, eos = next(
      (pieces[i][-1:] + pieces[i + 1][:1], said[slot][i + 2])
      for slot, pieces in text.items() for i in range(2, 10)
      if (pieces[i][-1:] + pieces[i + 1][:1]).isascii()
      and pieces[i] != pieces[i + 1] and len(said[slot]) > i + 2
      and said[slot][i + 2] not in said[slot][:i + 2])
  stopping = build(stop=(stop.decode(),), eos_ids=(eos,), slots=8, length=160)
  by_stop = by_eos = 0
  for slot, tokens in greedy(stopping).items():
    want = next(
        (n for n in range(1, 15) if stop in b''.join(text[slot][:n]) or
         said[slot][n - 1] == eos), 14)
    assert tokens == said[slot][:want]
    by_stop += stop in b''.join(text[slot][:want])
    by_eos += tokens[-1] == eos
  assert by_stop and by_eos + by_stop < 9


def test_a_new_turn_forgets_the_start_of_a_stop_string(engine, params):
  engine.load(params, TEMPERATURE)
  engine.append([engines.Append(slot, (1, 2), 1, (0,) * 5, True)
                 for slot in range(3)])
  engine.decode()
  half = jnp.ones_like(engine._state.stop_state)  # 't' of 'th' was said
  engine._state = dataclasses.replace(engine._state, stop_state=half)
  engine.append([engines.Append(1, (5,), 1, (0,) * 5, fresh=False)])
  assert engine._state.stop_state.tolist() == [1, 0, 1]


def test_a_turn_that_never_stops_has_exactly_its_budget(quiet, params):
  quiet.load(params, TEMPERATURE)
  before = quiet.decoded_tokens
  budgets = (1, 2, 4, 5, 6, 10, 11, 20)  # a decode takes five steps at most
  quiet.append([engines.Append(slot, (1, 2), budget, (0, 0, 0, slot, 0), True)
                for slot, budget in enumerate(budgets)])
  said = {}
  while len(said) < 8:
    said |= {s.slot: s for s in quiet.decode()}
  lengths = [len(said[slot].tokens) for slot in range(8)]
  ended = [said[slot].tokens[-1] in TOKENIZER.eos_ids for slot in range(8)]
  assert [n for n, e in zip(lengths, ended) if not e] == [
      n for n, e in zip(budgets, ended) if not e]
  assert sum(ended) < 4
  assert all(len(s.tokens) == len(s.logprobs) for s in said.values())
  assert quiet.decoded_tokens - before == sum(lengths)


def test_samples_follow_the_softmax():
  logits = jnp.array([1.0, -2.0, 0.5, 0.0, -30.0, 2.0, -1.0, 0.3])
  rows, temperature = 20_000, 1.5
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), rows))
  tokens, logprobs = jax.jit(engines.sample)(
      jnp.tile(logits, (rows, 1)), keys, jnp.full(rows, 9),
      jnp.float32(temperature))
  scaled = np.asarray(logits, np.float64) / temperature
  probs = np.exp(scaled) / np.exp(scaled).sum()
  np.testing.assert_allclose(logprobs, np.log(probs)[tokens], rtol=1e-5)
  counts = np.bincount(tokens, minlength=8)
  assert counts[4] == 0  # e**-20: never
  likely = probs > 1e-6
  chi2 = np.sum((counts - rows * probs)[likely] ** 2 / (rows * probs)[likely])
  assert chi2 < 22.5  # 6 degrees of freedom: exceeded once in a thousand


def test_samples_of_one_row_follow_the_softmax_over_positions():
  rows = 20_000
  key = jnp.tile(jax.random.key_data(jax.random.key(1)), (rows, 1))
  tokens, _ = jax.jit(engines.sample)(
      jnp.zeros((rows, 8)), key, jnp.arange(rows), jnp.float32(1))
  counts = np.bincount(tokens, minlength=8)
  assert np.sum((counts - rows / 8) ** 2 / (rows / 8)) < 24.3  # as above, 7


def test_slots_on_eight_devices_sample_the_same_ids(other, params):
  mesh = meshes.make(data=8)
  spread = build(slots=8, length=160, chunks=(40,),
                 place=lambda tree: meshes.shard_batch(mesh, tree))
  spread.load(jax.device_put(params, meshes.sharding(mesh, ())), TEMPERATURE)
  other.load(params, TEMPERATURE)
  asked = talks(6, rows=8)
  items = list(asked.items())
  expected = converse(other, dict(items[:5])) | converse(other, dict(items[5:]))
  said = converse(spread, asked)
  for uid in asked:
    assert said[uid][0] == expected[uid][0]
    np.testing.assert_allclose(said[uid][1], expected[uid][1], atol=1e-5)


def test_varied_conversations_need_no_new_programs(engine, params):
  engine.load(params, TEMPERATURE)
  programs = []
  for seed in range(20, 50):
    converse(engine, talks(seed, rows=1 + seed % 3), budget=1 + seed % 5)
    programs.append(
        (engine._append._cache_size(), engine._decode._cache_size()))
  assert programs[-1] == programs[9]
  appends, decodes = programs[-1]
  assert appends <= 8 and decodes <= 4


@pytest.mark.parametrize('append, message', [
    (dict(tokens=(1,) * 45, budget=4), 'holds 48 tokens, but slot 0 would need '
                                       '45 and a budget of 4'),
    (dict(tokens=(1,), budget=0), 'a budget of 0 >= 1'),
])
def test_what_does_not_fit_a_slot_is_refused(engine, append, message):
  with pytest.raises(ValueError, match=message):
    engine.append([engines.Append(0, row_ids=(0,) * 5, fresh=True, **append)])


def test_what_was_said_before_counts_against_a_slot(engine, params):
  engine.load(params, TEMPERATURE)
  converse(engine, {'x': [(1,) * 20]}, slots=[1], budget=1)
  engine.append([engines.Append(1, (1,) * 20, 1, (0,) * 5, True)])
  engine.decode()
  with pytest.raises(ValueError, match='slot 1 would need 47 and a budget'):
    engine.append([engines.Append(1, (1,) * 26, 2, (0,) * 5, False)])


@pytest.mark.parametrize('shape', [dict(slots=0), dict(length=1)])
def test_an_engine_without_room_is_refused(shape):
  with pytest.raises(ValueError, match='rollout.slots must be at least 1'):
    build(**shape)
