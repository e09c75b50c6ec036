# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Scripted turns of an agent that follows a chain of queries to the answer.

The agent says what it looks for, searches for it, reads the answer of the hop,
and goes on. Its first query may be a poor one, after which it searches again.
"""

from collections.abc import Mapping, Sequence
import hashlib
from typing import Any, NamedTuple

import numpy as np

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
  """One search that a question needs, and what it finds."""

  query: str  # query in natural words
  answer: str  # text that the passages have to hold


class Chain(NamedTuple):
  """The searches that lead to a question's answer, in their order."""

  hops: tuple[Hop, ...]
  # First queries that should miss, with what they find; '': nothing of use.
  poor_queries: tuple[Hop, ...] = ()


def parse(metadata: Mapping[str, Any], place: str) -> Chain | None:
  """Returns the chain of a question's metadata, or None if it has none.

  Args:
    metadata: Metadata, whose chain is [[query, answer], ...]. It may have
      poor_queries, too, for each hop a list of texts, or of pairs of a query
      and what it finds.
    place: Place of the question, for the error.

  Raises:
    ValueError: The chain has another form.
  """
  chain, poor = metadata.get('chain'), metadata.get('poor_queries') or []
  if chain is None:
    return None
  if not isinstance(chain, list) or not chain or not all(
      isinstance(hop, list) and len(hop) == 2 and all(map(_is_text, hop))
      for hop in chain):
    raise ValueError(
        'metadata.chain must be [[query, answer], ...], a pair of texts for '
        f'each hop, but that of {place} is {str(chain)[:80]}. Correct the '
        'line.')
  if not isinstance(poor, list) or not all(
      isinstance(queries, list) and all(map(_is_poor_query, queries))
      for queries in poor):
    raise ValueError(
        'metadata.poor_queries must have for each hop a list of texts or of '
        f'pairs of a query and what it finds, but that of {place} is '
        f'{str(poor)[:80]}. Correct the line.')
  return Chain(tuple(Hop(*map(str.strip, hop)) for hop in chain), tuple(
      Hop(entry, '') if isinstance(entry, str) else Hop(*entry)
      for entry in (poor[0] if poor else ())))


def _is_poor_query(value: Any) -> bool:
  return _is_text(value) or (isinstance(value, list) and len(value) == 2
                             and all(map(_is_text, value)))


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value.strip())


class Script(NamedTuple):
  """How one question is answered: its chain, and a first query that misses."""

  chain: Chain
  poor_query: str = ''  # '': the first query is that of the first hop
  aside: str = ''  # what the poor query finds; '': nothing of use


def script(question: Question, chain: Chain, others: Sequence[Chain], *,
           retry_share: float, seed: int) -> Script:
  """Returns the script of a question, drawn by the seed and the question's uid.

  Args:
    question: The question.
    chain: Its chain.
    others: Chains of all questions. The first query of another one is a poor
      query, if the chain has none.
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
  """Returns the text of the next turn; its wording is drawn by the seed.

  Args:
    script: The script of the question.
    request: The question, and the number of its sample.
    turns: Turns so far, with what was found.
    dialogue: The protocol, whose form the text has.
    seed: Seed of the wording.
  """
  hops, poor = script.chain.hops, script.poor_query
  missed = len(turns) == 1 and poor and not found(hops[0].answer, turns[0])
  done = len(turns) - bool(turns and poor and not found(
      hops[0].answer, turns[0]))
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
  text = dialogue.write(thought, action)
  before = dialogue.after if turns else dialogue.tail
  if before.rstrip().endswith('<think>'):  # the chat template opens thoughts
    text = text.removeprefix('<think>').lstrip()
  return text


def found(answer: str, turn: Turn) -> bool:
  """Returns whether the part of a passage that was read holds an answer."""
  words = f' {normalise(answer)} '
  return words in f' {rewards.observed(turn)} ' and any(
      words in f' {normalise(f"{passage.title} {passage.text}")} '
      for passage in turn.passages)


def is_retry(script: Script, trajectory: Trajectory) -> bool:
  """Returns whether the first search was poor and found nothing."""
  return bool(script.poor_query and trajectory.turns) and not found(
      script.chain.hops[0].answer, trajectory.turns[0])


def misses(script: Script, trajectory: Trajectory) -> bool:
  """Returns whether the answer of a hop was not found by its own query."""
  turns = trajectory.turns[is_retry(script, trajectory):]
  return any(number >= len(turns) or not found(hop.answer, turns[number])
             for number, hop in enumerate(script.chain.hops))


def _rng(seed: int, uid: str, part: int) -> np.random.Generator:
  digest = hashlib.sha256(uid.encode()).digest()
  return np.random.default_rng([seed, int.from_bytes(digest[:8]), part])
