# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a tiny model before any reinforcement learning, for its card.

Each of its prompts is evaluated on worlds that the model has never seen. The
questions are about fresh facts, about common knowledge, and about common
knowledge that is outdated there.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from searchrl.data import datasets
from searchrl.evaluation import evaluator
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.rollouts import driver
from searchrl.runtime import mesh as meshes
from searchrl.search import corpus as corpora
from searchrl.search import engines
from searchrl.search import engine_wrappers
from searchrl.trajectory import Query, Question, SearchError, SearchFn
from searchrl.world import facts
from searchrl.world import names
from searchrl.world import text
from tools import lessons

# Name parts, topic and split of the questions, by the name of a set.
_SETS: dict[str, tuple[names.NameSource, facts.Topic, text.Split]] = {
    'known': ('known', 'fresh', ''), 'unseen': ('unseen', 'fresh', ''),
    'famous': ('known', 'famous', ''), 'outdated': ('known', 'outdated', '')}


def scores(path: str, *, prompts: Mapping[str, Mapping[str, Any]],
           world_seed: int, questions_per_hop: int, max_hops: int, slots: int,
           length: int) -> list[dict[str, Any]]:
  """Evaluates a model with each of its prompts.

  Args:
    path: Directory of the model.
    prompts: Options by prompt name: `dialogue` ('module:function'), `sets` of
      questions, number of `passages` above a question, and `budgets` of a
      conversation.
    world_seed: Seed of the worlds.
    questions_per_hop: Number of questions per hop count in a set. Sets of
      common knowledge may have fewer.
    max_hops: Largest number of hops of a question.
    slots: Number of concurrent conversations.
    length: Largest number of tokens of a conversation.

  Returns:
    Rows of `evaluator.run`, with their prompt.
  """
  worlds = {source: _world(world_seed, source)
            for source, _, _ in _SETS.values()}
  first = next(iter(prompts.values()))
  sampler, params = policy.load(
      model_folders.read(path, first['dialogue']), seed=0, slots=slots,
      length=length, budgets=driver.Budgets(**first['budgets']),
      mesh=meshes.make())
  rows = []
  for name, prompt in prompts.items():
    dialogue = model_folders.load_dialogue(
        prompt['dialogue'], sampler.tokenizer, f'card.prompts.{name}.dialogue')
    prompted = sampler.with_dialogue(
        dialogue, driver.Budgets(**prompt['budgets']))
    cases = []
    for kind in prompt['sets']:
      source, topic, split = _SETS[kind]
      world, search = worlds[source]
      questions = text.questions(
          world, [questions_per_hop] * max_hops, data_source=kind,
          topics=(topic,), split=split)
      if prompt['passages']:
        questions = [_below_passages(q, search, dialogue, prompt['passages'])
                     for q in questions]
      cases += [
          evaluator.EvalCase(datasets.Dataset(kind, questions, None), 'bm25',
                             search, decoding)
          for decoding in ('greedy', 'sampled')]
    rows += [dict(row, prompt=name)
             for row in evaluator.run(prompted, params, cases)
             if row['set'] in _SETS]
  return rows


def table(rows: list[dict[str, Any]]) -> str:
  """Returns exact match by prompt, set and decoding, as a Markdown table."""
  hops = sorted({row['hops'] for row in rows} - {evaluator.ALL})
  cells = {(row['prompt'], row['set'], row['decoding'], row['hops']): row
           for row in rows}
  lines = ['| prompt | questions | decoding | ' + ' | '.join(
      f'{h} hop{"s" * (h > 1)}' for h in hops) + ' | searches |',
           '|---' * (4 + len(hops)) + '|']
  for prompt, name, decoding in dict.fromkeys(key[:3] for key in cells):
    scored = [cells.get((prompt, name, decoding, h)) for h in hops]
    lines.append(
        f'| {prompt} | {name} | {decoding} | '
        + ' | '.join(f'{row["em"]:.2f}' if row else '' for row in scored)
        + ' | ' + ' '.join(f'{row["searches"]:.1f}' for row in scored if row)
        + ' |')
  return '\n'.join(lines)


def _world(seed: int, source: names.NameSource) -> tuple[facts.World, SearchFn]:
  """Returns a world with common knowledge, and its BM25 engine."""
  world = facts.make(seed, source=source, common=True)
  return world, engine_wrappers.with_typed_errors(engines.make(
      'bm25', corpora.Corpus(tuple(text.passages(world)))))


def _below_passages(question: Question, search: SearchFn, dialogue,
                    top_k: int) -> Question:
  """Returns a question below the passages that a search for it finds."""
  (shown,) = search([Query(question.text, top_k, question)])
  assert not isinstance(shown, SearchError), shown
  return dataclasses.replace(question, text=lessons.with_passages(
      dialogue, shown, question.text))
