# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Speed of rollouts, as a share of the device's limits, in a table.

  python benchmarks/decode.py                # a GPU: Qwen2.5-3B, random weights
  python benchmarks/decode.py --size toy     # a CPU, in a minute: the same code
  python benchmarks/decode.py --transformers V/bin/python   # and its generate

The limit of a decode step of B rows is the sum of its phases' limits:

  max(W / bandwidth, 2 P B / F) + max(B c k / bandwidth, 4 B c L H d / F)

  W  bytes of weights     P  parameters, without an untied input embedding
  c  tokens of context    k  bytes of a token's keys and values

and of a prefill of n tokens, which computes no logits, (2 P' n + 4 L H d sum c)
/ F with P' parameters in layers. Bandwidth and F, FLOP/s, are measured in the
same run: the better of a large copy and a triad, and a large matrix product.

The reference phase collects trajectories of 1 to 4 turns (see `workload.py`)
with the driver and an instant search; its limit is the sum over its tokens,
with prompts counted once a question.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import statistics
import sys
import time

from train_step import SIZES, matmul_rate  # puts the library on the path
import jax
import jax.numpy as jnp
import numpy as np

import peers_rollout
import rollout as scripted
import turns
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import policy as policies
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.models.inference import layouts
from searchrl.models.inference import sampling
from searchrl.models.inference import stops
from searchrl.rollouts import driver
from searchrl.runtime import workdir
from searchrl.trajectory import Action, Passage, Question, Request

OPTIONS = {  # by size
    'toy': dict(slots=[16, 64], context=256, decodes=8, questions=32, samples=4,
                length=512, phase_slots=64, dtype='float32', tile=32,
                tiles=[4, 16, 64]),
    '3b': dict(slots=[64, 256], context=2048, decodes=16, questions=512,
               samples=5, length=4096, phase_slots=256, dtype='bfloat16',
               tile=128, tiles=[4, 16, 64]),
}
OPTIONS['0.5b'] = OPTIONS['3b']
AIMS = {'decode': '0.30 / 0.50 / 0.65', 'prefill': '0.35 / 0.50 / 0.65',
        'sampling': 'at most 0.04', 'phase': '0.30 / 0.45 / 0.60'}


def main() -> None:
  options = parsed()
  print(f'    python benchmarks/decode.py {" ".join(sys.argv[1:])}\n')
  peer_secs = transformers_secs(options) if options.transformers else {}
  device = jax.devices()[0]
  shape = SIZES[options.size]
  limits = Limits.of(shape, options.dtype)
  print(f'{device.device_kind}, jax {jax.__version__}, revision '
        f'{workdir.environment()["git"]}; {turns.load()}; '
        f'{limits.bandwidth / 1e9:.4g} GB/s, {limits.flops / 1e12:.4g} TFLOP/s '
        f'in {options.dtype}; {options}\n')
  params = jax.jit(lambda key: jax.tree.map(
      lambda x: x.astype(options.dtype), transformer.init(shape, key)))(
          jax.random.key(options.seed))
  print('| what | rows | context | ms | limit, ms | tokens/s '
        '| of the limit | aim |\n' + '|---' * 8 + '|')
  for rows in options.slots:
    with traced(options.profile and f'{options.profile}/{rows}'):
      steady(options, shape, params, limits, rows, peer_secs.get(rows))
    gc.collect()
  phase(options, shape, params, limits)


def parsed() -> argparse.Namespace:
  """Options, with defaults by the size."""
  first = argparse.ArgumentParser(add_help=False)
  first.add_argument('--size', choices=SIZES, default='3b')
  parser = argparse.ArgumentParser(
      description=__doc__.partition('\n')[0], parents=[first])
  parser.set_defaults(**OPTIONS[first.parse_known_args()[0].size])
  parser.add_argument('--slots', type=int, nargs='+')
  parser.add_argument('--context', type=int, help='tokens, half way')
  parser.add_argument('--decodes', type=int, help='timed, of `steps` steps')
  parser.add_argument('--steps', type=int, default=16, help='of a decode')
  parser.add_argument('--tile', type=int)
  parser.add_argument('--tiles', type=int, nargs='+')
  parser.add_argument('--block', type=int, default=128)
  parser.add_argument('--parts', type=int, default=3)
  parser.add_argument('--attention', default='auto', help='of the engine')
  parser.add_argument('--dtype')
  parser.add_argument('--questions', type=int, help='of the reference phase')
  parser.add_argument('--samples', type=int)
  parser.add_argument('--phase-slots', type=int)
  parser.add_argument('--length', type=int, help='4096: lengths unscaled')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--profile', default='', help='a folder for traces')
  parser.add_argument('--transformers', help='a python with torch')
  return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Limits:
  """The limits of one model on one device; see the top of this file."""

  shape: transformer.TransformerConfig
  bandwidth: float  # bytes a second
  flops: float  # a second
  item: int  # bytes of a number
  parameters: int  # read by a decode step
  in_layers: int

  @classmethod
  def of(cls, shape, dtype: str) -> 'Limits':
    table = shape.vocab_size * shape.hidden_size
    every = sum(x.size for x in jax.tree.leaves(transformer.abstract(shape)))
    untied = 0 if shape.tie_word_embeddings else table
    return cls(
        shape, bandwidth(), matmul_rate(dtype), jnp.dtype(dtype).itemsize,
        parameters=every - untied, in_layers=every - untied - table)

  def _attention(self, contexts: float) -> tuple[float, float]:
    """Seconds to read so many tokens of cache, and to attend to them."""
    s = self.shape
    read = (2 * s.num_hidden_layers * s.num_key_value_heads * s.head_dim
            * self.item * contexts)
    flops = (4 * s.num_hidden_layers * s.num_attention_heads * s.head_dim
             * contexts)
    return read / self.bandwidth, flops / self.flops

  def decode(self, rows: int, contexts: float) -> float:
    """Seconds of a step of rows that see so many tokens in total."""
    return max(self.item * self.parameters / self.bandwidth,
               2 * self.parameters * rows / self.flops) + max(
                   self._attention(contexts))

  def prefill(self, tokens: int, contexts: float) -> float:
    """Seconds for tokens that see so many in total."""
    return (2 * self.in_layers * tokens / self.flops
            + self._attention(contexts)[1])


def bandwidth() -> float:
  """Bytes a second of a large copy or triad, whichever is faster."""
  size = 2 ** (26 if jax.devices()[0].platform == 'cpu' else 29)  # float32
  a, b = (jnp.full(size, value, jnp.float32) for value in (1, 2))
  return max(moved * size * 4 / seconds_of(jax.jit(function), a, b)
             for moved, function in ((2, lambda a, b: -a),
                                     (3, lambda a, b: a + 0.5 * b)))


def seconds_of(function, *args, repeats: int = 5, calls: int = 4) -> float:
  """Median seconds of one of several calls in a row."""
  jax.block_until_ready(function(*args))
  taken = []
  for _ in range(repeats):
    start = time.perf_counter()
    for _ in range(calls):
      out = function(*args)
    jax.block_until_ready(out)
    taken.append((time.perf_counter() - start) / calls)
  return statistics.median(taken)


def traced(folder: str):
  """A context with jax's profiler, if there is a folder for the trace."""
  return jax.profiler.trace(folder) if folder else contextlib.nullcontext()


def build(options, shape, params, slots: int, length: int) -> engines.Engine:
  """An engine with weights, compiled."""
  engine = engines.Engine(
      shape, slots=slots, length=length, tile=options.tile,
      tiles=options.tiles, steps=options.steps, block=options.block,
      parts=options.parts, dtype=options.dtype,
      attention=attention(options.attention, options.dtype, shape),
      stop_table=stops.compile_table([b''], ['never said'], shape.vocab_size))
  engine.load(params, 1.0)
  engine.compile()
  return engine


@functools.cache
def attention(name: str, dtype: str, shape) -> str:
  """The engine's attention, as a run resolves it; said once."""
  name, note = layouts.resolve(
      name, platform=jax.devices()[0].platform, config=shape, dtype=dtype)
  print(note, file=sys.stderr)
  return name


def steady(options, shape, params, limits, rows: int, peer_secs) -> None:
  """Prefill of all slots, decode with all active, and the sampler alone."""
  room = options.steps * (options.decodes + 1)  # the first ends the prefill
  held = options.context - room // 2
  engine = build(options, shape, params, rows, held + room)
  rng = np.random.default_rng(options.seed)
  prefills, decodes = [], []
  for repeat in range(options.repeats + 1):  # one to warm up
    prompts = rng.integers(0, shape.vocab_size, (rows, held)).tolist()
    start = time.perf_counter()
    engine.append([engines.Append(
        row, prompts[row], room, engines.row_ids(repeat, f'{row}', 0, 0), True)
                   for row in range(rows)])
    engine.decode()
    filled = time.perf_counter() - start
    taken = decoded(engine, options.decodes)
    prefills.append(filled - statistics.median(taken))
    decodes += taken if repeat else []
    engine.abandon()
  step = statistics.median(decodes) / options.steps
  print_row('decode', rows, options.context, step,
            limits.decode(rows, rows * options.context), rows)
  if peer_secs:
    print_row('decode, transformers', rows, options.context, peer_secs,
              limits.decode(rows, rows * options.context), rows)
  print_row('prefill', rows, held, statistics.median(prefills[1:]),
            limits.prefill(rows * (held - 1), rows * held * (held - 1) / 2),
            rows * (held - 1))
  logits = jax.random.normal(jax.random.key(0), (rows, shape.vocab_size))
  keys = jnp.zeros((rows, 2), jnp.uint32)
  alone = seconds_of(jax.jit(sampling.sample, static_argnums=4), logits, keys,
                     jnp.arange(rows), np.float32(1), None, calls=16)
  print(f'| sampling | {rows} | | {1000 * alone:.3g} | | | {alone / step:.3f} '
        f'of a step | {AIMS["sampling"]} |')


def decoded(engine: engines.Engine, count: int) -> list[float]:
  """Seconds of each of several decodes, dispatched one ahead."""
  engine.dispatch()
  taken, last = [], None
  for number in range(count):
    if number + 1 < count:
      engine.dispatch()
    engine.read()
    now = time.perf_counter()
    taken += [] if last is None else [now - last]
    last = now
  return taken


def print_row(what: str, rows, context, secs: float, limit: float, tokens: int):
  """Prints a row of the table."""
  print(f'| {what} | {rows} | {context} | {1000 * secs:.4g} '
        f'| {1000 * limit:.4g} | {tokens / secs:.0f} | {limit / secs:.3f} '
        f'| {AIMS[what.partition(",")[0].partition(" ")[0]]} |', flush=True)


class Reference(scripted.Script):
  """The trajectories of `workload.py`: the length of every turn."""

  def __init__(self, options, tokenizer):
    rng = np.random.default_rng(options.seed)
    self.scale = options.length / 4096
    words = ' '.join(scripted.WORDS * 20)
    self._a_word = len(tokenizer.encode(words)) / len(words.split())
    self.requests, self.lengths = [], {}
    for number in range(options.questions):
      text = self._text(rng, rng.uniform(150, 250))
      question = Question(f'{number}', text, ('x',))
      for sample in range(options.samples):
        self.requests.append(Request(question, sample))
        count = 1 + rng.choice(4, p=[0.15, 0.35, 0.3, 0.2])
        lengths = np.minimum(rng.lognormal(np.log(110), 0.6, count), 500)
        self.lengths[question.uid, sample] = [
            max(1, round(x)) for x in lengths * self.scale]
    self.turns = scripted.turns_of(self.lengths)

  def _text(self, rng, tokens: float) -> str:
    count = max(1, round(tokens * self.scale / self._a_word))
    return ' '.join(rng.choice(scripted.WORDS, count))

  def search(self, queries):
    return [(Passage('1', '', self._text(rng, rng.normal(480, 60))),)
            for query in queries
            for rng in [np.random.default_rng(int(query.question.uid))]]


def phase(options, shape, params, limits) -> None:
  """The whole reference phase, against the limit of its trajectories."""
  tokenizer = tokenizers.load(str(policies.TINY_BASE))
  script = Reference(options, tokenizer)
  engine = build(options, shape, params, options.phase_slots, options.length)
  most = round(700 * script.scale)
  budgets = driver.Budgets(
      max_turns=5, max_new_tokens=round(500 * script.scale) + 1,
      max_prompt_tokens=most, passage_tokens=most, top_k=1)
  dialogue = dataclasses.replace(
      dialogues.laptop(tokenizer), parse=lambda text: Action(text, ('x',)))
  taken = []
  for _ in range(2):  # once to warm up
    engine.load(params, 1.0)
    scripted_engine = scripted.ScriptedEngine(engine, script)
    start = time.perf_counter()
    trajectories, _ = driver.run(
        script.requests, engine=scripted_engine, search=script.search,
        dialogue=dialogue, budgets=budgets, step=scripted.STEP, policy_step=0,
        tokenizer=scripted.Tokenizer(tokenizer, scripted_engine),
        schedule=driver.Schedule('arrival', async_decode=True))
    taken.append(time.perf_counter() - start)
  tokens = sum(len(t.tokens) for t in trajectories)
  print_row(f'phase of {len(trajectories)} trajectories', options.phase_slots,
            round(tokens / len(trajectories)), taken[-1],
            least(trajectories, limits, options.phase_slots), tokens)


def least(trajectories, limits: Limits, rows: int) -> float:
  """Seconds that these trajectories take at the limits, in so many slots."""
  prompts, filled, read, sampled, seen = set(), 0, 0, 0, 0
  for trajectory in trajectories:
    at = len(trajectory.prompt_tokens)
    if trajectory.question.uid not in prompts:
      prompts.add(trajectory.question.uid)
      filled, read = filled + at, read + at * (at + 1) / 2
    for turn in trajectory.turns:
      count = len(turn.action_tokens)
      sampled += count
      seen += count * (at + (count - 1) / 2)
      at += count
      count = len(turn.observation_tokens)
      filled, read = filled + count, read + count * (at + (count + 1) / 2)
      at += count
  return limits.prefill(filled, read) + sampled / rows * limits.decode(
      rows, seen / sampled * rows)


def transformers_secs(options) -> dict[int, float]:
  """Seconds of a decode step of transformers, by rows; alone on the device."""
  shape = SIZES[options.size]
  fields = ('vocab_size', 'hidden_size', 'num_hidden_layers', 'rope_theta',
            'num_attention_heads', 'num_key_value_heads', 'intermediate_size')
  worker = turns.Worker(
      options.transformers, peers_rollout.__file__, 'transformers',
      '--shape', json.dumps({name: getattr(shape, name) for name in fields}),
      f'--dtype={options.dtype}')
  result = {}
  for rows in options.slots:
    few, many = (statistics.median(
        worker.turn(f'{rows}x{options.context - 32}x{new_tokens}')['secs']
        for _ in range(options.repeats)) for new_tokens in (1, 65))
    result[rows] = (many - few) / 64
  worker.close()
  return result


if __name__ == '__main__':
  main()
