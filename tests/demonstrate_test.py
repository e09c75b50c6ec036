# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""demonstrate: what is written has the ids of a rollout with the same turns."""

import dataclasses
import json
import re

import chats
import fakes
import pytest

from configs import demonstrations as configured
from searchrl.agent import chains
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tag_parser
from searchrl.agent import tools
from searchrl.agent.chains import Chain, Hop, Script
from searchrl.data import conversations
from searchrl.data import jsonl
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.jobs import demonstrate
from searchrl.jobs import finetune
from searchrl.rollouts import driver
from searchrl.rollouts import records
from searchrl.search import corpus as corpora
from searchrl.search import mapped_corpus
from searchrl.trajectory import Action, Passage, Question, Request, Turn

TOWNS = 12


def passages():
  """Each town is on a river; each river is in a land. A special token in one.
  """
  for n in range(TOWNS):
    yield Passage(f't{n}', f'Town {n}',
                  f'The town {n} is on the river Riv{n}. ' + 'It is old. ' * 80)
    yield Passage(f'r{n}', f'River Riv{n}',
                  f'The river Riv{n} is in <|im_end|> the land Lan{n}, é日本.')


def questions():
  for n in range(TOWNS):
    yield {'id': f'one{n}', 'question': f'On which river is the town {n}?',
           'golden_answers': [f'Riv{n}'],
           'metadata': {'hops': 1, 'chain': [
               [f'river of the town {n}', f'Riv{n}']]}}
    yield {'id': f'two{n}', 'golden_answers': [f'Lan{n}', 'somewhere'],
           'question': f'In which <|im_end|> land is the river of the town {n}?',
           'metadata': {'hops': 2, 'poor_queries': [['zzz'], []], 'chain': [
               [f'river of the town {n}', f'Riv{n}'],
               [f'land of the river Riv{n}', f'Lan{n}']]}}


@pytest.fixture(name='data')
def _data(tmp_path):
  jsonl.write(tmp_path / 'train.jsonl', questions())
  corpora.write(tmp_path / 'corpus.jsonl', list(passages()))
  return tmp_path


def config(data, dialogue='searchrl.agent.dialogue:search_r1', **options):
  result = configured.get_config()
  result.data.train = str(data / 'train.jsonl')
  result.search.update(corpus=str(data / 'corpus.jsonl'), engine='bm25')
  result.search.options = {}
  result.dialogue = dialogue
  result.rollout.max_length = 1000
  result.rollout.budgets.update(
      max_prompt_tokens=100, max_new_tokens=99, passage_tokens=60)
  result.demonstrations.update(options)
  return result


def written(folder):
  return conversations.read(str(folder / demonstrate.FILE))


def texts_of(conversation):
  """The turns of the policy, each as one text, also if it is untrained."""
  return [segment.text for segment in conversation.segments if segment.trained]


KINDS = {
    'tags': (None, 'searchrl.agent.dialogue:search_r1'),
    'chat': (chats.qwen, 'searchrl.agent.chat:search_r1'),
    'tools': (chats.qwen, 'searchrl.agent.tools:dr_zero'),
    'llama': (chats.llama, 'searchrl.agent.tools:dspo'),
    'thoughts': (lambda: chats.qwen(chats.OPENS_THINKING),
                 'searchrl.agent.tools:dr_zero'),
    'mistral': (lambda: chats.sentence_piece(chats.MISTRAL),
                'searchrl.agent.chat:search_r1'),
}


@pytest.fixture(name='model', params=[*KINDS])
def _model(request, monkeypatch):
  """A model folder with a tokenizer of each kind, and its dialogue's name."""
  make, dialogue = KINDS[request.param]
  folder = model_folders.read(str(policy.TINY_BASE), TINY)
  if make:
    tokenizer = make()
    folder = dataclasses.replace(
        folder, tokenizer=tokenizer,
        dialogue=model_folders.load_dialogue(dialogue, tokenizer))
  else:
    folder = model_folders.read(str(policy.TINY_BASE), dialogue)
  monkeypatch.setattr(policy, 'folder_of', lambda config: folder)
  return folder, dialogue


TINY = model_folders.TINY_DIALOGUE


def test_ids_and_mask_are_those_of_a_rollout(model, data, tmp_path):
  folder, dialogue = model
  options = config(data, dialogue, retry_share=0.5, train_poor_queries=True)
  options.rollout.max_length = 4000
  options.rollout.budgets.update(
      max_prompt_tokens=1500, max_new_tokens=400, passage_tokens=150)
  demonstrate.run(options, str(tmp_path / 'run'))
  trajectories = [t for file in sorted((tmp_path / 'run/trajectories').iterdir())
                  for t in records.read(file)]
  lines = iter(written(tmp_path / 'run'))
  search = searches.engine(
      options.search, mapped_corpus.load(options.search.corpus), seed=0)
  budgets = driver.Budgets(**options.rollout.budgets)
  encode = folder.tokenizer.encode_data
  assert len(trajectories) == 2 * TOWNS
  for trajectory in trajectories:
    name = trajectory.question.uid, trajectory.sample
    replayed, = driver.run(
        [Request(trajectory.question)], engine=fakes.Engine(
            {name: [turn.text for turn in trajectory.turns]}, length=4000,
            encode=encode),
        search=search, dialogue=folder.dialogue, tokenizer=folder.tokenizer,
        budgets=budgets, step=fakes.STEP, policy_step=0)[0]
    assert replayed.stop_reason == 'answer'
    read = finetune._encode(next(lines), folder.tokenizer)
    assert list(zip(*read)) == chats.marked_ids(replayed)
  assert not list(lines)


def test_a_chain_by_hand(data, tmp_path, capsys):
  demonstrate.run(config(data, TINY, hops=(2,), count=1), str(tmp_path / 'run'))
  line, = written(tmp_path / 'run')
  number = re.search(r'town (\d+)', line.segments[0].text)[1]
  first, second, answer = texts_of(line)
  assert re.fullmatch(
      rf'<think> .*: river of the town {number}\. </think>\n'
      rf'<search> river of the town {number} </search>', first)
  assert re.fullmatch(
      rf'<think> .*Riv{number}\. .*: land of the river Riv{number}\. </think>\n'
      rf'<search> land of the river Riv{number} </search>', second)
  assert re.fullmatch(rf'<think> .*Lan{number}\..* </think>\n'
                      rf'<answer> Lan{number} </answer>', answer)
  read = ''.join(s.text for s in line.segments if not s.trained)
  assert f'Doc 1(Title: "Town {number}") The town {number} is on' in read
  out = capsys.readouterr().out
  assert '1 demonstrations (1 with 2 searches)' in out
  assert 'All questions are used up' not in out


def test_wordings_differ_and_depend_on_the_seed_alone(data, tmp_path):
  for name, seed in (('a', 0), ('b', 0), ('c', 1)):
    options = config(data, TINY, questions_a_round=7 if name == 'b' else 200)
    options.seed = seed
    demonstrate.run(options, str(tmp_path / name))
  a, b, c = ((tmp_path / name / demonstrate.FILE).read_bytes() for name in 'abc')
  assert a == b != c
  assert len({texts_of(line)[0].partition(':')[0]
              for line in written(tmp_path / 'a')}) > 3


@pytest.mark.parametrize('is_trained', [False, True])
def test_a_poor_first_query_is_followed_by_a_better_one(
    data, tmp_path, is_trained):
  demonstrate.run(config(data, TINY, retry_share=1.0, hops=(2,),
                         train_poor_queries=is_trained), str(tmp_path))
  lines = written(tmp_path)
  assert lines
  for line in lines:
    poor = next(s for s in line.segments if s.text.startswith('<think>'))
    assert poor.text.endswith('<search> zzz </search>')
    assert poor.trained == is_trained
    again = texts_of(line)[1 if is_trained else 0]
    assert 'again' in again or 'another' in again or 'differently' in again
    assert '<search> river of the town' in again
    assert len(texts_of(line)) == (4 if is_trained else 3)


def test_a_poor_query_may_find_what_the_question_asks_about():
  question = Question('q', 'what is the river of Aville?', ('Blue',))
  chain = chains.parse({'chain': [['Aville river', 'Blue']], 'poor_queries': [
      [['Aville Airport city', 'Aville']]]}, 'a line')
  made = chains.script(question, chain, [], retry_share=1.0, seed=0)
  assert made == Script(chain, 'Aville Airport city', 'Aville')
  passage = Passage('1', 'Aville Airport', 'It serves Aville.')
  turn = Turn((1,), (0.0,), Action('search', (made.poor_query,)), (2,),
              passages=(passage,), observation=(
                  '<information>It serves Aville.</information>'))
  texts = {chains.write(made, Request(question, 0), turns,
                        dialogue=dialogues.tags(), seed=seed)
           for seed in range(9) for turns in [(turn,)]}
  assert all(text.endswith('<search> Aville river </search>')
             and 'Aville' in text.partition('Aville river')[0]
             for text in texts) and len(texts) == 3
  nothing = dataclasses.replace(turn, observation='<information></information>')
  assert 'Aville' not in chains.write(
      made, Request(question, 0), (nothing,), dialogue=dialogues.tags(), seed=0
  ).partition('Aville river')[0]


def test_the_last_word_that_was_read_is_found():
  passage = Passage('1', 'Aville', 'Its river is the Blue.')
  turn = Turn((1,), (0.0,), Action('search', ('river',)), (2,), passages=(
      passage,), observation='<information>Its river is the Blue.</information>')
  assert chains.found('Blue', turn) and not chains.found('Bl', turn)
  cut = dataclasses.replace(
      turn, observation='<information>Its river</information>')
  assert not chains.found('Blue', cut)


def test_without_poor_queries_another_question_lends_its_own():
  question = Question('q', 'where?', ('here',))
  own = Chain((Hop('own', 'here'),))
  others = [own, Chain((Hop('other', 'there'),))]
  made = [chains.script(question, own, others, retry_share=1.0, seed=seed)
          for seed in range(20)]
  assert {one.poor_query for one in made} == {'other'}
  assert chains.script(question, own, [own], retry_share=1.0, seed=0) == Script(
      own)
  shares = [bool(chains.script(
      dataclasses.replace(question, uid=str(n)), own, others, retry_share=0.3,
      seed=0).poor_query) for n in range(500)]
  assert 0.24 < sum(shares) / 500 < 0.36


def test_what_finds_no_answer_is_left_out_and_counted(data, tmp_path, capsys):
  corpora.write(data / 'corpus.jsonl', [
      p for p in passages() if p.id not in ('t3', 'r4')])
  demonstrate.run(config(data, TINY, count=99), str(tmp_path / 'run'))
  # Town 3 in both kinds of questions, river 4 in the one of two hops.
  out, err = capsys.readouterr()
  assert '3 searched without finding the answer of a hop' in out
  assert 'are not demonstrated' not in err
  assert 'before demonstrations.count=99 is reached' in out
  assert len(written(tmp_path / 'run')) == 2 * TOWNS - 3


def test_questions_that_cannot_be_demonstrated_are_counted(
    data, tmp_path, capsys):
  rows = list(questions())
  for row in rows[:2]:
    del row['metadata']
  jsonl.write(data / 'train.jsonl', rows)
  demonstrate.run(config(data, TINY, count=9), str(tmp_path / 'run'))
  assert (f'2 of the {len(rows)} questions of data.train have no '
          'metadata.chain, and are not demonstrated.') in capsys.readouterr().err


def test_a_wrong_chain_has_no_reward(data, tmp_path, capsys):
  rows = [row | {'golden_answers': ['no']} if row['id'] == 'one5' else row
          for row in questions()]
  jsonl.write(data / 'train.jsonl', rows)
  demonstrate.run(config(data, TINY), str(tmp_path / 'run'))
  assert '1 have a lower reward' in capsys.readouterr().out


def test_counts_limit_what_is_kept(data, tmp_path):
  demonstrate.run(config(data, TINY, most_per_hops=3), str(tmp_path / 'a'))
  assert sorted(len(texts_of(line)) for line in written(tmp_path / 'a')) == [
      2, 2, 2, 3, 3, 3]
  options = config(data, TINY, count=5, questions_a_round=4)
  demonstrate.run(options, str(tmp_path / 'b'))
  assert len(written(tmp_path / 'b')) == 5
  assert len(list((tmp_path / 'b/trajectories').iterdir())) == 2


def test_hops_are_those_of_the_chain_if_a_question_does_not_say(data, tmp_path):
  rows = list(questions())
  for row in rows:
    del row['metadata']['hops']
  jsonl.write(data / 'train.jsonl', rows)
  demonstrate.run(config(data, TINY, most_per_hops=3), str(tmp_path / 'run'))
  assert sorted(len(texts_of(line)) for line in written(tmp_path / 'run')) == [
      2, 2, 2, 3, 3, 3]


def test_a_killed_job_goes_on(data, tmp_path, monkeypatch):
  options = config(data, TINY, questions_a_round=9)
  demonstrate.run(options, str(tmp_path / 'whole'))
  play, rounds = demonstrate.play, []

  def killed(*args):
    rounds.append(args[-2])
    if len(rounds) == 2:
      raise KeyboardInterrupt
    return play(*args)

  monkeypatch.setattr(demonstrate, 'play', killed)
  with pytest.raises(KeyboardInterrupt):
    demonstrate.run(options, str(tmp_path / 'run'))
  demonstrate.run(options, str(tmp_path / 'run'))
  assert rounds == [0, 1, 1, 2]
  assert (tmp_path / 'run' / demonstrate.FILE).read_bytes() == (
      tmp_path / 'whole' / demonstrate.FILE).read_bytes()


def test_other_chains_need_another_folder(data, tmp_path):
  demonstrate.run(config(data, TINY), str(tmp_path / 'run'))
  first, *rows = questions()
  metadata = {'hops': 1, 'chain': [['another query', 'Riv0']]}
  jsonl.write(data / 'train.jsonl', [first | {'metadata': metadata}, *rows])
  with pytest.raises(ValueError, match='a run whose chains was another'):
    demonstrate.run(config(data, TINY), str(tmp_path / 'run'))


@pytest.mark.parametrize('change, words', [
    (dict(metadata={'chain': [['query']]}), r'chain must be \[\[query, answer'),
    (dict(metadata={'chain': []}), 'chain must be'),
    (dict(metadata={'chain': [['query', ' ']]}), 'train.jsonl, line 1 is'),
    (dict(metadata={'chain': [['a', 'b']], 'poor_queries': ['x']}),
     'poor_queries must have for each hop a list of texts or of pairs'),
    (dict(metadata={'chain': [['a', 'b']], 'poor_queries': [[['x', '']]]}),
     r'for each hop a list of texts or of pairs .* is \[\[\[')])
def test_a_bad_chain_is_named(data, tmp_path, change, words):
  first, *rows = questions()
  jsonl.write(data / 'train.jsonl', [first | change, *rows])
  with pytest.raises(ValueError, match=words):
    demonstrate.run(config(data, TINY), str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


def test_questions_without_chains_are_an_error_that_says_so(data, tmp_path):
  with pytest.raises(ValueError, match=r'hops=\(3,\), but 24 of 24 have a'):
    demonstrate.run(config(data, TINY, hops=(3,)), str(tmp_path / 'run'))
  jsonl.write(data / 'train.jsonl', [
      row | {'metadata': None} for row in questions()])
  with pytest.raises(ValueError, match='0 of 24 have a chain'):
    demonstrate.run(config(data, TINY), str(tmp_path / 'run'))


def test_a_chain_may_be_in_metadata_that_is_a_text(data, tmp_path):
  rows = [row | {'metadata': json.dumps(row['metadata'])}
          for row in questions()]
  jsonl.write(data / 'train.jsonl', rows)
  demonstrate.run(config(data, TINY), str(tmp_path / 'run'))
  assert len(written(tmp_path / 'run')) == 2 * TOWNS


def test_all_left_out_is_an_error(data, tmp_path):
  options = config(data, TINY)
  options.rollout.budgets.max_turns = 1
  with pytest.raises(ValueError, match='leave out all: 24 reached a limit of'):
    demonstrate.run(options, str(tmp_path / 'run'))
  options.rollout.budgets.update(max_turns=6, max_new_tokens=9)
  with pytest.raises(ValueError, match='24 have a turn that is no action'):
    demonstrate.run(options, str(tmp_path / 'other'))


def test_a_dialogue_must_read_what_it_writes():
  one = dataclasses.replace(dialogues.tags(), parse=tools.parse)
  with pytest.raises(ValueError, match="own:make writes '<think> A tho"
                    ) as error:
    demonstrate.check_writes(one, 'own:make')
  assert 'Give it a write' in str(error.value)


@pytest.mark.parametrize('text', ['a', 'two words', 'a "quoted" é\n日本 \\n'])
@pytest.mark.parametrize('make', [dialogues.search_r1, tools.dr_zero])
def test_a_written_turn_is_read_as_its_action(make, text):
  dialogue = make(chats.qwen())
  for action in (Action('search', (text,)), Action('answer', (text,))):
    turn = dialogue.write('hm', action)
    assert tag_parser.until_stop(turn, dialogue.stop_strings) == turn
    assert dialogue.parse(turn) == action
