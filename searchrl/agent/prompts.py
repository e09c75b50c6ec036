# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts of the methods with which agents are compared, in our own words.

A prompt is a template with one {question}. Passages may come before the
question, and the text written so far may come after it. The prompts of the tiny
base models, LAPTOP, are shorter. If a task is in their training data, its
prompt there is used. No prompt is copied from its source. PLAIN differs from
the sources (arXiv numbers in brackets) as follows:

  direct, rag  no source fixes a prompt; no demonstrations, as in FlashRAG
  cot          3 demonstrations of facts, not 8 of arithmetic (2201.11903)
  ircot        2 demonstrations, not about 15 of one data set (2212.10509)
  agent        Search-o1's instruction and its worked example (2501.05366), with
               Search-R1's tags in place of special tokens and a boxed answer
  note         Search-o1's Reason-in-Documents, with its answer between tags
"""

from collections.abc import Mapping

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent.dialogue import Dialogue

_BRIEFLY = 'as briefly as you can, between <answer> and </answer>'
_THOUGHTS = """\
Question: In which country was the composer of The Magic Flute born?
<think> The Magic Flute is by Wolfgang Amadeus Mozart. Mozart was born in \
Salzburg. Salzburg is in Austria. </think>
<answer> Austria </answer>

Question: Which river flows through the capital of Hungary?
<think> The capital of Hungary is Budapest. The Danube flows through Budapest. \
</think>
<answer> the Danube </answer>

Question: Who was born first, Isaac Newton or Albert Einstein?
<think> Isaac Newton was born in 1643. Albert Einstein was born in 1879. 1643 \
is before 1879, so Newton was born first. </think>
<answer> Isaac Newton </answer>

"""
_CHAINS = """\
Doc 1(Title: "The Magic Flute") The Magic Flute is an opera in two acts by \
Wolfgang Amadeus Mozart to a German libretto by Emanuel Schikaneder.
Doc 2(Title: "Wolfgang Amadeus Mozart") Mozart was born in Salzburg, then the \
capital of a small state, and moved to Vienna in 1781.
Question: In which city was the composer of The Magic Flute born?
Thought: The Magic Flute is by Wolfgang Amadeus Mozart. Mozart was born in \
Salzburg. So the answer is: Salzburg.

Doc 1(Title: "Isaac Newton") Isaac Newton was an English mathematician and \
physicist, born at Woolsthorpe in 1643.
Doc 2(Title: "Albert Einstein") Albert Einstein was a physicist, born at Ulm in \
1879.
Question: Who was born first, Isaac Newton or Albert Einstein?
Thought: Isaac Newton was born in 1643. Albert Einstein was born in 1879. So \
the answer is: Isaac Newton.

"""
_SEARCHES = """\
Question: In which city was the composer of The Magic Flute born?
I have to know who composed The Magic Flute.
<search> composer of The Magic Flute </search>

<information>Doc 1(Title: "The Magic Flute") The Magic Flute is an opera in two \
acts by Wolfgang Amadeus Mozart to a German libretto by Emanuel \
Schikaneder.</information>

It is by Mozart. Now I have to know where Mozart was born.
<search> birthplace of Wolfgang Amadeus Mozart </search>

<information>Doc 1(Title: "Wolfgang Amadeus Mozart") Mozart was born in \
Salzburg and moved to Vienna in 1781.</information>

Mozart was born in Salzburg.
<answer> Salzburg </answer>

"""
PLAIN = {
    'direct': dialogues.FROM_MEMORY,
    'cot': 'Think step by step, between <think> and </think>. Then answer the '
           f'question, {_BRIEFLY}.\n\n{_THOUGHTS}Question: {{question}}\n',
    'rag': dialogues.FROM_DOCUMENTS,
    'ircot': 'Below are documents, a question, and the first sentences of a '
             'thought that leads to its answer. Write the next sentence alone. '
             'If the answer is known, it is: So the answer is: ... .\n\n'
             f'{_CHAINS}{{question}}',
    'agent': 'Answer the question step by step. Whenever you are unsure of a '
             'fact, search for it: write a query between <search> and '
             '</search>, and what is found stands between <information> and '
             '</information>. Then go on, and search again if you need to. '
             f'At the end answer {_BRIEFLY}.\n\n{_SEARCHES}'
             'Question: {question}',
    'note': 'Below are a question, the thoughts about it so far, a query and '
            'the documents that it found. Read the documents with care, and '
            'pick what the query asks for and what takes the thoughts further. '
            'Write that alone, in a sentence or two, between <answer> and '
            '</answer>. If the documents do not help, write there: No helpful '
            'information found.\n{question}\n',
}
LAPTOP = PLAIN | {  # prompts of the tiny base models, which have little room
    'direct': dialogues.ANSWER_TEMPLATE, 'rag': dialogues.READ_TEMPLATE,
    'cot': PLAIN['cot'].replace(f'\n{_THOUGHTS}', ''),
    'ircot': PLAIN['ircot'].replace(f'\n{_CHAINS}', ''),
    'note': 'Below are a question, what was thought about it, a query and what '
            'it found. Write in one sentence what the documents say that helps '
            'to answer, between <answer> and </answer>.\n{question}\n',
    'agent': dialogues.LAPTOP_TEMPLATE.removesuffix('\n')}  # a turn follows
SETS: Mapping[str, Mapping[str, str]] = {'plain': PLAIN, 'laptop': LAPTOP}


def framed(tokenizer, template: str) -> Dialogue:
  """Returns the tag protocol with a prompt, in a chat template if there is one.

  Args:
    tokenizer: Tokenizer of the model, which may have a chat template.
    template: The prompt, which has '{question}' once.

  Raises:
    ValueError: The chat template cannot frame the prompt.
  """
  plain = dialogues.tags(tokenizer.leading_space + template)
  return (chat.in_one_turn(plain, tokenizer) if tokenizer.has_chat_template
          else plain)
