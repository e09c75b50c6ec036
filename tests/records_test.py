# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""records: trajectories come back from a file as they went there."""

import dataclasses
import json

import numpy as np
import pytest

from searchrl import trajectory as trajectory_lib
from searchrl.evaluation import shards
from searchrl.rl import advantages
from searchrl.rollouts import records
from searchrl.runtime import atomic_files
from searchrl.trajectory import Action, Passage, Question, Trajectory, Turn

TRAJECTORY = Trajectory(
    Question('q', 'where?\u2028\n', ('é',), 2), 1, 3, (1, 2), (Turn(
        (3,), (-0.1,), Action('search', ('x',)), (4,), (Passage(
            'p', 'T', 'a\x85b', 0.5),), 0, '<search>', 'é\u2028'),), 'answer',
    1.0, 1.0, parts={'gate': 1.0})


def test_a_file_holds_all_of_every_trajectory_and_appears_whole(tmp_path):
  file = tmp_path / 'new' / 'round.jsonl.gz'
  records.write(file, [TRAJECTORY, TRAJECTORY])
  assert records.read(file) == [TRAJECTORY, TRAJECTORY]
  first = file.read_bytes()
  records.write(file, [TRAJECTORY, TRAJECTORY])
  assert file.read_bytes() == first
  assert [f.name for f in file.parent.iterdir()] == ['round.jsonl.gz']
  records.write(file, [])
  assert records.read(file) == []


def test_a_round_of_other_questions_is_sampled_again(tmp_path):
  questions = [Question(f'q{n}', 'where?', ('é',)) for n in range(3)]
  played = []

  def play(number, asked):
    played.append(number)
    return [dataclasses.replace(TRAJECTORY, question=question)
            for question in asked]

  other = [*questions[:2], dataclasses.replace(questions[2], text='who?')]
  for asked in (questions, questions, other, other):
    found = [t.question for sampled in records.in_rounds(
        tmp_path, asked, 2, play) for t in sampled]
    assert found == asked
  assert played == [0, 1, 1]


@pytest.mark.parametrize('damage', [
    lambda data: b'', lambda data: data[:-9], lambda data: b'x' + data,
    lambda data: data[:20] + bytes(8) + data[28:]])
def test_a_damaged_file_is_named_and_a_damaged_round_is_sampled_again(
    tmp_path, capsys, damage):
  question, played = TRAJECTORY.question, []

  def play(number, asked):
    played.append(number)
    return [TRAJECTORY]

  for _ in range(2):
    assert [*records.in_rounds(tmp_path, [question], 1, play)] == [[TRAJECTORY]]
    file, = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
  assert played == [0, 0]
  assert 'is damaged' in capsys.readouterr().err
  with pytest.raises(ValueError, match=f'{file.name} must hold trajectories'):
    records.read(file)


def test_half_a_character_in_a_passage_comes_back(tmp_path):
  """A search server can send it; UTF-8 cannot write it, but JSON can."""
  odd = dataclasses.replace(TRAJECTORY, turns=(dataclasses.replace(
      TRAJECTORY.turns[0], passages=(Passage('\udfff', '', 'é \ud83d'),)),))
  records.write(tmp_path / 'round.jsonl.gz', [odd])
  assert records.read(tmp_path / 'round.jsonl.gz') == [odd]
  shards.write(tmp_path / 's.jsonl.gz', [{'text': 'é \ud83d'}])
  assert shards.read(tmp_path / 's.jsonl.gz') == [{'text': 'é \ud83d'}]
  atomic_files.write(tmp_path / 'a', 'é \ud83d')
  assert (tmp_path / 'a').read_text(encoding='utf-8') == 'é \\ud83d'


def test_what_was_learned_is_found_by_group_and_sample(tmp_path):
  file = tmp_path / 'learned' / 'step.jsonl.gz'
  assert records.read_learned(file) == {}
  batch = trajectory_lib.collate([TRAJECTORY], group_ids=[0], policy_step=3,
                              length=8, rows=2)
  old = np.where(batch.loss_mask, np.float32(-0.25), 0)
  for values, seen in (
      (np.float32([0.5, 9]), [0.5]), (np.full((2, 8), 0.5), [0.5]),
      (advantages.Estimate(np.full((2, 8), 0.5), None), [0.5]),
      ({'mine': np.zeros(2)}, None)):
    records.write_learned(file, [TRAJECTORY], batch.__class__(**(
        vars(batch) | {'old_logprobs': old})), values, np.array([True, False]))
    assert records.read_learned(file) == {(0, 1): {
        'group': 0, 'sample': 1, 'uid': 'q', 'old_logprobs': [-0.25],
        'advantages': seen}}
  records.write_learned(
      file, [TRAJECTORY], dataclasses.replace(batch, old_logprobs=old),
      np.float32([0, 0]), np.array([False, False]))
  assert records.read_learned(file)[0, 1] == {
      'group': 0, 'sample': 1, 'uid': 'q', 'old_logprobs': [],
      'advantages': [0]}


def test_records_are_written_as_json_and_not_into_files(tmp_path):
  record = np.arange(600, dtype=np.uint16).reshape(150, 4)
  trajectory = dataclasses.replace(
      TRAJECTORY, routing=(record, record[:3]))
  text = json.dumps(records.to_json(trajectory))
  again = records.from_json(json.loads(text))
  assert again == trajectory
  for found, expected in zip(again.routing, trajectory.routing, strict=True):
    np.testing.assert_array_equal(found, expected, strict=True)
  records.write(tmp_path / 'file', [trajectory])
  plain, = records.read(tmp_path / 'file')
  assert plain == trajectory and plain.routing == ()


def test_fields_that_an_older_record_lacks_have_their_defaults():
  record = records.to_json(TRAJECTORY)
  for turn in record['turns']:
    for name in ('observation_tokens', 'passages', 'lead_tokens', 'text'):
      del turn[name]
  for turn in records.from_json(record).turns:
    assert turn.observation_tokens == turn.passages == turn.lead_tokens == ()
