# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""summary: a run's table."""

import json

from searchrl.evaluation import summary


def test_table_of_a_run_shows_before_and_after(tmp_path):
  for name, em in (('before', 0.25), ('after', 0.75)):
    (tmp_path / 'evaluation' / name).mkdir(parents=True)
    (tmp_path / 'evaluation' / name / 'table.json').write_text(json.dumps([
        {'set': 'known', 'engine': 'bm25', 'decoding': 'greedy', 'hops': 1,
         'n': 8, 'em': em, 'searches': 1.5}]))
  assert '.25→.75' in summary.table(tmp_path)


def test_sets_with_and_without_hop_counts_stand_in_one_table(tmp_path):
  rows = [('nq', 'all', 0.5, 10), ('world', 1, 0.25, 4), ('world', 2, 0.75, 4),
          ('world', 'all', 0.5, 8)]
  folder = tmp_path / 'evaluation' / 'after'
  folder.mkdir(parents=True)
  (folder / 'table.json').write_text(json.dumps([
      {'set': name, 'engine': 'bm25', 'decoding': 'greedy', 'hops': hops,
       'n': n, 'em': em, 'searches': 1.5} for name, hops, em, n in rows]))
  title, _, same, _, header, _, nq, world, *_ = (
      summary.table(tmp_path).splitlines())
  assert title == 'Exact match'  # nothing was evaluated before
  assert same == 'In all rows: engine bm25, decoding greedy'
  assert header.split() == ['set', '1-hop', '2-hop', 'all', 'n']
  assert nq.split() == ['nq', '.50', '10']
  assert world.split() == ['world', '.25', '.75', '.50', '8']


def written(folder, name, em, searches):
  """An evaluation of all kinds, four hop counts each."""
  cases = [(kind, 'bm25', decoding, n) for kind, n in (
      ('known', 16), ('unseen', 16), ('famous', 8), ('outdated', 8))
           for decoding in ('greedy', 'sampled')]
  cases += [('known', 'noise', 'greedy', 8), ('famous', 'noise', 'greedy', 8)]
  rows = [{'set': kind, 'engine': engine, 'decoding': decoding, 'hops': hops,
           'n': n * 4 if hops == 'all' else n, 'em': em, 'searches': searches}
          for kind, engine, decoding, n in cases
          for hops in (1, 2, 3, 4, 'all')]
  (folder / 'evaluation' / name).mkdir(parents=True)
  (folder / 'evaluation' / name / 'table.json').write_text(json.dumps(rows))


def test_all_kinds_are_shown_by_hops_with_searches_and_intervals(tmp_path):
  written(tmp_path, 'before', 0.25, 1.0)
  written(tmp_path, 'after', 0.75, 2.96)
  text = summary.table(tmp_path)
  lines = text.splitlines()
  assert max(map(len, lines[:-4])) <= 80  # below are paths
  outdated = [line for line in lines if line.startswith('outdated')]
  assert [line.split()[2] for line in outdated[:2]] == ['greedy', 'sampled']
  assert len(outdated) == 3  # searches: of greedy answers alone
  assert lines.count('In all rows: decoding greedy') == 1
  assert outdated[0].count('.25→.75') == 5
  assert outdated[2].count('1.0→3.0') == 5
  assert sum('noise  ' in line for line in lines) == 4
  # Half of the interval at 1/2 is z / 2 / sqrt(n + z^2) in closed form.
  for n in (8, 16, 32, 64):
    assert f'{1.96 / 2 / (n + 1.96 ** 2) ** 0.5:.2f} of {n}' in text


def test_a_run_without_random_passages_has_no_note_of_them(tmp_path):
  written(tmp_path, 'after', 0.75, 2.96)
  file = tmp_path / 'evaluation' / 'after' / 'table.json'
  rows = [row for row in json.loads(file.read_text())
          if row['engine'] != 'noise']
  assert 'noise: random passages; n: ' in summary.table(tmp_path)
  file.write_text(json.dumps(rows))
  text = summary.table(tmp_path)
  assert 'noise' not in text and 'n: questions of a row' in text
  assert 'In all rows: engine ' in text  # and that is no column any more


def line_of(step, **scores):
  return {'training/global_step': step, **{
      f'val/{name}/em/greedy': score for name, score in scores.items()}}


def trained(step):
  return {'training/global_step': step, 'critic/score/mean': step / 4,
          'search/calls_per_traj': 1.0 + step, 'response_length/mean': 9.0}


def test_greedy_exact_match_is_drawn_by_hops_if_training_was_evaluated():
  during = [[trained(step), line_of(step, known_noise_1hop=0.5, known_1hop=0.75,
                                    known_2hop=step / 4, known=0.5,
                                    famous_1hop=0.0)] for step in (2, 3)]
  ends = [line_of(0, known_1hop=0.5, known_2hop=0.0)], [trained(1)]
  panels = summary.curves(sum([*ends, *during], []))
  assert list(panels)[:3] == ['reward', 'searches', summary.EXACT_MATCH]
  assert len(panels) == 6
  assert panels[summary.EXACT_MATCH] == {
      '1-hop': ((0, 2, 3), (0.5, 0.75, 0.75)),
      '2-hop': ((0, 2, 3), (0.0, 0.5, 0.75))}
  assert panels['searches'] == ([1, 2, 3], [2.0, 3.0, 4.0])


def test_before_and_after_alone_are_no_curve():
  panels = summary.curves([line_of(0, nq=0.1), trained(1), line_of(1, nq=0.5)])
  assert summary.EXACT_MATCH not in panels and len(panels) == 6
  sets = summary.curves([
      line_of(step, nq=step / 4, hotpotqa=0.5) for step in (0, 1, 2)]
                        + [trained(1)])
  assert list(sets[summary.EXACT_MATCH]) == ['nq', 'hotpotqa']
