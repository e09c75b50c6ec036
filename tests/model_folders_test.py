# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""folders: a model without its weights, and the questions it has room for."""

import numpy as np
import pytest

from searchrl.agent import dialogue as dialogues
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.rollouts import driver
from searchrl.trajectory import Question

LAPTOP = 'searchrl.agent.dialogue:laptop'


@pytest.fixture(scope='module')
def folder():
  return model_folders.read(str(policy.TINY_BASE), LAPTOP)


def admitted(folder, text, most):
  try:
    folder.admit(driver.Budgets(max_prompt_tokens=most))(
        Question('a', text, ()), 'a.jsonl, line 7')
    return True
  except ValueError as error:
    assert f'but is {most}, and that of a.jsonl, line 7 has ' in str(error)
    return False


@pytest.mark.parametrize('dialogue', [
    LAPTOP, 'searchrl.agent.dialogue:search_r1'])
def test_a_question_is_admitted_if_its_prompt_fits_to_the_token(dialogue):
  folder = model_folders.read(str(policy.TINY_BASE), dialogue)
  rng = np.random.default_rng(0)
  alphabet = [*'abc eE?.,"<>/', ' the', ' Zinina', 'é', '日', '🙂', '\n']
  for _ in range(100):
    text = ''.join(rng.choice(alphabet, rng.integers(1, 60)))
    tokens = len(dialogues.opening(folder.dialogue, text, folder.tokenizer))
    assert admitted(folder, text, tokens)
    assert not admitted(folder, text, tokens - 1)


def test_a_conversation_must_fit_into_the_models_positions(folder):
  budgets = driver.Budgets()
  folder.check(budgets, folder.shape.max_position_embeddings)
  with pytest.raises(ValueError, match='^rollout.max_length must be at most 1024,'):
    folder.check(budgets, folder.shape.max_position_embeddings + 1)
  with pytest.raises(ValueError, match='must hold a prompt and a turn'):
    folder.check(budgets, 100)


@pytest.mark.parametrize('name', ['json:loads', 'builtins:id',
                                  'searchrl.agent.dialogue:tags'])
def test_what_makes_no_dialogue_is_named(folder, name):
  with pytest.raises(ValueError, match='^solver.dialogue must name a function '
                     f'of a tokenizer that returns a Dialogue, but {name} '):
    model_folders.load_dialogue(name, folder.tokenizer, 'solver.dialogue')
