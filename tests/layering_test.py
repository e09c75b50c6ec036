# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: the table of docs/layout.md, on the sources."""

import ast
import pathlib
import statistics

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / 'searchrl'
FLOORS = (  # a room imports rooms of lower floors only, and only its row's
    ('trajectory', 'texts', 'packing', 'runtime'),
    ('agent', 'search', 'world', 'rl', 'models', 'main', '__init__'),
    ('rollouts', 'training', 'encoders', 'data', 'toolbox'),
    ('evaluation', 'serving'),
    ('experiment',),
    ('jobs', 'papers'),
)
MAY_IMPORT = {  # room -> rooms of ours, besides itself
    'trajectory': (),
    'texts': (),
    'packing': (),
    'runtime': (),
    'agent': ('trajectory', 'texts'),
    'search': ('runtime', 'trajectory'),
    'world': ('trajectory', 'texts'),
    'rl': ('trajectory',),
    'models': ('trajectory', 'packing'),
    'main': ('runtime',),  # the job is named by the config
    '__init__': (),
    'rollouts': ('agent', 'search', 'rl', 'models', 'runtime', 'trajectory'),
    'training': ('rl', 'models', 'runtime', 'trajectory', 'packing'),
    'encoders': ('models', 'search', 'runtime'),
    'data': ('search', 'world', 'runtime', 'trajectory', 'texts'),
    'toolbox': ('search', 'runtime', 'trajectory'),
    'evaluation': ('rollouts', 'data', 'agent', 'runtime', 'trajectory'),
    'serving': ('rollouts', 'search', 'models', 'runtime', 'trajectory'),
    'experiment': (
        'evaluation', 'rollouts', 'training', 'encoders', 'data', 'toolbox',
        'agent',
        'search', 'world', 'rl', 'models', 'runtime', 'trajectory'),
    'jobs': (
        'experiment', 'evaluation', 'serving', 'rollouts', 'training',
        'encoders', 'data', 'agent', 'search', 'world', 'models', 'runtime',
        'trajectory', 'texts'),
    'papers': (
        'experiment', 'evaluation', 'serving', 'rollouts', 'training',
        'encoders', 'data', 'agent', 'search', 'world', 'rl', 'models',
        'runtime', 'trajectory', 'packing'),
}
WINGS = ('agent', 'search', 'world', 'rl', 'models')
READ_CONFIGS = ('experiment', 'jobs', 'papers', 'main')
_DEVICES = ('jax', 'jaxlib', 'flax', 'optax')
_RUN = ('absl', 'ml_collections', 'logging', 'os')
NEVER = {  # part -> what must not be named in it
    'agent': _DEVICES, 'search': _DEVICES, 'world': _DEVICES,
    'rl': ('flax', *_RUN), 'models': _RUN, 'training': _RUN,
    **{room: ('flax', 'absl', 'ml_collections') for room in MAY_IMPORT
       if room not in (*WINGS, 'training', 'main')},
}
EXEMPT = {  # file: what it may name all the same
    'models/inference/compilation.py': ('os',),  # the number of cores
    'search/index/exact_device.py': ('jax',),
    'runtime/config_fields.py': ('ml_collections',),
    'experiment/rules.py': ('ml_collections',),
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
    return [f'{file} is in no row of docs/layout.md. Give it one there, '
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
    if top == 'tools':
      result.append(f'{file} imports {name}, but tools/ is not in the wheel. '
                    'Move what both need into the package.')
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


def test_no_row_lists_a_room_of_its_own_floor_or_above():
  floor_of = {room: n for n, floor in enumerate(FLOORS) for room in floor}
  assert floor_of.keys() == MAY_IMPORT.keys()
  up = [(room, other) for room, row in MAY_IMPORT.items() for other in row
        if floor_of[other] >= floor_of[room]]
  assert not up


def test_papers_never_import_another_paper():
  """A paper's folder can be deleted, and nothing else must change."""
  folders = {file.split('/')[1] for file in FILES
             if file.startswith('papers/') and file.count('/') > 1}
  across = [
      (file, name) for file in FILES if file.startswith('papers/')
      for name in imports((PACKAGE / file).read_text(encoding='utf-8'))
      for folder in folders - {file.split('/')[1]}
      if f'{name}.'.startswith(f'searchrl.papers.{folder}.')]
  assert not across


def test_jobs_never_import_jobs_nor_an_index_what_is_made_of_it():
  names = {file: imports((PACKAGE / file).read_text(encoding='utf-8'))
           for file in FILES}
  across = [(file, name) for file in FILES for name in names[file]
            if file.startswith('jobs/') and name.startswith('searchrl.jobs')
            or file.startswith('search/') and name == 'searchrl.search.engines'
            or file.startswith('search/') and file != 'search/engines.py'
            and name.startswith('searchrl.search.builtin_engines')]
  assert not across


def test_only_the_upper_rooms_read_a_config():
  """A parameter `config` below is a decoder's shape, in models/, or a dict."""
  readers = []
  for file in FILES:
    if part_of(file) in (*READ_CONFIGS, 'models') or file in EXEMPT:
      continue
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
      if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
          and node.value.id == 'config'):
        readers.append(f'{file}:{node.lineno} reads config.{node.attr}')
  assert not readers, 'hand down plain arguments: ' + ', '.join(readers)


def test_the_house_is_no_corridor():
  """Few rooms, small files, short functions: what a stranger can hold."""
  root = [file for file in FILES if '/' not in file]
  folders = {part_of(file) for file in FILES if '/' in file} - {'assets'}
  assert len(root) <= 5 and len(folders) <= 16 and len(FLOORS) <= 6
  sizes, functions = {}, []
  for file in FILES:
    source = (PACKAGE / file).read_text(encoding='utf-8')
    sizes[file] = source.count('\n')
    functions += [node.end_lineno - node.lineno + 1 for node in ast.walk(
        ast.parse(source)) if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef)]
  assert not {file: size for file, size in sizes.items() if size > 450}
  assert statistics.median(functions) <= 10


@pytest.mark.parametrize('file, source, remedy', [
    ('agent/x.py', 'from searchrl.models import engine',
     'agent may import only: agent trajectory texts. Pass it in as an argument.'),
    ('world/x.py', 'from searchrl.jobs import ask',
     'Pass it in as an argument.'),
    ('experiment/x.py', 'from searchrl.papers.dr_zero import proposals',
     'experiment may import only'),
    ('rl/x.py', 'def f():\n  from searchrl.runtime import mesh',
     'rl may import only'),
    ('search/x.py', 'import jax.numpy as jnp', 'search never names jax'),
    ('agent/x.py', 'from jax import Array', 'Take what it gives as an arg'),
    ('main.py', 'import searchrl.jobs.train',
     'main may import only: main runtime.'),
    ('jobs/x.py', 'from tools import lessons', 'is not in the wheel'),
    ('new.py', '', 'Give it one there, and in MAY_IMPORT here.'),
])
def test_a_breach_is_found_and_its_remedy_named(file, source, remedy):
  assert any(remedy in complaint for complaint in complaints(file, source))
