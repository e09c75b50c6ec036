# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The notebooks of docs/notebooks run from the first cell to the last."""

import json
import pathlib
import shutil

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / 'docs' / 'notebooks').glob('*.ipynb'))


def cells(notebook):
  return json.loads(notebook.read_text(encoding='utf-8'))['cells']


def code(notebook):
  """The source of the cells that a test can run: the package is installed."""
  return [''.join(cell['source']) for cell in cells(notebook)
          if cell['cell_type'] == 'code'
          and 'install' not in cell['metadata'].get('tags', ())]


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_without_outputs(notebook):
  for cell in cells(notebook):
    assert not cell.get('outputs') and cell.get('execution_count') is None


def test_the_losses_are_composed_as_shown():
  names = {}
  for source in code(ROOT / 'docs/notebooks/compose_losses.ipynb'):
    exec(compile(source, 'notebook', 'exec'), names)  # pylint: disable=exec-used
  assert names['after'][8] > 0.5


@pytest.mark.slow
def test_the_first_agent_is_trained_and_reported(tmp_path, monkeypatch):
  nbclient = pytest.importorskip('nbclient', reason="needs '.[dev]'")
  import nbformat
  notebook = nbformat.read(ROOT / 'docs/notebooks/first_agent.ipynb', 4)
  notebook.cells = [cell for cell in notebook.cells
                    if 'install' not in cell.metadata.get('tags', ())]
  parameters, = [cell for cell in notebook.cells
                 if 'parameters' in cell.metadata.get('tags', ())]
  for old, new in (("SIZE = 'laptop'", "SIZE = 'smoke'"),
                   ("'../../runs/first_agent'", f'{str(tmp_path / "run")!r}')):
    assert old in parameters.source
    parameters.source = parameters.source.replace(old, new)
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  nbclient.NotebookClient(
      notebook, timeout=600, kernel_name='python3',
      resources={'metadata': {'path': str(ROOT / 'docs/notebooks')}}).execute()
  printed = ''.join(output.get('text', '') for cell in notebook.cells
                    for output in cell.get('outputs', ()))
  assert '== Ends ==' in printed and (tmp_path / 'run/curve.png').is_file()
  page = notebook.cells[-2].outputs[-1].data['text/html']
  assert '<script' in page
  shutil.rmtree(tmp_path / 'run')
