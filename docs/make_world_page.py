# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/world.md: a page of a world, and a question before and after.

  python -m searchrl.main --config=configs/dspo.py
  python docs/make_world_page.py runs/dspo
"""

import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from searchrl.evaluation import shards  # pylint: disable=g-import-not-at-top
from searchrl.evaluation import evaluator
from searchrl.world import facts
from searchrl.world import text

PAGE = ROOT / 'docs' / 'world.md'
SEED = 101  # the world of the default evaluation
_KINDS = {
    'fresh': 'facts exist only in this world, so only a search finds them.',
    'famous': 'facts are common knowledge, which the tiny models have '
              'memorised. They are the same in this world.',
    'outdated': 'facts are common knowledge that has changed in this world. '
                'The tiny models remember the old answer.'}


def main() -> None:
  """Writes docs/world.md."""
  before, after = _records(pathlib.Path(sys.argv[1]))
  PAGE.write_text('\n'.join([*page(), *example(before, after), '']))
  print(f'wrote {PAGE}')


def page() -> list[str]:
  """Returns the lines that depend only on the seed of the world."""
  world = facts.make(SEED, common=True)
  hard = facts.make(SEED, common=True, hard=True)
  person = world.entities['person'][0]
  lines = [
      '# A page of a world', '',
      '    python -m searchrl.main --config=configs/dspo.py',
      '    python docs/make_world_page.py runs/dspo', '',
      'This page shows the world that the first command evaluates on. Its seed '
      f'is {SEED}.', '',
      f'The world has {len(world.kind_of)} entities and {len(world.facts)} '
      f'facts about them, written as {len(text.passages(world))} passages. '
      'Every seed gives other facts. These are three of the passages:', '']
  stated = text.stated(world)
  shown = [person, world.facts[person, 'birthplace'],
           next(iter(world.memory))[0]]
  for name in shown:
    passage = next(p for p in stated.values() if p.title == name)
    lines += [f'> **{passage.title}.** {passage.text}', '']
  lines += [
      'In a hard world (`--config.world.hard=True`) an entity has namesakes and '
      'two or three passages. Only the name in them matches a query such as '
      '`NAME birthplace`:', '']
  person = next(name for name in hard.entities['person']
                if name.endswith('the Younger') or name.startswith('Captain'))
  for passage in text.passages(hard):
    if passage.title == person:
      lines += [f'> **{passage.title}.** {passage.text}', '']
  lines += ['## Questions', '',
            'A question asks for the end of a chain of facts. There are three '
            'kinds of facts:', '']
  for topic, meaning in _KINDS.items():
    lines += [f'**{topic}** {meaning}', '']
    rng = np.random.default_rng(0)
    for hops in (1, 2, 3):
      chain = next(facts.chains(world, hops, rng, (topic,)))
      steps = ' -> '.join([chain.start, *(
          f'*{relation}* {value}'
          for relation, value in zip(chain.relations, chain.values))])
      remembered = ('' if topic != 'outdated' else
                    f' (memory: {facts.remembered(world, chain)[-1]})')
      lines.append(f'- {text.ask(chain, rng)} {steps}{remembered}')
    lines.append('')
  return lines


def example(before: dict, after: dict) -> list[str]:
  """Returns lines on the first 2-hop question answered only after training."""
  uid = next(uid for uid in before if not before[uid]['em']
             and after[uid]['em'] and _hops(after[uid]) == 2)
  return ['## One question, before and after', '',
          'The policy answers greedily and searches with BM25. The right answer '
          f'is {after[uid]["golds"][0]}.', '', 'Before training:', '',
          *_quoted(before[uid]), '', 'After training:', '',
          *_quoted(after[uid])]


def _records(run: pathlib.Path) -> tuple[dict, dict]:
  """Returns greedy records of fresh questions by question, before and after."""
  return tuple({
      record['question']: record
      for record in shards.read_all(run / 'evaluation' / name / evaluator.RECORDS)
      if record['set'] == 'known'
      and record['decoding'] == 'greedy' and record['engine'] != 'noise'}
               for name in ('before', 'after'))


def _hops(record: dict) -> int:
  return record['trajectory']['question']['hops']


def _quoted(record: dict) -> list[str]:
  return ['```', *record['text'].strip().splitlines(), '```']


if __name__ == '__main__':
  main()
