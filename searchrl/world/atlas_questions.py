# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of 1 to 3 hops about the atlas, each with exactly one answer.

A chain is a path of facts: the answer of each fact is the subject of the next
fact. Each fact of a chain is a hop. A question names the first entity of a
chain and asks for the answer of the last hop. The answer of a hop is neither in
the question nor in the passage of an earlier hop. The gold answer is not in the
passages that an engine finds for any query before the last.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import random
from typing import Any

from searchrl.world import atlas_facts
from searchrl.world import atlas_passages
from searchrl.world.atlas_facts import Atlas, Fact
from searchrl.texts import normalise
from searchrl.trajectory import Passage

Search = Callable[[str], Iterable[Passage]]

MAX_HOPS = 3
_OTHER_PHRASE = .3  # share of questions that use a code or an older name
SOURCES = ('atlas_famous', 'atlas_obscure')
# How the last fact is asked, by relation; {x}: the entity.
_ASK = {
    'capital': ('What is the capital of {x}?', 'Which city is the capital of '
                '{x}?', 'Name the capital of {x}.'),
    'currency': ('What is the currency of {x}?', 'Which currency is used in '
                 '{x}?', 'Which currency does {x} have?'),
    'continent': ('On which continent is {x}?', 'Which continent is {x} on?',
                  'What is the continent of {x}?'),
    'calling_code': ('What is the telephone calling code of {x}?',
                     'Which calling code do telephones in {x} have?'),
    'domain': ('What is the internet domain of {x}?',
               'Which internet domain does {x} have?'),
    'area': ('What is the area of {x} in square kilometres?',
             'How many square kilometres is the area of {x}?'),
    'population': ('What is the population of {x}?',
                   'How large is the population of {x}?',
                   'What population does {x} have?'),
    'inhabitants': ('How many inhabitants does {x} have?',
                    'What is the number of inhabitants of {x}?'),
    'language': ('What is the language of {x}?', 'Which language is spoken in {x}?'),
    'country': ('In which country is {x}?', 'Which country is {x} in?',
                'What country does {x} belong to?'),
    'capital_of': ('{x} is the capital of which country?',
                   'Which country has {x} as its capital?'),
    'state': ('In which US state is {x}?', 'Which US state is {x} in?'),
    'time_zone': ('What is the time zone of {x}?',
                  'Which time zone does {x} have?'),
    'city': ('Which city does {x} serve?', 'What city is served by {x}?',
             'Name the city that {x} serves.'),
    'iata': ('What is the IATA code of {x}?', 'Which IATA code does {x} have?'),
    'icao': ('What is the ICAO code of {x}?', 'Which ICAO code does {x} have?'),
    'elevation': ('What is the elevation of {x} in feet?',
                  'How many feet is the elevation of {x}?'),
    'abbreviation': ('What is the postal abbreviation of {x}?',
                     'Which postal abbreviation does {x} have?'),
    'fips': ('What is the FIPS code of {x}?', 'Which FIPS code does {x} have?'),
    'code': ('What is the ISO code of {x}?', 'Which ISO code does {x} have?'),
    'numeric': ('What is the numeric code of {x}?',
                'Which numeric code does {x} have?'),
    'long_code': ('What is the three-letter code of {x}?',
                  'Which three-letter code does {x} have?'),
    'user': ('Which country uses {x}?', 'In which country is {x} used?')}
# How a fact before the last is named. The last forms are only used where the
# question ends with the entity.
_NAME = {
    'capital': ('the capital of {x}', 'the capital city of {x}'),
    'currency': ('the currency of {x}', 'the currency used in {x}'),
    'language': ('the language of {x}', 'the language spoken in {x}'),
    'country': ('the country of {x}', 'the country where {x} is',
                'the country that {x} is in'),
    'capital_of': ('the country whose capital is {x}',
                   'the country that has {x} as its capital'),
    'state': ('the home state of {x}', 'the US state where {x} is',
              'the US state that {x} is in'),
    'city': ('the city served by {x}', 'the city that {x} serves'),
    'user': ('the country that uses {x}', 'the country where {x} is used')}
# Pairs of relations that no chain has: only the US has capitals in a US state.
_POINTLESS = (('capital', 'state'),)
# The words of a query for a fact.
_WORDS: dict[str | tuple[str, str], str] = {
    ('city', 'country'): 'city country', ('city', 'state'): 'city US state',
    ('city', 'inhabitants'): 'city inhabitants',
    ('city', 'time_zone'): 'city time zone',
    'country': 'country', 'capital_of': 'capital country', 'state': 'state',
    'time_zone': 'time zone', 'city': 'city', 'iata': 'IATA code',
    'icao': 'ICAO code', 'fips': 'FIPS code', 'code': 'ISO code',
    'calling_code': 'telephone calling code', 'domain': 'internet domain',
    'abbreviation': 'postal abbreviation', 'numeric': 'numeric code',
    'long_code': 'three-letter code', 'user': 'country'}


@dataclasses.dataclass(frozen=True)
class AtlasQuestion:
  """A question with the chain of facts that answers it."""

  uid: str
  text: str
  facts: tuple[Fact, ...]
  queries: tuple[str, ...]  # one per hop
  poor_queries: tuple[tuple[str, ...], ...]  # one tuple per hop
  passages: tuple[str, ...]  # ids, one per hop
  source: str  # atlas_famous or atlas_obscure

  @property
  def hops(self) -> int:
    """Number of facts in the chain."""
    return len(self.facts)

  def row(self) -> dict[str, Any]:
    """Returns the question as a dict, which is one line of a file of questions.

    It has the question, its gold answers and, in 'metadata', the facts, queries
    and passages that lead to the answer. The format is in docs/data.md.
    """
    return {
        'id': self.uid, 'question': self.text,
        'golden_answers': list(self.facts[-1].answers),
        'metadata': {
            'hops': self.hops, 'data_source': self.source,
            'relations': [fact.relation for fact in self.facts],
            'chain': [[query, fact.answers[0]] for query, fact in zip(
                self.queries, self.facts)],
            'poor_queries': [list(queries) for queries in self.poor_queries],
            'passages': list(self.passages)}}


def split(atlas: Atlas, share: float, seed: int) -> frozenset[str]:
  """Draws the entities at which only questions of the test set may begin.

  Args:
    atlas: The atlas.
    share: Expected fraction of the entities that are drawn, in [0, 1].
    seed: Seed of the choice.

  Returns:
    The keys of these entities.
  """
  return frozenset(key for key in atlas.entities
                   if _uniform(f'{seed}/split/{key}') < share)


def draw(atlas: Atlas, passages: Sequence[Passage], keys: Iterable[str],
         per_hop: int, seed: int, search: Search = lambda query: ()
        ) -> list[AtlasQuestion]:
  """Returns questions that begin with the given entities, in a random order.

  Half of the questions begin with famous entities, if there are enough. Each
  half has about the same number of questions for each kind of chain, that is
  for each kind of first entity with each sequence of relations.

  Args:
    atlas: Atlas of entities and facts.
    passages: Passages of the atlas.
    keys: Keys of the entities with which questions may begin.
    per_hop: Number of questions for each number of hops.
    seed: Seed of the choice and of the wording.
    search: Function from a query to the passages that an engine finds. A
      question is left out if a query before its last hop finds a passage with
      its answer.
  """
  writer = _Writer(atlas, passages, seed, search)
  groups: dict[tuple[int, bool], dict[Any, list[tuple[Fact, ...]]]] = (
      collections.defaultdict(lambda: collections.defaultdict(list)))
  for key in sorted(keys):
    entity = atlas.entities[key]
    for chain in chains(atlas, key):
      kind = entity.kind, *(fact.relation for fact in chain)
      groups[len(chain), entity.is_famous][kind].append(chain)
  result = []
  for hops in range(1, MAX_HOPS + 1):
    famous = writer.take(groups[hops, True], per_hop - per_hop // 2)
    obscure = writer.take(groups[hops, False], per_hop - len(famous))
    result += famous + obscure
  return sorted(result, key=lambda q: _uniform(f'{seed}/order/{q.uid}'))


def chains(atlas: Atlas, key: str) -> Iterator[tuple[Fact, ...]]:
  """Yields the chains of at most three facts that begin with the entity `key`.

  No entity occurs twice in a chain. The first fact of a chain has `is_asked`.
  """
  unfinished: list[tuple[Fact, ...]] = [()]
  while unfinished:
    chain = unfinished.pop()
    last = chain[-1].target if chain else key
    seen = {key, *(fact.target for fact in chain)}
    for fact in atlas.facts_of[last].values():
      longer = (*chain, fact)
      pair = chain[-1].relation if chain else '', fact.relation
      if (fact.relation in _ASK and fact.target not in (seen - {''})
          and (fact.is_asked or chain) and pair not in _POINTLESS):
        yield longer
        if (fact.target and len(longer) < MAX_HOPS
            and fact.relation in _NAME):
          unfinished.append(longer)


def mentions(text: str, answers: Iterable[str]) -> bool:
  """Returns whether a text contains one of the answers, as whole words."""
  padded = f' {normalise(text)} '
  return any(f' {normalise(answer)} ' in padded for answer in answers)


def _uniform(text: str) -> float:
  """Returns a number in [0, 1) that is a hash of a text."""
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) / 2 ** 56


class _Writer:
  """A writer of questions: makes the text and queries of a chain of facts."""

  def __init__(self, atlas: Atlas, passages: Sequence[Passage], seed: int,
               search: Search):
    self._atlas = atlas
    self._search = search
    self._seed = seed
    self._place = atlas_passages.places(atlas)
    self._text = {p.id: _content(p) for p in passages}
    self._similar = atlas_facts.similar(atlas)
    self._leading: dict[str, list[Fact]] = collections.defaultdict(list)
    for fact in atlas.facts:
      if fact.target:
        self._leading[fact.target].append(fact)

  def take(self, by_kind: Mapping[Any, Sequence[tuple[Fact, ...]]], count: int
          ) -> list[AtlasQuestion]:
    """Returns up to `count` questions, equally many per kind where possible."""
    waiting = {kind: filter(None, map(self.write, self._ordered(group)))
               for kind, group in sorted(by_kind.items())}
    result: list[AtlasQuestion] = []
    while waiting and len(result) < count:
      for kind in list(waiting):
        question = next(waiting[kind], None)
        if question is None:
          del waiting[kind]
        elif len(result) < count:
          result.append(question)
    return result

  def _ordered(self, group: Iterable[tuple[Fact, ...]]
              ) -> list[tuple[Fact, ...]]:
    """Returns chains in random order, with repeated answers later.

    The answer of a chain is that of its last fact. First comes one chain for
    each answer, then a second chain for each answer that has one, and so on.
    """
    order = sorted(group, key=lambda chain: _uniform(
        f'{self._seed}/' + '/'.join(f.subject + f.relation for f in chain)))
    count: collections.Counter[str] = collections.Counter()
    ranked = []
    for chain in order:
      count[chain[-1].answers[0]] += 1
      ranked.append((count[chain[-1].answers[0]], chain))
    return [chain for _, chain in sorted(ranked, key=lambda item: item[0])]

  def write(self, chain: tuple[Fact, ...]) -> AtlasQuestion | None:
    """Returns the question of a chain, or None if the chain is not fair.

    It is not fair if the answer of a hop can be read before that hop.
    """
    entity = self._atlas.entities[chain[0].subject]
    relations = '-'.join(fact.relation for fact in chain)
    uid = f'{entity.key}-{relations}'
    draws = random.Random(f'{self._seed}/{uid}')
    phrase, words = entity.phrase, entity.words
    places = tuple(self._place[fact.subject, fact.relation] for fact in chain)
    if (entity.other_phrases and draws.random() < _OTHER_PHRASE
        and self._text[places[0]].startswith(entity.title)
        and not mentions(entity.other_phrases[0], chain[0].answers)):
      phrase, words = entity.other_phrases[0], entity.other_words[0]
    text = _wording(chain, phrase, draws)
    queries = (self._query(chain[0], words), *map(self._query, chain[1:]))
    if not self._is_fair(text, chain, places, queries):
      return None
    return AtlasQuestion(
        uid, text, chain, queries, tuple(self._poor(fact) for fact in chain),
        places,
        SOURCES[not entity.is_famous])

  def _is_fair(self, text: str, chain: Sequence[Fact], places: Sequence[str],
               queries: Sequence[str]) -> bool:
    """Returns whether no answer of a chain can be read before its own hop.

    Args:
      text: Text of the question. It may not contain any answer.
      chain: Facts of the question, one per hop.
      places: Ids of the passages that contain the facts. The last passage must
        mention the last answer.
      queries: Query for each fact. The passages that the engine finds for a
        query before the last may not contain the last answer.
    """
    earlier = [text, *(self._text[place] for place in places)]
    if any(mentions(other, fact.answers) for hop, fact in enumerate(chain)
           for other in earlier[:hop + 1]):
      return False
    answers = chain[-1].answers
    return mentions(earlier[-1], answers[:1]) and not any(
        mentions(_content(passage), answers)
        for query in queries[:-1] for passage in self._search(query))

  def _query(self, fact: Fact, words: str = '') -> str:
    """Returns the query for a fact; `words` replace its subject's."""
    entity = self._atlas.entities[fact.subject]
    return f'{words or entity.words} {_words(fact, entity.kind)}'

  def _poor(self, fact: Fact) -> tuple[Any, ...]:
    """Returns queries that fail to find a fact, for demonstrations of errors.

    If the subject of the fact is the answer of other facts, the result has at
    most two pairs. A pair is the query for such a fact and the answer of that
    fact. Otherwise, the result has two queries: the words for the relation
    without the subject, and the name of a similar entity.
    """
    leading = sorted(
        (other for other in self._leading[fact.subject]
         if other.subject != fact.target), key=lambda other: _uniform(
             f'{self._seed}/{fact.relation}/{other.subject}'))
    if leading:
      return tuple(
          (self._query(other), other.answers[0]) for other in leading[:2])
    similar = self._atlas.entities[self._similar[fact.subject]]
    return _words(fact, similar.kind), similar.name


def _content(passage: Passage) -> str:
  return f'{passage.title} {passage.text}'


def _wording(chain: Sequence[Fact], phrase: str, draws: random.Random) -> str:
  """Returns the text of a question, given the phrase for its first entity."""
  form = draws.choice(_ASK[chain[-1].relation])
  at_end = form[:-1].endswith('{x}')
  for fact in chain[:-1]:
    names = [name for name in _NAME[fact.relation]
             if at_end or name.endswith('{x}')]
    phrase = draws.choice(names).format(x=phrase)
  text = form.format(x=phrase)
  return text[0].upper() + text[1:]


def _words(fact: Fact, kind: str) -> str:
  """Returns the words of a query for a fact, given the kind of its subject."""
  return _WORDS.get((kind, fact.relation)) or _WORDS.get(
      fact.relation, fact.relation)
