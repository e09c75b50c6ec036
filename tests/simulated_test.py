# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""simulated: each query its own documents, whatever is asked beside it."""

import math
import random

import pytest
import tiny

from searchrl.papers.zerosearch import simulated
from searchrl.papers.zerosearch import simulator_prompts
from searchrl.papers.zerosearch.simulated import Curriculum
from searchrl.search import engine_wrappers
from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage, Query, SearchError

SIMULATED = 'searchrl.papers.zerosearch.simulated:make'
CORPUS = Corpus(tuple(
    Passage(str(i), f'Name {i}', f'Name {i} lives\nin town {i}.')
    for i in range(30)))


def query(text='Name 3 town', uid='q', top_k=2, **fields):
  return Query(text, top_k, tiny.question(uid, f'{uid}?', answers=(f'{uid}!',)),
               **fields)


def echo(tasks):
  """Writes what it was asked, and for whom."""
  return [f'Doc 1: {t.query.text} {t.query.question.text} {t.seed}\n'
          f'Doc 2: {t.query.question.answers[0]}' for t in tasks]


def engine(writer=echo, noise=0.5, **options):
  return simulated.Simulated(
      writer, Curriculum(noise, noise), **dict(seed=0) | options)


def oracle(noise, **options):
  return engines.make(
      SIMULATED, CORPUS, writer='oracle',
      curriculum=dict(start=noise, end=noise), **dict(seed=0) | options)


def texts(passages):
  return [p.text for p in passages]


def test_no_query_meets_another_rows_question():
  queries = [query(f'text {i}', f'q{i}', sample=i % 5, turn=i % 3)
             for i in range(10_000)]
  expected = dict(zip([q.text for q in queries], engine()(queries)))
  rng = random.Random(0)
  rng.shuffle(queries)
  left = queries
  while left:  # rows stop to search, and the others move together
    asked = left[:rng.randint(1, 700)]
    for one, found in zip(asked, engine()(asked)):
      assert found == expected[one.text]
      uid = one.question.uid
      assert texts(found)[0].startswith(f'{one.text} {uid}? ')
      assert texts(found)[1] == f'{uid}!'
    left = left[len(asked):]


def test_blank_queries_find_nothing_and_are_not_written():
  asked = []
  search = engine(lambda tasks: asked.extend(tasks) or echo(tasks))
  found = search([query(' \n'), query('a'), query('b', top_k=0)])
  assert found[0] == found[2] == () and len(found[1]) == 2
  assert [task.query.text for task in asked] == ['a']
  assert search([]) == []


def test_passages_say_what_was_asked_for():
  found = engine(noise=0.5)([query(uid=str(i)) for i in range(100)])
  kinds = {p.id.partition('-')[0] for passages in found for p in passages}
  assert kinds == {'useful', 'noisy'}
  assert len({p.id for passages in found for p in passages}) == 200


def test_the_curriculum_goes_by_the_step_of_the_query():
  search = simulated.Simulated(echo, Curriculum(0, 1, 1.0, 10), seed=0)
  shares = []
  for step in (0, 5, 10):
    search([query(uid=str(i), step=step) for i in range(2000)])
    metrics = search.pop()
    assert metrics['simulated/noise'] == step / 10
    shares.append(metrics['simulated/noisy_rate'])
  assert shares == pytest.approx([0, 0.5, 1], abs=0.04)


def test_metrics_are_of_the_time_since_the_last():
  search = engine(lambda tasks: ['Doc 1: a', 'nothing', 'Doc 7: b'])
  assert [len(found) for found in search([query()] * 3)] == [1, 0, 0]
  metrics = search.pop()
  assert metrics['simulated/malformed_rate'] == pytest.approx(2 / 3)
  assert metrics['simulated/secs'] > 0
  assert search.pop()['simulated/malformed_rate'] == 0


def test_malformed_texts_are_nothing_or_errors():
  writer = lambda tasks: ['no documents', SearchError('timeout'), 'Doc 1: a']
  for malformed, kind in (('nothing', None), ('error', 'malformed')):
    bad, late, good = engine(writer, malformed=malformed)([query()] * 3)
    assert bad == () if kind is None else bad.kind == kind
    assert late == SearchError('timeout') and texts(good) == ['a']
  with pytest.raises(ValueError, match="malformed must be one of.*'raise'"):
    engine(malformed='raise')


def test_a_writer_that_answers_too_little_fails_whole():
  search = engine_wrappers.with_typed_errors(engine(lambda tasks: echo(tasks)[1:]))
  found = search([query(), query()])
  assert [error.kind for error in found] == ['unavailable'] * 2
  assert '1 texts for 2 queries' in found[0].detail


# The oracle -------------------------------------------------------------------

def test_an_oracle_shows_the_true_passage_or_only_others():
  queries = [query(f'Name {i} town', top_k=3, step=s)
             for i in range(30) for s in range(5)]
  for noise, expected in ((0.0, 1), (1.0, 0)):
    places = set()
    for one, found in zip(queries, oracle(noise)(queries)):
      true = f'{" ".join(one.text.split()[:2])} lives in town'
      hits = [i for i, text in enumerate(texts(found)) if text.startswith(
          f'{true} ')]
      assert len(hits) == expected and len({*texts(found)}) == 3
      places.update(hits)
    assert places == ({0} if expected else set())  # the best stands first


def test_an_oracle_takes_the_longest_name_in_the_query_and_whole_words():
  search = oracle(0.0)
  for text, first in (('Name 29', 'Name 29 '), ('where is Name 2 ?', 'Name 2 ')):
    found, = search([query(text, top_k=1)])
    assert texts(found)[0].startswith(first)
  unknown, = search([query('nobody', top_k=2)])
  assert len(unknown) == 2  # others, as an engine would


def test_an_oracle_needs_titles_and_never_more_than_the_corpus():
  with pytest.raises(ValueError, match="passages .* but passage 'x' has none"):
    engines.make(SIMULATED, Corpus((Passage('x', '', 'text'),)),
                 writer='oracle')
  found, = oracle(0.0)([query(top_k=100)])
  assert len(found) == len(CORPUS)


def test_what_is_built_depends_on_the_seed_alone():
  queries = [query(f'Name {i}', uid=str(i)) for i in range(30)]
  assert oracle(0.5)(queries) == oracle(0.5)(queries)
  assert oracle(0.5)(queries) != oracle(0.5, seed=1)(queries)


def test_titles_come_and_go_by_the_option():
  plain, = oracle(0.0)([query(top_k=1)])
  found, = oracle(0.0, titled=True)([query(top_k=1)])
  assert (plain[0].title, found[0].title) == ('', 'Name 3')
  assert plain[0].text == found[0].text == 'Name 3 lives in town 3.'


# Names ------------------------------------------------------------------------

def test_the_steps_of_the_run_are_those_of_the_curriculum():
  noises = []
  for steps, own in ((10, 0), (10, 5), (0, 5)):
    search = engines.make(
        SIMULATED, CORPUS, steps=steps, writer='oracle',
        curriculum=dict(start=0.0, end=1.0, base=1.0, steps=own))
    search([query(step=5)])
    noises.append(search.pop()['simulated/noise'])
  assert noises == [0.5, 1.0, 1.0]


@pytest.mark.parametrize('options, message', [
    (dict(writer='gpt'), "writer must be one of .*'gpt'"),
    (dict(writer='oracle', curriculum=dict(end=3)), 'curriculum.end must be'),
    (dict(writer='served', urls=('http://a',), prompts='google'),
     "prompts must be one of .*'google'"),
    (dict(writer='served', urls=()), 'urls must be'),
    (dict(writer='served', urls=('http://a',), max_tokens=0),
     'max_tokens must be at least 1')])
def test_bad_options_are_refused_by_name(options, message):
  with pytest.raises(ValueError, match=message):
    engines.make(SIMULATED, CORPUS, **options)


def test_what_is_known_of_it_by_its_options():
  simulated_by = lambda writer: (SIMULATED, dict(writer=writer))
  assert engines.parse(*simulated_by('oracle')).needs_corpus
  assert not engines.parse(*simulated_by('served')).needs_corpus
  assert engines.parse(*simulated_by('served')).is_remote
  assert not engines.parse(*simulated_by('oracle')).is_remote
  for writer in ('oracle', 'served'):
    assert not engines.parse(*simulated_by(writer)).reads_text_alone
    with pytest.raises(ValueError, match='cache.*may also use'):
      engines.make('cache', CORPUS, engine=dict(
          name=SIMULATED, writer=writer))


def test_the_published_simulators_have_names():
  assert sorted(simulator_prompts.PUBLISHED) == [
      'google_14b', 'google_3b', 'google_7b', 'wiki_14b', 'wiki_3b', 'wiki_7b']
  loaded = []

  def load(path, *, slots, **options):
    loaded.append((path, slots))
    raise LookupError

  with pytest.raises(LookupError):
    engines.make(SIMULATED, None, writer='model', simulator='wiki_14b',
                 load_model=load, slots=3)
  assert loaded == [('sunhaonlp/Simulation_LLM_wiki_14B_V2', 3)]
  options_of = simulator_prompts.of_simulator
  assert options_of('google_3b', 'served') == dict(
      model='sunhaonlp/Simulation_LLM_google_3B_V2', prompts='zerosearch')
  assert options_of('qwen2.5-14b-instruct', 'served') == dict(
      model='Qwen/Qwen2.5-14B-Instruct', prompts='demonstrated')
  assert options_of('', 'served') == {}
  assert {*simulator_prompts.SHAPES} == {*simulator_prompts.PUBLISHED.values()}
  assert {*simulator_prompts.SHAPES.values()} == {
      'Qwen/Qwen2.5-3B', 'Qwen/Qwen2.5-7B', 'Qwen/Qwen2.5-14B'}
  with pytest.raises(ValueError, match="simulator must be one of .*'bing_3b'"):
    engines.make(SIMULATED, None, writer='served', simulator='bing_3b')


def test_what_a_model_in_the_process_is_told():
  options = dict(writer='model', simulator='google_7b', curriculum=dict(end=1),
                 slots=9, titled=True, malformed='error')
  model = engines.LocalModel(
      'sunhaonlp/Simulation_LLM_google_7B_V2', field='search.options.path',
      slots=9, length=512 + 600, dtype='float32', shape='Qwen/Qwen2.5-7B')
  assert engines.parse(SIMULATED, options).local_model == model
  fused = engines.parse('fusion', dict(engines=(
      dict(name='bm25'), dict(name=SIMULATED, **options))))
  assert fused.local_model == model
  for name, options in (('bm25', {}), (SIMULATED, dict(writer='oracle'))):
    assert engines.parse(name, options).local_model is None


def test_which_curricula_last_as_long_as_the_run():
  for options, lasts in ((dict(), True), (dict(curriculum=None), True),
                         (dict(curriculum=dict(end=0.5)), True),
                         (dict(curriculum=dict(steps=0)), True),
                         (dict(curriculum=dict(steps=24)), False)):
    options['writer'] = 'oracle'
    assert engines.parse(SIMULATED, options).depends_on_num_steps == lasts
    fused = engines.parse('fusion', dict(engines=(
        dict(name='bm25'), dict(name=SIMULATED, **options))))
    assert fused.depends_on_num_steps == lasts
  assert not engines.parse('bm25', {}).depends_on_num_steps


# The curriculum ---------------------------------------------------------------

def test_values_of_the_readme_of_zerosearch():
  course = Curriculum(0.0, 0.5, 4.0, 200)
  found = [course.noise(i) for i in (0, 50, 100, 150, 200)]
  assert found == pytest.approx([0, 0.0690, 0.1667, 0.3047, 0.5], abs=5e-5)


@pytest.mark.parametrize('start, end, base', [
    (0.1, 0.9, 4.0), (0.9, 0.1, 4.0), (0.2, 0.7, 0.25), (0.0, 1.0, 1.0),
    (0.25, 0.25, 4.0), (0.0, 0.0, 4.0)])
def test_it_runs_from_start_to_end_and_stays(start, end, base):
  course = Curriculum(start, end, base, 24)
  found = [course.noise(i) for i in range(30)]
  assert found[0] == start and found[24:] == pytest.approx([end] * 6)
  steps = [b - a for a, b in zip(found, found[1:25])]
  assert all(s * (end - start) >= 0 for s in steps)
  for i in range(25):
    part = i / 24 if base == 1 else (
        math.exp(math.log(base) * i / 24) - 1) / (base - 1)
    assert found[i] == pytest.approx(start + part * (end - start))


def test_above_a_base_of_one_most_noise_comes_late():
  middle = [Curriculum(0, 1, base, 2).noise(1) for base in (0.25, 1.0, 4.0)]
  assert middle == pytest.approx([2 / 3, 1 / 2, 1 / 3])


@pytest.mark.parametrize('field, value', [
    ('start', -0.1), ('start', 1.1), ('end', 2), ('end', float('nan')),
    ('base', 0), ('base', -4), ('base', float('inf')), ('steps', 0)])
def test_what_is_out_of_range_is_refused_by_name(field, value):
  with pytest.raises(ValueError, match=f'curriculum.{field} must be'):
    Curriculum(**{field: value})
