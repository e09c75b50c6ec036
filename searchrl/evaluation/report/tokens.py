# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A trajectory as segments of tokens with their numbers, for page and terminal."""

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
  """Consecutive tokens of one writer.

  Attributes:
    role: PROMPT, POLICY or OBSERVATION.
    texts: of the tokens; together they are the text.
    logprobs: of the sampler, in nats; () but for the policy's.
    ratios: learner over sampler; () where the learner said nothing.
    advantages: () likewise.
    trained: whether the loss is over these tokens; None: nobody has noted it.
    turn: that it is of; None of the prompt.
  """

  role: str
  texts: tuple[str, ...]
  logprobs: tuple[float, ...] = ()
  ratios: tuple[float, ...] = ()
  advantages: tuple[float, ...] = ()
  trained: bool | None = False
  turn: Turn | None = None


def segments(trajectory: Trajectory, tokenizer: tokenizers.Tokenizer | None,
             learned: Mapping[str, Any]) -> Iterator[Segment]:
  """The segments of a conversation, in order.

  Args:
    trajectory: finished.
    tokenizer: of the policy; None: each segment is one text.
    learned: `records.read_learned` of it; {} if there is none.
  """
  if trajectory.prompt_tokens:
    yield Segment(PROMPT, _texts(
        trajectory.prompt_tokens, trajectory.prompt, tokenizer))
  used = 0
  for turn in trajectory.turns:
    if turn.action_tokens:
      end = used + len(turn.action_tokens)
      yield _of_policy(turn, tokenizer, learned, slice(used, end))
      used = end
    if turn.observation_tokens or turn.observation or turn.passages:
      yield Segment(OBSERVATION, _texts(
          turn.observation_tokens, turn.observation, tokenizer), turn=turn)


def _of_policy(turn: Turn, tokenizer: tokenizers.Tokenizer | None,
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
  """A text a token; a character of several tokens stands at the last."""
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
