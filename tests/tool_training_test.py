# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A training run whose policy calls an MCP server by others; killed, resumed.

The tiny base model only searches. In the dialogue of this test, a search for a
text with an even number of letters is a call of the server.
"""

import dataclasses
import datetime
import gzip
import json
import sys
import time

import loopback
import pytest
import train_test

from searchrl.agent import dialogue as dialogues
from searchrl.runtime import checkpoint
from searchrl.trajectory import Action

pytest.importorskip('mcp_server_time')
_ARGUMENTS = {'source_timezone': 'Etc/UTC', 'time': '12:00'}


def with_a_clock(tokenizer, tools):
  """The tiny base's dialogue, in which every other search asks the server."""
  plain = dialogues.laptop(tokenizer, tools)

  def parse(text):
    action = plain.parse(text)
    if not action.is_search or sum(map(str.isalpha, action.texts[0])) % 2:
      return action
    # A time zone that does not exist is a wrong call, which the server answers.
    zone = 'Asia/Tokyo' if len(action.texts[0]) % 4 else action.texts[0]
    return Action('convert_time', action.texts,
                  _ARGUMENTS | {'target_timezone': zone})

  return dataclasses.replace(plain, parse=parse)


def command(folder):
  options = {'clock': {'tool': 'mcp', 'command': (
      sys.executable, '-m', 'mcp_server_time'), 'names': ('convert_time',)}}
  return (1, 'searchrl.main', '--config=configs/grpo.py:smoke',
          '--config.dialogue=tool_training_test:with_a_clock',
          "--config.tools=('search', 'clock')",
          f'--config.tool_options={options!r}',
          '--config.evaluate.worlds.kinds=()', '--config.train.loggers=()',
          # Room for four turns with the server's longest answers, of 198 tokens
          # each, so that no answer is left unread.
          '--config.rollout.budgets.max_turns=4',
          '--config.rollout.max_length=1024', f'--workdir={folder}')


def turns_of(folder, step):
  """All turns of a step's trajectories."""
  file = folder / f'trajectories/step_{step:06d}.jsonl.gz'
  lines = gzip.decompress(file.read_bytes()).splitlines()
  return [turn for line in lines for turn in json.loads(line)['turns']]


@pytest.mark.slow
def test_a_server_by_others_serves_a_run_that_is_killed_and_resumed(tmp_path):
  day = datetime.date.today()
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  loopback.run(*command(whole), devices=1, timeout=600)
  with loopback.start(*command(killed), devices=1) as group:
    while group.popen[0].poll() is None and not checkpoint.steps(
        killed / 'checkpoints'):
      time.sleep(0.02)
    assert group.popen[0].poll() is None, group.logs()
  loopback.run(*command(killed), devices=1, timeout=600)
  turns = turns_of(whole, 3)
  calls = [turn for turn in turns if turn['action']['kind'] == 'convert_time'
           and turn['observation_tokens']]
  assert calls and any(turn['action']['kind'] == 'search' for turn in turns)
  for turn in calls:
    right = turn['action']['arguments']['target_timezone'] == 'Asia/Tokyo'
    assert turn['is_tool_error'] != right
    assert ('Asia/Tokyo' if right else 'Invalid timezone') in (
        turn['observation'])
  last = train_test.lines(whole)[-1]
  assert last['tool/convert_time/queries'] == len(calls)
  assert last['tool/convert_time/failed_queries'] == 0
  assert last['tool/convert_time/wrong_rate'] == pytest.approx(sum(
      turn['is_tool_error'] for turn in calls) / len(calls))
  assert last['actor/grad_norm'] > 0
  noted = json.loads((whole / 'tools.json').read_text())
  assert noted['convert_time']['required'] == [
      'source_timezone', 'time', 'target_timezone']
  if datetime.date.today() != day:
    pytest.skip('the server wrote two dates, as it was midnight')
  assert train_test.lines(killed) == train_test.lines(whole)
  assert train_test.state_digest(killed) == train_test.state_digest(whole)
