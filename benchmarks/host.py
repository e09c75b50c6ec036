# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Measures the host's cost of a rollout's turn, if the device took no time.

  python benchmarks/host.py

Trajectories of three searches and an answer go through the engine, the driver
and Qwen2.5's tokenizer (packages dashscope and trl; see
tests/real_tokenizers.py). The programs of the engine are replaced by a script
of sampled tokens, whose own time is not counted. Each search returns three
passages of 100 words, from the documentation of Python. Some of them have
characters outside ASCII. CPU milliseconds per turn are the minimum of
`--repeats` runs: other work on the machine only adds to them.

  new       no passage is seen twice
  shared    the five samples of a question find the same passages
"""

import argparse
import itertools
import pathlib
import pydoc_data.topics
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
# pylint: disable=g-import-not-at-top
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.trajectory import Passage, Question, Request
import real_tokenizers

SAMPLES, SEARCHES, PASSAGES, WORDS = 5, 3, 3, 100
BUDGETS = driver.Budgets(max_turns=5, max_new_tokens=500, max_prompt_tokens=512,
                         passage_tokens=500, top_k=PASSAGES)
LENGTH, STEPS = 4096, 16


class Programs:
  """Programs of an engine that return scripted tokens.

  Attributes:
    secs: CPU seconds that the script itself took.
  """

  def __init__(self, slots: int, script):
    self._script, self._slots, self.secs = script, slots, 0.0
    self._left = {}  # slot -> tokens of its turn that are not sampled yet

  def install(self, engine) -> None:
    """Replaces the programs of an engine."""
    for name in engine._programs:
      program = getattr(self, name, self._nothing)
      engine._programs[name] = Program(self._timed(program))

  def _timed(self, program):
    def run(*arguments, **options):
      start = time.thread_time()
      result = program(*arguments, **options)
      self.secs += time.thread_time() - start
      return result
    return run

  def _nothing(self, *_, state, **__):
    return state

  def begin(self, *, state, slot, ids, **_):
    for row in np.flatnonzero(slot < self._slots).tolist():
      self._left[int(slot[row])] = self._script[tuple(ids[row].tolist())]
    return state

  def decode(self, _, *, state, slot, **__):
    rows = range(self._slots) if slot is None else slot.tolist()
    tokens = np.zeros((len(rows), STEPS), np.int32)
    count, active = np.zeros((2, len(rows)), np.int32)
    for row, held in enumerate(rows):
      if left := self._left.pop(held, ()):
        now, left = left[:STEPS], left[STEPS:]
        tokens[row, :len(now)], count[row] = now, len(now)
        active[row] = bool(left)
        if left:
          self._left[held] = left
    return state, dict(tokens=tokens, logprobs=np.zeros(tokens.shape, 'f4'),
                       count=count, active=active, steps=np.int32(STEPS))


class Program:
  """A function in the place of a compiled program."""

  def __init__(self, run):
    self._run = run

  def __call__(self, *arguments, **options):
    return self._run(*arguments, **options)

  def _cache_size(self) -> int:
    return 0


def passages():
  """Yields passages without end; none is equal to an earlier one."""
  words = ' '.join(pydoc_data.topics.topics.values()).split()
  for number in itertools.count():
    first = number * WORDS % (len(words) - WORDS)
    name = ('Café', 'Ångström', '東京')[number % 3] if number % 4 == 0 else 'Doc'
    yield Passage(f'{number}', f'{name} {number}', ' '.join(
        words[first:first + WORDS]))


def workload(questions: int, tokenizer):
  """Returns requests, and a script of tokens by the row ids of turns."""
  requests, script = [], {}
  thought = ('I have to find out who was first, so I look for the person, the '
             'place and the year, and compare what the passages say of them.')
  for number in range(questions):
    question = Question(f'{number}', f'who was number {number}?', ('x',))
    for sample in range(SAMPLES):
      requests.append(Request(question, sample))
      for turn in range(SEARCHES + 1):
        kind = 'search' if turn < SEARCHES else 'answer'
        text = (f'<think> {thought} </think>\n<{kind}> the year of {number} and '
                f'turn {turn} </{kind}>')
        row = engines.row_ids(0, question.uid, sample, turn)
        script[row] = tokenizer.encode(text)
  return requests, script


def search_of(is_shared: bool):
  """Returns a search engine; its passages are shared by samples or all new."""
  new, known = passages(), {}

  def find(query):
    key = (query.question.uid, query.turn,
           None if is_shared else query.sample)
    if key not in known:
      known[key] = tuple(itertools.islice(new, PASSAGES))
    return known[key]
  return lambda queries: [find(query) for query in queries]


def build(slots: int, tokenizer) -> engines.Engine:
  """Builds an engine whose cache is as small as can be."""
  shape = transformer.TransformerConfig(
      vocab_size=tokenizer.vocab_size, hidden_size=2, intermediate_size=2,
      num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
      head_dim=2)
  return engines.Engine(
      shape, slots=slots, length=LENGTH, steps=STEPS,
      stop_table=samplers.compile_stops(
          dialogues.search_r1(tokenizer), tokenizer, shape.vocab_size))


def measure(engine, tokenizer, questions: int, is_shared: bool) -> float:
  """Returns the CPU milliseconds per turn of one rollout."""
  requests, script = workload(questions, tokenizer)
  device = Programs(engine.slots, script)
  device.install(engine)
  engine.load(dict(layers=()), 1.0)
  engine.compile()
  device.secs, start = 0.0, time.process_time()
  trajectories, _ = driver.run(
      requests, engine=engine, search=search_of(is_shared),
      dialogue=dialogues.search_r1(tokenizer), tokenizer=tokenizer,
      budgets=BUDGETS, step=0, policy_step=0,
      schedule=driver.Schedule('arrival', True))
  secs = time.process_time() - start - device.secs
  turns = sum(len(trajectory.turns) for trajectory in trajectories)
  assert turns == len(requests) * (SEARCHES + 1)
  assert all(trajectory.stop_reason == 'answer' for trajectory in trajectories)
  return 1000 * secs / turns


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--questions', type=int, default=128)
  parser.add_argument('--slots', type=int, default=256)
  parser.add_argument('--repeats', type=int, default=5)
  options = parser.parse_args()
  folder = str(real_tokenizers.folder('qwen2.5'))
  tokenizer = tokenizers.load(folder)
  engine = build(options.slots, tokenizer)
  print('| passages | CPU ms per turn |\n|---|---|')
  for name, is_shared in (('new', False), ('shared', True)):
    print(f'| {name} | %.2f |' % min(
        measure(engine, tokenizers.load(folder), options.questions, is_shared)
        for _ in range(options.repeats)))


if __name__ == '__main__':
  main()
