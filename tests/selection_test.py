# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""selection: which proposals become questions, and where they come from."""

import json

import pytest

from searchrl.agent import rewards
from searchrl.data import questions as questions_lib
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import selection
from searchrl.trajectory import Question, Trajectory
import proposals_test


def proposal(answer='Jeanne Roux-Martin', question='Who is the mayor of Albi?',
             uid='q', sample=0, hops=2, turns=None):
  asked = Question(uid, proposals.ask(proposals_test.DOCUMENT, hops), (), hops)
  return Trajectory(asked, sample, 0, (1,), turns if turns is not None else (
      proposals_test.search(), proposals_test.end(answer, question)))


def test_the_best_sample_is_that_of_the_best_form_and_the_first_of_equals():
  without_thought = proposal(sample=0, turns=(
      proposals_test.search(),
      proposals_test.end('Jeanne Roux-Martin', think='')))
  whole = [proposal(sample=n) for n in (1, 2)]
  assert selection.best([without_thought, *whole]) == whole[0]
  assert selection.best(whole[::-1]) == whole[1]


@pytest.mark.parametrize('bad, reason', [
    (dict(turns=()), 'ill_formed'), (dict(answer=''), 'ill_formed'),
    (dict(question=' '), 'ill_formed'),
    (dict(question='Is Jeanne Roux-Martin mayor?'), 'leaking'),
    (dict(question='Is Jeanne Roux Martin mayor?'), 'leaking'),
    (dict(answer='Toulouse'), 'ungrounded'),
    (dict(answer='Tarn is a river. It flows past Albi, and rises on Mont '
          'Lozere. The mayor'), 'ungrounded'),
    (dict(question='who is the  mayor of ALBI'), 'duplicate')])
def test_what_is_no_good_is_dropped_and_the_reason_kept(bad, reason):
  good, other = proposal(uid='a'), proposal(uid='b', **bad)
  found = selection.select([[good], [other]])
  assert found.kept == [good]
  assert found.dropped == [(other, reason)]
  assert reason in selection.REASONS


def test_a_seed_is_kept_for_any_good_sample():
  bad = proposal(answer='Toulouse', turns=(proposals_test.end('Toulouse'),))
  good = proposal(sample=1)
  assert selection.select([[bad, good]]).kept == [good]


def test_a_line_is_a_question_of_any_training_file_with_its_provenance(tmp_path):
  file = tmp_path / 'questions.jsonl'
  lines = [selection.record(proposal(uid='a')),
           selection.record(proposal(uid='b'), answer='Albi')]
  file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  first, second = questions_lib.read(file)
  assert first == proposals.question(proposal(uid='a'))
  assert second.answers == ('Albi',)
  assert second.hops == 2 and second.data_source == 'proposals'
  metadata = lines[1]['metadata']
  assert metadata['document'] == proposals_test.DOCUMENT
  assert metadata['searches'] == ['mayor of Albi']
  assert metadata['proposed_answer'] == 'Jeanne Roux-Martin'
  assert metadata['form'] == dict(
      gate=1.0, think=1.0, tool=1.0, grounding=1.0, score=1.0)


def test_diversity_by_hand():
  found = [proposal(question=text, answer=answer) for text, answer in (
      ('Who is mayor of Albi?', 'A'), ('who is mayor of Albi', 'B'),
      ('Who is king?', 'b'))] + [proposal(question='')]
  assert selection.diversity(found) == {
      'unique_questions': pytest.approx(2 / 3),
      'unique_answers': pytest.approx(2 / 3),
      'distinct_bigrams': 5 / 10}  # 4 + 4 + 2 pairs, who-is in all
  assert set(selection.diversity([]).values()) == {0.0}


def test_the_check_keeps_what_is_right_with_evidence_and_never_without():
  found = selection.select([[proposal(uid=u, question=f'{u}?')] for u in 'abcd'])
  checked = selection.checked(found, [(1, 0), (3, 1), (0, 0), (0, 2)])
  assert [one.question.uid for one in checked.kept] == ['a']
  assert [(one.question.uid, why) for one, why in checked.dropped] == [
      ('b', 'known'), ('c', 'unanswerable'), ('d', 'known')]
  with pytest.raises(ValueError):
    selection.checked(found, [(1, 0)])


def test_evidence_is_the_document_and_what_was_found_once():
  one = proposal(turns=(*[proposals_test.search()] * 2,
                        proposals_test.end('Jeanne Roux-Martin')))
  assert selection.evidence(one, lambda n, p: f'{n} {p.title}') == (
      f'{proposals_test.DOCUMENT}\n1 Albi')


@pytest.mark.parametrize('answers', [
    ['a', 'b'], [*'aabbcc'], ['The Elba', 'elba', 'Oder', 'x'],
    [str(n % 40) for n in range(200)], [*'aaaabbcd']])
def test_no_question_keeps_its_answer_when_answers_are_shuffled(answers):
  for seed in range(50):
    found = selection.others(answers, seed)
    assert sorted(found) == sorted(answers)
    assert not any(rewards.normalise(a) == rewards.normalise(b)
                   for a, b in zip(found, answers))
  assert len({tuple(selection.others(answers, seed)) for seed in range(50)}) > 1 or (
      len(answers) == 2)


def test_where_most_answers_are_one_some_must_stay():
  assert sorted(selection.others([*'aaab'], 0)) == [*'aaab']
  assert selection.others(['a'], 0) == ['a'] and selection.others([], 0) == []
