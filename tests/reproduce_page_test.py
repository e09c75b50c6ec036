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
import published
import pytest
import zerosearch_test

from searchrl.models import weights

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
INSTALL, DATA, INDEX, SERVER, FLAGS, TRAIN, EVALUATE, TABLE = re.findall(
    r'^```sh\n(.*?)^```$', (ROOT / 'docs/reproduce.md').read_text('utf-8'),
    re.M | re.S)
MODEL = (
    '--config.model.path=tiny --config.model.dtype=float32 '
    '--config.rollout.dtype=float32 '
    '--config.rollout.max_num_seqs=4 --config.rollout.max_length=768 '
    '--config.rollout.budgets.max_turns=2 '
    '--config.rollout.budgets.max_new_tokens=16 '
    '--config.rollout.budgets.passage_tokens=16 '
    '--config.rollout.budgets.max_prompt_tokens=512')
SMALL = {  # config -> flags that are appended to its command
    'prepare_data': '--config.source=downloads --config.any_rows=True',
    'build_index': '--config.encoder.path=tiny_e5',
    'serve_search': '--config.serve.port={port}',
    'ppo': MODEL + ' --config.learner.dtype=float32 '
           '--config.train.num_steps=1 '
           '--config.rollout.questions_per_step=2 '
           '--config.evaluate.initial=False --config.evaluate.noise=False '
           "--config.evaluate.decodings=\"('greedy',)\"",
    'evaluate': MODEL, 'paper_tables': ''}
SETS = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique',
        'bamboogle', 'mean')


def command(block, port):
  """A block for the shell, after the flags that it shares, in small."""
  small = SMALL[re.search(r'configs/(\w+)\.py', block)[1]]
  return (FLAGS.replace('8000', str(port)) + block.rstrip() + ' '
          + small.format(port=port) + '\n')


def environment():
  return own_data_page_test.environment() | {
      'GPUS': '0', 'JAX_PLATFORMS': 'cpu'}


def run(block, folder, port=8000):
  done = subprocess.run(
      ['bash', '-ec', command(block, port)], cwd=folder, env=environment(),
      capture_output=True, text=True, timeout=900)
  assert not done.returncode, block + done.stdout[-999:] + done.stderr[-3000:]
  return done.stdout


@pytest.fixture
def folder(tmp_path):
  """A clone with downloads, and a model with a chat template."""
  for name in ('configs', 'launch'):
    (tmp_path / name).symlink_to(ROOT / name)
  published.write_flashrag(tmp_path / 'downloads')
  shutil.copytree(weights.locate('tiny_instruct'), tmp_path / 'tiny')
  (tmp_path / 'tiny/chat_template.jinja').write_text(zerosearch_test.TEMPLATE)
  return tmp_path


def test_the_page_leads_from_nothing_to_the_table(folder):
  assert 'pip install' in INSTALL
  run(DATA, folder)
  run(INDEX, folder)
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  server = subprocess.Popen(
      ['bash', '-ec', command(SERVER, port).replace(
          ' python -m', ' exec python -m')],
      cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
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
