# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A trajectory as segments of tokens with numbers, for page and terminal."""

import codecs
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any

from searchrl.agent import tokenizer as tokenizers
from searchrl.trajectory import Trajectory, Turn

PROMPT, POLICY, OBSERVATION = 'prompt', 'policy', 'observation'


@dataclasses.dataclass(frozen=True)
class Segment:
  """Consecutive tokens that were written by the policy or the environment."""

  role: str  # PROMPT, POLICY or OBSERVATION
  texts: tuple[str, ...]  # a text per token, or the whole text as one
  # Log-probs of the sampler, in nats; only the policy has them.
  logprobs: tuple[float, ...] = ()
  # Ratios of learner to sampler, and advantages; () where the learner has none.
  ratios: tuple[float, ...] = ()
  advantages: tuple[float, ...] = ()
  trained: bool | None = False  # True: in the loss; None: not recorded
  turn: Turn | None = None  # None: the prompt


def segments(trajectory: Trajectory, tokenizer: tokenizers.Tokenizer | None,
             learned: Mapping[str, Any]) -> Iterator[Segment]:
  """Yields the segments of a conversation: prompt, actions and observations.

  If the trajectory has several contexts, their segments follow each other.

  Args:
    trajectory: The finished trajectory.
    tokenizer: Tokenizer of the policy, which gives the segments a text per
      token. None: each segment is one text.
    learned: Result of `records.read_learned` for the trajectory; {} if there is
      none.
  """
  start = 0
  for context in trajectory.contexts:
    if context.prompt_tokens:
      yield Segment(PROMPT, _texts(
          context.prompt_tokens, context.prompt, tokenizer))
    for turn in context.turns:
      if turn.action_tokens:
        end = start + len(turn.action_tokens)
        yield _policy_segment(turn, tokenizer, learned, slice(start, end))
        start = end
      if turn.observation_tokens or turn.observation or turn.passages:
        yield Segment(OBSERVATION, _texts(
            turn.observation_tokens, turn.observation, tokenizer), turn=turn)


def _policy_segment(turn: Turn, tokenizer: tokenizers.Tokenizer | None,
                    learned: Mapping[str, Any], part: slice) -> Segment:
  old = (learned.get('old_logprobs') or ())[part]
  advantages = (learned.get('advantages') or ())[part]
  return Segment(
      POLICY, _texts(turn.action_tokens, turn.text, tokenizer),
      turn.action_logprobs,
      tuple(math.exp(min(new - was, 80.0))
            for new, was in zip(old, turn.action_logprobs)),
      tuple(advantages), bool(old) if learned else None, turn)


def _texts(ids: Sequence[int], text: str,
           tokenizer: tokenizers.Tokenizer | None) -> tuple[str, ...]:
  """Returns a text per token, or (text,) if there are no ids or no tokenizer.

  If a character consists of several tokens, the last of them has it as its
  text, and the others have ''. The text of a special token is its name.
  """
  if tokenizer is None or not ids:
    return (text,)
  decoder, result = codecs.getincrementaldecoder('utf-8')('replace'), []
  for id_ in ids:
    known = 0 <= id_ < len(tokenizer.token_bytes)
    written = tokenizer.token_bytes[id_] if known else b''
    result.append(decoder.decode(written) if written else (
        tokenizer.token(id_) if known else f'[{id_}]'))
  result[-1] += decoder.decode(b'', final=True)
  return tuple(result)
