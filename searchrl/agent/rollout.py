# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Questions in, finished trajectories out: the host-side driver of the slots.

The engine, the search and the dialogue arrive as arguments. A slot plays one
trajectory; a finished one's slot goes to the next in the queue, and a search
pauses its slot while others decode. Admission is deterministic: slots are
filled and extended in a fixed order, so that a repeated run is bitwise equal.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.trajectory import (Action, Query, Question, SearchError, SearchFn,
                                 Trajectory, Turn)


@dataclasses.dataclass(frozen=True)
class Budgets:
  """Where a trajectory must end; lengths in tokens.

  Attributes:
    max_turns: actions, the answer included; a search in the last one is not
      carried out.
    max_turn_tokens: of one action.
    max_prompt_tokens: a longer prompt is refused, never cut.
    passage_tokens: each passage is cut to this many.
    top_k: passages a search.
  """

  max_turns: int = 5
  max_turn_tokens: int = 48
  max_prompt_tokens: int = 128
  passage_tokens: int = 96
  top_k: int = 2


@dataclasses.dataclass
class _Game:
  """A trajectory being played."""

  row: int  # its place in the result
  trajectory: Trajectory
  pending: tuple[int, ...]  # what its slot is fed next
  slot: int | None = None
  fresh: bool = True


def play(
    requests: Sequence[tuple[Question, int]],
    *,
    engine: Any,
    search: SearchFn,
    dialogue: dialogues.Dialogue,
    tokenizer: Any,
    budgets: Budgets,
    row_ids: Callable[[int, str, int, int], Sequence[int]],
    append: Callable[..., Any],
    step: int,
    policy_step: int,
    progress: Callable[[int], None] = lambda finished: None,
) -> list[Trajectory]:
  """Plays every (question, sample) to its end.

  Args:
    requests: what to play; a question's samples differ in their randomness.
    engine: `slots`, `length`, `append`, `decode`, `used`, `release`; see
      `models.engine.Engine`. It must have been given weights.
    search: answers all queries of a pass in one call.
    dialogue: the protocol.
    tokenizer: see `agent.tokenizer`.
    budgets: limits.
    row_ids: (step, uid, sample, turn) -> what the row's key is folded from.
    append: makes what `engine.append` takes, from keyword arguments.
    step: of the run; part of every row's randomness.
    policy_step: written into the trajectories.
    progress: told how many have finished, after each pass.

  Returns:
    Trajectories in the order of `requests`, without rewards.

  Raises:
    ValueError: a prompt longer than max_prompt_tokens.
  """
  queue = [_new_game(row, question, sample, policy_step, dialogue, tokenizer,
                     budgets)
           for row, (question, sample) in enumerate(requests)][::-1]
  free = list(range(engine.slots))[::-1]
  playing = {}
  finished = {}
  waiting = []  # games whose slot is to be fed
  while queue or playing:
    while queue and free:
      game = queue.pop()
      game.slot = free.pop()
      playing[game.slot] = game
      waiting.append(game)
    feeds = []
    for game in waiting:
      feed = _feed(game, engine, budgets, row_ids, append, step)
      if feed is None:  # it does not fit: the trajectory ends here
        _finish(game, 'length_limit', playing, finished, free, engine)
      else:
        feeds.append(feed)
    if feeds:
      engine.append(feeds)
    stopped = engine.decode() if playing else []
    games = [playing[s.slot] for s in stopped]
    waiting = _advance(games, stopped, search, dialogue, tokenizer, budgets,
                       engine, playing, finished, free)
    progress(len(finished))
  return [finished[row] for row in range(len(requests))]


def _new_game(row, question, sample, policy_step, dialogue, tokenizer, budgets):
  prompt = tokenizer.encode_data(dialogue.prompt(question.text))
  if len(prompt) > budgets.max_prompt_tokens:
    raise ValueError(
        f'a prompt may have rollout.max_prompt_tokens='
        f'{budgets.max_prompt_tokens} tokens, but that of question '
        f'{question.uid!r} has {len(prompt)}. Raise the limit, or leave the '
        'question out.')
  return _Game(row, Trajectory(question, sample, policy_step, prompt), prompt)


def _feed(game, engine, budgets, row_ids, append, step):
  """What the slot is fed; None if not one token could be sampled after it."""
  used = 0 if game.fresh else engine.used(game.slot)
  budget = min(budgets.max_turn_tokens,
               engine.length - used - len(game.pending))
  if budget < 1:
    return None
  question, turn = game.trajectory.question, len(game.trajectory.turns)
  feed = append(
      slot=game.slot, tokens=game.pending, budget=budget, fresh=game.fresh,
      row_ids=row_ids(step, question.uid, game.trajectory.sample, turn))
  if turn:  # what the policy now reads belongs to the turn that asked for it
    last = dataclasses.replace(game.trajectory.turns[-1],
                               observation_tokens=game.pending)
    game.trajectory = dataclasses.replace(
        game.trajectory, turns=(*game.trajectory.turns[:-1], last))
  game.fresh = False
  return feed


def _advance(games, stopped, search, dialogue, tokenizer, budgets, engine,
             playing, finished, free) -> list[_Game]:
  """Reads what the stopped slots said; the games that go on, fed next."""
  actions = [dialogue.parse(tokenizer.decode(s.tokens)) for s in stopped]
  asking = []
  for game, said, action in zip(games, stopped, actions, strict=True):
    turn = Turn(said.tokens, said.logprobs, action)
    game.trajectory = dataclasses.replace(
        game.trajectory, turns=(*game.trajectory.turns, turn))
    if action.kind == 'search' and _limit(game, budgets, engine) is None:
      asking += [Query(text, budgets.top_k, game.trajectory.question)
                 for text in action.texts]
  found = iter(search(asking) if asking else ())
  going_on = []
  for game, action in zip(games, actions, strict=True):
    reason = _react(game, action, found, dialogue, tokenizer, budgets, engine)
    if reason is None:
      going_on.append(game)
    else:
      _finish(game, reason, playing, finished, free, engine)
  return going_on


def _limit(game, budgets, engine) -> str | None:
  """The limit after which nothing, a search neither, is carried out."""
  if engine.used(game.slot) >= engine.length:
    return 'length_limit'
  if len(game.trajectory.turns) >= budgets.max_turns:
    return 'turn_limit'
  return None


def _react(game, action: Action, found, dialogue, tokenizer, budgets, engine):
  """Takes an action's results; the stop reason, or None to go on."""
  if action.kind == 'answer':
    return 'answer'
  limit = _limit(game, budgets, engine)
  if limit is not None:
    return limit
  if action.kind == 'invalid':
    game.pending = tokenizer.encode(dialogue.invalid)
    return None
  results = [next(found) for _ in action.texts]
  if any(isinstance(result, SearchError) for result in results):
    return 'search_error'
  passages = tuple(p for result in results for p in result)
  shown = dialogues.observation(
      dialogue, passages, tokenizer, passage_tokens=budgets.passage_tokens)
  last = dataclasses.replace(game.trajectory.turns[-1], passages=passages,
                             passages_cut=shown.passages_cut)
  game.trajectory = dataclasses.replace(
      game.trajectory, turns=(*game.trajectory.turns[:-1], last))
  game.pending = shown.tokens
  return None


def _finish(game, reason, playing, finished, free, engine) -> None:
  finished[game.row] = dataclasses.replace(
      game.trajectory, stop_reason=reason)
  del playing[game.slot]
  engine.release(game.slot)
  free.append(game.slot)
