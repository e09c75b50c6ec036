# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""figures: curves that are drawn alike each time, and tables by hand."""

import math

import numpy as np
import pytest

from searchrl.evaluation import figures


def test_running_mean_by_hand():
  got = figures.running_mean([1, 3, math.nan, 5, 9], window=3)
  np.testing.assert_allclose(got, [1, 2, 2, 4, 7])
  assert np.isnan(figures.running_mean([math.nan])).all()
  assert figures.running_mean([]).shape == (0,)


def test_curve_draws_both_files_and_the_same_ones_again(tmp_path):
  pytest.importorskip('matplotlib')
  x = np.arange(1, 41)
  series = {'reward': (x, x / 40), 'entropy': (x, [math.nan] * 5 + [1.0] * 35),
            'speed': (x[::10], [1234.5] * 4), 'nothing yet': ([], [])}
  units = {'reward': 'exact match', 'speed': 'tokens per second'}
  paths = [figures.curve(tmp_path / name / 'dspo.v2', series, title='DSPO <1>',
                         units=units) for name in ('a', 'b')]
  png, svg = paths[0]
  assert (png.name, svg.name) == ('dspo.v2.png', 'dspo.v2.svg')
  assert png.read_bytes().startswith(b'\x89PNG')
  text = svg.read_text()
  for word in ('DSPO &lt;1&gt;', 'reward', 'exact match', 'tokens per second',
               'training step', '1,234'):
    assert f'<!-- {word} -->' in text, word
  assert svg.read_bytes() == paths[1][1].read_bytes()


def test_table_by_hand():
  rows = [{'method': 'direct', 'em': 0.03125, 'n': 500},
          {'method': 'DSPO', 'em': 0.5, 'n': 500, 'note': 'ours'}]
  assert figures.table(rows, ['method', 'em', 'n', 'note']) == (
      'method     em    n  note\n'
      '------  -----  ---  ----\n'
      'direct  0.031  500\n'
      'DSPO    0.500  500  ours')
  assert figures.table([], ['a']) == 'a\n-'


def test_a_narrow_table_says_what_is_alike_once_and_breaks_no_line():
  rows = [{'set': name, 'engine': 'bm25', 'n': 8, 'em': em, 'f1': em / 2,
           'note': ''} for name, em in (('known', 0.5), ('unseen', 0.25))]
  columns, keys = ['set', 'engine', 'n', 'em', 'f1', 'note'], ('set', 'engine')
  assert figures.narrow_table(rows, columns, keys) == (
      'In all rows: engine bm25, n 8\n\n'
      'set        em     f1\n'
      '------  -----  -----\n'
      'known   0.500  0.250\n'
      'unseen  0.250  0.125')
  assert figures.narrow_table(rows, columns, keys, width=16) == (
      'In all rows: engine bm25, n 8\n\n'
      'set        em\n'
      '------  -----\n'
      'known   0.500\n'
      'unseen  0.250\n\n'
      'set        f1\n'
      '------  -----\n'
      'known   0.250\n'
      'unseen  0.125')
  assert figures.narrow_table(rows[:1], columns, keys) == (
      'set    engine  n     em     f1\n'
      '-----  ------  -  -----  -----\n'
      'known  bm25    8  0.500  0.250')
