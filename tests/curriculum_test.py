# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""curriculum: its formula, its ends, its refusals."""

import math

import pytest

from searchrl.search.simulated.curriculum import Curriculum


def test_values_of_the_readme_of_zerosearch():
  course = Curriculum(0.0, 0.5, 4.0, 200)
  found = [course.noise(i) for i in (0, 50, 100, 150, 200)]
  assert found == pytest.approx([0, 0.0690, 0.1667, 0.3047, 0.5], abs=5e-5)


@pytest.mark.parametrize('start, end, base', [
    (0.1, 0.9, 4.0), (0.9, 0.1, 4.0), (0.2, 0.7, 0.25), (0.0, 1.0, 1.0),
    (0.25, 0.25, 4.0), (0.0, 0.0, 4.0)])
def test_it_runs_from_start_to_end_and_stays(start, end, base):
  course = Curriculum(start, end, base, 24)
  found = [course.noise(i) for i in range(30)]
  assert found[0] == start and found[24:] == pytest.approx([end] * 6)
  steps = [b - a for a, b in zip(found, found[1:25])]
  assert all(s * (end - start) >= 0 for s in steps)
  for i in range(25):
    part = i / 24 if base == 1 else (
        math.exp(math.log(base) * i / 24) - 1) / (base - 1)
    assert found[i] == pytest.approx(start + part * (end - start))


def test_above_a_base_of_one_most_noise_comes_late():
  middle = [Curriculum(0, 1, base, 2).noise(1) for base in (0.25, 1.0, 4.0)]
  assert middle == pytest.approx([2 / 3, 1 / 2, 1 / 3])


@pytest.mark.parametrize('field, value', [
    ('start', -0.1), ('start', 1.1), ('end', 2), ('end', float('nan')),
    ('base', 0), ('base', -4), ('base', float('inf')), ('steps', 0)])
def test_what_is_out_of_range_is_refused_by_name(field, value):
  with pytest.raises(ValueError, match=f'curriculum.{field} must be'):
    Curriculum(**{field: value})
