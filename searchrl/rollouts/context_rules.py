# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rules for a conversation with a full context; `Budgets.when_full` names one.

  stop       The trajectory ends. Its stop reason is length_limit.
  drop       A new context begins with the whole conversation, in which the
             oldest observations are replaced by a short note.
  summarise  The policy is asked for a summary. A new context begins with the
             question, the summary, and the last action and its observation.

The policy's tokens are trained on in the context in which they were sampled,
with all tokens that it had read there, exactly.
"""

from searchrl.agent import dialogue as dialogues
from searchrl.agent.dialogue import Dialogue
from searchrl.agent.markup import neutralise
from searchrl.trajectory import Action, ToolResult, Trajectory

RULES = ('stop', 'drop', 'summarise')
_LEFT_OUT = ToolResult('Left out to make room.')
_NOTE_TOKENS = 32  # limit of the note's length; it is shorter
_NOTES = '\nNotes on what was found so far:\n'


def without_oldest(
    trajectory: Trajectory,
    observation: tuple[int, ...],
    *,
    dialogue: Dialogue,
    tokenizer,
    target: int,
) -> tuple[int, ...]:
  """Returns a conversation's tokens, shortened to about `target` tokens.

  Observations are replaced by a short note, the oldest first, until there are
  at most `target` tokens. The last observation is never replaced, nor is one
  that is not longer than the note.

  Args:
    trajectory: The conversation so far.
    observation: Tokens of its last observation.
    dialogue: Dialogue that writes the note.
    tokenizer: The tokenizer; see `agent.tokenizer`.
    target: Number of tokens that the result should have at most. It has more if
      all notes together do not save enough.
  """
  turns = trajectory.turns
  observed = [*(turn.observation_tokens for turn in turns[:-1]), observation]
  total = len(trajectory.prompt_tokens) + sum(
      len(turn.action_tokens) + len(tokens)
      for turn, tokens in zip(turns, observed))
  for number, turn in enumerate(turns[:-1]):
    if total <= target:
      break
    note = dialogues.observation(
        dialogue, _LEFT_OUT, tokenizer, passage_tokens=_NOTE_TOKENS,
        action_tokens=turn.action_tokens).tokens
    if len(note) < len(observed[number]):
      total -= len(observed[number]) - len(note)
      observed[number] = note
  return sum((turn.action_tokens + tokens
              for turn, tokens in zip(turns, observed)),
             trajectory.prompt_tokens)


def after_summary(trajectory: Trajectory, *, dialogue: Dialogue, tokenizer
                 ) -> tuple[int, ...]:
  """Returns the tokens of a new context, in which a summary replaces the past.

  It has the question, the summary that the last turn wrote, and the action
  before that turn with its observation. Tags in the summary are broken, so that
  it is read as data.
  """
  *_, acted, summary = trajectory.turns
  notes = neutralise(summary.action.texts[0], dialogue.tag_names)
  question = trajectory.question.text + _NOTES + notes
  return (*dialogues.opening(dialogue, question, tokenizer),
          *acted.action_tokens, *acted.observation_tokens)


def summary(dialogue: Dialogue, text: str) -> Action:
  """Returns the action of a turn in which the policy was asked for a summary.

  If the policy answered the question instead, it is that answer. Else it is a
  'summary' whose text is what follows the policy's thoughts.
  """
  action = dialogue.parse(text)
  if action.kind == 'answer':
    return action
  return Action('summary', (text.rpartition('</think>')[2].strip(),))

