# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""package: a built wheel imports, holds prompts and model, runs the losses."""

import hashlib
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from searchrl.models import weights

ROOT = pathlib.Path(__file__).resolve().parent.parent

_PROGRAM = """
import sys
import jax.numpy as jnp
import searchrl
assert searchrl.__file__.startswith(sys.argv[1]), searchrl.__file__
from searchrl import algorithms, losses
from searchrl.agent import dialogue, tools
from searchrl.models import weights
from searchrl.experiment import policy
assert 'as your want' in dialogue.verbatim('search_r1_prompt.txt')
assert tools.schema()['function']['name'] == 'search'
shape = weights.read_config(str(policy.TINY_BASE))
weights.load(str(policy.TINY_BASE), shape)
from searchrl.encoders import embedder
encode = embedder.cached_loader()(path='tiny_e5')
assert encode(['a'], 'query').shape == (1, 128)
one = jnp.ones((1, 2))
loss = losses.sequence_ratio_loss(
    one, one, jnp.ones(1), jnp.ones((1, 2), bool))
assert loss.tolist() == [-1.0], loss
algorithms.dspo()
from searchrl.models import shipped_shapes
assert weights.read_config(shipped_shapes.locate('Qwen/Qwen2.5-3B'))
from searchrl.papers import settings
assert len(settings.PAPERS) == 5 and settings.lineage('dspo')[0] == 'shared'
print('whole')
"""
_COMMAND = """
import sys
sys.path = [path for path in sys.path if path not in sys.argv[1].split(':')]
sys.argv[:2] = ['searchrl']
from searchrl.runtime import command
command.run()
"""


@pytest.mark.slow
def test_wheel_imports_and_holds_prompts_model_and_losses(tmp_path):
  source = shutil.copytree(  # a build leaves things behind
      ROOT, tmp_path / 'source', symlinks=True,
      ignore=shutil.ignore_patterns('.*', 'runs', 'build', '*.egg-info'))
  subprocess.run(
      [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps',
       '--no-build-isolation', '--wheel-dir', tmp_path, source], check=True)
  wheel, = tmp_path.glob('searchrl-*.whl')
  place = tmp_path / 'site'
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(place)
  result = subprocess.run(
      [sys.executable, '-c', _PROGRAM, str(place)], cwd=tmp_path, check=True,
      env={'PYTHONPATH': str(place), 'JAX_PLATFORMS': 'cpu'},
      capture_output=True, text=True)
  assert result.stdout.strip() == 'whole'
  empty = tmp_path / 'empty'
  empty.mkdir()
  for arguments, wanted in (
      (['train', 'configs/dspo.py:smoke', '--show_prompt'], '== Ends =='),
      (['report', '--help'], '--config.report.runs=')):
    result = subprocess.run(  # without the clone, which has configs
        [sys.executable, '-c', _COMMAND, f'{ROOT}:', *arguments], cwd=empty,
        env={'PYTHONPATH': str(place), 'JAX_PLATFORMS': 'cpu',
             'HOME': str(tmp_path)}, check=True, capture_output=True, text=True)
    assert wanted in result.stdout


def test_nothing_large_is_shipped():
  for model in (ROOT / 'searchrl' / 'assets').iterdir():
    assert sum(f.stat().st_size for f in model.iterdir()) < 8 * 2**20


def test_every_card_is_that_of_the_model_beside_it():
  cards = [*(ROOT / 'searchrl' / 'assets').glob('*/README.md')]
  assert {card.parent.name for card in cards} == {*weights.SHIPPED, 'tiny_e5'}
  for card in cards:
    digests = dict(re.findall(r'\| sha256 of (\S+) \| `(\w+)` \|',
                              card.read_text()))
    assert digests, card
    for name, digest in digests.items():
      found = hashlib.sha256((card.parent / name).read_bytes()).hexdigest()
      assert digest == found, (card, name)
