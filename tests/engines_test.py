# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""engines: one contract for every engine; engines over engines; records."""

import sys

import faulty
import ml_collections
import pytest

from searchrl.search import builtin_engines
from searchrl.search import engine_wrappers
from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage, Query, Question

QUESTION = Question('q', 'Where?', ('here',))
CORPUS = Corpus((
    Passage('a', 'Tarn', 'A river that joins the Garonne.'),
    Passage('b', 'Garonne', 'A river that reaches the sea.'),
))
ENGINES = ('bm25', 'dense', 'noise', 'fusion', 'rerank', 'cache')
OPTIONS = {
    'fusion': dict(engines=(dict(name='bm25'), dict(name='dense', dim=64))),
    'rerank': dict(engine=dict(name='bm25'), model='by length'),
    'cache': dict(engine=dict(name='rerank', engine=dict(name='dense'),
                              model='by length', candidates=1),
                  index='named'),
}


def load_judge(path):
  assert path == 'by length'
  return lambda pairs: [float(len(text)) for _, text in pairs]


def make(name, **options):
  return engines.make(name, CORPUS, load_judge=load_judge,
                      **OPTIONS.get(name, {}) | options)


def query(text='river', top_k=2):
  return Query(text, top_k, QUESTION)


@pytest.mark.parametrize('name', ENGINES)
class TestContract:

  def test_one_tuple_of_passages_a_query_in_its_order(self, name):
    search = make(name)
    texts = ('river', '', 'Tarn', 'the sea')
    found = search([query(text) for text in texts])
    assert len(found) == 4
    assert found == [search([query(text)])[0] for text in texts]
    for passages in found:
      assert isinstance(passages, tuple)
      for p in passages:
        assert isinstance(p.score, float)
        source = {q.id: q for q in CORPUS}[p.id]
        assert (p.title, p.text) == (source.title, source.text)
    assert search([]) == []

  def test_at_most_top_k_and_at_most_the_corpus(self, name):
    search = make(name)
    sizes = [len(search([query(top_k=k)])[0]) for k in (0, 1, 2, 3, 100)]
    assert sizes == [0, 1, 2, 2, 2]

  @pytest.mark.parametrize('text', ['', ' ', '\n\t'])
  def test_a_blank_query_finds_nothing(self, name, text):
    assert make(name)([query(text)]) == [()]

  @pytest.mark.parametrize('text', [
      '?', '\x00', '\ud800', 'x' * 10000, 'river ' * 2000, '😀', '</search>'])
  def test_no_text_is_too_strange(self, name, text):
    (found,) = make(name)([query(text)])
    assert isinstance(found, tuple)

  def test_two_engines_of_one_kind_agree(self, name):
    queries = [query('river'), query('Garonne')]
    first, second = (make(name, seed=3) for _ in range(2))
    assert first(queries) == second(queries)


@pytest.mark.parametrize('name, text', [('bm25', 'Tarn'), ('dense', 'tarns')])
def test_what_shares_words_comes_first(name, text):
  assert engines.make(name, CORPUS)([query(text)])[0][0].id == 'a'


def test_options_reach_the_engine():
  assert engines.make('dense', CORPUS, dim=32, n=2, batch=1)([query()])[0]
  with pytest.raises(ValueError, match='k1 must be'):
    engines.make('bm25', CORPUS, k1=-1)
  with pytest.raises(ValueError, match="of 'bm25', which are .*'dim' is given"):
    engines.make('bm25', CORPUS, dim=3)


def test_the_seed_reaches_the_noise():
  queries = [query(str(i), 1) for i in range(20)]
  assert engines.make('noise', CORPUS, seed=1)(queries) != engines.make(
      'noise', CORPUS, seed=2)(queries)


def test_an_unknown_engine_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match="bm25, dense,.* remote.*'bm52'"):
    engines.make('bm52', CORPUS)


def test_the_engine_of_a_paper_is_named_by_its_function():
  with pytest.raises(ValueError, match=(
      "bm25, dense, .*, or 'module:function' of your own, but is 'simulated'. "
      "Did you mean 'searchrl.papers.zerosearch.simulated:make'")):
    engines.find('simulated')
  assert not {'simulated', 'load_writer'} & {
      *engines.ENGINES, *builtin_engines.FROM_THE_RUN}


def test_engines_over_engines_are_what_their_parts_are():
  texts = ['river', 'Tarn', 'the sea', '']
  queries = [query(text, 1) for text in texts]
  inner = engines.make('bm25', CORPUS, k1=2.0)(queries)
  part = dict(name='bm25', k1=2.0)
  ids = lambda found: [[p.id for p in passages] for passages in found]
  for name, options in (('fusion', dict(engines=(part,), depth=1)),
                        ('cache', dict(engine=part)),
                        ('cache', dict(engine=ml_collections.ConfigDict(part))),
                        ('rerank', dict(engine=part, candidates=1))):
    assert ids(make(name, **options)(queries)) == ids(inner), name


@pytest.mark.parametrize('name, options, message', [
    ('fusion', dict(engines=()), 'must have engines'),
    ('fusion', dict(engines=('bm25',)), 'an engine as dict'),
    ('fusion', dict(engines=(dict(k1=1),)), 'an engine as dict'),
    ('fusion', dict(engines=(dict(name='bm52'),)), "but is 'bm52'"),
    ('cache', dict(entries=-1), 'entries must be at least 0'),
    ('rerank', dict(candidates=0), 'candidates must be at least 1'),
])
def test_options_of_engines_over_engines_are_checked(name, options, message):
  with pytest.raises(ValueError, match=message):
    make(name, **options)
  if 'an engine as dict' in message:  # whoever looks first
    for look in (lambda: engines.parse(name, options),
                 lambda: engines.describe(name, CORPUS, options)):
      with pytest.raises(ValueError, match=message):
        look()


def test_missing_parts_are_named():
  for name, field in (('fusion', 'engines'), ('cache', 'engine'),
                      ('rerank', 'engine and model')):
    with pytest.raises(ValueError, match=f'must have {field}'):
      engines.make(name, CORPUS)


@pytest.mark.parametrize('name, options, field', [
    ('bm25', dict(index='s3://b/i'), 'search.options.index'),
    ('dense', dict(index='s3://b/i'), 'search.options.index'),
    ('cache', dict(engine=dict(name='bm25'), path='s3://b/i'),
     'search.options.path'),
    ('cache', dict(engine=dict(name='dense', index='s3://b/i'), index='i'),
     'search.options.engine.index')])
def test_paths_in_an_object_store_are_refused(
    tmp_path, monkeypatch, name, options, field):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=(
      f"^{field} must be a path on this machine, but is 's3://b/i'. Copy it")):
    engines.make(name, CORPUS, **options)
  assert not [*tmp_path.iterdir()]


def test_the_name_of_what_a_cache_holds_may_be_an_address():
  cached = engines.make(
      'cache', CORPUS, engine=dict(name='bm25'), index='s3://b/i')
  (passages,) = cached([Query('Tarn', 1, QUESTION)])
  assert [passage.id for passage in passages] == ['a']


NOISE, BM25 = dict(name='noise'), dict(name='bm25')
FUSED = dict(name='fusion', engines=(BM25, NOISE))


@pytest.mark.parametrize('part', [
    NOISE, FUSED,
    dict(name='rerank', engine=NOISE, model='by length'),
    dict(name='rerank', engine=FUSED, model='by length'),
    dict(name='fusion', engines=(BM25, dict(name='fusion', engines=(NOISE,)))),
    dict(name='rerank', model='by length', engine=dict(
        name='cache', engine=NOISE, index='i')),
    ml_collections.ConfigDict(dict(
        name='rerank', engine=NOISE, model='by length')),
])
@pytest.mark.parametrize('index', [{}, dict(index='named')])
def test_no_cache_stands_around_what_reads_more_than_the_text(part, index):
  options = dict(engine=part, **index)
  for look in (lambda: engines.make('cache', CORPUS, **options),
               lambda: engines.parse('cache', options)):  # a run's first
    with pytest.raises(ValueError, match="of 'cache' must answer by a query's "
                       'text and top_k alone, but noise in it'):
      look()


def test_a_cache_may_stand_beside_noise():
  cached = dict(name='cache', engine=BM25)
  search = engines.make('fusion', CORPUS, engines=(cached, NOISE))
  assert len(search([query()])[0]) == 2


@pytest.mark.parametrize('part, message', [
    (dict(name='remote', urls=('http://a',)), 'index must name'),
    (dict(name='fusion', engines=(
        dict(name='bm25'), dict(name='remote', urls=('http://a',)))),
     'index must name'),
])
def test_a_cache_refuses_what_it_cannot_name(part, message):
  with pytest.raises(ValueError, match=message):
    engines.make('cache', CORPUS, engine=part)


def test_caches_of_other_corpora_and_options_share_nothing(tmp_path):
  other = Corpus((Passage('a', 'Tarn', 'Another river.'),))
  path = str(tmp_path / 'c.sqlite')
  for corpus in (CORPUS, other):
    for k1 in (0.9, 2.0):
      plain = engines.make('bm25', corpus, k1=k1)
      for _ in range(2):
        search = engines.make('cache', corpus, path=path,
                              engine=dict(name='bm25', k1=k1))
        assert search([query()]) == plain([query()])
      assert search.pop()['search/cache/hit_rate'] == 1


def test_the_counts_and_the_pause_of_a_part_are_those_of_the_whole():
  url = faulty.unused_url()
  remote = dict(name='remote', urls=(url,), tries=1, pause_secs=0)
  search = engine_wrappers.with_typed_errors(engines.make(
      'cache', CORPUS, index='i',
      engine=dict(name='fusion', engines=(dict(name='bm25'), remote))))
  error, = search([query()])
  assert error.kind == 'unavailable'
  values = search.pop()
  assert values['search/remote/failed_calls'] == 1
  assert values['search/cache/hit_rate'] == 0
  with pytest.raises(ConnectionError, match='pause_secs=0'):
    search.wait()


@pytest.mark.parametrize('name, options, needed', [
    ('bm25', {}, True), ('remote', dict(urls=('http://a',)), False),
    ('web', {}, False), ('cache', dict(engine=dict(name='web')), False),
    ('cache', dict(engine=dict(name='dense')), True),
    ('fusion', dict(engines=(dict(name='remote'), dict(name='bm25'))), True),
    ('fusion', dict(engines=(dict(name='remote'), dict(name='web'))), False),
    ('rerank', ml_collections.ConfigDict(dict(engine=dict(
        name='cache', engine=dict(name='remote')), model='m')), False),
])
def test_who_needs_a_corpus(name, options, needed):
  assert engines.parse(name, options).needs_corpus == needed


@pytest.mark.parametrize('name, options, remote', [
    ('bm25', {}, False), ('noise', {}, False), ('web', {}, True),
    ('remote', dict(urls=('http://a',)), True),
    ('cache', dict(engine=dict(name='dense')), False),
    ('fusion', dict(engines=(dict(name='bm25'), dict(name='remote'))), True),
    ('rerank', dict(engine=dict(name='fusion', engines=(
        BM25, dict(name='cache', engine=dict(name='web')))), model='m'), True),
])
def test_who_waits_for_a_network(name, options, remote):
  assert engines.parse(name, options).is_remote == remote


@pytest.mark.parametrize('name, options, alone', [
    ('bm25', {}, True), ('web', {}, True), ('noise', {}, False),
    ('fusion', dict(engines=(BM25, dict(name='remote'))), True),
    ('fusion', dict(engines=(BM25, NOISE)), False),
    ('rerank', dict(engine=FUSED, model='m'), False),
])
def test_whose_results_the_text_decides(name, options, alone):
  assert engines.parse(name, options).reads_text_alone == alone


def test_what_was_searched_is_described_engine_by_engine():
  part = engines.describe('bm25', CORPUS, {})
  assert part == {'engine': 'bm25', 'corpus': CORPUS.digest, 'passages': 2}
  assert engines.describe('web', None, dict(provider='bing')) == {
      'engine': 'web'}
  facts = engines.describe('cache', CORPUS, dict(engine=dict(
      name='fusion', engines=(dict(name='bm25'), dict(name='dense')))))
  (inner,) = facts['engines']
  assert inner['engines'] == [part, part | {'engine': 'dense'}]


def test_settings_are_what_results_depend_on():
  options = ml_collections.ConfigDict(dict(
      path='/x', engine=dict(name='fusion', k=2.0, engines=(
          dict(name='bm25', k1=1.5, index='/i'),
          dict(name='remote', urls=('http://a',))))))
  assert engines.settings('cache', options) == {
      'engine': 'cache', 'engines': [{
          'engine': 'fusion', 'k': 2.0, 'engines': [
              {'engine': 'bm25', 'k1': 1.5}, {'engine': 'remote'}]}]}


def test_a_named_cache_knows_the_corpus(tmp_path):
  other = Corpus((Passage('x', 'x', CORPUS.passages[0].text),))
  query = [Query(CORPUS.passages[0].text, 1, QUESTION)]
  for corpus in (CORPUS, other, CORPUS):
    search = engines.make('cache', corpus, engine=dict(name='bm25'),
                          index='mine', path=str(tmp_path / 'c.sqlite'))
    ((found,),) = search(query)
    assert found.id == corpus.passages[0].id


@engines.traits(inner='engine', deadline_secs=lambda options, queries: 500.0,
                local_model=lambda options: 'a size',
                rows_on_devices=lambda options, memory, hosts: {'mine': 5.0})
def judged(corpus, *, parts):
  return parts[0]


def test_traits_of_an_engine_over_others_count_beside_theirs():
  part = dict(name='remote', urls=('http://127.0.0.1:1',), deadline_secs=7.0)
  spec = engines.parse(f'{__name__}:judged', dict(engine=part))
  assert spec.deadline_secs(4) == 507  # its own, and those of its part
  assert spec.local_model == 'a size'
  assert spec.rows_on_devices(1e9, 1) == {'mine': 5.0}
  both = engines.parse('fusion', dict(engines=(part, part)))
  assert both.deadline_secs(4) == 7  # at the same time


@pytest.mark.parametrize('make', [
    lambda: None, lambda *, url: None, lambda **options: None])
def test_an_engine_takes_the_corpus_first(make, monkeypatch):
  monkeypatch.setattr(sys.modules[__name__], 'corpusless', make, raising=False)
  with pytest.raises(ValueError, match="the function of 'engines_test:corpusl"
                     "ess' must take the corpus first"):
    engines.check(engines.parse('engines_test:corpusless', {'url': 'x'}))
