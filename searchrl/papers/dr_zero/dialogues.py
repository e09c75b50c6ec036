# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dialogues of a proposer: the prompts that ask it to write a question.

Each function makes a Dialogue for a tokenizer. A config names the function. The
question in the prompt is the text that `proposals.ask` returns. A turn either
searches or ends with <question> and <answer>. The prompts are our own.
"""

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tools
from searchrl.agent.dialogue import Dialogue

LAPTOP_TEMPLATE = 'Write a question. {question}\n'
TEMPLATE = """\
You write questions for others, who have to search for the answers. Below are a \
number of hops and a source document. Write one question, with one short answer \
that nobody can doubt, which takes that many hops to answer:
- Hop 1 is something that the document names. If one hop is asked for, it is the \
answer, and you do not search.
- Each further hop is a fact about the hop before it which the document does not \
tell. Find it with the search tool, one call a hop: n hops take n - 1 calls.
- The last hop is the answer.

Begin each turn with what you think, between <think> and </think>: what has been \
found, and which hop comes next. Then either call the tool between <tool_call> \
and </tool_call>; what it finds comes back between <tool_response> and \
</tool_response>. Or, when all hops are known, write the question between \
<question> and </question>, and after it the answer between <answer> and \
</answer>.

The question
- can be understood by somebody who has not seen the document, and does not \
speak of it;
- names neither the answer nor any hop between the first and the last;
- cannot be answered if a hop is left out;
- has an answer of at most five words: a name, a place, a date, a number.

One hop: <think> ... </think> <question> ... </question> <answer> ... </answer>
Three hops: <think> ... </think> <tool_call> ... </tool_call>, twice, each \
followed by what was found, and then <think> ... </think> <question> ... \
</question> <answer> ... </answer>

{question}
"""
# The same prompt in the tag protocol.
TAG_TEMPLATE = TEMPLATE.replace('tool_call>', 'search>').replace(
    'tool_response>', 'information>').replace(
        'with the search tool, one call a hop: n hops take n - 1 calls',
        'by searching, once a hop: n hops take n - 1 searches').replace(
            'call the tool between', 'search between')


def laptop(tokenizer) -> Dialogue:
  """Returns the dialogue with the short prompt of the model tiny_proposer."""
  return dialogues.tags(tokenizer.leading_space + LAPTOP_TEMPLATE)


def in_tags(tokenizer) -> Dialogue:
  """Returns the Dialogue of a proposer, the model that writes questions.

  It uses no chat template. Tags such as <search> and <question> mark the parts
  of a turn.
  """
  return dialogues.tags(tokenizer.leading_space + TAG_TEMPLATE)


def in_chat(tokenizer) -> Dialogue:
  """Returns the dialogue of `in_tags`, with the prompt as a user's message.

  Raises:
    ValueError: There is no chat template, or it cannot frame a question.
  """
  return chat.in_one_turn(dialogues.tags(TAG_TEMPLATE), tokenizer)


def with_tool(tokenizer) -> Dialogue:
  """Returns the dialogue of a proposer that searches by tool calls of a chat.

  Dr. Zero's proposer searches in this way.

  Raises:
    ValueError: There is no chat template, or it cannot frame this protocol.
  """
  return tools.make(tokenizer, template=TEMPLATE)
