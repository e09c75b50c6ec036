# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: the table of DESIGN.md, section 2, on the sources."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / 'searchrl'
NOUNS = ('trajectory', 'packing')
WINGS = ('agent', 'search', 'world', 'rl', 'models')
MIDDLE = ('rollouts', 'training', 'encoders', 'data')
FLOORS = (  # a room may import rooms of lower floors, if its row names them
    (*NOUNS, 'runtime'), WINGS, MIDDLE, ('evaluation', 'serving'),
    ('experiment',), ('jobs',))
BELOW = {room: tuple(r for floor in FLOORS[:i] for r in floor)
         for i, floor in enumerate(FLOORS) for room in floor}

MAY_IMPORT = {  # room -> rooms of ours, besides itself
    **{noun: () for noun in NOUNS},
    'runtime': (),
    'agent': ('trajectory',),
    'search': ('trajectory',),
    'world': ('trajectory',),
    'rl': ('trajectory',),
    'models': ('trajectory', 'packing'),
    'rollouts': ('agent', 'search', 'rl', 'models', 'runtime', 'trajectory'),
    'training': ('rl', 'models', 'runtime', *NOUNS),
    'encoders': ('models', 'search', 'runtime'),
    'data': ('search', 'world', 'runtime', 'trajectory'),
    **{room: BELOW[room] for room in (
        'evaluation', 'serving', 'experiment', 'jobs')},
    'main': ('runtime',),  # the job is named by the config
    '__init__': ('runtime',),  # which names what has moved
}
_DEVICES = ('jax', 'jaxlib', 'flax', 'optax')
_RUN = ('absl', 'ml_collections', 'logging', 'os')
NEVER = {  # part -> what must not be named in it
    'agent': _DEVICES, 'search': _DEVICES, 'world': _DEVICES,
    'rl': ('flax', *_RUN), 'models': _RUN, 'training': _RUN,
    **{room: ('flax', 'absl', 'ml_collections') for room in MAY_IMPORT
       if room not in (*WINGS, 'training', 'main')},
}
EXEMPT = {  # file: what it may name all the same
    'search/index/exact_device.py': ('jax',),
}
FILES = sorted(str(f.relative_to(PACKAGE)) for f in PACKAGE.rglob('*.py'))


def part_of(file: str) -> str:
  return file.partition('/')[0].removesuffix('.py')


def imports(source: str) -> set[str]:
  """Dotted names that a source imports, anywhere in it."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, 'relative imports hide the layer: write searchrl.'
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
  return found


def complaints(file: str, source: str) -> list[str]:
  part = part_of(file)
  if part not in MAY_IMPORT:
    return [f'{file} is in no row of DESIGN.md, section 2. Give it one there, '
            'and in MAY_IMPORT here.']
  result = []
  allowed = (part, *MAY_IMPORT[part])
  for name in sorted(imports(source)):
    top, _, rest = name.partition('.')
    ours = rest.partition('.')[0]
    if top == 'searchrl' and ours not in allowed:
      result.append(
          f'{file} imports {name}, but {part} may import only: '
          f'{" ".join(allowed)}. Pass it in as an argument.')
    if top in NEVER.get(part, ()) and top not in EXEMPT.get(file, ()):
      result.append(
          f'{file} imports {name}, but {part} never names {top}. Take what it '
          'gives as an argument, or move the code to a part that may.')
  return result


@pytest.mark.parametrize('file', FILES)
def test_imports_only_what_its_row_allows(file):
  found = complaints(file, (PACKAGE / file).read_text(encoding='utf-8'))
  assert not found, '\n'.join(found)


def test_only_models_name_flax():
  naming = {part_of(file) for file in FILES
            if any(name.partition('.')[0] == 'flax' for name in
                   imports((PACKAGE / file).read_text(encoding='utf-8')))}
  assert naming == {'models'}


def test_every_row_of_the_table_has_files():
  missing = set(MAY_IMPORT) - {part_of(file) for file in FILES}
  assert not missing, f'take {missing} out of MAY_IMPORT: there is no such part'


@pytest.mark.parametrize('file, source, remedy', [
    ('agent/x.py', 'from searchrl.models import engine',
     'agent may import only: agent trajectory. Pass it in as an argument.'),
    ('world/x.py', 'from searchrl.jobs import ask', 'Pass it in as an argument.'),
    ('rl/x.py', 'def f():\n  from searchrl.runtime import mesh',
     'rl may import only'),
    ('search/x.py', 'import jax.numpy as jnp', 'search never names jax'),
    ('agent/x.py', 'from jax import Array', 'Take what it gives as an arg'),
    ('main.py', 'import searchrl.jobs.train', 'main may import only: main runtime.'),
    ('new.py', '', 'Give it one there, and in MAY_IMPORT here.'),
])
def test_a_breach_is_found_and_its_remedy_told(file, source, remedy):
  assert any(remedy in complaint for complaint in complaints(file, source))
