# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The engine's tests again, attending by the kernel of TPUs, as plain XLA."""

import dataclasses
import pathlib
import subprocess
import sys

import fakes
import numpy as np
import pallas
import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.models.inference import engine as engines
from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import weight_sync
from searchrl.trajectory import Request

TESTS = pathlib.Path(__file__).parent
NAMED = {
    'engine_test.py': (
        'test_logprobs_equal_a_full_forward_over_several_turns',
        'test_greedy_takes_the_argmax_of_a_full_forward',
        'test_a_prompt_that_a_slot_holds_is_copied_and_not_fed_again',
        'test_decodes_in_flight_lose_and_repeat_nothing',
        'test_an_abandoned_engine_goes_on_as_if_new',
        'test_a_turn_ends_at_the_token_that_completes_a_stop_string',
        'test_a_new_turn_drops_the_start_of_a_stop_string',
        'test_a_turn_that_never_stops_has_exactly_its_budget',
        'test_slots_on_eight_devices_sample_the_same_ids',
        'test_varied_rollouts_compile_nothing_after_the_first_feed[0]',
        'test_varied_rollouts_compile_nothing_after_the_first_feed[2]',
        'test_each_slot_draws_in_its_way_beside_others',
        'test_a_slot_shows_its_unfinished_turn_and_can_be_cut'),
    'sampler_test.py': (  # whole rollouts
        'test_one_engine_plays_two_dialogues_and_two_policies',),
}


@pytest.mark.slow
@pytest.mark.long
def test_the_engine_is_the_same_by_the_kernel_of_tpus():
  names = [f'{TESTS / file}::{name}' for file, of in NAMED.items()
           for name in of]
  run = subprocess.run(
      [sys.executable, '-m', 'pytest', '-q', '-n', '0', '--ragged', *names],
      cwd=TESTS.parent, text=True, capture_output=True, check=False)
  assert f'{len(names)} passed' in run.stdout, run.stdout[-3000:]


CONFIG = dataclasses.replace(tiny.CONFIG, head_dim=128)
DIALOGUE = dataclasses.replace(
    dialogues.tags('q: {question}\n'), parse=fakes.by_length,
    stop_strings=('th', '>'))
BUDGETS = driver.Budgets(max_turns=4, max_new_tokens=20, max_prompt_tokens=60,
                         passage_tokens=10, top_k=1)


def play(**options):
  """Trajectories of four questions, four each; and their engine."""
  engine = engines.Engine(
      CONFIG, slots=6, length=160, tile=16, tiles=(2, 8), block=16, steps=6,
      attention='ragged', **options, stop_table=samplers.compile_stops(
          DIALOGUE, fakes.TOKENIZER, CONFIG.vocab_size))
  sampler = samplers.Sampler(CONFIG, fakes.TOKENIZER, DIALOGUE, BUDGETS, engine,
                             weight_sync.Synced)
  requests = [Request(tiny.question(f'{n}', 'where? ' * (n + 2)), sample)
              for n in range(4) for sample in range(4)]
  return sampler.rollout(tiny.params(CONFIG), requests, search=fakes.Search(),
                         temperature=1.5, step=2).trajectories, engine


@pytest.mark.slow
@pytest.mark.long
def test_few_pages_with_shared_prompts_change_no_trajectory():
  with pallas.interpreted():
    expected, whole = play()
    found, few = play(cache_tokens=320)  # twenty pages; a full slot takes ten
  assert [t.tokens for t in found] == [t.tokens for t in expected]
  for a, b in zip(found, expected):
    for turn, other in zip(a.turns, b.turns, strict=True):
      np.testing.assert_allclose(turn.action_logprobs, other.action_logprobs,
                                 atol=1e-5)
  assert few.copied_tokens and whole.copied_tokens
  assert [pages.free for engine in (few, whole)
          for pages in engine._contents._pages] == [20, 60]
  assert len({t.stop_reason for t in found}) > 1
