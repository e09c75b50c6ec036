# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""search: engines of a config, remote or not, and cases; in experiment/."""

import functools
import re

import faulty
import ml_collections
import pytest
import tiny

from configs import common
from searchrl.data import datasets
from searchrl.experiment import config_checks
from searchrl.experiment import search as searches
from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.search.index import bm25_files
from searchrl.trajectory import Passage, Query

CORPUS = Corpus((Passage('a', 'Tarn', 'A river.'), Passage('b', 'Lot', 'One.')))

SIMULATED = 'searchrl.papers.zerosearch.simulated:make'


def config(name, **options):
  return ml_collections.ConfigDict(dict(engine=name, options=options))


def query(text='Tarn'):
  return Query(text, 1, tiny.question())


@pytest.mark.parametrize('engine, options, is_remote, needs_corpus', [
    ('bm25', {}, False, True), ('noise', {}, False, True),
    ('remote', dict(urls=('http://127.0.0.1:1/retrieve',)), True, False),
    ('cache', dict(engine=dict(name='web')), True, False),
    ('fusion', dict(engines=(dict(name='web'), dict(name='bm25'))),
     True, True)])
def test_what_is_remote_may_need_a_corpus_too(
    engine, options, is_remote, needs_corpus):
  search = config(engine, **options)
  assert searches.spec(search).is_remote == is_remote
  assert searches.spec(search).needs_corpus == needs_corpus


def test_an_engine_finds_and_what_fails_in_it_is_typed():
  found, = searches.engine(config('bm25'), CORPUS, seed=0)([query()])
  assert [p.id for p in found] == ['a']
  down = config('remote', urls=(faulty.unused_url(),), tries=1, pause_secs=0)
  error, = searches.engine(down, None, seed=0)([query()])
  assert error.kind == 'unavailable' and error.detail


@pytest.mark.parametrize('engine, options', [
    ('bm25', dict(k1='high')),
    ('remote', dict(urls=('http://a',), try_seconds=1.0)),
    (SIMULATED, dict(writer='oracle', size=1))])
def test_an_unknown_option_is_named(engine, options):
  with pytest.raises(ValueError, match=(
      f"search.options must be those of '{engine}', .* are not: ")):
    searches.engine(config(engine, **options), CORPUS, seed=0)


def test_a_missing_option_is_named_before_anything_is_built():
  for engine, missing in ((SIMULATED, 'writer'), ('rerank', 'engine and mod'),
                          ('fusion', 'engines'), ('cache', 'engine')):
    with pytest.raises(ValueError, match=(
        f"evaluate.search.options of '{engine}' must have {missing}")):
      engines.check(searches.spec(config(engine), 'evaluate.search'))


def test_evaluation_may_have_an_engine_of_its_own():
  both = common.get_config()
  assert searches.of_evaluation(both) == {'bm25': both.search}
  both.search.corpus = 'corpus.jsonl'
  both.search.options = dict(k1=2.0)
  both.evaluate.search.update(engine='remote', options=dict(urls=('http://a',)))
  (name, found), = searches.of_evaluation(both.lock()).items()
  assert name == 'remote'
  assert found.to_dict() == dict(engine='remote', corpus='corpus.jsonl',
                                 options=dict(urls=('http://a',)))
  assert both.search.engine == 'bm25'
  assert common.as_evaluated(both.unlock()).search.to_dict() == found.to_dict()
  assert 'search' not in both.evaluate
  assert [*searches.of_evaluation(both).values()] == [both.search]


def test_evaluation_may_go_through_several_engines():
  several = common.get_config()
  several.evaluate.engines = dict(
      plain=dict(engine='bm25', options={}),
      steep=dict(engine='bm25', options=dict(k1=9.0)))
  through = searches.of_evaluation(several.lock())
  assert [*through] == ['plain', 'steep']
  assert through['steep'].options.k1 == 9.0
  sets = [datasets.Dataset('known', [tiny.question()], CORPUS)]
  cases = searches.cases(through, sets, options(noise=False), seed=0)
  assert [case.name for case in cases] == [
      f'known.{name}.{way}' for name in through
      for way in ('greedy', 'sampled')]
  assert cases[0].search is not cases[2].search


def test_an_engine_without_options_has_none():
  config = common.get_config()
  config.search.options = dict(k1=2.0)
  config.evaluate.engines = {'first': {'engine': 'bm25'}}
  config_checks.check(config)
  assert searches.of_evaluation(config)['first'].options.to_dict() == {}


@pytest.mark.parametrize('engine', [
    'bm25', {'options': {}}, {'engine': 1}, {'engine': 'bm25', 'option': {}},
    {'engine': 'bm25', 'options': 'k1'}, {'corpus': 'x', 'engine': 'bm25'}])
def test_what_is_no_engine_of_an_evaluation_is_named(engine):
  config = common.get_config()
  config.evaluate.engines = {'first': engine}
  for check in config_checks.check, searches.of_evaluation:
    with pytest.raises(ValueError, match=re.escape(
        "evaluate.engines.first must be a dict with an engine, and with "
        "options if it has any, such as {'engine': 'bm25', 'options': {}}, but "
        f'is {engine!r}.')):
      check(config)


def options(noise=True, decodings=('greedy', 'sampled'), score='em'):
  return ml_collections.ConfigDict(
      dict(noise=noise, decodings=decodings, score=score))


def test_cases_are_every_set_in_both_ways_and_noise_over_the_first():
  sets = [datasets.Dataset('known', [tiny.question()], CORPUS),
          datasets.Dataset('unseen', [tiny.question()], CORPUS)]
  cases = searches.cases(
      {'bm25': config('bm25')}, sets, options(score='f1'), seed=0)
  assert {case.score for case in cases} == {'f1'}
  assert [(c.dataset.name, c.engine, c.decoding) for c in cases] == [
      ('known', 'bm25', 'greedy'), ('known', 'bm25', 'sampled'),
      ('unseen', 'bm25', 'greedy'), ('unseen', 'bm25', 'sampled'),
      ('known', 'noise', 'greedy')]
  bm25 = {'bm25': config('bm25')}
  assert len(searches.cases(
      bm25, sets, options(noise=False), seed=0)) == 4
  assert [c.decoding for c in searches.cases(
      bm25, sets, options(decodings=('sampled',)), seed=0)] == [
          'sampled', 'sampled', 'greedy']
  greedy = [c.search for c in cases if c.decoding == 'greedy']
  assert greedy[0] is greedy[1] is not greedy[2]  # one corpus, one index
  remote = [datasets.Dataset('eval', [tiny.question()], None)]
  assert len(searches.cases(
      {'remote': config('remote', urls=('http://127.0.0.1:1/r',))},
      remote, options(), seed=0)) == 2


def test_famous_facts_are_asked_with_random_passages_too_and_share_the_engine():
  def set_of(name, corpus, **fields):
    questions = [tiny.question(f'{name}{n}') for n in range(3)]
    return datasets.Dataset(
        name, questions, corpus, few=questions[:2], **fields)
  other = Corpus(CORPUS.passages[:1])
  cases = searches.cases({'bm25': config('bm25')}, [
      set_of('known', CORPUS), set_of('unseen', other),
      set_of('famous', CORPUS, is_common=True),
      set_of('outdated', CORPUS, is_common=True)], options(), seed=0)
  assert [(c.dataset.name, c.decoding) for c in cases
          if c.engine == 'noise'] == [('known', 'greedy'), ('famous', 'greedy')]
  built = {name: {id(c.search) for c in cases if c.engine == 'bm25'
                    and c.dataset.name == name}
             for name in ('known', 'unseen', 'famous', 'outdated')}
  assert built['known'] == built['famous'] == built['outdated']
  assert len(built['known'] | built['unseen']) == 2
  for case in cases:  # many questions only where greedy answers are searched
    assert len(case.dataset.questions) == (
        3 if (case.engine, case.decoding) == ('bm25', 'greedy') else 2)


def test_what_was_searched_is_described():
  assert searches.describe(config('bm25'), CORPUS) == {
      'engine': 'bm25', 'corpus': CORPUS.digest, 'passages': 2}


@pytest.mark.parametrize('indexed', [False, True])
def test_training_and_evaluation_share_one_bm25(
    indexed, tmp_path, monkeypatch):
  """They share it even where each of them has read the corpus by itself."""
  alike = Corpus((*CORPUS.passages,))
  bm25_files.build(CORPUS.texts, tmp_path / 'bm25', corpus=CORPUS.digest)
  calls = []
  for module, name in ((bm25, 'build'), (bm25_files, 'load')):
    monkeypatch.setattr(module, name, functools.partial(
        lambda make, name, *args, **options: (
            calls.append(name), make(*args, **options))[1],
        getattr(module, name), name))
  # No other test has this engine.
  options = dict(index=str(tmp_path)) if indexed else dict(k1=0.77)
  training = searches.engine(config('bm25', **options), CORPUS, seed=0)
  sets = [datasets.Dataset(name, [], alike) for name in ('nq', 'hotpotqa')]
  judged = searches.engines(config('bm25', **options), sets, seed=1)
  for search in judged:
    assert search([query()]) == training([query()])
  assert calls == ['load' if indexed else 'build']
  other = Corpus(CORPUS.passages[:1])
  searches.engine(config('bm25', k1=0.77), other, seed=0)
  assert calls[1:] == ['build']
