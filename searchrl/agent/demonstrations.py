# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Demonstrations: selects and writes trajectories for fine-tuning."""

from collections.abc import Callable, Hashable, Iterable, Sequence
import collections
import itertools
import os
from typing import Any

from searchrl.agent import transcripts
from searchrl.texts import Segment
from searchrl.trajectory import Trajectory, Turn


def right(trajectories: Sequence[Trajectory],
          reward: Callable[[Trajectory], float], *, most: int, balance: float
         ) -> list[Trajectory]:
  """Returns trajectories with right answers, for rejection sampling.

  Args:
    trajectories: Trajectories, several per question.
    reward: Reward function. An answer is right if its reward is 1.
    most: Maximum number of right trajectories of a question. Only the
      first of them are kept, in the order of `trajectories`.
    balance: Limit for each hop count, as a multiple of the rarest. At 2, a hop
      count keeps its first trajectories, at most twice as many as the rarest
      hop count has after `most` is applied. 0: no limit.

  Source: Yuan et al. 2023, arXiv:2308.01825; the baseline of Search-R1.
  """
  correct = _first(most, (t for t in trajectories if reward(t) == 1),
                   lambda trajectory: trajectory.question.uid)
  if not balance:
    return correct
  counts = collections.Counter(t.question.hops for t in correct)
  return _first(int(balance * min(counts.values(), default=0)), correct,
                lambda trajectory: trajectory.question.hops)


def _first(limit: int, trajectories: Iterable[Trajectory],
           kind: Callable[[Trajectory], Hashable]) -> list[Trajectory]:
  """Returns the first `limit` trajectories of each kind, in the given order."""
  counts: collections.Counter[Hashable] = collections.Counter()
  selected = []
  for trajectory in trajectories:
    counts[kind(trajectory)] += 1
    if counts[kind(trajectory)] <= limit:
      selected.append(trajectory)
  return selected


def lines(trajectory: Trajectory, tokenizer, *, untrained: Iterable[int] = ()
         ) -> list[dict[str, Any]]:
  """Returns a trajectory as records of fine-tuning data, one for each context.

  There is one context, unless it was full and a new one followed. A record is
  {"segments": [...]}, as `data.conversations` reads it. Only the policy's text
  is trained on.

  The texts include the special tokens of the chat template, and the tokens by
  which the policy ended its turns. Text after a stop string is left out. Text
  that the policy reads keeps the ids of the rollout. A passage that was cut, or
  that spells a special token, may therefore be several segments.

  Args:
    trajectory: The trajectory.
    tokenizer: Tokenizer of the model that is trained.
    untrained: Numbers of turns, from 0, that are not trained on.
  """
  written, number = [], itertools.count()
  for context in trajectory.contexts:
    pieces = exact(context.prompt_tokens, tokenizer, first=True)
    for turn in context.turns:
      pieces += _action(turn, tokenizer, next(number) not in untrained)
      pieces += exact(turn.observation_tokens, tokenizer)
    written.append({'segments': [piece.record for piece in pieces]})
  return written


def _action(turn: Turn, tokenizer, trained: bool) -> list[Segment]:
  """Returns the segments of the text that the policy wrote in a turn.

  Usually it is one segment. If the policy wrote the name of a special token as
  ordinary text, the text is cut there, because otherwise the name would be
  encoded as the special token. `trained` is the segments' flag.
  """
  unread = tokenizer.decode(turn.action_tokens).removeprefix(turn.text)
  text = tokenizer.write(turn.action_tokens).removesuffix(unread)
  special = [[id_ for id_ in ids if id_ in tokenizer.special_ids]
             for ids in (tokenizer.encode(text), turn.action_tokens)]
  if special[0] == special[1]:
    return [Segment(text, trained)]
  return exact(turn.action_tokens, tokenizer, trained=trained)


def exact(ids: Sequence[int], tokenizer, *, trained: bool = False,
          first: bool = False) -> list[Segment]:
  """Returns segments whose texts are tokenized into exactly the given ids.

  Usually, one segment of text is enough. A new segment begins where the text as
  a whole would be tokenized into other ids, and where the name of a special
  token was written as ordinary text. Some ids do not result from any text, such
  as the id of half a character. They are kept as a segment of ids.

  Args:
    ids: Ids of a part of a conversation.
    tokenizer: Tokenizer that encodes the segments.
    trained: Whether the segments are trained on.
    first: Whether the segments begin the conversation.
  """
  pieces: list[Segment] = []
  ids = tuple(ids)
  while ids:
    piece, count = _longest(ids, tokenizer, trained, first and not pieces)
    if pieces and piece.ids and pieces[-1].ids:
      piece = Segment('', trained, ids=pieces.pop().ids + piece.ids)
    pieces.append(piece)
    ids = ids[count:]
  return pieces


def _longest(ids: tuple[int, ...], tokenizer, trained: bool, first: bool
            ) -> tuple[Segment, int]:
  """Returns the longest segment whose tokenization is a beginning of `ids`.

  The second result is the number of these ids. If no text gives the first id,
  the segment has this id instead. `trained` and `first` are as in `exact`.
  """
  best = Segment('', trained, ids=ids[:1]), 0
  for special in (True, False):
    piece = _text(ids, tokenizer, trained, special, first)
    count = len(ids)
    while count and (encoded := transcripts.encode(
        piece, tokenizer, first=first)) != ids[:count]:
      same = len(os.path.commonprefix([encoded, ids[:count]]))
      count = min(max(same, 1), count - 1)
      piece = _text(ids[:count], tokenizer, trained, special, first)
    if count > best[1]:
      best = piece, count
  return best[0], max(best[1], 1)


def _text(ids: Sequence[int], tokenizer, trained: bool, special: bool,
          first: bool = False) -> Segment:
  return Segment(tokenizer.write(ids, first=first), trained, special)
