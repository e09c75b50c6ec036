# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An oracle of a generated world: finds the facts that answer a question."""

import re

from searchrl.world import facts
from searchrl.world import text

_ASKED = re.compile('|'.join(
    re.escape(form).replace(re.escape('{}'), '(.+)') for form in text.ASKS))
_RELATION = {phrase: relation for relation, phrases in text.PHRASES.items()
             for phrase in phrases}


def understand(world: facts.World, question: str) -> facts.Chain | None:
  """Returns the chain of facts that answers a question, or None.

  It is None if the question cannot be parsed or the world lacks a fact.

  Args:
    world: World, with its names and facts.
    question: Question in any of the wordings that `world.text.ask` can choose.
  """
  match = _ASKED.fullmatch(question.strip())
  rest = next(filter(None, match.groups()), '') if match else ''
  relations: list[str] = []
  while rest and rest not in world.kind_of:
    phrase = next((p for p in _RELATION if rest.startswith(f'{p} ')), None)
    if phrase is None:
      return None
    relations.insert(0, _RELATION[phrase])
    rest = rest.removeprefix(f'{phrase} ')
    if rest not in world.kind_of:
      rest = rest.removeprefix('the ')
  here, values = rest, []
  for relation in relations:
    here = world.facts.get((here, relation))
    if here is None:
      return None
    values.append(here)
  return facts.Chain(rest, tuple(relations), tuple(values)) if values else None
