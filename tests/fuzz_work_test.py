# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fuzzing: the time of reading a hostile text grows with its length alone."""

import json
import time

import chats
import pytest
import strategies
from strategies import Dice, fuzzed

from searchrl.agent import dialogue as dialogues
from searchrl.agent import formats
from searchrl.agent import rewards
from searchrl.agent import tools
from searchrl.agent.markup import neutralise
from searchrl.papers.dr_zero import proposals
from searchrl.papers.zerosearch import documents
from searchrl.rollouts import judged
from searchrl.search.index import bm25
from searchrl.search.remote import wire
from searchrl.trajectory import Action, Passage, Question, Trajectory, Turn

TOKENIZER = chats.qwen()
TOOLS = tools.dr_zero(TOKENIZER)


def proposal(text):
  return proposals.read(Trajectory(
      Question('q', proposals.ask('x', 1), ()), 0, 0, (1,),
      (Turn((1,), (0.0,), Action('invalid'), text=text),)))


def found(text):
  try:
    return documents.read(f'Doc 1:{text}', 5)
  except documents.Malformed:
    return ()


def observed(text):
  return dialogues.observation(
      TOOLS, [(Passage('1', '', text),)], TOKENIZER, passage_tokens=9)


READERS = {
    'neutralise': neutralise, 'parse_tags': dialogues.parse_tags,
    'tools.parse': tools.parse, 'formats.is_valid': formats.is_valid,
    'proposals.read': proposal, 'proposals.leaks': lambda text: (
        proposals.leaks(text, text)), 'normalise': rewards.normalise,
    'documents.read': found, 'documents.titled': documents.titled,
    'bm25.analyze': bm25.analyze, 'judged.read_verdict': judged.read_verdict,
    'judged.read_grade': judged.read_grade,
    'wire.read_response': lambda text: wire.read_response(json.dumps(
        {'result': [[{'contents': text}]]}).encode(), queries=1, top_k=1)}


@fuzzed(short=40, share=0.02)
def test_no_reader_takes_longer_for_what_is_repeated(dice: Dice):
  """20,000 characters; their square would take seconds."""
  unit = strategies.text(dice, 3) or 'a'
  text = strategies.text(dice, 3) + unit * (20_000 // len(unit)) + (
      strategies.text(dice, 2))
  for name, read in READERS.items():
    begun = time.process_time()
    read(text)
    assert time.process_time() - begun < 1, (name, unit)


UNITS = ['a', ' ', '\n', 'verdict\n', 'not ', '<', '<<  ', '</search>',
         '<search>', '<answer> x </answer>', '<tool_call>', '{"a":', '[',
         '\u0301\u0327', '＜ſ', '</s> ', '_', '"', '\\', 'Doc 2:',
         '<question>', '‹', '▁', '\u3164']


@pytest.mark.slow
@pytest.mark.parametrize('name', READERS)
def test_a_megabyte_of_anything_is_read_in_seconds(name):
  for unit in UNITS:
    text = '<search>' + unit * (2**20 // len(unit)) + '</tool_call>'
    begun = time.process_time()
    READERS[name](text)
    assert time.process_time() - begun < 20, unit  # the square: an hour


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('unit', UNITS)
def test_eight_times_the_text_takes_about_eight_times_the_time(unit):
  for name, read in READERS.items():
    secs = []
    for size in (2**16, 2**19):
      text = '<search>' + unit * (size // len(unit)) + '</tool_call>'
      times = []
      for _ in range(3):
        begun = time.process_time()
        read(text)
        times.append(time.process_time() - begun)
      secs.append(min(times))
    assert secs[1] < 24 * secs[0] + 0.2, (name, unit, secs)  # 64: the square


def test_an_observation_takes_no_longer_for_what_is_repeated():
  for unit in UNITS:
    begun = time.process_time()
    assert len(observed(unit * (2**14 // len(unit))).tokens) < 200
    assert time.process_time() - begun < 5, unit
