# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ZeroSearch from end to end: collect, tune, train on it, die, go on."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import faulty
import jax
import pytest

from configs import collect_simulation_data as collect
from searchrl.experiment import policy
from searchrl.papers.zerosearch import completions
from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch import model_writer
from searchrl.papers.zerosearch import query_pairs
from searchrl.papers.zerosearch import simulator_prompts
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.runtime import metrics
from searchrl.trajectory import Query

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMED = ('timing_s/', 'perf/throughput', 'perf/cpu_seconds',
         'search/latency_ms/', 'simulated/secs')


def start(*arguments):
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  return subprocess.Popen(
      [sys.executable, '-m', 'searchrl.main', *map(str, arguments)], cwd=ROOT,
      env=environment, text=True, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE)


def finish(*arguments):
  process = start(*arguments)
  output, error = process.communicate(timeout=900)
  assert process.returncode == 0, error
  return output


TEMPLATE = (  # a chat, in plain letters: the tiny tokenizer has no others
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '<|im_end|>' }}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}")


@pytest.fixture(scope='module')
def simulator(tmp_path_factory):
  """A model folder that has barely learned the form of a list of documents."""
  folder = tmp_path_factory.mktemp('simulator')
  base = folder / 'base'
  shutil.copytree(policy.TINY_BASE, base)
  (base / 'chat_template.jinja').write_text(TEMPLATE)
  finish('--config=configs/collect_simulation_data.py:smoke',
         f'--workdir={folder / "collected"}', '--config.collect.chat=True',
         '--config.data.per_hop=(30, 30)', '--config.collect.worlds=1')
  finish('--config=configs/finetune_simulator.py:smoke',
         f'--workdir={folder / "tuned"}', f'--config.model.path={base}',
         f'--config.data.train={folder / "collected/train.jsonl"}',
         f'--config.data.validation={folder / "collected/validation.jsonl"}',
         '--config.train.epochs=0', '--config.train.steps=80',
         '--config.batch.documents=16', '--config.train.validate_every=0',
         '--config.train.save_every=80', '--config.learner.pack_length=256',
         '--config.optimizer.learning_rate=2e-3')
  return folder / 'tuned' / 'model'


def run_of(**writer_options):
  """The arguments of a short run that trains on simulated search."""
  return [
      '--config=configs/zerosearch.py:smoke', '--config.train.num_steps=3',
      '--config.evaluate.worlds.questions_per_hop=1',
      "--config.evaluate.worlds.kinds=('known',)",
      '--config.rollout.search_timeout_secs=600.0',
      '--config.search.options=' + repr(dict(
          prompts=collect.LAPTOP, titled=True, max_tokens=110,
          curriculum=dict(start=0.2, end=0.8, steps=4), **writer_options))]


def after_step(number, process, folder):
  """Waits until a step of a run is over."""
  file = folder / metrics.FILE
  while process.poll() is None and not (
      file.exists() and f'"training/global_step": {number},' in
      file.read_text()):
    time.sleep(0.02)
  assert process.poll() is None


def lines(folder):
  return [{name: x for name, x in line.items() if not name.startswith(TIMED)}
          for line in metrics.read(folder / metrics.FILE)]


def seals(folder):
  """A SHA-256 of every leaf of the newest checkpoint."""
  path = folder / 'checkpoints'
  newest = path / str(checkpoint.steps(path)[-1])
  return json.loads((newest / 'integrity.json').read_text())['leaves']


def test_a_run_killed_with_its_simulator_in_the_process_goes_on_bit_for_bit(
    simulator, tmp_path):
  arguments = run_of(writer='model', path=str(simulator), slots=16,
                     max_prompt_tokens=128)
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  finish(*arguments, f'--workdir={whole}')
  process = start(*arguments, f'--workdir={broken}')
  after_step(1, process, broken)
  process.send_signal(signal.SIGKILL)
  process.communicate(timeout=60)
  assert process.returncode == -signal.SIGKILL
  finish(*arguments, f'--workdir={broken}')
  assert lines(broken) == lines(whole) and seals(broken) == seals(whole)
  _check_that_documents_were_read(whole)


def _check_that_documents_were_read(folder):
  """Checks that documents reach the policy, on which other checks depend."""
  steps = [line for line in lines(folder) if 'simulated/noise' in line]
  assert [round(line['simulated/noise'], 3) for line in steps] == [
      0.2, 0.283, 0.4]
  assert max(line['search/obs_tokens'] for line in steps) > 5
  assert min(line['simulated/malformed_rate'] for line in steps) < 0.9
  assert all(line['simulated/tokens'] > 0 for line in steps)


@contextlib.contextmanager
def our_server(folder, port):
  process = start('--config=configs/serve_model.py',
                  f'--config.model.path={folder}', f'--config.serve.port={port}')
  try:
    _until_healthy(process, port)
    yield process
  finally:
    process.kill()
    process.communicate()


def _until_healthy(process, port):
  for _ in range(1200):
    with contextlib.suppress(OSError):
      urllib.request.urlopen(f'http://127.0.0.1:{port}/health', timeout=1)
      return
    assert process.poll() is None, f'it ended with {process.returncode}'
    time.sleep(0.1)
  raise AssertionError(f'nobody answers at {port}')


def free_port():
  return int(faulty.unused_url().rpartition(':')[2].partition('/')[0])


def test_a_run_whose_server_dies_pauses_and_ends_as_if_it_had_not(
    simulator, tmp_path):
  port = free_port()
  arguments = run_of(
      writer='served', model='model', connections=16, failures=1,
      urls=(f'http://127.0.0.1:{port}/v1/chat/completions',), rest_secs=0.5,
      try_secs=60.0, tries=1, deadline_secs=60.0, pause_secs=300.0)
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  with our_server(simulator, port):
    finish(*arguments, f'--workdir={whole}')
    process = start(*arguments, f'--workdir={broken}')
    after_step(1, process, broken)
  with our_server(simulator, port):  # the first one was killed
    _, error = process.communicate(timeout=900)
  assert process.returncode == 0, error
  assert 'the run is paused' in error and 'the run goes on' in error
  assert seals(broken) == seals(whole)
  for one, other in zip(lines(broken), lines(whole), strict=True):
    for name in ('critic/score/mean', 'actor/pg_loss', 'search/obs_tokens'):
      assert one.get(name) == other.get(name)
  assert max(line.get('search/remote/pauses', 0) for line in lines(broken)) > 0
  _check_that_documents_were_read(whole)


@contextlib.contextmanager
def strangers_server(folder, port):
  """transformers' own server of OpenAI's API."""
  program = pathlib.Path(sys.executable).parent / 'transformers'
  process = subprocess.Popen(
      [program, 'serve', folder, '--host=127.0.0.1', f'--port={port}',
       '--device=cpu'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    _until_healthy(process, port)
    yield
  finally:
    process.kill()
    process.wait()


def test_a_strangers_server_writes_as_our_own_engine_does(simulator):
  """Asked greedily; it dies, and comes back."""
  for module in ('torch', 'fastapi'):
    pytest.importorskip(module)
  prompts = simulator_prompts.Prompts(**collect.LAPTOP)
  pairs = query_pairs.read(
      simulator.parents[1] / 'collected' / 'train.jsonl')[:6]
  tasks = [documents.Task(Query(one.query, 2, one.question), True, seed)
           for seed, one in enumerate(pairs)]
  one = meshes.make(devices=jax.devices()[:1])
  ours = model_writer.ModelWriter(
      functools.partial(policy.second, mesh=one, seed=0), prompts=prompts,
      path=str(simulator), temperature=0.0, slots=8,
      max_prompt_tokens=160, max_tokens=112)(tasks)
  port = free_port()
  theirs = completions.Completions(
      prompts=prompts, urls=(f'http://127.0.0.1:{port}/v1/chat/completions',),
      model=str(simulator), temperature=0.0, max_tokens=112, try_secs=60.0,
      deadline_secs=60.0, rest_secs=0.1, failures=1)
  with strangers_server(simulator, port):
    assert theirs(tasks) == ours
    assert theirs(tasks[3:4]) == ours[3:4]
  assert {error.kind for error in theirs(tasks)} <= {
      'unavailable', 'circuit_open'}
  with strangers_server(simulator, port):
    theirs.wait()
    assert theirs(tasks) == ours
  assert documents.read(ours[0], 2)
