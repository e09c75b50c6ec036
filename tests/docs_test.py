# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents show runs, is what the files hold, and exists."""

import ast
import doctest
import pathlib
import pkgutil
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob('docs/*.md'))
DOCUMENTS = ['README.md', *PAGES]
COMMAND = re.compile(r'-m searchrl\.main\s+(?:\\\s+)?--config=([^\s:`]+)')


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
  monkeypatch.syspath_prepend(ROOT)  # for docs.cispo, as `python -m` does


def read(name: str) -> str:
  return (ROOT / name).read_text(encoding='utf-8')


def python_blocks(text: str) -> list[str]:
  """Fenced Python without prompts: what a reader would paste into a file."""
  blocks = re.findall(r'^```python\n(.*?)^```$', text, re.M | re.S)
  return [block for block in blocks if not block.startswith('>>>')]


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES)
def test_examples_run_and_give_what_is_shown(page):
  text = read(page)
  assert '# doctest:' not in text, 'show the result instead of hiding it'
  # As doctest.testfile does, but the report goes where pytest shows it.
  test = doctest.DocTestParser().get_doctest(
      text, {'__name__': '__main__'}, page, page, 0)
  report = []
  doctest.DocTestRunner(verbose=False).run(test, out=report.append)
  if report:
    pytest.fail(''.join(report), pytrace=False)
  assert len(test.examples) == len(re.findall(r'^>>> ', text, re.M))


def test_a_wrong_result_is_reported():
  test = doctest.DocTestParser().get_doctest('>>> 1 + 1\n3\n', {}, '', '', 0)
  report = []
  doctest.DocTestRunner(verbose=False).run(test, out=report.append)
  assert 'Got:\n    2' in ''.join(report)


def test_the_shown_algorithm_is_the_file_and_short():
  source = read('docs/cispo.py')
  assert source in python_blocks(read('docs/compose.md'))
  assert len(source.splitlines()) <= 30


def named(block: str) -> set[tuple[str, str]]:
  """What a block takes from modules of ours: {(module, attribute)}."""
  tree = ast.parse(block)
  modules = {
      alias.asname or alias.name: f'{node.module}.{alias.name}'
      for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
      for alias in node.names if node.module.partition('.')[0] == 'searchrl'}
  return {
      (modules[node.value.id], node.attr) for node in ast.walk(tree)
      if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
      and node.value.id in modules}


@pytest.mark.parametrize('document', DOCUMENTS)
def test_python_blocks_compile_and_name_what_exists(document):
  for block in python_blocks(read(document)):
    for module, attribute in sorted(named(block)):
      found = pkgutil.resolve_name(module)  # also names that are lazy
      assert hasattr(found, attribute), (
          f'{document} shows {module}.{attribute}, which does not exist.')


@pytest.mark.parametrize('document', DOCUMENTS)
def test_commands_name_configs_that_exist(document):
  configs = COMMAND.findall(read(document))
  assert configs
  missing = [config for config in configs if not (ROOT / config).is_file()]
  assert not missing, f'{document} runs {missing}, but there is no such file.'
