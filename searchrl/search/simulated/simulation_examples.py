# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts with an example, for a language model that was not tuned to simulate.

They have the form of ZeroSearch's prompted simulators, arXiv:2505.04588,
section 3.3. The wording and the example are ours. Only the prompt for useful
documents contains the question and its answer.
"""

from searchrl.search.simulated import simulated_documents

_ASK = '''\
You write what a web search engine would return. For a query, write five \
{quality} documents in the manner of this example.

Query: Suez Canal opening year
{heading}:
{example}

{context}Each document has about 30 words. Write the five documents in \
English, each in a line of its own, and nothing else.

Query: {{query}}
{heading}:
'''
_USEFUL = '''\
Doc 1: The Suez Canal was opened to ships on 17 November 1869, after ten \
years of work led by Ferdinand de Lesseps, and joined the Mediterranean Sea \
to the Red Sea.
Doc 2: Opened in 1869, the Suez Canal shortened the voyage between Europe and \
India by thousands of kilometres, since ships no longer had to sail around \
the Cape of Good Hope.
Doc 3: History of the canal: digging began in April 1859; the first fleet \
passed from Port Said to Suez in November 1869, with guests from all over \
Europe on board.
Doc 4: When did the Suez Canal open? It was inaugurated in November 1869 by \
the Khedive of Egypt, whose celebrations lasted for weeks and cost a fortune.
Doc 5: The waterway of 1869 was about eight metres deep. It has been widened \
and deepened many times since, most recently by a second lane that was opened \
in 2015.'''
_NOISY = '''\
Doc 1: Ships that pass the Suez Canal travel in convoys and take a pilot on \
board. The passage lasts about half a day, and tolls depend on the size of \
the ship.
Doc 2: The city of Suez lies at the southern end of the canal, on the gulf of \
the same name. It has three harbours, a refinery and a railway to Cairo.
Doc 3: A canal carries water or boats from one place to another. Locks lift a \
boat between two levels, but a canal at sea level, such as that of Suez, has \
none.
Doc 4: In March 2021 a container ship ran aground in the Suez Canal and \
blocked it for six days, while hundreds of vessels waited at both ends.
Doc 5: The opening hours of museums in Port Said change with the season. \
Visitors find exhibits on navigation there, and a view of the ships that \
enter the canal.'''


def prompts() -> simulated_documents.Prompts:
  """Returns prompts for five documents, however many the policy is shown."""
  return simulated_documents.Prompts(
      useful=_ASK.format(
          quality='useful', heading='Useful documents', example=_USEFUL,
          context='The user wants to answer the question "{problem}", whose '
          'answer is {ground_truth}. The documents should help to find that '
          'answer.\n'),
      noisy=_ASK.format(
          quality='related but unhelpful', heading='Unhelpful documents',
          example=_NOISY,
          context='The documents are about what the query names, but do not '
          'help with it.\n'))
