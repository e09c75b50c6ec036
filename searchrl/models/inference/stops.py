# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stop strings as an automaton over token ids.

`</search>` has many tokenisations, and its last bracket may share a token with
the following text. Therefore the automaton (Aho and Corasick 1975) runs over
bytes and is compiled for the vocabulary once. A slot stops at the token that
completes a stop string, and ids are never split.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_STATES = 64  # the number of states in a table is a multiple of this


class StopTable(NamedTuple):
  """An automaton that finds stop strings in a sequence of token ids.

  It is an Aho-Corasick automaton that makes one step per token. Its two tables
  have a row for each of S states and a column for each of V ids. State 0 is the
  start.

  S is padded to a multiple of 64, so that one compiled program takes the tables
  of nearly all dialogues. The tags `</search>` and `</answer>`, for example,
  need 17 states. With 152,000 ids and 64 states, the two tables have 19 MB
  together.
  """

  next_state: np.ndarray  # next state, [S, V], uint8; uint16 above 256 states
  hit: np.ndarray  # True where the token ends the turn, [S, V], bool


def compile_table(
    token_bytes: Sequence[bytes],
    stop_strings: Sequence[str],
    vocab_size: int | None = None,
    end_ids: Sequence[int] = (),
) -> StopTable:
  """Compiles stop strings and end ids into a table for one vocabulary.

  Args:
    token_bytes: Text of each id, as bytes; see `Tokenizer.token_bytes`.
    stop_strings: Strings that end a turn, none of them empty. There must be at
      least one, unless there are end_ids.
    vocab_size: Number of ids, V. Ids beyond `token_bytes` have no text. It
      defaults to the length of `token_bytes`.
    end_ids: Ids that also end a turn, whatever their text.

  Raises:
    ValueError: Nothing ends a turn, a stop string is empty, or there are more
      than 65,536 states.
  """
  if not (stop_strings or end_ids) or not all(stop_strings):
    raise ValueError(
        'stop_strings must hold at least one string, unless there are end_ids, '
        f'and no empty one, but is {list(stop_strings)!r}.')
  step, ends = _byte_automaton([s.encode() for s in stop_strings])
  if len(step) > 2 ** 16:
    raise ValueError(
        f'stop_strings must have at most {2 ** 16} prefixes together, but have '
        f'{len(step)}. Leave some out.')
  size = max(vocab_size or 0, len(token_bytes))
  longest = max(map(len, token_bytes), default=0)
  text = np.zeros((size, longest), np.int64)
  length = np.zeros(size, np.int64)
  for id_, piece in enumerate(token_bytes):
    text[id_, :len(piece)] = list(piece)
    length[id_] = len(piece)
  state = np.repeat(np.arange(len(step))[:, None], size, 1)
  hit = np.zeros(state.shape, bool)
  for i in range(longest):
    inside = np.flatnonzero(i < length)
    state[:, inside] = step[state[:, inside], text[inside, i]]
    hit[:, inside] |= ends[state[:, inside]]
  hit[:, list(end_ids)] = True
  unused = (0, -len(step) % _STATES), (0, 0)
  return StopTable(
      np.pad(state.astype(np.uint8 if len(step) <= 256 else np.uint16), unused),
      np.pad(hit, unused))


def _byte_automaton(words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
  """Returns transitions [S, 256] and accepting states [S] for these words."""
  prefixes = sorted({w[:i] for w in (b'', *words) for i in range(len(w) + 1)},
                    key=lambda p: (len(p), p))
  index = {prefix: i for i, prefix in enumerate(prefixes)}
  step = np.zeros((len(prefixes), 256), np.int64)
  for prefix, state in index.items():
    for byte in range(256):
      text = prefix + bytes([byte])
      while text not in index:  # shorten to a suffix that is a word's prefix
        text = text[1:]
      step[state, byte] = index[text]
  ends = np.array([any(p.endswith(w) for w in words) for p in prefixes])
  return step, ends
