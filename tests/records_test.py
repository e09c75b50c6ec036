# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""records: trajectories come back from a file as they went there."""

from searchrl.rollouts import records
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
