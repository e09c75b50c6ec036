# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""deviations: which fields make a run another than that of its command."""

import pytest

from searchrl.papers import deviations
from searchrl.papers import tables
from searchrl.runtime import config_fields
from searchrl.runtime import config_files


def recorded(folder, config, flags=(), arm=''):
  """Writes the config of a run of a command, as a run does."""
  made = config_files.load(f'configs/{config}')
  config_fields.assign(made, config_fields.split(flags)[0], config)
  if arm:
    with made.unlocked():
      config_fields.change(made, made.sweep.runs[arm], arm)
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(made.to_json())


RUNS = {  # a flag that the command does not have, and what is said
    'ppo.py:search_r1/qwen2.5-7b': {
        'rollout.top_p=0.95': 'rollout.top_p=0.95, not 1.0',
        # Unset in the recipe, but neither the model nor the data decide them.
        'rollout.max_rounds=2': 'rollout.max_rounds=2, not 1',
        'model.lora.rank=16': 'model.lora.rank=16, not 0',
        'learner.minibatches=4': 'learner.minibatches=4, not 2',
        'outcome=a:b': "outcome='a:b', not 'searchrl.agent.rewards:em'",
        'data.question_mark=False': 'data.question_mark=False, not True',
        # A keyword that a recipe leaves out has its default.
        'algorithm.dual_clip=3.0': 'algorithm.dual_clip=3.0, not None',
        "search.options={'index':'runs/e5','backend':'hnsw'}":
            "search.options.backend='hnsw', not None",
        'search.engine=remote': "search.engine='remote', not 'dense'",
        'evaluate.search.engine=web': "evaluate.search.engine='web', not ''"},
    'drzero.py:qwen2.5-3b-instruct': {
        'proposer.optimizer.learning_rate=5e-07':
            'proposer.optimizer.learning_rate=5e-07, not 1e-06',
        'solver.train.num_steps=100': 'solver.train.num_steps=100, not 50',
        'solver.rollout.budgets.max_turns=4':
            'solver.rollout.budgets.max_turns=4, not 5',
        'solver.model.path=a/b':
            "solver.model.path='a/b', not 'Qwen/Qwen2.5-3B-Instruct'",
        'proposer.solver.temperature=0.5':
            'proposer.solver.temperature=0.5, not 1.0',
        'proposer.reward_options.attempts=3':
            'proposer.reward_options.attempts=3, not 5',
        'selfplay.documents=False': 'selfplay.documents=False, not True',
        'proposing.seeds=99': 'proposing.seeds=99, not 12800',
        'proposing.majority.attempts=10':
            'proposing.majority.attempts=10, not 0'},
    'zerosearch.py:qwen2.5-3b': {
        'search.options.simulator=google_3b':
            "search.options.simulator='google_3b', not 'google_14b'",
        'search.options.curriculum.end=0.0':
            'search.options.curriculum.end=0.0, not 0.5',
        'search.options.temperature=0.5':
            'search.options.temperature=0.5, not 0.8'}}
ALIKE = {
    'ppo.py:search_r1/qwen2.5-7b': (
        'rollout.max_num_seqs=8', 'rollout.tensor=2', 'learner.remat=dots',
        "search.options={'index':'disk/e5','batch':8}"),
    'drzero.py:qwen2.5-3b-instruct': (
        'selfplay.iterations=4', 'selfplay.examined=9', 'proposer.mesh.fsdp=2',
        'proposing.seeds_a_round=64', 'solver.rollout.max_num_seqs=8',
        'search.options.index=disk/e5',
        'proposer.solver.path=disk/Qwen/Qwen2.5-3B-Instruct'),
    'zerosearch.py:qwen2.5-3b': (
        "search.options.urls=('http://a:6001/v1/chat/completions',)",
        'search.options.connections=8', 'search.options.try_secs=60.0')}


@pytest.mark.parametrize('config, flag, text', [
    (config, *case) for config, cases in RUNS.items()
    for case in cases.items()])
def test_a_field_that_changes_numbers_is_named(config, flag, text, tmp_path):
  recorded(tmp_path, config, [f'--config.{flag}'])
  assert deviations.of_run(tmp_path, config, []) == [text]


@pytest.mark.parametrize('config', ALIKE)
def test_places_and_speed_may_differ(config, tmp_path):
  recorded(tmp_path, config, [f'--config.{flag}' for flag in ALIKE[config]])
  assert deviations.of_run(tmp_path, config, []) == []


@pytest.mark.parametrize('name', tables.names())
def test_a_run_of_a_row_has_its_config_and_not_that_of_the_next(name, tmp_path):
  table = tables.load(name)
  sources = [tables.source(way, 'runs', model=[*table['groups']][0])
             for way in table['rows'].values()]
  rows = {source.commands[0]: source.arms[0] for source in sources
          if source.commands and source.commands[0][0] != 'evaluate.py'}
  for ours, following in zip(rows, [*rows][1:] + [*rows][:1]):
    recorded(tmp_path, *ours[:2], rows[ours])
    assert not deviations.of_run(tmp_path, *ours[:2], rows[ours])
    assert ours == following or deviations.of_run(
        tmp_path, *following[:2], rows[following])
