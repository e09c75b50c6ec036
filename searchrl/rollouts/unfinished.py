# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trajectories that are being sampled, or wait for it."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from searchrl.agent import dialogue as dialogues
from searchrl.trajectory import Request, Trajectory


@dataclasses.dataclass
class Unfinished:
  """A trajectory that is being sampled, or waits for it."""

  row: int  # index of its request, and of its place in the result
  trajectory: Trajectory
  pending: tuple[int, ...]  # tokens to append to its slot next
  slot: int = -1  # -1: still in the queue
  fresh: bool = True  # True: its slot is empty
  # Pending tokens that are no observation of the last turn; see `Turn`.
  lead: tuple[int, ...] = ()
  opens_context: bool = False  # True: the lead opens a new context
  routing: tuple[np.ndarray, ...] = ()  # experts of the contexts so far

  def amend(self, **fields) -> None:
    """Replaces fields of the last turn."""
    *earlier, last = self.trajectory.turns
    self.trajectory = dataclasses.replace(self.trajectory, turns=(
        *earlier, dataclasses.replace(last, **fields)))

  def forget_unread(self) -> None:
    """Removes the observation that the policy would have read after its lead.

    `follow` may be called after the observation was recorded, and before it is
    known whether the lead fits into the slot.
    """
    if not self.lead:
      return
    turns = [*self.trajectory.turns]
    index = -2 if turns[-1].action.kind == 'summary' else -1
    turns[index] = dataclasses.replace(
        turns[index], observation_tokens=(), observation='')
    self.trajectory = dataclasses.replace(self.trajectory, turns=tuple(turns))

  def follow(self, lead: tuple[int, ...], *, opens_context: bool) -> None:
    """Sets the tokens that the policy reads next instead of an observation.

    Args:
      lead: These tokens: a request for a summary, or the start of a context.
      opens_context: True if they replace all that was in the slot before.
    """
    self.pending = self.lead = lead
    self.opens_context = self.fresh = opens_context


def queue(requests: Sequence[Request], policy_step: int,
          dialogue: dialogues.Dialogue, tokenizer: Any, max_prompt_tokens: int
         ) -> list[Unfinished]:
  """Returns an unfinished trajectory with an encoded prompt for each request.

  The list is in reverse order, so that `pop` gives the first request.

  Raises:
    ValueError: A prompt has more than `max_prompt_tokens` tokens.
  """
  prompts: dict[str, tuple[tuple[int, ...], str]] = {}  # ids and text
  entries = []
  for row, request in enumerate(requests):
    question = request.question
    if question.text not in prompts:
      prompt = dialogues.opening(dialogue, question.text, tokenizer)
      prompts[question.text] = prompt, tokenizer.decode(prompt)
    prompt, text = prompts[question.text]
    if len(prompt) > max_prompt_tokens:
      raise ValueError(
          f'a prompt may have rollout.budgets.max_prompt_tokens='
          f'{max_prompt_tokens} tokens, but that of question '
          f'{question.uid!r} has {len(prompt)}. Raise the limit, or leave the '
          'question out.')
    entries.append(Unfinished(row, Trajectory(
        question, request.sample, policy_step, prompt, group=request.group,
        prompt=text), prompt))
  return entries[::-1]
