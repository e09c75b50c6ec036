# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""docs/world.md is what docs/make_world_page.py writes today."""

import importlib.util
import pathlib

import pytest

DOCS = pathlib.Path(__file__).parents[1] / 'docs'


@pytest.fixture(scope='module')
def maker():
  spec = importlib.util.spec_from_file_location(
      'make_world_page', DOCS / 'make_world_page.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_page_is_of_todays_worlds(maker):
  written = (DOCS / 'world.md').read_text()
  assert written.startswith('\n'.join(maker.page()))


def test_the_example_is_a_question_of_two_hops_that_became_right(maker):
  def record(em, text, hops=2):
    return {'em': em, 'text': text, 'golds': ['Liburg'],
            'trajectory': {'question': {'hops': hops}}}
  before = {'a': record(0, 'no'), 'b': record(1, 'yes'), 'c': record(0, 'was')}
  after = {'a': record(1, 'other', 3), 'b': record(1, 'yes'),
           'c': record(1, 'is')}
  lines = maker.example(before, after)
  assert 'Liburg' in ' '.join(lines)
  assert lines.count('was') == lines.count('is') == 1
  assert 'other' not in lines and 'no' not in lines
