# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""datasets: only an engine with a corpus of its own needs none here."""

from concurrent import futures
import json
import threading

import fakes
import pytest

from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.search import corpus as corpora
from searchrl.world import facts
from searchrl.world import text


@pytest.fixture
def questions(tmp_path):
  path = tmp_path / 'q.jsonl'
  path.write_text(json.dumps({'id': 'q', 'question': 'Where?',
                              'golden_answers': ['here']}) + '\n')
  return str(path)


def train_set(tmp_path, questions, **options):
  return datasets.train_set(tmp_path / 'data', train=questions, corpus='',
                            world_seed=1, per_hop=(1,), **options)


def evaluation_sets(tmp_path, **options):
  return datasets.evaluation_sets(
      tmp_path / 'data', corpus='', own_train=False, world_seed=1,
      kinds=('known',), questions_per_hop=1, max_hops=1, **options)


def test_a_remote_corpus_need_not_be_here(tmp_path, questions):
  data = train_set(tmp_path, questions, needs_corpus=False)
  assert data.corpus is None and len(data.questions) == 1
  held, = evaluation_sets(tmp_path, evaluate=questions, needs_corpus=False)
  assert held.corpus is None
  # A server has no world that is generated for evaluation.
  assert evaluation_sets(tmp_path, evaluate='', needs_corpus=False) == []


def test_else_it_is_missed(tmp_path, questions):
  with pytest.raises(ValueError, match='needs both data.train and search.corp'):
    train_set(tmp_path, questions)
  with pytest.raises(ValueError, match='needs search.corpus, but that'):
    evaluation_sets(tmp_path, evaluate=questions)


def test_generated_data_is_written_once_and_read_back(tmp_path):
  first = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=3, per_hop=(2, 1))
  stamp = (tmp_path / 'questions.jsonl').stat().st_mtime_ns
  again = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=3, per_hop=(2, 1))
  assert (tmp_path / 'questions.jsonl').stat().st_mtime_ns == stamp
  assert list(first.questions) == list(again.questions)
  assert first.corpus.digest == again.corpus.digest
  assert [q.hops for q in first.questions] == [1, 1, 2]
  other = datasets.generated(tmp_path, name='known', source='known',
                             world_seed=4, per_hop=(3,))
  assert [q.hops for q in other.questions] == [1, 1, 1]
  assert other.corpus.digest != first.corpus.digest


def own(folder, *names, count=2, **fields):
  """Files whose ids are 0, 1, ... in each, as a config names them."""
  folder.mkdir(exist_ok=True)
  for name in names:
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(
        {'id': n, 'question': f'{name} {n}', 'golden_answers': ['x'], **fields})
                                             + '\n' for n in range(count)))
  return ','.join(f'{name}={folder}/{name}.jsonl' for name in names)


def test_equal_ids_of_several_files_are_told_apart(tmp_path):
  data = train_set(tmp_path, own(tmp_path, 'nq', 'hotpotqa'), needs_corpus=False)
  assert [q.uid for q in data.questions] == [
      'nq/0', 'nq/1', 'hotpotqa/0', 'hotpotqa/1']
  assert [[q.data_source for q in file] for file in data.files] == [
      ['nq', 'nq'], ['hotpotqa', 'hotpotqa']]


def test_a_limit_is_a_seeded_choice_over_all_files(tmp_path):
  text = own(tmp_path, 'a', 'b', count=20)
  def uids(files, **options):
    return {q.uid for q in train_set(
        tmp_path, files, needs_corpus=False, **options).questions}
  few = uids(text, limit=10, seed=1)
  assert len(few) == 10
  assert uids(','.join(reversed(text.split(','))), limit=10, seed=1) == few
  assert uids(text, limit=10, seed=2) != few
  data = train_set(tmp_path, text, needs_corpus=False, limit=10, seed=1)
  assert {q.uid for file in data.files for q in file} == few
  with pytest.raises(ValueError, match='data.limit must be at most the 40 '):
    uids(text, limit=41)
  world = datasets.train_set(tmp_path / 'world', train='', corpus='',
                             world_seed=1, per_hop=(4,), limit=3)
  assert len(world.questions) == 3


def sets(tmp_path, text, **options):
  return {data.name: [q.text for q in data.questions] for data in
          evaluation_sets(tmp_path, evaluate=str(text), needs_corpus=False,
                          **options)}


def test_evaluation_sets_keep_their_names(tmp_path):
  text = own(tmp_path, 'nq', 'hotpotqa', count=1)
  assert sets(tmp_path, text) == {'nq': ['nq 0'], 'hotpotqa': ['hotpotqa 0']}
  assert sets(tmp_path, tmp_path / 'nq.jsonl') == {'nq': ['nq 0']}
  assert sets(tmp_path, tmp_path, question_mark=True) == {
      'hotpotqa': ['hotpotqa 0?'], 'nq': ['nq 0?']}


def test_a_file_of_several_sources_is_a_set_a_source(tmp_path):
  file = tmp_path / 'test.jsonl'
  file.write_text(''.join(json.dumps(
      {'id': '0', 'question': f'of {source}', 'golden_answers': ['x'],
       'data_source': source}) + '\n' for source in ('nq', 'musique')))
  assert sets(tmp_path, file) == {'nq': ['of nq'], 'musique': ['of musique']}
  assert sets(tmp_path, f'all={file}') == {'all': ['of nq', 'of musique']}
  with pytest.raises(ValueError, match="'nq' is the name of two"):
    sets(tmp_path, f'{file},{own(tmp_path, "nq")}')
  with pytest.raises(ValueError, match="must not call a set 'mean'"):
    sets(tmp_path, own(tmp_path, 'nq', 'mean'))


def test_a_worlds_file_is_one_set_whatever_its_hop_counts(tmp_path):
  datasets.generated(tmp_path, name='known', source='known', world_seed=3,
                     per_hop=(2, 1))
  found, = evaluation_sets(tmp_path, evaluate=f'{tmp_path}/questions.jsonl',
                           needs_corpus=False)
  assert found.name == 'questions' and len(found.questions) == 3


def test_sets_share_one_corpus(tmp_path):
  corpus = tmp_path / 'corpus' / 'c.jsonl'
  corpus.parent.mkdir()
  corpus.write_text('{"id": "0", "contents": "T\\ntext"}\n')
  one, two = datasets.evaluation_sets(
      tmp_path / 'data', evaluate=own(tmp_path, 'a', 'b'), corpus=str(corpus),
      own_train=True, world_seed=1, kinds=(), questions_per_hop=1, max_hops=1)
  assert one.corpus is two.corpus and len(one.corpus) == 1


COMMON = datasets.WorldOptions(common=True)


def worlds_sets(folder, **options):
  return datasets.evaluation_sets(folder, **{**dict(
      evaluate='', corpus='', own_train=False, world_seed=5, max_hops=2,
      kinds=('known', 'unseen', 'famous', 'outdated'), questions_per_hop=6,
      common_per_hop=4, sampled_per_hop=3, world=COMMON), **options})


def test_common_knowledge_is_asked_about_in_the_world_of_known_parts(tmp_path):
  known, unseen, famous, outdated = found = worlds_sets(tmp_path)
  assert [d.name for d in found] == ['known', 'unseen', 'famous', 'outdated']
  assert known.corpus is famous.corpus is outdated.corpus is not unseen.corpus
  assert [d.is_common for d in found] == [False, False, True, True]
  for data, count in zip(found, (6, 6, 4, 4)):
    assert [q.hops for q in data.questions] == [1] * count + [2] * count
    assert [q.data_source for q in data.questions] == [
        f'{data.name}_{q.hops}hop' for q in data.questions]
    assert [q.hops for q in data.few] == [1] * 3 + [2] * 3
    assert {*data.few} <= {*data.questions}
  # What a question is about: memory and the world, by hand from facts alone.
  world = facts.make(5, common=True)
  for data in (famous, outdated):
    for question in (q for q in data.questions if q.hops == 1):
      (subject, relation), = [
          fact for fact in world.memory if question.text.rstrip('.?').endswith(
              f' {fact[0]}') and world.facts[fact] == question.answers[0]
          and any(phrase in question.text
                  for phrase in text.PHRASES[fact[1]])]
      same = world.memory[subject, relation] == question.answers[0]
      assert same == (data is famous)
      assert data is outdated or (subject, relation) in facts.held_out()


def test_fresh_questions_are_those_of_the_world_without_common_knowledge(
    tmp_path):
  with_, without = (worlds_sets(tmp_path / name, kinds=('known',), world=world)[
      0] for name, world in (('a', COMMON), ('b', datasets.WorldOptions())))
  assert list(with_.questions) == list(without.questions)
  assert len(with_.corpus) == len(without.corpus) + 114


def test_kinds_come_in_their_order_and_as_many_as_there_are(tmp_path):
  outdated, known = worlds_sets(
      tmp_path, kinds=('outdated', 'known'), common_per_hop=0,
      sampled_per_hop=0)
  assert (outdated.name, known.name) == ('outdated', 'known')
  assert len(outdated.questions) == len(known.questions) == len(known.few) == 12
  assert not (tmp_path / 'eval_unseen').exists()
  many, = worlds_sets(tmp_path, kinds=('famous',), max_hops=1,
                      common_per_hop=100)
  assert 0 < len(many.questions) <= len(facts.held_out()) == 60


def test_training_asks_of_nothing_that_is_held_out(tmp_path):
  data = datasets.train_set(tmp_path, train='', corpus='', world_seed=1,
                            per_hop=(20, 10), common=0.35, world=COMMON)
  fresh, common = data.files
  assert [*fresh, *common] == list(data.questions)
  assert [q.hops for q in fresh] == [1] * 20 + [2] * 10
  assert [q.hops for q in common] == [1] * 7 + [2] * 4  # rounded up
  assert {q.data_source for q in common} == {
      'train_common_1hop', 'train_common_2hop'}
  for question in (q for q in common if q.hops == 1):
    about = {(s, r) for s, r in facts.common_knowledge().facts
             if question.text.rstrip('.?').endswith(f' {s}')
             and any(f' {p} ' in question.text for p in text.PHRASES[r])}
    assert about and not about & facts.held_out()


def test_a_recipe_names_all_that_files_are_made_of(tmp_path):
  """A plain world has the recipe that it had before there were hard ones."""
  def made(**options):
    datasets.generated(tmp_path, name='known', source='known', world_seed=3,
                       per_hop=(2, 1), **options)
    return (tmp_path / 'recipe.json').read_text()
  assert made() == ('{"name": "known", "source": "known", "world_seed": 3, '
                    '"per_hop": [2, 1]}')
  worlds = [datasets.WorldOptions(**options) for options in (
      {}, dict(common=True), dict(common=True, outdated=0.2), dict(hard=True),
      dict(scale=0.5))]
  assert len({made(world=world) for world in worlds}) == 5


def test_a_world_is_whole_though_two_generate_it(tmp_path, monkeypatch):
  """The second would write half a file between the first's write and read."""
  wrote, half, done = (threading.Event() for _ in range(3))
  write_corpus, write_questions = corpora.write, questions_lib.write

  def write_half(path, passages):
    if wrote.is_set():
      path.write_text('{"id": "half')
      half.set()
      done.wait(60)
    write_corpus(path, passages)

  def write_and_wait(path, questions):
    write_questions(path, questions)
    if not wrote.is_set():
      wrote.set()
      half.wait(1)  # in vain: the second waits until all is written

  def made(name):
    return datasets.generated(tmp_path / name, name='known', source='known',
                              world_seed=3, per_hop=(9,)).corpus.digest

  expected = made('alone')
  monkeypatch.setattr(corpora, 'write', write_half)
  monkeypatch.setattr(questions_lib, 'write', write_and_wait)
  with futures.ThreadPoolExecutor(2) as threads:
    first = threads.submit(made, 'world')
    first.add_done_callback(lambda _: done.set())
    wrote.wait(60)
    second = threads.submit(made, 'world')
    assert first.result() == second.result() == expected
  assert not half.is_set()


def test_a_world_that_another_command_replaces_is_not_mixed_with_its_own(
    tmp_path, monkeypatch):
  def made(seed):
    return datasets.generated(tmp_path / 'world', name='known', source='known',
                              world_seed=seed, per_hop=(2,))

  read = corpora.read
  monkeypatch.setattr(corpora, 'read', lambda path: (
      monkeypatch.undo(), made(4)) and read(path))
  with pytest.raises(ValueError, match='world must be written by one command'):
    made(3)


def test_a_killed_generation_leaves_the_world_before_it(tmp_path, monkeypatch):
  def made(seed):
    return datasets.generated(tmp_path / 'world', name='known', source='known',
                              world_seed=seed, per_hop=(2,)).corpus.digest

  before = made(3)

  def fails(path, questions):
    raise fakes.Killed

  with monkeypatch.context() as patch:
    patch.setattr(questions_lib, 'write', fails)
    with pytest.raises(fakes.Killed):
      made(4)
    assert made(3) == before  # nothing is written again
  assert made(4) != before


def test_data_are_read_once_by_a_process_alone():
  calls = []
  assert datasets.shared(lambda: calls.append('read') or 'data') == 'data'
  assert calls == ['read']


def test_worlds_can_be_hard_and_larger(tmp_path):
  def passages(name, **options):
    return len(datasets.generated(
        tmp_path / name, name='known', source='known', world_seed=3,
        per_hop=(1,), world=datasets.WorldOptions(**options)).corpus)
  entities = sum(facts.SIZES.values())
  assert passages('plain') == entities
  assert abs(passages('half', scale=0.5) - entities / 2) <= 4
  assert passages('hard', hard=True) > 1.5 * entities
