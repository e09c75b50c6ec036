# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""tables: the papers' numbers add up, commands exist, cells by hand."""

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest

from configs import paper_tables
from searchrl.evaluation import evaluator
from searchrl.evaluation import scores
from searchrl.experiment import config_checks
from searchrl.papers import tables
from searchrl.papers.dr_zero import selfplay
from searchrl.papers.known_models import MODELS
from searchrl.runtime import config_fields
from searchrl.runtime import config_files


# Means that the papers print are off by this much, for Qwen2.5-7B.
PRINTED = {'IRCoT': 0.0131, 'w/o dynamic filter': 0.004,
           'Dr. Zero, iteration 3': -0.002}


@pytest.mark.parametrize('name', tables.names())
def test_the_papers_means_are_those_of_their_sets(name):
  table = tables.load(name)
  assert table['score'] in scores.ANSWERS and table['sets'][-1] == 'mean'
  for model, group in table['groups'].items():
    for row, numbers in group.items():
      assert row in table['rows']
      if not numbers:  # the runs of a figure
        continue
      assert len(numbers) == len(table['sets'])
      gap = numbers[-1] - np.mean(numbers[:-1])
      assert gap == pytest.approx(PRINTED.get(row, 0.0), abs=0.0011) or (
          model != 'qwen2.5-7b' and abs(gap) < 0.0011), (model, row)


@pytest.mark.parametrize('name', tables.names())
@pytest.mark.parametrize('small', ['', 'smoke'])
def test_every_command_of_a_table_names_a_config(name, small):
  table = tables.load(name)
  ways = table['small' if small else 'rows']
  for model in ('tiny',) if small else table['groups']:
    for way in ways.values():
      source = tables.source(way, 'runs', model=model, size=small)
      for config, flags, folder in source.commands:
        made = config_files.load(f'configs/{config}')
        assert folder.startswith('runs/')
        if not small and config != 'evaluate.py':  # it names a run
          role = made.get('solver', made)  # a run, or Dr. Zero's
          instruct = MODELS.get(f'{model}-instruct', MODELS[model])
          assert role.model.path in {MODELS[model].hub_id, instruct.hub_id}
        settings, others = config_fields.split(flags)
        assert not others
        config_fields.assign(made, settings, config)
      if source.method:
        # The last command evaluates the method.
        assert source.method in made.evaluate.methods
  assert not small or {*ways} <= {*table['rows']}


@pytest.mark.parametrize('name', tables.names())
def test_every_printed_command_passes_the_checks_of_its_config(
    name, tmp_path):
  """They read no file. Dr. Zero's own check refuses what its phases set."""
  config = paper_tables.get_config(name)
  config.table.runs = 'none'
  tables.run(config.lock(), str(tmp_path))
  text = (tmp_path / 'table.txt').read_text().partition('To run:')[2]
  for command in text.replace('\\\n', '').split('python -m searchrl.main ')[1:]:
    file, workdir, *flags = shlex.split(command)
    assert workdir.startswith('--workdir=none/')
    made = config_files.load(file.removeprefix('--config='))
    config_fields.assign(made, config_fields.split(flags)[0], file)
    check = selfplay.check_fields if 'selfplay' in made else config_checks.check
    check(made)
    # Runs that train on questions are given them, unless they write their own.
    assert bool(made.data.train) == ('selfplay' not in made)


@pytest.mark.parametrize('name', tables.names())
def test_rows_that_another_run_makes_have_folders_of_their_own(name):
  table = tables.load(name)
  for ways, fields in ((table['rows'], dict(model='m')),
                       (table['small'], dict(size='smoke'))):
    sources = [tables.source(way, 'runs', **fields) for way in ways.values()]
    places = [(source.commands[-1], source.scored, source.method, source.engine)
              for source in sources if source.commands]
    folders = {command[2]: command for source in sources
               for command in source.commands}
    assert len({*places}) == len(places)
    assert all(folders[command[2]] == command for source in sources
               for command in source.commands)


def written(folder, rows):
  folder.mkdir(parents=True)
  (folder / 'table.json').write_text(json.dumps([dict(
      dict(engine='dense', decoding='greedy', hops='all'), **row)
                                                 for row in rows]))


def test_cells_by_hand(tmp_path):
  sets = ['nq', 'hotpotqa', 'mean']
  table = dict(sets=sets, score='subem')
  written(tmp_path / 'grpo-qwen2.5-7b/evaluation/after', [
      dict(set='nq', n=400, em=0.0, subem=0.5),
      dict(set='nq', n=400, em=0.0, subem=0.9, decoding='sampled'),
      dict(set='nq', n=100, em=0.0, subem=0.9, hops=1),
      dict(set='nq', n=400, em=0.0, subem=0.1, engine='noise'),
      dict(set='hotpotqa', n=100, em=0.0, subem=0.2),
      dict(set='mean', n=500, em=0.0, subem=0.35)])
  way = tables.source(dict(config='grpo.py:{model}'), str(tmp_path),
                      model='qwen2.5-7b')
  nq, hotpotqa, mean = tables.cells(table, 'm', 'GRPO', [.56, .25, .3], [way])
  low, high = evaluator.wilson(200, 400)
  assert (nq['paper'], nq['ours'], nq['95% interval']) == (
      .56, .5, f'{low:.3f}-{high:.3f}')
  assert nq['difference'] == pytest.approx(-.06) and nq['verdict'] == 'lower'
  assert hotpotqa['verdict'] == 'agrees'
  other_low, other_high = evaluator.wilson(20, 100)
  below = np.hypot(.5 - low, .2 - other_low) / 2
  above = np.hypot(high - .5, other_high - .2) / 2
  assert mean['95% interval'] == f'{.35 - below:.3f}-{.35 + above:.3f}'
  assert mean['verdict'] == ('higher' if below < .05 else 'agrees')
  absent = tables.source(dict(config='ppo.py'), str(tmp_path))
  assert [cell['verdict'] for cell in tables.cells(
      table, 'm', 'PPO', [.1, .2, .3], [absent])] == ['not run'] * 3
  nothing = tables.source({}, str(tmp_path))
  assert tables.cells(table, 'm', 'SFT', [.1, .2, .3], [nothing])[0] == {
      'model': 'm', 'row': 'SFT', 'set': 'nq', 'paper': .1,
      'verdict': 'not run'}


def test_a_job_prints_what_is_there_and_the_commands_of_the_rest(
    tmp_path, capsys):
  config = paper_tables.get_config('search_r1/table2')
  config.table.runs = str(tmp_path)
  written(tmp_path / 'evaluate-methods-qwen2.5-7b-instruct', [
      dict(set='nq', n=3610, em=0.14, method='direct'),
      dict(set='nq', n=3610, em=0.35, method='rag')])
  tables.run(config.lock(), str(tmp_path / 'out'))
  text = (tmp_path / 'out/table.txt').read_text()
  assert capsys.readouterr().out == text
  lines = [line.split() for line in text.splitlines()]
  assert ['qwen2.5-7b', 'Direct', 'Inference', 'nq', '0.134', '0.140', '3610',
          '0.129-0.152', '0.006', 'agrees'] in lines
  commands = text.partition('To run:')[2]
  assert 'methods/qwen2.5-7b-instruct' not in commands  # it is there
  assert commands.count('methods/qwen2.5-3b-instruct') == 1  # for five rows
  tune, = (lines for lines in commands.split('python -m searchrl.main ')
           if 'configs/sft.py:qwen2.5-3b ' in lines)
  assert tune.split() == [
      '--config=configs/sft.py:qwen2.5-3b', '\\',
      f'--workdir={tmp_path}/sft-qwen2.5-3b', '\\',
      '--config.data.train=data/train.jsonl']
  assert f'''--config.model.path={tmp_path}/sft-qwen2.5-3b/model \\
    '--config.evaluate.order=('"'"'direct'"'"',)'
''' in commands
  cells = json.loads((tmp_path / 'out/table.json').read_text())
  assert len(cells) == 3 * 10 * 8
  assert '<td>0.140</td>' in (tmp_path / 'out/table.html').read_text()
  latex = (tmp_path / 'out/table.tex').read_text()
  assert '95\\% interval' in latex and latex.count('\\\\') == 1 + len(cells)


def test_a_run_with_another_config_than_its_command_has_no_verdict(tmp_path):
  config = paper_tables.get_config('search_r1/table2')
  config.table.update(runs=str(tmp_path), flags='--config.search.engine=remote')
  place = tmp_path / 'ppo-search_r1-qwen2.5-7b'
  written(place, [dict(set='nq', n=9, em=0.5)])

  def verdict(**changes):
    """The verdict of a run of the command, with changed fields."""
    made = config_files.load('configs/ppo.py:search_r1/qwen2.5-7b')
    config_fields.assign(made, {
        name.replace('__', '.'): [value] for name, value in changes.items()}, '')
    (place / 'config.json').write_text(made.to_json())
    tables.run(config, str(tmp_path / 'out'))
    cell, = (cell for cell in json.loads(
        (tmp_path / 'out/table.json').read_text()) if cell.get('n'))
    return cell['verdict']

  same = dict(search__engine='remote', rollout__tensor='4')
  assert verdict(**same) == 'agrees'
  assert 'other config' not in (tmp_path / 'out/table.txt').read_text()
  assert verdict(**same, train__num_steps='4', model__path='tiny') == (
      'other config')
  for name in ('table.txt', 'table.html', 'table.tex'):
    assert 'train.num_steps=4, not 1005' in (
        tmp_path / 'out' / name).read_text().replace('\\_', '_')
  assert verdict(search__engine='bm25') == 'other config'


def test_zerosearch_is_compared_by_substring_and_a_note_says_why(tmp_path):
  config = paper_tables.get_config('zerosearch/table7')
  config.table.runs = str(tmp_path)
  written(tmp_path / 'zerosearch-llama-3.2-3b', [
      dict(set='nq', n=3610, em=0.1, subem=0.4, f1=0.2)])
  tables.run(config.lock(), str(tmp_path / 'out'))
  cell, = (cell for cell in json.loads(
      (tmp_path / 'out/table.json').read_text()) if cell.get('n'))
  assert (cell['paper'], cell['ours'], cell['verdict']) == (.4028, .4, 'agrees')
  for name in ('table.txt', 'table.html', 'table.tex'):
    text = (tmp_path / 'out' / name).read_text()
    assert 'in subEM' in text and text.count(
        'its scripts count an answer that contains a gold answer') == 1


def test_answers_whose_search_failed_are_not_compared(tmp_path):
  written(tmp_path / 'grpo', [
      dict(set='nq', n=9, em=0.5, search_errors=2)])
  way = tables.source(dict(config='grpo.py'), str(tmp_path))
  cell, = tables.cells(dict(sets=['nq'], score='em'), 'm', 'GRPO', [.5], [way])
  assert cell['verdict'] == '2 searches failed'


def test_a_run_that_has_begun_is_not_finished(tmp_path):
  way = tables.source(dict(config='grpo.py'), str(tmp_path))
  cell = lambda: tables.cells(
      dict(sets=['nq'], score='em'), 'm', 'GRPO', [.5], [way])[0]
  assert cell()['verdict'] == 'not run'
  (tmp_path / 'grpo').mkdir()
  (tmp_path / 'grpo/config.json').write_text('{}')
  assert cell()['verdict'] == 'not finished' and len(way.missing) == 1


def test_a_shared_flag_without_a_field_is_refused(tmp_path):
  config = paper_tables.get_config('search_r1/table3')
  config.table.update(runs=str(tmp_path), flags='--config.data.tran=t.jsonl')
  with pytest.raises(ValueError, match="data.tran"):
    tables.run(config, str(tmp_path))


def test_a_damaged_file_of_scores_is_named(tmp_path):
  (tmp_path / 'grpo').mkdir()
  (tmp_path / 'grpo/table.json').write_text('[{')
  way = tables.source(dict(config='grpo.py'), str(tmp_path))
  with pytest.raises(ValueError, match='grpo/table.json must be the table of an '
                     'evaluation, but is damaged: .* Delete it and repeat'):
    tables.cells(dict(sets=['nq'], score='em'), 'm', 'GRPO', [.5], [way])


def test_the_flags_of_a_row_replace_the_shared_ones(tmp_path):
  config = paper_tables.get_config('zerosearch/table3')
  config.table.update(runs=str(tmp_path), flags=(
      '--config.search.engine=remote --config.data.train=t.jsonl'))
  tables.run(config.lock(), str(tmp_path))
  commands = (tmp_path / 'table.txt').read_text().split('python -m ')
  grpo, = (text for text in commands if 'grpo.py:zerosearch/qwen2.5-7b ' in text)
  assert list(filter(str.strip, shlex.split(grpo)))[-3:] == [
      '--config.search.engine=web', '--config.data.train=t.jsonl',
      '--config.search.options={}']


def test_in_small_one_model_stands_for_all(tmp_path):
  config = paper_tables.get_config('search_r1/table3,small=smoke')
  config.table.runs = str(tmp_path)
  written(tmp_path / 'ppo-smoke', [dict(set='known', n=10, em=0.5)])
  tables.run(config.lock(), str(tmp_path / 'out'))
  cells = json.loads((tmp_path / 'out/table.json').read_text())
  mean, = (cell for cell in cells if cell.get('ours') and cell['set'] == 'mean')
  assert (mean['row'], mean['ours'], mean['paper']) == ('base (PPO)', .5, .292)
  assert {cell['model'] for cell in cells} == {'smoke'}


def sources(way, folder, seeds):
  return [tables.source(way, str(folder), seed=seed, model='m')
          for seed in seeds]


def test_a_row_is_measured_once_all_its_seeds_are_there(tmp_path):
  way = dict(config='engines.py:{model}', arm='bm25', engine='hnsw')
  seeds = sources(way, tmp_path, (3, 4))
  assert seeds[1].commands == ((
      'engines.py:m', ('--config.seed=4', "--config.sweep.order=('bm25',)"),
      str(tmp_path / 'engines-m-bm25/seed_4')),)
  row = dict(set='nq', n=400, engine='hnsw')
  table = dict(sets=['nq', 'mean'], score='em')
  for seed, value in ((3, .5), (4, .6)):
    nq, _ = tables.cells(table, 'm', 'BM25', [], seeds)
    assert nq['verdict'] == 'not run' and 'ours' not in nq
    written(tmp_path / f'engines-m-bm25/seed_{seed}/bm25', [
        row | dict(em=value), row | dict(em=0.0, engine='bm25')])
  nq, mean = tables.cells(table, 'm', 'BM25', [], seeds)
  assert nq['ours'] == pytest.approx(.55) and nq['paper'] is None
  assert nq['95% interval'] == '0.000-1.000'  # t of one degree of freedom
  assert (nq['verdict'], mean['verdict']) == ('', 'not run')
  assert not any(source.missing for source in seeds)


def test_the_interval_of_seeds_has_their_spread_and_that_of_questions(tmp_path):
  seeds = sources(dict(config='grpo.py'), tmp_path, (0, 1, 2))
  values = .5, .52, .54
  for seed, value in enumerate(values):
    written(tmp_path / f'grpo/seed_{seed}', [dict(set='nq', n=3610, em=value)])
  cell, = tables.cells(dict(sets=['nq'], score='em'), 'm', 'GRPO', [.4], seeds)
  lows, highs = zip(*(evaluator.wilson(value * 3610, 3610) for value in values))
  of_seeds = 4.30265 * .02 / np.sqrt(3)
  low = .52 - np.hypot(of_seeds, .52 - np.mean(lows))
  high = .52 + np.hypot(of_seeds, np.mean(highs) - .52)
  assert cell['95% interval'] == f'{low:.3f}-{high:.3f}'
  assert cell['verdict'] == 'higher'


def test_the_file_of_commands_has_those_whose_needs_exist(tmp_path):
  def lines():
    tables.run(config.lock(), str(tmp_path / 'out'))
    text = (tmp_path / 'out/to_run.txt').read_text()
    return [shlex.split(line) for line in text.splitlines()]

  runs = tmp_path / 'a run'
  config = paper_tables.get_config('empirical_study/table5')
  config.table.update(runs=str(runs), seeds=(0, 1))
  trained = lines()
  assert len(trained) == 3 * 2 and all(
      line[0] == '--config=configs/engines.py:qwen2.5-7b' for line in trained)
  place = runs / 'engines-qwen2.5-7b-bm25/seed_1'
  assert f'--workdir={place}' in [line[1] for line in trained]
  written(place / 'bm25/evaluation/after', [])
  tested = [line for line in lines()
            if line[0] == '--config=configs/evaluate.py']
  assert len(tested) == 2  # once for all engines, once for the web
  assert all(f'--config.evaluate.run={place}/bm25' in line
             and '--config.seed=1' in line for line in tested)


@pytest.mark.long
@pytest.mark.parametrize('name', ['search_r1/table2', 'empirical_study/table4'])
def test_a_table_is_filled_in_small_by_its_own_commands(name, tmp_path):
  """It begins with nothing, and each command runs as it is printed."""
  def table():
    command = [sys.executable, '-m', 'searchrl.main',
               f'--config=configs/paper_tables.py:{name},small=smoke',
               f'--workdir={tmp_path}/out', f'--config.table.runs={tmp_path}']
    return subprocess.run(
        command, check=True, capture_output=True, text=True).stdout

  commands = table().partition('To run:')[2].replace('\\\n', '')
  for line in filter(str.strip, commands.splitlines()):
    subprocess.run([sys.executable, *shlex.split(line)[1:]], check=True)
  assert 'not run' not in table() and 'To run' not in table()
