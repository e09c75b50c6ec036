# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""engine: samples equal full forwards, and depend on their row alone."""

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pallas
import pytest
import tiny

from searchrl.models.inference import engine as engines
from searchrl.models.inference import engine_weights
from searchrl.models.inference import sampling
from searchrl.models.inference import stops
from searchrl.models import policy_logprobs
from searchrl.models import transformer
from searchrl.runtime import mesh as meshes

DEVICES = 8

LENGTH = 48
TEMPERATURE = 0.8
TOKENIZER = tiny.Tokenizer()


@pytest.fixture(scope='module')
def params():
  return tiny.params()


def build(stop=('th', '>'), eos_ids=TOKENIZER.eos_ids, **options):
  table = stops.compile_table(TOKENIZER.token_bytes, stop, end_ids=eos_ids)
  options = dict(slots=3, length=LENGTH, tile=8, block=16, steps=5,
                 seed=4) | options
  return engines.Engine(tiny.CONFIG, stop_table=table, **options)


@pytest.fixture(scope='module')
def engine():
  return build()


@pytest.fixture(scope='module')
def other():
  """The same engine in another shape."""
  return build(slots=5, length=160, tile=40, block=32, steps=2)


@pytest.fixture(scope='module')
def quiet():
  """An engine whose turns rarely stop before their budget."""
  return build(stop=('never sampled',), slots=8, length=160)


@functools.partial(jax.jit, static_argnames='temperature')
def full_logprobs(params, tokens, temperature=TEMPERATURE):
  return policy_logprobs.token_logprobs(
      params, tokens, tiny.CONFIG, temperature=temperature)[0]


def ids(rng, count):
  return tuple(rng.integers(0, tiny.CONFIG.vocab_size, count).tolist())


def turn_inputs(seed=0, rows=3):
  """uid -> the tokens appended in each turn; some longer than a tile."""
  rng = np.random.default_rng(seed)
  return {f'{seed}-{row}': [ids(rng, int(n)) for n in (
      rng.integers(1, 20), rng.integers(1, 11), 1)] for row in range(rows)}


def run_turns(engine, turn_inputs, slots=None, budget=4):
  """Runs the turns of all uids side by side, each at its own pace.

  Returns:
    uid -> (tokens, log-probs [T], 0 at appended tokens).
  """
  slots = slots or range(len(turn_inputs))
  uid_of = dict(zip(slots, turn_inputs))
  outputs = {uid: ([], []) for uid in turn_inputs}
  left = {uid: list(turns) for uid, turns in turn_inputs.items()}

  def next_append(slot):
    uid = uid_of[slot]
    turn = len(turn_inputs[uid]) - len(left[uid])
    tokens = left[uid].pop(0)
    outputs[uid][0].extend(tokens)
    outputs[uid][1].extend([0.0] * len(tokens))
    row_ids = engines.row_ids(3, uid, 1, turn)
    return engines.Append(slot, tokens, budget, row_ids, fresh=turn == 0)

  engine.append([next_append(slot) for slot in slots])
  while uid_of:
    again = []
    for stopped in engine.decode():
      uid = uid_of[stopped.slot]
      outputs[uid][0].extend(stopped.tokens)
      outputs[uid][1].extend(stopped.logprobs)
      assert engine.used(stopped.slot) == len(outputs[uid][0])
      if left[uid]:
        again.append(next_append(stopped.slot))
      else:
        del uid_of[stopped.slot]
        engine.release(stopped.slot)
    if again:
      engine.append(again)
  return outputs


def padded(rows):
  return np.array([[*r, *[0] * (LENGTH - len(r))] for r in rows])


def test_logprobs_equal_a_full_forward_over_several_turns(engine, params):
  engine.load(params, TEMPERATURE)
  before = engine.prefilled_tokens
  inputs = turn_inputs()
  outputs = run_turns(engine, inputs)
  tokens = padded(t for t, _ in outputs.values())
  logprobs = padded(logprobs for _, logprobs in outputs.values())
  expected = np.where(logprobs < 0, full_logprobs(params, tokens), 0)
  assert (logprobs < 0).sum() >= 9  # three turns of three rows
  np.testing.assert_allclose(logprobs, expected, atol=1e-4)
  # Tokens are prefilled once: history never again.
  count = sum(len(turn) for turns in inputs.values() for turn in turns)
  assert engine.prefilled_tokens - before == count - len(inputs)


@pytest.mark.slow
def test_a_slot_of_any_length_is_whole_blocks_of_a_kernel(engine, params):
  """Kernels take blocks of multiples of 16 tokens, and this slot has 43."""
  with pallas.interpreted():
    by_kernel = build(length=43, block=128, attention='triton')
    for loaded in (engine, by_kernel):
      loaded.load(params, 0)
    expected, found = (
        run_turns(x, turn_inputs(5)) for x in (engine, by_kernel))
  assert by_kernel._layout.block == 48
  assert {uid: tokens for uid, (tokens, _) in found.items()} == {
      uid: tokens for uid, (tokens, _) in expected.items()}


def test_a_row_is_the_same_in_any_slot_company_order_and_shape(
    engine, other, params):
  engine.load(params, TEMPERATURE)
  other.load(params, TEMPERATURE)
  inputs = turn_inputs(1)
  together = run_turns(engine, inputs)
  for uid, turns in inputs.items():
    alone = run_turns(engine, {uid: turns}, slots=[2])
    assert alone[uid][0] == together[uid][0]
  crowd = turn_inputs(2, rows=2) | dict(reversed(inputs.items()))
  crowded = run_turns(other, crowd, slots=[1, 4, 0, 3, 2])
  for uid in inputs:
    assert crowded[uid][0] == together[uid][0]
    np.testing.assert_allclose(crowded[uid][1], together[uid][1], atol=1e-5)


WIDE = dataclasses.replace(
    tiny.CONFIG, hidden_size=128, intermediate_size=352, head_dim=32,
    num_hidden_layers=3)
LAYOUT = dict(slots=72, length=400, tile=32, tiles=(2, 6), steps=5, block=128)


@pytest.fixture(scope='module')
def wide():
  """Inputs and outputs of a model of the laptop's widths, and a rerun."""
  params = tiny.params(WIDE, seed=3)
  rng = np.random.default_rng(8)
  inputs = {f'{row}': [ids(rng, n) for n in rng.integers(1, 130, 3)]
           for row in range(40)}

  def sample_all(inputs, places=None, **options):
    table = stops.compile_table(TOKENIZER.token_bytes, ('th', '>'),
                                end_ids=(0,))
    engine = engines.Engine(WIDE, stop_table=table, seed=4, **LAYOUT | options)
    engine.load(params, TEMPERATURE)
    return run_turns(engine, inputs, slots=places, budget=9)

  return inputs, sample_all, sample_all(inputs)


SLOW = pytest.mark.slow


@pytest.mark.parametrize('rows, slots, options', [
    (range(40), None, {}),
    (range(39, -1, -1), range(63, 23, -1), {}),  # other slots, other order
    ([7], [50], {}),  # alone
    (range(0, 40, 3), range(5, 19), {}),  # other company
    (range(40), None, dict(steps=1)),
    pytest.param(range(40), None, dict(steps=13, patience=40), marks=SLOW),
    pytest.param(range(40), None, dict(tiles=(2, 4, 48)), marks=SLOW),
    pytest.param(range(40), None, dict(tile=64, tiles=(1, 24)), marks=SLOW),
    pytest.param(range(40), None, dict(length=1000), marks=SLOW),
    pytest.param(range(40), None, dict(slots=97), marks=SLOW),
    pytest.param(range(40), range(3, 163, 4), dict(slots=256),
                 marks=SLOW),  # few of many: 64 rows
])
def test_no_bit_of_a_row_depends_on_anything_but_the_row(
    wide, rows, slots, options):
  inputs, sample_all, expected = wide
  outputs = sample_all(
      {f'{row}': inputs[f'{row}'] for row in rows}, slots, **options)
  for uid, (tokens, logprobs) in outputs.items():
    assert tokens == expected[uid][0]
    assert logprobs == expected[uid][1]  # to the last bit


def test_few_slots_change_only_the_rounding(wide):
  inputs, sample_all, expected = wide
  few = dict(list(inputs.items())[:6])
  outputs = sample_all(few, slots=6)
  same = sum(outputs[uid][0] == expected[uid][0] for uid in few)
  assert same == 6
  for uid in few:
    np.testing.assert_allclose(outputs[uid][1], expected[uid][1], atol=1e-4)


@pytest.mark.slow
def test_an_engine_with_few_rows_computes_all_alike_unless_it_is_let(wide):
  inputs, sample_all, expected = wide
  few = dict(list(inputs.items())[:2])
  for uid, (tokens, logprobs) in sample_all(few, few_rows=(1, 4)).items():
    assert (tokens, logprobs) == tuple(expected[uid])  # to the last bit


def test_a_decode_computes_the_fewest_rows_whose_bits_are_those_of_all(params):
  engine = build(slots=40, length=160)
  assert engine._rows == [20, 30, 40]  # to be tried
  engine.load(params, TEMPERATURE)
  run_decode, computed = engine._run_decode, []

  def rounded_otherwise(rows):
    slots, sampled = run_decode(rows)
    computed.append(rows)
    if rows == 30:
      last = sampled['logprobs'][-1, 0]
      sampled['logprobs'] = sampled['logprobs'].at[-1, 0].set(
          jnp.nextafter(last, jnp.inf))
    return slots, sampled

  engine._run_decode = rounded_otherwise
  engine.compile()
  assert 30 not in engine._rows and engine._rows[-1] == 40
  assert not engine._decoding and not engine._state.active.any()
  computed.clear()
  engine.compile()
  assert not computed  # once is enough
  prompt = ids(np.random.default_rng(3), 9)
  engine.append([engines.Append(slot, prompt, 3, (0, 0, 0, slot, 0), True)
                 for slot in range(5)])
  engine.dispatch()
  assert computed == [engine._rows[0]]


def test_transposed_weights_are_turned_back(params):
  tree = engine_weights.unstacked(params, 'float32')
  tree = {'head': {'kernel': tree['embed']['embedding'].T}} | tree
  for weights in (tree['layers'][0], tree):
    turned = engine_weights.transposed(weights)
    matrices = {name for name in weights if 'transposed' in turned[name]}
    assert matrices == {'q', 'k', 'v', 'o', 'gate', 'up', 'down', 'head'} & (
        weights.keys())
    for name in matrices:
      assert turned[name]['transposed'].shape == (
          weights[name]['kernel'].shape[::-1])
    back = engine_weights.upright(turned)
    jax.tree.map(np.testing.assert_array_equal, back, weights)


def test_half_precision_gives_nearly_the_same(wide):
  inputs, sample_all, expected = wide
  few = dict(list(inputs.items())[:20])
  outputs = sample_all(few, dtype='bfloat16')
  firsts = []
  for uid in few:
    start = len(inputs[uid][0])
    if outputs[uid][0][start] == expected[uid][0][start]:
      firsts.append(abs(outputs[uid][1][start] - expected[uid][1][start]))
  assert len(firsts) > 10 and 0 < np.mean(firsts) < 0.3


def test_a_prompt_that_a_slot_holds_is_copied_and_not_fed_again(other, params):
  other.load(params, TEMPERATURE)
  prompt = ids(np.random.default_rng(9), 37)
  name = lambda sample: (3, 1, 2, sample, 0)

  def sample_all(slots):
    other.append([engines.Append(slot, prompt, 5, name(sample), True)
                  for sample, slot in slots.items()])
    outputs = {}
    while len(outputs) < len(slots):
      outputs |= {s.slot: (s.tokens, s.logprobs) for s in other.decode()}
    return [outputs[slot] for slot in slots.values()]

  alone = []
  for sample in range(4):
    other.load(params, TEMPERATURE)  # drops what is held
    alone += sample_all({sample: 2})
  other.load(params, TEMPERATURE)
  before = other.prefilled_tokens, other.copied_tokens
  together = sample_all({0: 4, 1: 0, 2: 2})
  assert other.prefilled_tokens - before[0] == 36
  assert other.copied_tokens - before[1] == 72
  other.release(4)
  other.append([engines.Append(4, (5, 6), 1, name(9), True)])  # another prompt
  other.decode()
  together += sample_all({3: 1})  # from slot 0 or 2
  assert other.prefilled_tokens - before[0] == 36 + 1
  assert together == alone
  other.load(tiny.params(seed=1), TEMPERATURE)
  sample_all({0: 1})  # held by old weights: prefilled again
  assert other.prefilled_tokens - before[0] == 36 + 1 + 36


def test_decodes_in_flight_lose_and_repeat_nothing(engine, params):
  inputs = turn_inputs(70)
  engine.load(params, TEMPERATURE)
  expected = run_turns(engine, inputs)
  engine.load(params, TEMPERATURE)
  read, ahead = engine.read, engine.decode

  def late():  # one more is always under way
    while len(engine._in_flight) < 2:
      engine.dispatch()
    return read()

  engine.decode = late
  try:
    assert run_turns(engine, inputs) == expected
  finally:
    engine.decode = ahead


def test_an_abandoned_engine_goes_on_as_if_new(engine, params):
  inputs = turn_inputs(71)
  engine.load(params, TEMPERATURE)
  expected = run_turns(engine, inputs)
  engine.append([engines.Append(slot, (3, 4, 5), 20, (0,) * 5, True)
                 for slot in range(3)])
  engine.dispatch()
  engine.abandon()
  assert not engine._state.active.any() and engine.used(1) == 0
  assert run_turns(engine, inputs) == expected


def test_step_uid_sample_and_turn_each_give_other_samples(other, params):
  other.load(params, TEMPERATURE)
  prompt = ids(np.random.default_rng(5), 6)
  names = [(0, 'a', 0, 0), (1, 'a', 0, 0), (0, 'b', 0, 0), (0, 'a', 1, 0),
           (0, 'a', 0, 1)]
  other.append([
      engines.Append(slot, prompt, 12, engines.row_ids(*name), fresh=True)
      for slot, name in enumerate(names)])
  outputs = {}
  while len(outputs) < len(names):
    outputs |= {s.slot: s.tokens for s in other.decode()}
  assert len(set(outputs.values())) == len(names)


def test_row_ids_are_what_every_part_of_the_library_folds_in():
  digest = hashlib.sha256('frage-ü'.encode()).hexdigest()
  step, high, low, sample, turn = engines.row_ids(7, 'frage-ü', 2, 3)
  assert (step, sample, turn) == (7, 2, 3)
  assert f'{high:08x}{low:08x}' == digest[:16]


def test_greedy_takes_the_argmax_of_a_full_forward(engine, params):
  engine.load(params, 0.0)
  outputs = run_turns(engine, turn_inputs(3), budget=6)
  tokens = padded(t for t, _ in outputs.values())
  forward = jax.jit(lambda p, x: transformer.logits(
      p, transformer.forward(p, x, tiny.CONFIG)))
  best = np.argmax(forward(params, tokens), -1)
  logprobs = full_logprobs(params, tokens, temperature=1.0)
  for row, (of_row, row_logprobs) in enumerate(outputs.values()):
    sampled = np.flatnonzero(row_logprobs)
    assert len(sampled) >= 3
    np.testing.assert_array_equal(np.array(of_row)[sampled],
                                  best[row, sampled - 1])
    np.testing.assert_allclose(np.array(row_logprobs)[sampled],
                               logprobs[row, sampled], atol=1e-4)


def test_a_turn_ends_at_the_token_that_completes_a_stop_string(engine, params):
  engine.load(params, 2.0)  # hot: every token is sampled now and then
  ended_by_stop = 0
  for seed in range(10, 16):
    inputs = turn_inputs(seed)
    turn = []
    for token, logprob in [
        pair for row in run_turns(engine, inputs, budget=6).values()
        for pair in zip(*row, strict=True)]:
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
        assert ends  # it was appended, so the turn had stopped
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
    outputs = {}
    while len(outputs) < 8:
      outputs |= {s.slot: s.tokens for s in engine.decode()}
    return outputs

  outputs = greedy(quiet)
  text = {slot: [TOKENIZER.token_bytes[t] for t in tokens]
          for slot, tokens in outputs.items()}
  # The last byte of one token and the first of the next, deep in a turn.
  stop, eos = next(
      (pieces[i][-1:] + pieces[i + 1][:1], outputs[slot][i + 2])
      for slot, pieces in text.items() for i in range(2, 10)
      if (pieces[i][-1:] + pieces[i + 1][:1]).isascii()
      and pieces[i] != pieces[i + 1] and len(outputs[slot]) > i + 2
      and outputs[slot][i + 2] not in outputs[slot][:i + 2])
  stopping = build(stop=(stop.decode(),), eos_ids=(eos,), slots=8, length=160)
  by_stop = by_eos = 0
  for slot, tokens in greedy(stopping).items():
    want = next(
        (n for n in range(1, 15) if stop in b''.join(text[slot][:n]) or
         outputs[slot][n - 1] == eos), 14)
    assert tokens == outputs[slot][:want]
    by_stop += stop in b''.join(text[slot][:want])
    by_eos += tokens[-1] == eos
  assert by_stop and by_eos + by_stop < 9


def test_a_new_turn_drops_the_start_of_a_stop_string(engine, params):
  engine.load(params, TEMPERATURE)
  engine.append([engines.Append(slot, (1, 2), 1, (0,) * 5, True)
                 for slot in range(3)])
  engine.decode()
  half = jnp.ones_like(engine._state.stop_state)  # 't' of 'th' was sampled
  engine._state = dataclasses.replace(engine._state, stop_state=half)
  engine.append([engines.Append(1, (5,), 1, (0,) * 5, fresh=False)])
  assert engine._state.stop_state.tolist() == [1, 0, 1]


def test_a_turn_that_never_stops_has_exactly_its_budget(quiet, params):
  quiet.load(params, TEMPERATURE)
  before = quiet.decoded_tokens
  budgets = (1, 2, 4, 5, 6, 10, 11, 20)  # a decode takes five steps at most
  quiet.append([engines.Append(slot, (1, 2), budget, (0, 0, 0, slot, 0), True)
                for slot, budget in enumerate(budgets)])
  outputs = {}
  while len(outputs) < 8:
    outputs |= {s.slot: s for s in quiet.decode()}
  lengths = [len(outputs[slot].tokens) for slot in range(8)]
  ended = [outputs[slot].tokens[-1] in TOKENIZER.eos_ids for slot in range(8)]
  assert [n for n, e in zip(lengths, ended) if not e] == [
      n for n, e in zip(budgets, ended) if not e]
  assert sum(ended) < 4
  assert all(len(s.tokens) == len(s.logprobs) for s in outputs.values())
  assert quiet.decoded_tokens - before == sum(lengths)


def test_slots_on_eight_devices_sample_the_same_ids(other, params):
  mesh = meshes.make(data=8)
  spread = build(slots=8, length=160, tile=40,
                 shardings=functools.partial(meshes.shardings, mesh))
  spread.load(jax.device_put(params, meshes.sharding(mesh, ())), TEMPERATURE)
  other.load(params, TEMPERATURE)
  inputs = turn_inputs(6, rows=8)
  items = list(inputs.items())
  expected = run_turns(other, dict(items[:5]))
  expected |= run_turns(other, dict(items[5:]))
  outputs = run_turns(spread, inputs)
  for uid in inputs:
    assert outputs[uid][0] == expected[uid][0]
    np.testing.assert_allclose(outputs[uid][1], expected[uid][1], atol=1e-5)
  programs = spread.compile()
  table = spread.placed(stops.compile_table(TOKENIZER.token_bytes, ('e', 'in')))
  spread.load(jax.device_put(params, meshes.sharding(mesh, ())), TEMPERATURE,
              stop_table=table)
  assert run_turns(spread, inputs) != outputs and spread.compile() == programs


@pytest.mark.parametrize('copies', [0, 2])
def test_varied_rollouts_compile_nothing_after_the_first_feed(params, copies):
  shardings = copies and functools.partial(
      meshes.shardings, meshes.make(devices=jax.devices()[:copies]))
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda name, *_, **__: compiled.append(name)
      if name == '/jax/core/compile/backend_compile_duration' else None)
  fresh = build(slots=4, steps=7, tiles=(2, 8),
                shardings=shardings or None)
  if shardings:
    params = jax.device_put(params, shardings(()))  # on every copy
  fresh.load(params, TEMPERATURE)
  programs = fresh.compile()
  assert compiled and programs <= 12
  compiled.clear()
  for seed in range(20, 60):
    if seed % 8 == 0:  # new weights, greedy now and then
      fresh.load(params, 0.0 if seed % 16 else TEMPERATURE)
    run_turns(fresh, turn_inputs(seed, rows=1 + seed % 4), budget=1 + seed % 5)
  assert not compiled and fresh.compile() == programs
  fresh.load(params, TEMPERATURE, sampling.Truncation(top_k=4))
  truncated = fresh.compile()
  compiled.clear()
  run_turns(fresh, turn_inputs(61))
  fresh.load(params, TEMPERATURE, sampling.Truncation(top_p=0.5, min_p=0.1))
  run_turns(fresh, turn_inputs(62))
  fresh.load(params, TEMPERATURE)
  run_turns(fresh, turn_inputs(63))
  assert not compiled and fresh.compile() == truncated <= 32


def test_a_slot_alone_needs_no_program_that_copies(params):
  alone = build(stop=('never sampled',), slots=1)
  alone.load(params, 0.0)
  programs, prompt = alone.compile(), ids(np.random.default_rng(5), 9)
  first = sample_all(alone, {0: prompt})
  assert sample_all(alone, {0: prompt}) == first  # and nothing is copied
  assert alone.copied_tokens == 0 and alone.compile() == programs


def test_stop_strings_come_and_go_with_the_weights(other, params):
  pieces, inputs = TOKENIZER.token_bytes, turn_inputs(64)
  other.load(params, TEMPERATURE)
  own, programs = run_turns(other, inputs), other.compile()
  never = other.placed(stops.compile_table(pieces, ('never sampled',)))
  other.load(params, TEMPERATURE, stop_table=never)
  length = lambda outputs: sum(len(tokens) for tokens, _ in outputs.values())
  whole = run_turns(other, inputs)
  assert length(own) < length(whole)
  other.load(params, TEMPERATURE)
  assert run_turns(other, inputs) == own and other.compile() == programs
  long = other.placed(stops.compile_table(pieces, ('never sampled' * 9,)))
  other.load(params, TEMPERATURE, stop_table=long)
  more = other.compile()
  assert run_turns(other, inputs) == whole
  assert other.compile() == more > programs  # all before the first turn


WAYS = [sampling.Draw(TEMPERATURE), sampling.Draw(0.0),
        sampling.Draw(2.0, sampling.Truncation(top_k=3, top_p=0.9)),
        sampling.Draw(1.5, sampling.Truncation(min_p=0.1)), sampling.Draw()]


def sample_all(engine, prompts, **draws):
  """slot -> what it samples after its prompt, drawn in its way."""
  engine.append([
      engines.Append(slot, prompt, 12, (0, 0, 0, slot, 0), True,
                     **{name: ways[slot] for name, ways in draws.items()})
      for slot, prompt in prompts.items()])
  outputs = {}
  while len(outputs) < len(prompts):
    outputs |= {s.slot: (s.tokens, s.logprobs) for s in engine.decode()}
  for slot in prompts:
    engine.release(slot)
  return outputs


def test_each_slot_draws_in_its_way_beside_others(other, params):
  rng = np.random.default_rng(4)
  prompts = {slot: ids(rng, 7) for slot in range(5)}
  other.load(params, None)
  programs = other.compile()
  together = sample_all(other, prompts, draw=WAYS)
  assert sample_all(other, {4: prompts[4]}, draw=WAYS) == {4: together[4]}
  assert other.compile() == programs <= 32
  for slot, (temperature, truncation) in enumerate(WAYS):
    other.load(params, temperature, truncation)
    assert sample_all(other, {slot: prompts[slot]}) == {slot: together[slot]}


def test_a_slot_shows_its_unfinished_turn_and_can_be_cut(quiet, params):
  prompts = {slot: ids(np.random.default_rng(5), 7) for slot in range(3)}
  quiet.load(params, TEMPERATURE)
  whole = sample_all(quiet, prompts)
  assert len(whole[1][0]) == 12
  quiet.append([engines.Append(slot, prompt, 12, (0, 0, 0, slot, 0), True)
                for slot, prompt in prompts.items()])
  assert not quiet.decode()
  for slot in prompts:
    tokens, logprobs = quiet.partial(slot)
    assert tuple(tokens) == whole[slot][0][:5]  # a decode's steps
    assert tuple(logprobs) == whole[slot][1][:5]
  quiet.cut([1])
  assert quiet.used(1) == 0 and not quiet._state.active[1]
  again = engines.Append(1, prompts[1], 12, (0, 0, 0, 1, 0), True)
  quiet.append([again])  # the slot is free at once
  outputs = {}
  while len(outputs) < 3:
    outputs |= {s.slot: (s.tokens, s.logprobs) for s in quiet.decode()}
  assert outputs == whole


def test_nothing_copies_the_cache(params):
  config = dataclasses.replace(tiny.CONFIG, num_hidden_layers=4)
  slots, block = 12, 16
  table = stops.compile_table(TOKENIZER.token_bytes, ('th',))
  engine = engines.Engine(config, slots=slots, length=256, stop_table=table,
                          block=block, tile=8, tiles=(8,))
  state = engine._empty()
  weights = engine_weights.unstacked(tiny.params(config), 'float32')
  ints = lambda *shape: np.zeros(shape, np.int32)
  arguments = dict(
      append=dict(params=weights, slot=ints(8), tokens=ints(8, 8),
                  start=ints(8), length=ints(8)),
      copy=dict(source=ints(slots), target=ints(slots), blocks=ints()),
      decode=dict(params=weights, stop=engine._stops, truncation=None,
                  temperature=np.float32(1)),
      release=dict(slot=ints(slots)))
  size = sum(x.nbytes for x in jax.tree.leaves(state.cache))
  for name, given in arguments.items():
    memory = engine._programs[name].lower(
        state=state, **given).compile().memory_analysis()
    activations = 60_000  # of 64 tokens or 12 rows; they don't grow with length
    assert memory.temp_size_in_bytes - activations <= 0.05 * size, name
    assert memory.alias_size_in_bytes >= size  # donated


def test_an_update_has_the_room_of_the_cache_on_cpus(params):
  engine, inputs = build(slots=3, length=47), turn_inputs()
  cache = jax.eval_shape(engine._empty).cache
  blocks = {x.shape for x in jax.tree.leaves(cache)}
  held = lambda: sum(x.nbytes for x in jax.live_arrays() if x.shape in blocks)
  others = held()  # those of other engines
  assert engine._state is None  # before the first rollout
  engine.load(params, TEMPERATURE)
  first = run_turns(engine, inputs)
  engine.unload()
  assert held() == others
  engine.load(params, TEMPERATURE)
  assert held() > others and run_turns(engine, inputs) == first


@pytest.mark.parametrize('append, message', [
    (dict(tokens=(1,) * 45, budget=4), 'holds 48 tokens, but slot 0 would need '
                                       '45 and a budget of 4'),
    (dict(tokens=(1,), budget=0), 'a budget of 0 >= 1'),
])
def test_what_does_not_fit_a_slot_is_refused(engine, append, message):
  with pytest.raises(ValueError, match=message):
    engine.append([engines.Append(0, row_ids=(0,) * 5, fresh=True, **append)])


def test_earlier_tokens_count_against_a_slot(engine, params):
  engine.load(params, TEMPERATURE)
  run_turns(engine, {'x': [(1,) * 20]}, slots=[1], budget=1)
  engine.append([engines.Append(1, (1,) * 20, 1, (0,) * 5, True)])
  engine.decode()
  with pytest.raises(ValueError, match='slot 1 would need 47 and a budget'):
    engine.append([engines.Append(1, (1,) * 26, 2, (0,) * 5, False)])


@pytest.mark.parametrize('shape', [dict(slots=0), dict(length=1)])
def test_an_engine_without_room_is_refused(shape):
  with pytest.raises(ValueError, match='rollout.max_num_seqs must be at least 1'):
    build(**shape)
