# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Published simulators, and prompts that ask a language model for documents.

A simulator is a language model that writes documents as a search engine would
return them. The prompts for a model that was not tuned to simulate contain an
example, as for ZeroSearch's prompted simulators (arXiv:2505.04588, section
3.3). The wording and the example are ours. Our prompt for useful documents
contains the question and its answer, and our prompt for noisy documents does
not. ZeroSearch's own prompts for tuned simulators both contain them.
"""

from collections.abc import Callable
import dataclasses
import re
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.papers.zerosearch.documents import Task
from searchrl.trajectory import SearchError

PUBLISHED = {  # ZeroSearch's simulators, tuned on the results of an engine
    f'{engine}_{size}': f'sunhaonlp/Simulation_LLM_{engine}_{size.upper()}_V2'
    for engine in ('google', 'wiki') for size in ('3b', '7b', '14b')}
PROMPTED = {  # models that were not tuned, which are asked with an example
    f'qwen2.5-{size}-instruct': f'Qwen/Qwen2.5-{size.upper()}-Instruct'
    for size in ('3b', '7b', '14b')}
SHAPES = {  # base model of each simulator, as ZeroSearch's paper says
    path: f'Qwen/Qwen2.5-{name.partition("_")[2].upper()}'
    for name, path in PUBLISHED.items()}
_FIELD = re.compile(r'\{(query|problem|ground_truth)\}')
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


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Prompt templates that ask a language model for documents.

  Both may contain {query}, {problem} (the question) and {ground_truth} (the
  question's first answer).

  Attributes:
    useful: Template for useful documents.
    noisy: Template for noisy documents.
  """

  useful: str
  noisy: str

  def of(self, task: Task) -> str | SearchError:
    """Returns the prompt that asks a model for the documents of a task.

    The result is a SearchError if the prompt needs the question's answer, but
    the question has none. A {field} inside inserted text is not replaced.
    """
    template = self.useful if task.useful else self.noisy
    question = task.query.question
    if '{ground_truth}' in template and not question.answers:
      return SearchError('unanswerable',
                         f'question {question.uid!r} has no answer')
    values = {'query': task.query.text, 'problem': question.text,
              'ground_truth': (*question.answers, '')[0]}
    return _FIELD.sub(lambda field: values[field[1]], template)


def zerosearch() -> Prompts:
  """Returns the prompts that ZeroSearch's published simulators were tuned with.

  Source: ZeroSearch's code, word for word (third_party). The prompts always ask
  for five documents, regardless of how many the policy is shown.
  """
  return Prompts(*(dialogues.verbatim(f'zerosearch_{quality}.txt')
                   for quality in ('useful', 'noisy')))


def demonstrated() -> Prompts:
  """Returns prompts with an example, for models not tuned to simulate engines.

  They ask for five documents, regardless of how many the policy is shown.
  """
  return Prompts(
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


_NAMED: dict[str, Callable[[], Prompts]] = {
    'zerosearch': zerosearch, 'demonstrated': demonstrated}


def find(spec: Any) -> Prompts:
  """Returns prompts by their name, or makes them of two templates.

  Args:
    spec: Name 'zerosearch' or 'demonstrated', or dict(useful=..., noisy=...).

  Raises:
    ValueError: There are no prompts of that name.
  """
  if hasattr(spec, 'items'):  # a dict, or a ConfigDict
    return Prompts(**spec)
  if spec not in _NAMED:
    raise ValueError(
        f'search.options.prompts must be one of {sorted(_NAMED)}, or a dict '
        f'of useful and noisy, but is {spec!r}.')
  return _NAMED[spec]()


def of_simulator(simulator: str, writer: str) -> dict[str, str]:
  """Returns the options of a writer that uses a known simulator.

  The options are the simulator's model and the name of its prompts.

  Args:
    simulator: Name of the simulator; '' gives {}.
    writer: Name of the writer. The option for the model is named 'path' if the
      writer is 'model', and 'model' otherwise.

  Raises:
    ValueError: There is no such simulator.
  """
  if not simulator:
    return {}
  known = PUBLISHED | PROMPTED
  if simulator not in known:
    raise ValueError(
        f'search.options.simulator must be one of {sorted(known)}, or '
        f"'' for a model of your own, but is {simulator!r}.")
  field = 'path' if writer == 'model' else 'model'
  return {field: known[simulator], 'prompts': (
      'zerosearch' if simulator in PUBLISHED else 'demonstrated')}
