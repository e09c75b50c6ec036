# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The cost of rollouts whose lengths are scripted, as tables.

  python benchmarks/rollout.py --out benchmarks/rollout.jsonl

The shipped tiny model samples trajectories whose turns have scripted lengths:
1 to 4 turns (0.15, 0.35, 0.30, 0.20), sampled tokens a turn lognormal with
median 14 and at most 62, passages of about 60 tokens: an eighth of what
Qwen2.5-3B writes. The ways to sample them take turns, `--repeats` times, and
the ratios are medians over pairs of neighbours:

  slots      the library's engine and driver
  slow       the same, with a search that sleeps 50 ms
  turns      the shape of Search-R1: batches of as many rows as there are slots;
             in every turn each row's whole history is prefilled again, all rows
             decode until the longest has stopped, then all search

Then come decode programs whose layers are unrolled, and scanned.
"""

import argparse
import collections
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# pylint: disable=g-import-not-at-top
from searchrl.experiment import model_folders
from searchrl.experiment import policy as policies
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.models.inference import engine_weights
from searchrl.models.inference import kv_blocks
from searchrl.models.inference import slots as slots_lib
from searchrl.models.inference import stops
from searchrl.rollouts import driver
from searchrl.runtime import mesh as meshes
from searchrl.runtime import workdir
from searchrl.trajectory import Action, Passage, Question, Request

LENGTH = 512
STEP = 0  # of every rollout
BUDGETS = driver.Budgets(max_turns=9, max_new_tokens=62, passage_tokens=96,
                         top_k=1)
SCHEDULES = {'slots': driver.Schedule(), 'slow': driver.Schedule('arrival'),
             'instant': driver.Schedule('arrival')}
WORDS = ('river', 'city', 'founded', 'near', 'the', 'old', 'company', 'of')


class Script:
  """How many tokens each turn samples, and what its search finds.

  Attributes:
    requests: one for each trajectory.
    lengths: (uid, sample) -> the number of tokens that each turn samples.
    turns: row ids of a turn -> that number, and whether the turn is the last.
  """

  def __init__(self, questions: int, samples: int, seed: int):
    rng = np.random.default_rng(seed)
    self.requests, self.lengths = [], {}
    for number in range(questions):
      text = ' '.join(rng.choice(WORDS, rng.integers(4, 12)))
      question = Question(f'{number}', text, ('x',))
      for sample in range(samples):
        self.requests.append(Request(question, sample))
        turns = rng.choice([1, 2, 3, 4], p=[.15, .35, .30, .20])
        self.lengths[question.uid, sample] = np.minimum(
            rng.lognormal(np.log(14), 0.6, turns).astype(int) + 1, 62).tolist()
    self.turns = turns_of(self.lengths)

  def search(self, queries):
    return [(Passage('1', 'a title', ' '.join(
        WORDS[(len(q.question.text) + i) % 8] for i in range(44))),)
            for q in queries]

  def slow_search(self, queries):
    time.sleep(0.05)
    return self.search(queries)


def turns_of(lengths):
  """`Script.turns` of `Script.lengths`."""
  return {engines.row_ids(STEP, uid, sample, turn):
          (count, turn + 1 == len(counts))
          for (uid, sample), counts in lengths.items()
          for turn, count in enumerate(counts)}


class ScriptedEngine:
  """An engine whose turns have the lengths and the meanings of a script."""

  def __init__(self, engine, script):
    self._engine, self._turns = engine, script.turns
    self._is_last = {}  # slot -> whether its turn is the trajectory's last
    self._kind = {}  # id of the action's tokens -> what they mean
    self.slots, self.length = engine.slots, engine.length
    self.dispatch, self.used = engine.dispatch, engine.used
    self.release, self.abandon = engine.release, engine.abandon
    self.admit = engine.admit

  def append(self, feeds):
    scripted = []
    for feed in feeds:
      count, self._is_last[feed.slot] = self._turns[feed.row_ids]
      assert feed.budget >= count, 'the slots are too short for this workload'
      scripted.append(dataclasses.replace(feed, budget=count))
    self._engine.append(scripted)

  def read(self):
    self._stopped = self._engine.read()  # so the ids of its tokens stay taken
    for stopped in self._stopped:
      is_last = self._is_last[stopped.slot]
      self._kind[id(stopped.tokens)] = 'answer' if is_last else 'search'
    return self._stopped

  def kind(self, tokens) -> str | None:
    """Returns the kind of an action by its tokens, or None for other tokens."""
    return self._kind.pop(id(tokens), None)


class Tokenizer:
  """The model's tokenizer, but for actions: the script knows their meaning."""

  def __init__(self, tokenizer, scripted_engine):
    self._tokenizer, self._kind = tokenizer, scripted_engine.kind

  def decode(self, tokens) -> str:
    kind = self._kind(tokens)
    return self._tokenizer.decode(tokens) if kind is None else kind

  def __getattr__(self, name):
    return getattr(self._tokenizer, name)


class Bench:
  """A model, and ways to sample a script's trajectories with it."""

  def __init__(self, options):
    mesh = meshes.make(data=1)
    self.sampler, self.params = policies.load(
        model_folders.read(str(policies.TINY_BASE), 'searchrl.agent.dialogue:laptop'),
        seed=0, slots=1,
        length=LENGTH, budgets=BUDGETS, mesh=mesh)
    table = stops.compile_table(
        self.sampler.tokenizer.token_bytes, ('never said',),
        self.sampler.shape.vocab_size)
    build = functools.partial(
        engines.Engine, self.sampler.shape, slots=options.slots, length=LENGTH,
        stop_table=table,
        shardings=functools.partial(meshes.shardings, mesh))
    self.dialogue = dataclasses.replace(
        self.sampler.dialogue, parse=lambda text: Action(text, ('x',)))
    self.engine = build(steps=options.steps, patience=options.patience)
    # All rows decode, and read as far as the longest, until it has stopped.
    self.waiting = build(steps=BUDGETS.max_new_tokens, patience=1, parts=1)
    self.slots = options.slots

  def rollout(self, script, engine, *, requests, search, schedule):
    engine.load(self.params, 1.0)
    scripted = ScriptedEngine(engine, script)
    trajectories, _ = driver.run(
        requests, engine=scripted, search=search, dialogue=self.dialogue,
        tokenizer=Tokenizer(self.sampler.tokenizer, scripted), budgets=BUDGETS,
        step=STEP, policy_step=0, schedule=schedule)
    return trajectories

  def in_turns(self, script, search):
    """Whole batches, turn by turn, with all history prefilled again."""
    trajectories = []
    for first in range(0, len(script.requests), self.slots):
      trajectories += self.rollout(
          script, Forgetful(self.waiting), search=search,
          requests=script.requests[first:first + self.slots],
          schedule=driver.Schedule())
    return trajectories


class Forgetful:
  """An engine that is fed a conversation from its start in every turn."""

  def __init__(self, engine):
    self._engine = engine
    self._history = collections.defaultdict(list)
    self.slots, self.length = engine.slots, engine.length
    self.load, self.dispatch = engine.load, engine.dispatch
    self.used, self.release = engine.used, engine.release
    self.abandon, self.admit = engine.abandon, engine.admit

  def append(self, feeds):
    again = []
    for feed in feeds:
      if feed.fresh:
        self._history[feed.slot] = []
      self._history[feed.slot] += feed.tokens
      again.append(dataclasses.replace(
          feed, fresh=True, tokens=tuple(self._history[feed.slot])))
    self._engine.append(again)

  def read(self):
    stopped = self._engine.read()
    for one in stopped:
      self._history[one.slot] += one.tokens
    return stopped


def counted(engine) -> dict[str, int]:
  return {name: getattr(engine, name) for name in (
      'prefilled_tokens', 'copied_tokens', 'decoded_tokens', 'slot_steps')}


def measure(bench: Bench, script: Script, way: str) -> dict:
  """Samples the script's trajectories in one way, once."""
  engine = bench.waiting if way == 'turns' else bench.engine
  before, wall, cpu = counted(engine), time.perf_counter(), time.process_time()
  if way == 'turns':
    trajectories = bench.in_turns(script, script.search)
  else:
    trajectories = bench.rollout(
        script, engine, requests=script.requests,
        search=script.slow_search if way == 'slow' else script.search,
        schedule=SCHEDULES[way])
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  assert all(t.stop_reason == 'answer' for t in trajectories)
  held = sum(len(t.tokens) - 1 for t in trajectories)
  work = {name: count - before[name] for name, count in counted(engine).items()}
  return dict(
      way=way, wall_secs=wall, cpu_secs=cpu, trajectories=len(trajectories),
      tokens=held + len(trajectories), sampled=work['decoded_tokens'],
      useful=work['decoded_tokens'] / work['slot_steps'],
      prefilled=work['prefilled_tokens'], copied=work['copied_tokens'],
      prefilled_again=work['prefilled_tokens'] + work['copied_tokens'] +
      work['decoded_tokens'] - held, programs=engine.compile())


def scanned(params, tokens, positions, state, tiles, config, layout):
  """`slots._layers` in a scan, with the caches as its xs and ys."""
  x = params['embed']['embedding'][tokens]

  def layer(x, weights_and_cache):
    weights, cache = weights_and_cache
    return transformer.Block(config).apply(
        {'params': weights}, x, positions,
        lambda q, k, v: layout.attend(cache, q, k, v, tiles))

  x, cache = jax.lax.scan(layer, x, (params['layers'], state.cache))
  return x, dataclasses.replace(state, cache=cache)


def decode_by(layers, *args, **options):
  """`slots.decode` over other layers; they count while it is traced."""
  with mock.patch.object(slots_lib, '_layers', layers):
    return slots_lib.decode(*args, **options)


def decode_programs(bench: Bench, options) -> list[dict]:
  """A decode of 16 steps with all slots active, by how layers are laid out."""
  config, rows = bench.sampler.shape, []
  table = jax.tree.map(jnp.asarray, stops.compile_table(
      bench.sampler.tokenizer.token_bytes, ('never said',), config.vocab_size))
  runs = {}
  unrolled = slots_lib._layers  # pylint: disable=protected-access
  for way, layers in (('unrolled', unrolled), ('scanned', scanned)):
    layout = kv_blocks.layout(slots=options.slots, length=LENGTH, block=128,
                              parts=3)
    state = slots_lib.empty(config, layout, 1, 'float32')
    state = dataclasses.replace(
        state, position=state.position + 160, active=~state.active,
        budget=state.budget + 10**6)
    params = bench.params
    if way == 'unrolled':
      params = engine_weights.unstacked(params, 'float32')
    else:
      state = dataclasses.replace(state, cache=jax.tree.map(
          lambda *layers: jnp.stack(layers), *state.cache))
    program = jax.jit(functools.partial(
        decode_by, layers, config=config, layout=layout, steps=16, patience=1),
                      donate_argnums=1)
    given = dict(stop=table, temperature=np.float32(1), truncation=None)
    memory = program.lower(params, state, **given).compile(
        ).memory_analysis()
    runs[way] = [program, params, state, []]
    size = sum(x.nbytes for x in jax.tree.leaves(state.cache))
    rows.append(dict(way=way, temp_of_cache=memory.temp_size_in_bytes / size))
    runs[way][2], _ = program(params, state, **given)
  for _ in range(3 * options.repeats):
    for run in runs.values():
      again = dataclasses.replace(run[2], position=run[2].position * 0 + 160)
      jax.block_until_ready(again)
      start = time.perf_counter()
      run[2], _ = jax.block_until_ready(run[0](run[1], again, **given))
      run[3].append((time.perf_counter() - start) / 16)
  for row in rows:
    row['ms_per_step'] = 1000 * statistics.median(runs[row['way']][3])
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--questions', type=int, default=512)
  parser.add_argument('--samples', type=int, default=5)
  parser.add_argument('--slots', type=int, default=256)
  parser.add_argument('--steps', type=int, default=4, help='of one decode')
  parser.add_argument('--patience', type=int, default=32)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--ways', nargs='+', default=['turns', 'slots', 'slow'])
  parser.add_argument('--out', type=pathlib.Path)
  options = parser.parse_args()
  bench = Bench(options)
  warm = Script(4, 2, options.seed)
  for way in options.ways:
    measure(bench, warm, way)
  records = []
  for repeat in range(options.repeats):
    script = Script(options.questions, options.samples, options.seed + repeat)
    records.append({way: measure(bench, script, way) for way in options.ways})
    print(json.dumps(records[-1]['slots']), file=sys.stderr)
  layers = decode_programs(bench, options)
  report(records, layers, options)
  if options.out:
    with options.out.open('a', encoding='utf-8') as file:
      for record in [*(r for pair in records for r in pair.values()), *layers]:
        file.write(json.dumps(record | dict(
            seed=options.seed, **workdir.environment())) + '\n')


def report(records, layers, options) -> None:
  """Prints the tables."""
  print(f'    python benchmarks/rollout.py {" ".join(sys.argv[1:])}\n')
  names = list(records[0]['slots'])[1:]
  print('| way | ' + ' | '.join(names) + ' |\n|' + '---|' * (len(names) + 1))
  for way in options.ways:
    middle = {name: statistics.median(pair[way][name] for pair in records)
              for name in names}
    print(f'| {way} | ' + ' | '.join(f'{middle[n]:.4g}' for n in names) + ' |')
  print('\n| ratio | wall | CPU |\n|---|---|---|')
  for way in options.ways:
    if way != 'slots':
      ratios = [statistics.median(
          pair[way][name] / pair['slots'][name] for pair in records)
                for name in ('wall_secs', 'cpu_secs')]
      print(f'| {way} / slots | {ratios[0]:.2f} | {ratios[1]:.2f} |')
  print('\n| layers | ms a decode step | temporary / cache |\n|---|---|---|')
  for row in layers:
    print(f'| {row["way"]} | {row["ms_per_step"]:.2f} | '
          f'{row["temp_of_cache"]:.3f} |')


if __name__ == '__main__':
  main()
