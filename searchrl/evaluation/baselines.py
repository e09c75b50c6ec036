# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Methods that need no training, each a function over one kind of rollout.

A trained agent reads its own conversation, which only grows. These methods
write a new prompt for every turn (a question below passages, a thought so far).
Their samples are therefore not training data, and are only scored.

Sources: RAG (Lewis et al. 2020, arXiv:2005.11401), IRCoT (Trivedi et al. 2023,
arXiv:2212.10509) in the form of FlashRAG, Search-o1 (Li et al. 2025,
arXiv:2501.05366), whose RA-Agent is the one without Reason-in-Documents.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.agent import prompts
from searchrl.rollouts.sampler import Sampler
from searchrl.trajectory import (
    Action, Passages, Query, Question, Request, SearchError, SearchFn,
    Trajectory, Turn)

_CONCLUSION = re.compile(r'answer is:?\s*(.+?)[.\s]*\Z', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Player:
  """The model, the engine and the prompts that a method uses.

  Attributes:
    sampler: Sampler of the model.
    weights: Weights that its `sync` returned.
    search: The engine.
    templates: Prompt templates by the names of `agent.prompts`.
    step: Seed of the samples.
    temperature: Sampling temperature; 0 is greedy.
  """

  sampler: Sampler
  weights: Any
  search: SearchFn
  templates: Mapping[str, str]
  step: int = 0
  temperature: float = 0.0

  def write(self, kind: str, questions: Sequence[Question],
            **changes: Any) -> list[Trajectory]:
    """Samples one turn below each prompt; too long a prompt gets none.

    Args:
      kind: Name of the template.
      questions: Questions whose texts fill the template. Their uids determine
        the randomness.
      **changes: Changed fields of the dialogue, such as `stop_strings`.
    """
    own = self.sampler.tokenizer
    made = dataclasses.replace(
        prompts.framed(own, self.templates[kind]), **changes)
    room = self.sampler.engine.length - self.sampler.budgets.max_new_tokens
    speaking = self.sampler.with_dialogue(made, dataclasses.replace(
        self.sampler.budgets, max_turns=1, max_prompt_tokens=room))
    fits = [len(dialogues.opening(made, q.text, own)) <= room
            for q in questions]
    found = iter(speaking.rollout(
        self.weights, [Request(q, 0, n) for n, q in enumerate(questions)
                       if fits[n]],
        search=self.search, step=self.step,
        temperature=self.temperature).trajectories)
    return [next(found) if fit else Trajectory(
        question, 0, 0, (), stop_reason='length_limit')
            for question, fit in zip(questions, fits)]

  def find(self, asked: Sequence[tuple[Question, str]]
          ) -> list[Passages | SearchError]:
    """Returns the engine's results for queries on behalf of questions."""
    top_k = self.sampler.budgets.top_k
    return list(self.search([Query(text, top_k, q, self.step)
                             for q, text in asked])) if asked else []

  def below(self, passages: Passages, text: str) -> str:
    """Returns a text below passages, one per line and cut to its budget."""
    encode, decode = (self.sampler.tokenizer.encode_data,
                      self.sampler.tokenizer.decode)
    lines = [decode(encode(dialogues.tag_passage(n, p))[
        :self.sampler.budgets.passage_tokens])
             for n, p in enumerate(passages, start=1)]
    return '\n'.join([*lines, text])


Method = Callable[[Player, Sequence[Question]], list[Trajectory]]


def direct(player: Player, questions: Sequence[Question]) -> list[Trajectory]:
  """Answers at once, from memory."""
  return player.write('direct', questions)


def cot(player: Player, questions: Sequence[Question]) -> list[Trajectory]:
  """Writes a chain of thought, then an answer, from memory."""
  return player.write('cot', questions)


def rag(player: Player, questions: Sequence[Question]) -> list[Trajectory]:
  """Retrieves once, with the question, and answers from the passages."""
  games = {q.uid: _Game(q, query=q.text) for q in questions}
  results = player.find([(q, q.text) for q in questions])
  for game, of in zip(games.values(), results):
    game.found(_searched(game.query, of), of)
  written = player.write('rag', [_asked(game.question, player.below(
      game.turns[0].passages, game.query)) for game in _open(games)])
  for game, one in zip(_open(games), written):
    game.turns += one.turns
    game.end = one.stop_reason
  return [game.trajectory() for game in games.values()]


def ircot(player: Player, questions: Sequence[Question], rounds: int = 3
         ) -> list[Trajectory]:
  """Alternates retrieval and a sentence of thought, which is the next query.

  The passages of all rounds are above the question, the best first. A sentence
  that states the answer ends the method.
  """
  games = {q.uid: _Game(q, query=q.text) for q in questions}
  for _ in range(rounds):
    asking = _open(games)
    for game, of in zip(asking, player.find(
        [(game.question, game.query) for game in asking])):
      game.found(_searched(game.query, of), of)
    thinking = _open(games)
    written = player.write('ircot', [_asked(game.question, player.below(
        _best(game.turns), f'Question: {game.question.text}\n'
        f'Thought: {game.written}')) for game in thinking],
                           stop_strings=('.', '\n'))
    for game, one in zip(thinking, written):
      game.query = ''.join(turn.text for turn in one.turns).strip() or (
          game.question.text)
      game.written = f'{game.written} {game.query}'.strip()
      conclusion = _CONCLUSION.search(game.query)
      action = Action('answer', (conclusion[1].strip(),)) if conclusion else (
          Action('invalid'))
      game.turns += [dataclasses.replace(turn, action=action)
                     for turn in one.turns]
      if conclusion or not one.turns:
        game.end = 'answer' if conclusion else 'length_limit'
  return [game.trajectory() for game in games.values()]


def ra_agent(player: Player, questions: Sequence[Question]) -> list[Trajectory]:
  """Runs an agent that searches when it wants to, and reads the passages."""
  return _agent(player, questions, _as_found)


def search_o1(player: Player, questions: Sequence[Question]
             ) -> list[Trajectory]:
  """Runs an agent that reads a note about the passages in place of them."""
  return _agent(player, questions, _noted)


def _agent(player: Player, questions: Sequence[Question],
           read: Callable[..., list[str]]) -> list[Trajectory]:
  """Samples turns until an answer; `read` turns results into shown texts."""
  games = {q.uid: _Game(q) for q in questions}
  for _ in range(player.sampler.budgets.max_turns):
    acting = _open(games)
    said = player.write('agent', [
        _asked(game.question, f'{game.question.text}\n{game.written}')
        for game in acting])
    for game, one in zip(acting, said):
      if not one.turns:
        game.end = 'length_limit'
        continue
      game.turns += one.turns
      game.written += one.turns[0].text
      if one.answer:
        game.end = 'answer'
    asking = [game for game in _open(games)
              if game.turns[-1].action.kind == 'search']
    for game in asking:
      game.query = game.turns[-1].action.texts[0]
    results = player.find([(game.question, game.query) for game in asking])
    for game, of, text in zip(asking, results, read(player, asking, results)):
      shown = f'\n\n<information>{text}</information>\n\n'
      game.written += shown
      game.found(dataclasses.replace(
          game.turns.pop(), passages=_passages(of), observation=shown), of)
  return [game.trajectory() for game in games.values()]


def _as_found(player: Player, games: Sequence['_Game'],
              found: Sequence[Passages | SearchError]) -> list[str]:
  """Returns the passages themselves."""
  del games
  return [player.below(_passages(of), '').rstrip('\n') for of in found]


def _noted(player: Player, games: Sequence['_Game'],
           found: Sequence[Passages | SearchError]) -> list[str]:
  """Returns the model's notes on the passages: Reason-in-Documents."""
  notes = player.write('note', [dataclasses.replace(
      game.question, uid=f'note:{game.query}:{game.question.uid}',
      text='\n'.join([
          f'Question: {game.question.text}', f'Thought: {game.written[-400:]}',
          f'Query: {game.query}', player.below(_passages(of), '')]).rstrip())
      for game, of in zip(games, found)])
  return [note.answer or 'nothing' for note in notes]


METHODS: dict[str, Method] = {function.__name__: function for function in (
    direct, cot, rag, ircot, ra_agent, search_o1)}


def _asked(question: Question, text: str) -> Question:
  return dataclasses.replace(question, text=text)


def _passages(found: Passages | SearchError) -> Passages:
  return () if isinstance(found, SearchError) else tuple(found)


def _searched(query: str, found: Passages | SearchError) -> Turn:
  """Returns a search by the method, in which the policy wrote no token."""
  return Turn((), (), Action('search', (query,)), passages=_passages(found))


def _best(turns: Sequence[Turn]) -> Passages:
  """Returns the passages of all searches, each once, the best first."""
  best = {}
  for passage in (p for turn in turns for p in turn.passages):
    if passage.id not in best or passage.score > best[passage.id].score:
      best[passage.id] = passage
  return tuple(sorted(best.values(), key=lambda p: -p.score))


@dataclasses.dataclass
class _Game:
  """A question, and the state of the method's work on it."""

  question: Question
  query: str = ''  # the next query, or the last
  written: str = ''  # text that the model has written and read
  turns: list[Turn] = dataclasses.field(default_factory=list)
  end: str = ''  # stop reason; '': not finished
  error: SearchError | None = None

  def found(self, turn: Turn, of: Passages | SearchError) -> None:
    """Adds a search; a failed one ends the game."""
    self.turns.append(turn)
    if isinstance(of, SearchError):
      self.end, self.error = 'search_error', of

  def trajectory(self) -> Trajectory:
    return Trajectory(self.question, 0, 0, (), tuple(self.turns),
                      self.end or 'turn_limit', search_error=self.error)


def _open(games: Mapping[str, _Game]) -> list[_Game]:
  return [game for game in games.values() if not game.end]
