# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ZeroSearch's dialogues: of a policy that reads documents, and of a writer."""

import dataclasses

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent.dialogue import Dialogue
from searchrl.agent.markup import neutralise
from searchrl.agent.tokenizer import Tokenizer
from searchrl.trajectory import Passage


def document(number: int, passage: Passage) -> str:
  """Returns a passage as ZeroSearch writes it: 'Doc NUMBER: TITLE TEXT'.

  The title is left out if the text contains it.
  """
  title = '' if passage.title in passage.text else f'{passage.title} '
  return f'Doc {number}: {neutralise(title + passage.text)}'


def in_tags(tokenizer: Tokenizer) -> Dialogue:
  """Returns Search-R1's dialogue in tags; passages have ZeroSearch's form."""
  return dataclasses.replace(dialogues.search_r1(tokenizer), passage=document)


def in_chat(tokenizer: Tokenizer) -> Dialogue:
  """Returns the dialogue of `in_tags`, framed by the model's chat template."""
  return chat.in_one_turn(in_tags(tokenizer), tokenizer)


def of_writer(tokenizer: Tokenizer) -> Dialogue:
  """Returns the dialogue of the model that writes documents, in a single turn.

  The prompt is a user's message after an empty system message, as in
  ZeroSearch's code. Without a chat template, it is plain text to be continued.
  """
  plain = dialogues.continuation(tokenizer)
  return (chat.in_one_turn(plain, tokenizer, system='')
          if tokenizer.has_chat_template else plain)
