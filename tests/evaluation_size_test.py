# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The size of the papers' test sets, on two processes: memory, messages, rows.

The policy is a stand-in that answers at once; sharing, exchange, scores and
records are those of an evaluation, and so is the length of a conversation.
"""

import json

import pytest

from searchrl.data import questions as questions_lib
from searchrl.evaluation import shards
from searchrl.evaluation import evaluator
from searchrl.trajectory import Question
import loopback

pytestmark = [pytest.mark.slow, pytest.mark.long]

SETS = {'nq': 3610, 'triviaqa': 11_313, 'popqa': 14_267, 'hotpotqa': 7405,
        '2wikimultihopqa': 12_576, 'musique': 2417, 'bamboogle': 125}
LIMIT = 2 << 30  # bytes, of memory and of a message

CODE = r'''
import os, pathlib, resource
from jax._src import distributed
from searchrl.data import datasets
from searchrl.evaluation import evaluator
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import weight_sync
from searchrl.runtime import processes
from searchrl.trajectory import Action, Passage, Trajectory, Turn

PASSAGES = tuple(Passage(str(n), f'Title {n}', f'words of passage {n} ' * 30,
                         9.0 - n) for n in range(3))
largest = 0


class Answers:
  """Two searches, then the gold of every second question."""

  together = False

  class tokenizer:
    decode = staticmethod(lambda tokens: 'a text' * (len(tokens) // 2))

  def sync(self, params):
    return weight_sync.Synced(params)

  def rollout(self, weights, requests, **_):
    return samplers._of_all_processes(samplers.Rollouts(
        [played(request) for request in processes.share(requests)], []))


def played(request):
  number = int(request.question.uid.rpartition('/')[2])
  written = tuple(range(number, number + 100))
  logprobs = tuple(-1 / (1 + n) for n in range(100))
  search = Turn(written, logprobs, Action('search', ('who?',)),
                tuple(range(480)), PASSAGES, text='t' * 400,
                observation='o' * 1900)
  answer = request.question.answers[0] if number % 2 else 'nobody'
  return Trajectory(
      request.question, request.sample, 0, tuple(range(300)),
      (search, search, Turn(written[:20], logprobs[:20],
                            Action('answer', (answer,)))), 'answer')


class Client:
  """The coordination service's client, which keeps the longest message."""

  def __init__(self, client):
    self.client = client

  def __getattr__(self, name):
    return getattr(self.client, name)

  def key_value_set_bytes(self, key, value, **options):
    global largest
    largest = max(largest, len(value))
    return self.client.key_value_set_bytes(key, value, **options)


processes.initialize()
service = distributed.global_state.client
distributed.global_state.client = Client(service)
folder = pathlib.Path(os.environ['FOLDER'])
sets = datasets.evaluation_sets(
    folder, evaluate=str(folder / 'questions'), corpus='', own_train=False, world_seed=0, kinds=(), questions_per_hop=0, max_hops=0,
    needs_corpus=False)
rows = evaluator.run(Answers(), None, [
    evaluator.EvalCase(one, 'none', None, 'greedy') for one in sets],
    folder=folder / 'out')
out('rows', rows)
out('largest', largest)
out('memory', 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
processes.barrier('end')
distributed.global_state.client = service
'''


def test_all_seven_sets_on_two_processes(tmp_path):
  for name, count in SETS.items():
    (tmp_path / 'questions').mkdir(exist_ok=True)
    questions_lib.write(tmp_path / f'questions/{name}.jsonl', [
        Question(str(n), f'Question {n} of {name}?', (f'gold {n}',),
                 data_source=name) for n in range(count)])
  said = loopback.outputs(2, CODE, env={'FOLDER': str(tmp_path)}, timeout=3600)
  for memory, message in zip(said['memory'], said['largest']):
    print('memory', memory >> 20, 'MiB, largest message', message, 'bytes')
    assert memory <= LIMIT and 0 < message <= LIMIT
  first, second = said['rows']
  rows = {row['set']: row for row in first}
  assert first == second
  assert {name: rows[name]['n'] for name in SETS} == SETS
  assert rows['mean']['n'] == sum(SETS.values()) == 51_713
  for name, count in SETS.items():  # odd numbers are right
    assert rows[name]['em'] == (count // 2) / count
  files = sorted((tmp_path / 'out').glob('records/*/*.jsonl.gz'))
  assert len(files) == sum(-(-count // evaluator.SHARD) for count in SETS.values())
  lines = 0
  for file in files:
    found = shards.read(file)
    assert len(found) <= evaluator.SHARD
    lines += len(found)
  assert lines == 51_713
  assert json.loads((tmp_path / 'out' / evaluator.TABLE).read_text())
