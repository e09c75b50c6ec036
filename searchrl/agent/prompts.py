# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts of the methods that agents are compared with, in our own words.

A prompt is a template with one {question}. Passages may be above the question,
and the text written so far below it. The tiny base models have prompts of their
own for those tasks that their training data includes.
"""

from collections.abc import Mapping

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent.dialogue import Dialogue

_BRIEFLY = 'as briefly as you can, between <answer> and </answer>'
PLAIN = {
    'direct': dialogues.FROM_MEMORY,
    'cot': 'Think step by step, between <think> and </think>. Then answer the '
           f'question, {_BRIEFLY}.\nQuestion: {{question}}\n',
    'rag': dialogues.FROM_DOCUMENTS,
    'ircot': 'Below are documents, a question, and the first sentences of a '
             'thought that leads to its answer. Write the next sentence alone. '
             'If the answer is known, it is: So the answer is: ... .\n'
             '{question}',
    'agent': 'Answer the question. You may search: write a query between '
             '<search> and </search>, and read what is found between '
             '<information> and </information>, as often as you need. Then '
             f'answer {_BRIEFLY}.\nQuestion: {{question}}',
    'note': 'Below are a question, what was thought about it, a query and what '
            'it found. Write in one sentence what the documents say that helps '
            'to answer, between <answer> and </answer>.\n{question}\n',
}
LAPTOP = PLAIN | {  # prompts of the tiny base models
    'direct': dialogues.ANSWER_TEMPLATE, 'rag': dialogues.READ_TEMPLATE,
    'agent': dialogues.LAPTOP_TEMPLATE.removesuffix('\n')}  # a turn follows
SETS: Mapping[str, Mapping[str, str]] = {'plain': PLAIN, 'laptop': LAPTOP}


def framed(tokenizer, template: str) -> Dialogue:
  """Returns the dialogue of a template, in the chat template if there is one.

  Raises:
    ValueError: The chat template cannot frame the prompt.
  """
  plain = dialogues.tags(tokenizer.leading_space + template)
  return (chat.in_one_turn(plain, tokenizer) if tokenizer.has_chat_template
          else plain)
