# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The report: what it reads, tokens and their numbers, hostile text."""

import base64
import dataclasses
import gzip
import html.parser
import json
import math
import pathlib
import re
from xml.etree import ElementTree

from configs import report as report_config
from configs import show as show_config
import numpy as np
import pytest

from searchrl.agent import tokenizer as tokenizers
from searchrl.evaluation.report import page
from searchrl.evaluation.report import plots
from searchrl.evaluation.report import reading
from searchrl.evaluation.report import stories
from searchrl.evaluation.report import tokens
from searchrl.experiment import policy
from searchrl.jobs import report
from searchrl.jobs import show
from searchrl.rollouts import records
from searchrl.trajectory import (Action, Passage, Question, Trajectory, Turn,
                                 collate)

HOSTILE = '</script><img src=x onerror=alert(1)>\u202e\x1b[31m'


@pytest.fixture(scope='module', name='tokenizer')
def _tokenizer():
  return tokenizers.load(str(policy.TINY_BASE))


def conversation(tokenizer, group=0, sample=0, text='Who?') -> Trajectory:
  """One search, and an answer; the numbers of its tokens are all different."""
  def turn(words, action, observed='', passages=()):
    ids = tokenizer.encode(words)
    return Turn(ids, tuple(-0.01 * (n + 1) for n in range(len(ids))), action,
                tokenizer.encode(observed) if observed else (), passages,
                text=words, observation=observed)
  return Trajectory(
      Question(f'q{group}', text, ('Ada Lovelace',), 2, 'toy'), sample, 3,
      tokenizer.encode(f'Search: {text}'),
      (turn('<search> Ada</search>', Action('search', ('Ada',)),
            '<information>né</information>', (
                Passage('1', 'Ada', 'ada lovelace wrote', 2.5),
                Passage('2', HOSTILE, 'nothing', 1.0))),
       turn('<answer> Ada</answer>', Action('answer', ('Ada',)))),
      'answer', reward=0.5, outcome_reward=1.0, group=group,
      prompt=f'Search: {text}', parts={'format': 1.0})


def write_run(folder: pathlib.Path, tokenizer, count=4, seed=0) -> list:
  """A folder as training leaves it, with a step of so many trajectories."""
  texts = ['Who?', HOSTILE, '"quoted" & <b>bold</b>', 'Wer ist Jürgen 😀?']
  played = [conversation(tokenizer, n // 2, n % 2, texts[n // 2 % 4])
            for n in range(count)]
  records.write(folder / 'trajectories' / 'step_000001.jsonl.gz', played)
  batch = collate(played, group_ids=[one.group for one in played],
                  policy_step=0, length=256)
  learner = np.where(batch.loss_mask, batch.behavior_logprobs + 0.1, 0)
  records.write_learned(
      folder / 'learned' / 'step_000001.jsonl.gz', played,
      dataclasses.replace(batch, old_logprobs=learner.astype(np.float32)),
      np.linspace(-1, 1, count, dtype=np.float32), np.ones(count, bool))
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps({
      'training/global_step': n, 'critic/score/mean': n / 8,
      'actor/grad_norm': 1.0, 'timing_s/step': 2.0, 'timing_s/gen': 1.0}) + '\n'
                                                for n in range(1, 5)))
  (folder / 'config.json').write_text(json.dumps(
      {'seed': seed, 'model': {'path': ''},
       'algorithm': {'name': 'searchrl.rl.algorithms:grpo'}}))
  return played


def write_evaluations(folder: pathlib.Path, tokenizer) -> None:
  """Evaluations before and after: of 2 hops, q1 is wrong and then right."""
  for where, right in (('before', {'q0'}), ('after', {'q0', 'q1'})):
    records_of = []
    for n, text in enumerate(['Who?', 'Where & when?', HOSTILE]):
      one = conversation(tokenizer, n, 0, text)
      if where == 'before':
        one = dataclasses.replace(one, turns=one.turns[1:])
      records_of.append({
          'method': 'agent', 'set': 'toy', 'engine': 'bm25',
          'decoding': 'greedy', 'em': float(f'q{n}' in right),
          'trajectory': records.to_json(one)})
    path = folder / 'evaluation' / where
    (path / 'records' / 'toy.bm25.greedy').mkdir(parents=True)
    with gzip.open(path / 'records' / 'toy.bm25.greedy' / '000000.jsonl.gz',
                   'wt') as file:
      file.writelines(json.dumps(record) + '\n' for record in records_of)
    (path / 'table.json').write_text(json.dumps([{
        'set': 'toy', 'engine': 'bm25', 'decoding': 'greedy', 'hops': hops,
        'n': 3, 'em': len(right) / 3, 'searches': float(where == 'after')}
                                                 for hops in (2, 'all')]))


def rendered(runs, most=2000) -> str:
  return page.render(runs, lambda run: policy.tokenizer_of(run.folder),
                     title=HOSTILE, most=most)


def data_of(text: str):
  """(heads, bodies) of a page, read by Python's own parser of HTML."""
  class Scripts(html.parser.HTMLParser):
    found, inside = {}, None
    def handle_starttag(self, tag, attrs):
      if tag == 'script' and dict(attrs).get('type'):
        self.inside = dict(attrs).get('id', 'chunk')
    def handle_data(self, data):
      if self.inside:
        self.found.setdefault(self.inside, []).append(data)
        self.inside = None
  parser = Scripts()
  parser.found = {}
  parser.feed(text)
  def unpacked(one):
    return json.loads(gzip.decompress(base64.b64decode(one)))
  return (unpacked(parser.found['index'][0]),
          [body for chunk in parser.found.get('chunk', ())
           for body in unpacked(chunk)])


def test_the_page_holds_every_number_of_the_records(tmp_path, tokenizer):
  played = write_run(tmp_path / 'mine', tokenizer)
  heads, bodies = data_of(rendered(reading.runs([str(tmp_path / 'mine')])))
  assert [head['question'] for head in heads] == [
      one.question.text for one in played]
  advantages = np.linspace(-1, 1, len(played))
  for one, body, advantage in zip(played, bodies, advantages):
    assert ''.join(''.join(s['texts']) for s in body) == (
        one.prompt + one.response)
    policys = [s for s in body if s['role'] == 'policy']
    for segment, turn in zip(policys, one.turns, strict=True):
      assert len(segment['texts']) == len(turn.action_tokens)
      assert segment['logprobs'] == pytest.approx(turn.action_logprobs)
      assert segment['ratios'] == pytest.approx(
          [math.exp(0.1)] * len(turn.action_tokens), rel=1e-4)
      assert segment['advantages'] == pytest.approx(
          [advantage] * len(turn.action_tokens), rel=1e-4, abs=1e-4)
      assert segment['trained'] is True
    passages = next(s for s in body if s['role'] == 'observation')['passages']
    assert [p['gold'] for p in passages] == [True, False]


def test_hostile_text_is_data_alone(tmp_path, tokenizer):
  write_run(tmp_path / 'mine', tokenizer)
  text = rendered(reading.runs([str(tmp_path / 'mine')]))
  assert '<img' not in text and HOSTILE not in text
  assert len(re.findall('<script>', text)) == 1  # the page's own
  assert "default-src 'none'" in text


def test_many_trajectories_are_thinned_out_evenly_and_counted(
    tmp_path, tokenizer):
  write_run(tmp_path / 'mine', tokenizer, count=10)
  text = rendered(reading.runs([str(tmp_path / 'mine')]), most=5)
  heads, bodies = data_of(text)
  assert len(heads) == len(bodies) == 5 and '5 of 10' in text


def test_runs_of_several_seeds_share_a_curve(tmp_path, tokenizer):
  for seed in (0, 1):
    write_run(tmp_path / 'mine' / f'seed_{seed}', tokenizer, seed=seed)
  found = reading.runs([str(tmp_path / 'mine')])
  assert [run.name for run in found] == ['mine/seed_0', 'mine/seed_1']
  assert 'mine/seed_0 and 1 more seeds' in rendered(found)


@pytest.mark.parametrize('phase, curves', [('tune', 1), ('other', 2)])
def test_seeds_may_start_from_phases_of_their_own(
    tmp_path, tokenizer, phase, curves):
  for seed in (0, 1):
    folder = tmp_path / 'mine' / f'seed_{seed}'
    write_run(folder / 'grpo', tokenizer, seed=seed)
    config = json.loads((folder / 'grpo' / 'config.json').read_text())
    config['model']['path'] = str(folder / (phase if seed else 'tune'))
    (folder / 'grpo' / 'config.json').write_text(json.dumps(config))
  assert len(plots.groups(reading.runs([str(tmp_path / 'mine')]))) == curves


def test_the_story_is_a_question_that_training_made_right(tmp_path, tokenizer):
  """One of three questions of 2 hops is wrong before and right after."""
  write_run(tmp_path / 'mine', tokenizer)
  write_evaluations(tmp_path / 'mine', tokenizer)
  run, = reading.runs([str(tmp_path / 'mine')])
  story, = stories.stories([run])
  assert (story.question, story.hops, story.gain) == ('Where & when?', 2, 1.0)
  before, after = story.sides
  assert [len(turn['passages']) for turn in before['turns']] == [0]
  assert [len(turn['passages']) for turn in after['turns']] == [2, 0]
  assert [p['gold'] for p in after['turns'][0]['passages']] == [True, False]
  text = rendered([run])
  assert text.index('Where &amp; when?') < text.index('id="runs"')
  assert HOSTILE not in text and '<img' not in text


def test_the_story_names_calls_of_tools_and_shows_their_results(
    tmp_path, tokenizer):
  write_run(tmp_path / 'mine', tokenizer)
  write_evaluations(tmp_path / 'mine', tokenizer)
  run, = reading.runs([str(tmp_path / 'mine')])
  entry = next(entry for entry in reading.entries_of(run, 'evaluated after')
               if entry.trajectory.searches)
  searched = entry.trajectory.turns[0]
  called = dataclasses.replace(
      searched, passages=(), observation='12 <b>' + 'x' * 200,
      action=Action('calculate', ('3 * 4',)))
  trajectory = dataclasses.replace(
      entry.trajectory, turns=(searched, called, called, *entry.trajectory.turns))
  assert stories.calls(trajectory) == '2 searches, 2 calls of calculate'
  assert stories.calls(entry.trajectory) == '1 search'
  side = stories._side(dataclasses.replace(entry, trajectory=trajectory))
  assert side['turns'][0]['result'] == ''
  assert side['turns'][1]['result'] == '12 <b>' + 'x' * 154 + '…'


def test_tables_before_and_after_are_side_by_side(tmp_path, tokenizer):
  write_run(tmp_path / 'mine', tokenizer)
  write_evaluations(tmp_path / 'mine', tokenizer)
  table, = page._compared(*reading.runs([str(tmp_path / 'mine')]))
  assert [[cell for cell, _ in row] for row in table['rows']] == [
      ['toy', 'bm25', 'greedy', hops, '3', '0.333', '0.667', '+0.333', '0.000',
       '1.000'] for hops in ('2', 'all')]


def test_several_runs_have_a_row_for_each_recipe(tmp_path, tokenizer):
  """Means and deviations over two seeds by hand: 2/3 twice, so 0."""
  for seed in range(2):
    write_run(tmp_path / 'mine' / f'seed_{seed}', tokenizer, seed=seed)
    write_evaluations(tmp_path / 'mine' / f'seed_{seed}', tokenizer)
  runs = reading.runs([str(tmp_path / 'mine')])
  assert page._overview(runs) == [{
      'recipe': 'grpo', 'runs': 'mine/seed_0, mine/seed_1',
      'before': '0.333 ± 0.000', 'after': '0.667 ± 0.000'}]
  assert page._overview(runs[:1]) == []


def test_curves_have_points_and_places_and_none_is_shown_twice(
    tmp_path, tokenizer):
  """The reward is the outcome here; the gradient norm is constant."""
  write_run(tmp_path / 'mine', tokenizer)
  file = tmp_path / 'mine' / 'metrics.jsonl'
  lines = [json.loads(line) for line in file.read_text().splitlines()]
  file.write_text(''.join(json.dumps(
      line | {'critic/rewards/mean': line['critic/score/mean'],
              'val/toy/em/greedy': 0.25}) + '\n' for line in lines[:3]))
  panels = plots.curves(reading.runs([str(tmp_path / 'mine')]))
  assert [*panels] == ['outcome', 'exact match: toy', 'gradient norm']
  line, = panels['outcome'].points
  assert [point[2:] for point in line['points']] == [
      [1, 0.125, 0.0], [2, 0.25, 0.0], [3, 0.375, 0.0]]
  root = ElementTree.fromstring(panels['outcome'].svg)
  _, _, width, height = map(float, root.get('viewBox').split())
  drawn = [(float(use.get('x')), float(use.get('y')))
           for use in root.iter('{http://www.w3.org/2000/svg}use')
           if use.get('style', '').startswith('fill: var(--line-0)')]
  np.testing.assert_allclose(drawn, [
      (x * width, y * height) for x, y, *_ in line['points']], atol=0.1)


def test_equal_names_are_told_apart_by_their_folders(tmp_path, tokenizer):
  folders = [str(tmp_path / part / 'mine') for part in 'ab']
  for folder in folders:
    write_run(pathlib.Path(folder), tokenizer)
  assert [run.name for run in reading.runs(folders)] == folders
  assert len(reading.runs(folders[:1] * 2)) == 1


def test_the_score_of_an_evaluation_is_its_main_score(tmp_path, tokenizer):
  write_evaluations(tmp_path, tokenizer)
  file = tmp_path / 'evaluation/after/records/toy.bm25.greedy/000000.jsonl.gz'
  lines = [json.loads(line) | {'score': {'values': {'em': 0.0, 'f1': 0.5}}}
           for line in gzip.decompress(file.read_bytes()).splitlines()]
  file.write_bytes(records.packed(lines))
  for score, value in (('f1', 0.5), ('', 0.0)):
    (tmp_path / 'config.json').write_text(json.dumps(
        {'evaluate': {'score': score}}))
    run = reading._run(tmp_path, 'mine')
    assert {entry.score for entry in reading.entries_of(
        run, 'evaluated after')} == {value}


@pytest.mark.parametrize('damage', [
    lambda data: data[:-9], lambda data: b'', lambda data: gzip.compress(b'{')])
def test_a_damaged_file_of_trajectories_is_named(tmp_path, tokenizer, damage):
  write_run(tmp_path, tokenizer)
  file = tmp_path / 'trajectories' / 'step_000001.jsonl.gz'
  file.write_bytes(damage(file.read_bytes()))
  run, = reading.runs([str(tmp_path)])
  with pytest.raises(ValueError, match=(
      f'{file} must be a whole file of traj.*. Move it away, and make the')):
    rendered([run])


def test_a_damaged_file_of_rollbacks_is_named(tmp_path, tokenizer):
  write_run(tmp_path, tokenizer)
  (tmp_path / 'rollbacks.jsonl').write_text('{"at": 3, "to": 0, "wh')
  run, = reading.runs([str(tmp_path)])
  with pytest.raises(ValueError, match=(
      'line 1 of .*/rollbacks.jsonl must be JSON, but is damaged')):
    rendered([run])


def test_a_damaged_file_of_what_was_learned_is_named(tmp_path, tokenizer):
  write_run(tmp_path, tokenizer)
  file = tmp_path / 'learned' / 'step_000001.jsonl.gz'
  file.parent.mkdir(exist_ok=True)
  file.write_bytes(b'no gzip')
  run, = reading.runs([str(tmp_path)])
  with pytest.raises(ValueError, match=f'{file} must be a whole file'):
    rendered([run])


def test_runs_may_be_below_a_folder_named_evaluation(tmp_path, tokenizer):
  folder = tmp_path / 'evaluation' / 'runs'
  write_run(folder / 'mine', tokenizer)
  write_evaluations(folder / 'mine', tokenizer)
  run, = reading.runs([str(folder)])
  assert run.folder == folder / 'mine'
  assert '<h2>Trajectories' in rendered([run], most=0)
  assert 'hold no trajectories' not in rendered([run], most=0)


def test_several_runs_may_be_joined_by_commas(tmp_path, tokenizer):
  for name in ('a', 'b'):
    write_run(tmp_path / name, tokenizer)
  config = report_config.get_config()
  config.report.runs = (f'{tmp_path}/a,{tmp_path}/b',)
  report.run(config, str(tmp_path / 'report'))
  page = (tmp_path / 'report' / report.FILE).read_text()
  assert '<title>a, b' in page


def test_a_file_of_learned_numbers_is_no_file_of_trajectories(tmp_path):
  (tmp_path / 'learned').mkdir()
  file = tmp_path / 'learned' / 'step_000001.jsonl.gz'
  file.write_bytes(b'x')
  with pytest.raises(ValueError, match='of the same name in trajectories/'):
    reading.entry(file, 1)


def test_a_folder_without_runs_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='report.runs must be folders'):
    reading.runs([str(tmp_path)])
  config = report_config.get_config()
  config.report.runs = ()
  with pytest.raises(ValueError, match='report.runs must name the folders'):
    report.run(config, str(tmp_path / 'report'))
  config = report_config.get_config()
  config.report.trajectories = -1
  with pytest.raises(ValueError, match='report.trajectories must be'):
    report.run(config, str(tmp_path / 'report'))
  assert not (tmp_path / 'report').exists()


def test_tokens_that_end_within_a_character_lose_nothing(tokenizer):
  one = conversation(tokenizer, text='Wer ist Jürgen 😀?')
  prompt = next(iter(tokens.segments(one, tokenizer, {})))
  assert ''.join(prompt.texts) == one.prompt
  assert len(prompt.texts) == len(one.prompt_tokens)
  assert next(iter(tokens.segments(one, None, {}))).texts == (one.prompt,)


def test_a_trajectory_in_the_terminal(tmp_path, tokenizer, capsys):
  played = write_run(tmp_path / 'mine', tokenizer)
  config = show_config.get_config()
  config.show.trajectory = (
      f'{tmp_path}/mine/trajectories/step_000001.jsonl.gz:3')
  show.run(config, '')
  text = capsys.readouterr().out
  assert played[2].question.uid == 'q1' and '\x1b' not in text
  rows = re.findall(r'^ +(\d+) +(-\S+) +(\S+) +([+-]\S+)  (.+)$', text, re.M)
  assert len(rows) == sum(played[2].loss_mask)
  position = played[2].loss_mask.index(True)
  assert rows[0][:4] == (str(position), '-0.0100', '1.1052', '+0.3333')
  assert [n for n, of in enumerate(played[2].loss_mask) if of] == [
      int(row[0]) for row in rows]


@pytest.mark.parametrize('name, words', [
    ('no_line', 'must be FILE:LINE'), ('absent.gz:1', 'There is no file'),
    ('{run}:0', 'a line from 1 on'), ('{run}:5', 'lines 1 to 4'),
    ('{other}:1', 'must be a file of trajectories')])
def test_a_trajectory_that_is_not_there_is_named(
    tmp_path, tokenizer, name, words):
  write_run(tmp_path, tokenizer)
  (tmp_path / 'other.gz').write_bytes(b'no gzip')
  with pytest.raises((ValueError, FileNotFoundError), match=words):
    show.find(name.format(
        run=tmp_path / 'trajectories' / 'step_000001.jsonl.gz',
        other=tmp_path / 'other.gz'))


def rewrite(folder: pathlib.Path, *lines) -> reading.Run:
  """The run of a folder whose metrics are replaced by some lines."""
  (folder / 'metrics.jsonl').write_text(''.join(
      json.dumps(line) + '\n' for line in lines))
  run, = reading.runs([str(folder)])
  return run


def test_numbers_in_texts_of_a_curve_keep_their_digits(tmp_path):
  folder = tmp_path / 'lr_0.00035'
  folder.mkdir()
  run = rewrite(folder, *({
      'training/global_step': n, 'critic/score/mean': 0.0, 'timing_s/gen': 1.0,
      'actor/grad_norm': n / 1e4} for n in range(1, 5)))
  root = ElementTree.fromstring(plots.curves([run])['gradient norm'].svg)
  labels = [text.text for text in root.iter('{http://www.w3.org/2000/svg}text')]
  assert {'0.0001', '0.0002', '0.0003', '0.0004'} <= {*labels}
  assert 'lr_0.00035: time' in plots.times(run)
  assert not re.search(r'<[^>]*\d\.\d{3}', plots.times(run))


def test_the_card_and_the_overview_have_the_first_engines_mean(
    tmp_path, tokenizer):
  write_run(tmp_path / 'mine', tokenizer)
  path = tmp_path / 'mine' / 'evaluation' / 'after'
  path.mkdir(parents=True)
  rows = [{'set': name, 'engine': engine, 'decoding': 'greedy', 'hops': 'all',
           'em': em} for name, engine, em in (
               ('a', 'plain', 0.1), ('b', 'plain', 0.3), ('a', 'steep', 0.5),
               ('b', 'steep', 0.7), ('a', 'noise', 0.0), ('mean', 'plain', 0.2),
               ('mean', 'steep', 0.6))]
  one = [row for row in rows if row['engine'] != 'steep']
  for chosen, expected in ((rows, 'exact match, greedy, mean, plain'),
                           (one, 'exact match, greedy, mean')):
    (path / 'table.json').write_text(json.dumps(chosen))
    run, = reading.runs([str(tmp_path / 'mine')])
    assert page._card(run)['scores'] == [('after', '0.200', expected)]
    assert page._overview([run, run])[0]['after'].startswith('0.200')


def test_every_rollback_is_on_the_card(tmp_path, tokenizer):
  """Also one to the first checkpoint, after which no step is before another."""
  write_run(tmp_path, tokenizer)
  run = rewrite(tmp_path, {'training/global_step': 1, 'critic/score/mean': 0.5,
                           'guards/rollbacks': 2, 'timing_s/gen': 1.0})
  assert not page._card(run)['alerts']
  (tmp_path / 'rollbacks.jsonl').write_text(''.join(json.dumps({
      'rollback': n, 'at': n + 2, 'to': 0, 'position': [], 'why': HOSTILE
  }) + '\n' for n in (1, 2)))
  run, = reading.runs([str(tmp_path)])
  said, steps = zip(*page._card(run)['alerts'])
  assert steps == ('from step 3 to step 0', 'from step 4 to step 0')
  assert all(HOSTILE in text for text in said)
  assert HOSTILE not in rendered([run])


def test_the_mean_over_sets_is_drawn_and_others_are_counted(tmp_path):
  names = [f'val/{name}/em/greedy' for name in (*'abcdefg', 'mean')]
  run = rewrite(tmp_path, *({
      'training/global_step': n, 'critic/score/mean': n / 8, 'timing_s/gen': 1.0
  } | {name: (n + m) / 16 for m, name in enumerate(names)} for n in (1, 2)))
  drawn = [title for title in plots.curves([run]) if 'exact' in title]
  assert drawn == [f'exact match: {name}' for name in ('mean', *'abcd')]
  assert 'The exact match of 3 more sets is not drawn.' in rendered([run])


def test_a_tuning_shows_its_losses(tmp_path):
  run = rewrite(tmp_path, {'sft/step': 0, 'sft/val_loss': 2.0},
                {'sft/step': 1, 'sft/loss': 1.5},
                {'sft/step': 2, 'sft/loss': 1.0},
                {'sft/step': 2, 'sft/val_loss': 1.25})
  card, panels = page._card(run), plots.curves([run])
  assert [score[:2] for score in card['scores']] == [
      ('before', '2.000'), ('after', '1.250')]
  assert [[point[2:4] for point in panel.points[0]['points']]
          for panel in panels.values()] == [
              [[1, 1.5], [2, 1.0]], [[0, 2.0], [2, 1.25]]]
  text = rendered([run, run])
  assert '2 updates of tuning' in text and 'No alerts' not in text
