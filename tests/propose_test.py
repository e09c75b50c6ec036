# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""propose: seeds in, a file of questions out, by a scripted proposer."""

import dataclasses
import json

import fakes
import pytest
import sampler_test
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.data import questions as questions_lib
from searchrl.experiment import solver
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import propose
from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.trajectory import Action, Trajectory, Turn

SEEDS = [tiny.question(f's{n}', proposals.ask(f'(Title: "t{n}") is in d{n}', 1),
                       answers=()) for n in range(6)]


class Options(dict):
  """Options that can be read as attributes, like config.proposing."""

  __getattr__ = dict.__getitem__


def options(**changes):
  return Options(dict(samples=2, seeds_a_round=4, shuffle_answers=False,
                      check=Options(attempts=0),
                      majority=Options(attempts=0)) | changes)


def written(question, answer):
  return (f'<think> so </think> <question> {question} </question> '
          f'<answer> {answer} </answer>')


def script():
  """Returns a bad and then a good sample of each seed; the last has none."""
  texts = {(f's{n}', 0): ['<answer> no question </answer>'] for n in range(6)}
  texts |= {(f's{n}', 1): [written(f'where is t{n}', f'd{n}')]
            for n in range(6)}
  texts['s5', 1] = [written('where is d5', 'd5')]
  return texts


def proposer(texts, play=None):
  engine = fakes.Engine(texts, steps=(1,))
  sampler = samplers.Sampler(
      tiny.CONFIG, fakes.TOKENIZER, dialogues.tags('q: {question}\n'),
      driver.Budgets(max_turns=1, max_new_tokens=250, max_prompt_tokens=90),
      engine, sampler_test.weight_sync.Synced)
  return propose.Proposer(
      sampler, None, None, play or solver.Solver(sampler, None, None, 1.0), 2, 0)


def run(folder, maker=None, **changes):
  propose.questions(maker or proposer(script()), SEEDS, folder,
                    options=options(**changes), world=None)
  return questions_lib.read(folder / propose.QUESTIONS), json.loads(
      (folder / propose.REPORT).read_text())


def test_the_best_sample_of_each_seed_becomes_a_question(tmp_path):
  found, report = run(tmp_path)
  assert [(q.text, q.answers) for q in found] == [
      (f'where is t{n}', (f'd{n}',)) for n in range(5)]
  assert report['seeds'] == 6 and report['kept'] == 5
  # Of two samples that fail, the first is the seed's.
  assert report['dropped'] == dict(
      ill_formed=1, leaking=0, ungrounded=0, too_long=0, duplicate=0,
      unanswerable=0, known=0, sure_or_unsure=0)


def test_a_question_without_room_in_the_solvers_prompt_is_dropped(tmp_path):
  texts = script()
  texts['s2', 1] = [written('where is' + ' the' * 100 + ' t2', 'd2')]
  maker = proposer(texts)
  found, report = run(tmp_path, maker)
  assert [q.answers for q in found] == [('d0',), ('d1',), ('d3',), ('d4',)]
  assert report['dropped']['too_long'] == 1
  long = tiny.question('long', 'where is' + ' the' * 100)
  tried, = maker.play([long], 3)
  assert [(t.sample, t.stop_reason, t.answer) for t in tried] == [
      (n, 'length_limit', None) for n in range(3)]


def test_rounds_that_are_there_are_not_sampled_again(tmp_path):
  whole = run(tmp_path / 'whole')
  maker = proposer(script())
  broken = tmp_path / 'broken'
  first = 'trajectories/round_000000.jsonl.gz'
  (broken / 'trajectories').mkdir(parents=True)
  (broken / first).write_bytes((tmp_path / 'whole' / first).read_bytes())
  assert run(broken, maker) == whole
  assert {maker.sampler.engine.name(feed)[0]
          for feed in maker.sampler.engine.feeds} == {'s4', 's5'}
  maker.sampler.engine.feeds.clear()
  (broken / propose.REPORT).unlink()
  assert run(broken, maker) == whole and not maker.sampler.engine.feeds


def test_shuffled_answers_are_those_of_others(tmp_path):
  plain, _ = run(tmp_path / 'plain')
  found, _ = run(tmp_path / 'shuffled', shuffle_answers=True)
  assert [q.text for q in found] == [q.text for q in plain]
  assert sorted(q.answers for q in found) == sorted(q.answers for q in plain)
  assert all(a.answers != b.answers for a, b in zip(found, plain))


def test_no_good_proposal_is_an_error_that_counts_the_reasons(tmp_path):
  bad = {key: ['<answer> none </answer>'] for key in script()}
  with pytest.raises(ValueError, match="must write questions, but of 6 seeds "
                     "none has a usable proposal: {'ill_formed': 6"):
    run(tmp_path, proposer(bad))
  assert not (tmp_path / propose.QUESTIONS).exists()


def test_the_check_asks_with_the_evidence_and_without(tmp_path):
  texts = script()
  for n in range(5):
    uid = f'proposal:s{n}:1'
    for k in (0, 1):
      right = f'<answer> d{n} </answer>'
      texts[f'from_documents:{uid}', k] = [
          right if n != 3 and k else '<answer> x </answer>']
      texts[f'from_memory:{uid}', k] = [
          right if n == 2 and k else '<answer> x </answer>']
  maker = proposer(texts)
  engine = maker.sampler.engine
  engine._names |= {fakes.engines.row_ids(0, uid, k, 0): (uid, k, 0)
                    for uid, k in texts}
  engine.placed = lambda table: table
  maker = dataclasses.replace(
      maker, play=solver.Solver(maker.sampler, None, None, 1.0))
  found, report = run(tmp_path, maker, check=Options(
      attempts=2, max_prompt_tokens=80,
      from_documents='searchrl.agent.dialogue:laptop_read',
      from_memory='searchrl.agent.dialogue:laptop_answer'))
  assert [q.answers for q in found] == [('d0',), ('d1',), ('d4',)]
  assert report['dropped']['known'] == report['dropped']['unanswerable'] == 1
  prompts = {engine.name(feed)[0]: fakes.TOKENIZER.decode(feed.tokens)
             for feed in engine.feeds if engine.name(feed)[0].startswith('from')}
  assert 'is in d0' in prompts['from_documents:proposal:s0:1']
  assert 'is in d0' not in prompts['from_memory:proposal:s0:1']
  assert all('where is t0' in prompts[f'from_{kind}:proposal:s0:1']
             for kind in ('documents', 'memory'))


def test_the_majority_of_the_attempts_may_be_the_answer(tmp_path):
  """Kept where half to three quarters of the attempts agree."""
  said = {'where is t0': ['x', 'X', 'd0', 'y'], 'where is t1': ['c'] * 4,
          'where is t2': ['d2', 'd2', 'd2', 'e'], 'where is t3': list('wxyz'),
          'where is t4': [''] * 4}

  class Play:
    fits = staticmethod(lambda question: True)

    def __call__(self, questions, attempts):
      assert attempts == 4
      return [[Trajectory(q, n, 0, (1,), (Turn((), (), Action(
          'answer', (answer,)) if answer else Action('invalid')),))
               for n, answer in enumerate(said[q.text])] for q in questions]

  found, report = run(tmp_path, proposer(script(), play=Play()),
                      majority=Options(attempts=4, least=0.5, most=0.75))
  assert [(q.text, q.answers) for q in found] == [
      ('where is t0', ('x',)), ('where is t2', ('d2',))]
  assert report['dropped']['sure_or_unsure'] == 3
  _, plain = run(tmp_path / 'plain')
  assert plain['dropped']['sure_or_unsure'] == 0
