# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""How often a model reads a fact off two passages right, and where it fails.

  python benchmarks/study/copying.py --model tiny_instruct

A question of one hop, the search for it and two passages stand before the
answer; each token of the answer is predicted after the right ones before it. A
name may be found (its first token is right) and yet be spelled wrongly. Prints
the share of right answers by names and by where the fact stands: before its
subject ("X employs S"), or after it ("S works for X").
"""

import argparse
import collections
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from searchrl.agent import dialogue as dialogues  # pylint: disable=g-import-not-at-top
from searchrl.agent import tokenizer as tokenizers
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.world import facts
from searchrl.world import teacher
from searchrl.world import text

_LENGTH, _ROWS = 320, 16


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--model', default='tiny_base')
  parser.add_argument('--worlds', type=int, default=10)
  parser.add_argument('--facts', type=int, default=40, help='a world')
  options = parser.parse_args()
  path = weights.locate(options.model)
  shape, tokenizer = weights.read_config(path), tokenizers.load(path)
  params = weights.load(path, shape)
  predict = jax.jit(lambda tokens: jnp.argmax(transformer.logits(
      params, transformer.forward(params, tokens, shape)), -1))
  print('| names | facts | all tokens right | the first one | value before its '
        'subject | after it |', '|---|---|---|---|---|---|', sep='\n')
  for source in ('known', 'unseen'):
    cases = [case for seed in range(300, 300 + options.worlds)
             for case in readings(seed, source, options.facts, tokenizer)]
    right = collections.defaultdict(list)
    for ids, answer, is_first, tokens in predicted(cases, predict):
      same = tokens[len(ids) - 1:len(ids) + len(answer) - 1] == answer
      right['all'].append(same.all())
      right['first'].append(same[0])
      right[is_first].append(same.all())
    cells = [np.mean(right[key]) for key in ('all', 'first', True, False)]
    print(f'| {source} | {len(cases)} | '
          + ' | '.join(f'{cell:.2f}' for cell in cells) + ' |')


def readings(seed: int, source: str, count: int, tokenizer):
  """Yields (ids until the answer, its ids, whether it precedes its subject)."""
  world = facts.make(seed, sizes=facts.SMALL_SIZES, source=source)
  stated, rng = text.stated(world), np.random.default_rng(seed)
  keys, dialogue = list(world.facts), dialogues.tags()
  for i in rng.choice(len(keys), count, replace=False):
    (subject, relation), other = keys[i], keys[rng.integers(len(keys))]
    value = world.facts[subject, relation]
    chain = facts.Chain(subject, (relation,), (value,))
    passage = stated[subject, relation]
    pieces = (
        dialogue.prompt(text.ask(chain, rng)),
        f'<think> {relation}</think>\n<search> {subject} {relation}</search>',
        teacher.observation(dialogue, [passage, stated[other]]),
        f'<think> {relation}')
    ids = [token for piece in pieces for token in tokenizer.encode(piece)]
    sentence = next(s for s in passage.text.split('.')
                    if value in s and subject in s)
    answer = np.array(tokenizer.encode(f' {value}'))
    if len(ids) + len(answer) <= _LENGTH:
      yield ids, answer, sentence.index(value) < sentence.index(subject)


def predicted(cases, predict):
  """Yields cases with the model's likeliest token after each of theirs."""
  for start in range(0, len(cases), _ROWS):
    chosen = cases[start:start + _ROWS]
    tokens = np.zeros((_ROWS, _LENGTH), np.int32)
    for row, (ids, answer, _) in enumerate(chosen):
      tokens[row, :len(ids) + len(answer)] = [*ids, *answer]
    for case, likeliest in zip(chosen, np.asarray(predict(tokens))):
      yield *case, likeliest


if __name__ == '__main__':
  main()
