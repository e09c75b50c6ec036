# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""lesson_tokens: lessons as tokens, by the config's kinds and counts."""

import numpy as np
import pytest

from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import policy
from tools import lesson_tokens
from tools import tiny_base

EOS = '<|endoftext|>'


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizers.load(str(policy.TINY_BASE))


def options(**stage):
  chosen = tiny_base.get_config('smoke').lessons.to_dict()
  return dict(chosen, stages=(stage,))


def test_echoes_weigh_only_what_can_be_copied():
  (ids, weight), = lesson_tokens.echoes(1, 50, np.random.default_rng(0))
  period = weight.count(0.0)
  assert len(ids) == 128 and ids[period:] == ids[:-period]


def test_each_world_has_so_many_lessons_of_each_kind(tokenizer):
  made = lesson_tokens.make(tokenizer, eos=EOS, **options(
      worlds=2, echoes=3, counts=dict(recall=4, drill=1)))
  assert len(made['lengths']) == 3 + 2 * 5
  assert made['documents'].sum() == len(made['lengths'])
  ends = np.cumsum(made['lengths'])[:-1]
  texts = [tokenizer.decode(ids) for ids in np.split(made['ids'], ends)]
  assert sum(text.startswith('Answer: ') for text in texts) == 8
  answers = [made['weights'][start:end].max() for start, end in zip(
      [0, *ends], [*ends, None])]
  assert set(answers) == {np.float32(1.0)}


def test_a_prompt_of_ones_own_stands_in_its_lessons(tokenizer):
  mine = options(worlds=1, echoes=0, counts=dict(thinking=3))
  mine['kinds']['thinking'] = dict(
      lesson='tools.lessons:recall',
      prompt='Think, then answer: {question}\n', hops=(1,), fresh=0.0,
      thought=1.0)
  made = lesson_tokens.make(tokenizer, eos=EOS, **mine)
  text = tokenizer.decode(made['ids'])
  assert text.count('Think, then answer: ') == text.count('<think>') == 3


def test_a_stage_that_counts_an_unknown_kind_is_refused(tokenizer):
  with pytest.raises(ValueError, match=(
      r'lessons.stages\[0\].counts may name .*, but names poems')):
    lesson_tokens.make(tokenizer, eos=EOS, **options(
        worlds=1, counts=dict(poems=3)))


def test_a_lesson_that_is_no_function_is_refused(tokenizer):
  mine = options(worlds=1, counts=dict(drill=1))
  mine['kinds']['drill'] = dict(lesson='tools.lessons:dril')
  with pytest.raises(ValueError, match='lessons.kinds.drill.lesson'):
    lesson_tokens.make(tokenizer, eos=EOS, **mine)
