# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Turns of a scripted agent that follows a chain of queries to the answer.

A hop is one of the facts that a question's answer needs. A chain has a query
for each hop, and the answer that this query must find. For each hop, the agent
says what it looks for, searches for it, and reads the hop's answer. It may
begin with a poor query, which seldom finds the answer of the first hop, and
then search again. A script is a chain with its poor first query, if any.
"""

from collections.abc import Mapping, Sequence
import hashlib
from typing import Any, NamedTuple

import numpy as np

from searchrl.agent import formats
from searchrl.agent import rewards
from searchrl.agent.dialogue import Dialogue
from searchrl.texts import normalise
from searchrl.trajectory import Action, Question, Request, Trajectory, Turn

_SEEK = ('I need to find: {}.', 'I look up: {}.', 'I have to know: {}.',
         'I do not know this yet: {}.', 'I search for: {}.', 'What I need: {}.')
_NEXT = ('Now I need: {}.', 'Next I look up: {}.', 'I still need: {}.',
         'With that I search for: {}.')
_FOUND = ('It is {}.', 'The passages say {}.', 'I found it: {}.',
          'That is {}.', 'The answer to this is {}.')
_MISSED = ('That does not say it. I search again: {}.',
           'These passages do not help. I search again, for: {}.',
           'The answer is not there. I try another query: {}.',
           'Nothing here tells me that. I ask differently: {}.')
_ASIDE = ('That says {}, but not what I need. I search for: {}.',
          'I found {}, but I need more. I search for: {}.',
          'It is about {}. I still need: {}.')
_DONE = ('', ' So I can answer.', ' That answers the question.',
         ' Now I know the answer.')


class Hop(NamedTuple):
  """One search that a question needs, and the answer that it must find."""

  query: str  # query in natural words
  answer: str  # text that the passages must contain


class Chain(NamedTuple):
  """The searches that lead to a question's answer, in their order."""

  hops: tuple[Hop, ...]
  # Poor first queries, each with the text that it finds; '': nothing useful.
  poor_queries: tuple[Hop, ...] = ()


def parse(metadata: Mapping[str, Any], place: str) -> Chain | None:
  """Returns the chain in a question's metadata, or None if it has none.

  Args:
    metadata: Metadata. Its 'chain' is [[query, answer], ...]. It may also have
      'poor_queries': a list for each hop, of queries or of pairs [query, text
      that the query finds]. Only the list of the first hop is used.
    place: File and line of the question, for the error.

  Raises:
    ValueError: The chain has another form.
  """
  chain, poor = metadata.get('chain'), metadata.get('poor_queries') or []
  if chain is None:
    return None
  if not isinstance(chain, list) or not chain or not all(map(_is_pair, chain)):
    raise ValueError(
        'metadata.chain must be [[query, answer], ...], a pair of texts for '
        f'each hop, but that of {place} is {str(chain)[:80]}. Correct the '
        'line.')
  if not isinstance(poor, list) or not all(
      isinstance(queries, list) and all(
          _is_text(query) or _is_pair(query) for query in queries)
      for queries in poor):
    raise ValueError(
        'metadata.poor_queries must have for each hop a list of texts or of '
        f'pairs of a query and what it finds, but that of {place} is '
        f'{str(poor)[:80]}. Correct the line.')
  return Chain(tuple(Hop(*map(str.strip, hop)) for hop in chain), tuple(
      Hop(entry, '') if isinstance(entry, str) else Hop(*entry)
      for entry in (poor[0] if poor else ())))


def _is_pair(value: Any) -> bool:
  return (isinstance(value, list) and len(value) == 2
          and all(map(_is_text, value)))


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value.strip())


class Script(NamedTuple):
  """Plan for one question: its chain, and perhaps a poor first query."""

  chain: Chain
  poor_query: str = ''  # '': the agent begins with the query of the first hop
  aside: str = ''  # text that the poor query finds; '': nothing useful


def script(question: Question, chain: Chain, others: Sequence[Chain], *,
           retry_share: float, seed: int) -> Script:
  """Returns the plan of the scripted agent for a question.

  It has the question's chain and, with probability `retry_share`, a poor first
  query, so that the agent must search again. The choice depends only on the
  seed and the question's uid.

  Args:
    question: The question.
    chain: Chain of the question.
    others: Chains of all questions. If `chain` has no poor queries, the poor
      query is the first query of another chain, drawn at random.
    retry_share: Probability that the first query is poor.
    seed: Seed of the choice.
  """
  rng = _rng(seed, question.uid, 0)
  if rng.random() >= retry_share:
    return Script(chain)
  poor = chain.poor_queries or [
      Hop(query, '') for n in rng.integers(len(others), size=8)
      if (query := others[n].hops[0].query) != chain.hops[0].query]
  return Script(chain, *poor[rng.integers(len(poor))]) if poor else (
      Script(chain))


def write(script: Script, request: Request, turns: Sequence[Turn], *,
          dialogue: Dialogue, seed: int) -> str:
  """Returns the text of the scripted agent's next turn, in a random wording.

  The turn searches for the next hop of the chain. After the last hop, it
  answers.

  Args:
    script: The script of the question.
    request: The question, and the number of its sample.
    turns: Turns so far, with the passages that were found.
    dialogue: Protocol in which the turn is written.
    seed: Seed of the wording.
  """
  hops, poor = script.chain.hops, script.poor_query
  retries = bool(turns and poor) and not found(hops[0].answer, turns[0])
  missed, done = retries and len(turns) == 1, len(turns) - retries
  rng = _rng(seed, request.question.uid, 1 + len(turns))
  pick = lambda texts: texts[rng.integers(len(texts))]
  if done >= len(hops):
    thought = pick(_FOUND).format(hops[-1].answer) + pick(_DONE)
    action = Action('answer', (hops[-1].answer,))
  else:
    topic = hops[done].query.rstrip(' .?!')
    if missed and script.aside and found(script.aside, turns[0]):
      thought = pick(_ASIDE).format(script.aside, topic)
    else:
      thought = pick(_MISSED if missed else _NEXT if done else _SEEK).format(
          topic)
    if done:
      thought = f'{pick(_FOUND).format(hops[done - 1].answer)} {thought}'
    action = Action('search', (hops[done].query if turns or not poor else
                               poor,))
  return formats.continued(dialogue.write(thought, action),
                           dialogue.after if turns else dialogue.tail)


def found(answer: str, turn: Turn) -> bool:
  """Returns whether a turn's search found an answer that the agent could read.

  The normalised answer must occur, as whole words, in one of the passages and
  in the turn's observation, which may have only the beginning of a passage.
  """
  words = f' {normalise(answer)} '
  return words in f' {rewards.observed(turn)} ' and any(
      words in f' {normalise(f"{passage.title} {passage.text}")} '
      for passage in turn.passages)


def is_retry(script: Script, trajectory: Trajectory) -> bool:
  """Returns whether the agent had to repeat its first search.

  This is so if its script begins with a poor query, and the passages did not
  have the answer of the first hop.
  """
  return bool(script.poor_query and trajectory.turns) and not found(
      script.chain.hops[0].answer, trajectory.turns[0])


def misses(script: Script, trajectory: Trajectory) -> bool:
  """Returns whether a search for a hop is missing, or missed the hop's answer.

  A poor first search that had to be repeated does not count as a miss.
  """
  turns = trajectory.turns[is_retry(script, trajectory):]
  return any(number >= len(turns) or not found(hop.answer, turns[number])
             for number, hop in enumerate(script.chain.hops))


def _rng(seed: int, uid: str, part: int) -> np.random.Generator:
  digest = hashlib.sha256(uid.encode()).digest()
  return np.random.default_rng([seed, int.from_bytes(digest[:8]), part])
