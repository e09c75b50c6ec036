# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""demonstrations: which right answers are kept, and how they are written."""

import dataclasses
import json

import chats
import numpy as np
import pytest
import tiny

from searchrl.agent import chat
from searchrl.agent import demonstrations
from searchrl.agent import dialogue as dialogues
from searchrl.agent import rewards
from searchrl.agent import tools
from searchrl.agent import transcripts
from searchrl.texts import Segment
from searchrl.trajectory import Action, Passage, Trajectory, Turn

TOKENIZERS = {'qwen2': chats.qwen(), 'qwen3': chats.qwen(chats.QWEN3),
              'llama3': chats.llama(),
              'mistral': chats.sentence_piece(chats.MISTRAL)}


def answered(uid, sample=0, hops=1, right=True):
  turns = (Turn((1,), (0.0,), Action('search', ('x',)), (2,), text='<search> x',
                observation='found'),
           Turn((3,), (0.0,), Action('answer', ('here' if right else 'no',)),
                text='<answer> here'))
  return Trajectory(tiny.question(uid, hops=hops), sample, 0, (1,), turns,
                    'answer', prompt='Ask: where?')


def kept(*found, most=1, balance=0.0):
  return [(t.question.uid, t.sample) for t in demonstrations.right(
      found, rewards.em, most=most, balance=balance)]


def test_right_answers_are_kept_the_first_of_a_question():
  found = [answered('a', 0, right=False), answered('a', 1), answered('a', 2),
           answered('b', 0, right=False)]
  assert kept(*found) == [('a', 1)]
  assert kept(*found, most=2) == [('a', 1), ('a', 2)]
  assert kept(found[0]) == []


def test_no_hop_count_is_more_than_so_many_times_the_rarest():
  found = [answered(f'one{n}') for n in range(9)] + [
      answered(f'two{n}', hops=2) for n in range(2)]
  uids = [uid for uid, _ in kept(*found, balance=2.0)]
  assert sum(uid.startswith('one') for uid in uids) == 4
  assert sum(uid.startswith('two') for uid in uids) == 2
  assert len(kept(*found)) == 11 and len(kept(*found, balance=9.0)) == 11


def sampled(dialogue, tokenizer, *texts):
  """A trajectory of these texts; all but the last are searches."""
  found, turns = [(Passage('1', 'Paris', 'the "town"'),)], []
  for number, text in enumerate(texts):
    ids = (*tokenizer.encode(text), *dialogue.end_ids)
    shown = () if number == len(texts) - 1 else dialogues.observation(
        dialogue, found, tokenizer, passage_tokens=99, action_tokens=ids).tokens
    turns.append(Turn(ids, (0.0,) * len(ids), Action('invalid'), shown,
                      text=tokenizer.decode(ids)))
  return Trajectory(
      tiny.question(), 0, 0, dialogues.opening(dialogue, 'where?', tokenizer),
      tuple(turns), 'answer')


@pytest.mark.parametrize('name', TOKENIZERS)
@pytest.mark.parametrize('make', [dialogues.search_r1, chat.search_r1,
                                  tools.dr_zero])
def test_a_line_has_the_ids_of_the_rollout_and_trains_on_the_policys(
    name, make):
  tokenizer = TOKENIZERS[name]
  trajectory = sampled(make(tokenizer), tokenizer, '<think> a </think> b',
                       ' <answer> here </answer>')
  line = demonstrations.lines(trajectory, tokenizer)[0]['segments']
  read = transcripts.of_segments(
      [(piece['text'], piece['trained']) for piece in line], tokenizer)
  assert list(zip(*read)) == chats.marked_ids(trajectory)
  assert [piece['trained'] for piece in line] == [False, True, False, True]


def test_each_context_has_a_line_of_its_own():
  tokenizer = TOKENIZERS['qwen2']
  trajectory = sampled(dialogues.search_r1(tokenizer), tokenizer, 'a',
                       '<answer> b </answer>')
  first, last = trajectory.turns
  trajectory = dataclasses.replace(trajectory, turns=(
      first, dataclasses.replace(
          last, opens_context=True, lead_tokens=tokenizer.encode('notes'))))
  lines = demonstrations.lines(trajectory, tokenizer, untrained=(0,))
  assert [[(piece['text'], piece['trained']) for piece in line['segments'][-2:]]
          for line in lines] == [
              [(tokenizer.decode(trajectory.prompt_tokens), False),
               ('a', False)],
              [('notes', False), ('<answer> b </answer>', True)]]


def ids_of(pieces, tokenizer, first=False):
  """Segments that the trainer reads, after a round trip through JSON."""
  records = [json.loads(json.dumps(piece.record)) for piece in pieces]
  for record in records:
    record['ids'] = tuple(record.get('ids', ()))
  segments = [Segment(**record) for record in records]
  if not first:
    segments = [Segment('', False), *segments]
  ids = transcripts.of_segments(segments, tokenizer).ids
  return ids if first else ids[len(tokenizer.start_ids):]


@pytest.mark.parametrize('name', TOKENIZERS)
def test_any_ids_have_exact_segments(name):
  tokenizer = TOKENIZERS[name]
  rng = np.random.default_rng(0)
  texts = ['the search', ' goes on', 'é日本', '<|im_end|>', '</s>', '\n\nDoc 1',
           '[INST]', '<|eot_id|>', ' ']
  for case in range(60):
    ids = ()
    for _ in range(rng.integers(1, 9)):
      text = texts[rng.integers(len(texts))]
      encode = (tokenizer.encode, tokenizer.encode_data)[rng.integers(2)]
      cut = rng.integers(1, 9)
      ids += encode(text)[:cut]
    pieces = demonstrations.exact(ids, tokenizer)
    assert ids_of(pieces, tokenizer) == ids, case
    # As few as can be: no two neighbours are one.
    for one, other in zip(pieces, pieces[1:]):
      assert not one.ids or not other.ids
    opening = tokenizer.with_start(ids)
    pieces = demonstrations.exact(opening, tokenizer, first=True)
    assert ids_of(pieces, tokenizer, first=True) == opening, case


def test_segments_by_hand():
  tokenizer = TOKENIZERS['qwen2']
  end, = tokenizer.encode('<|im_end|>')
  plain = tokenizer.encode_data('<|im_end|>')
  assert demonstrations.exact((*tokenizer.encode('so'), end), tokenizer) == [
      Segment('so<|im_end|>', False)]
  assert demonstrations.exact(
      (*plain, end), tokenizer, trained=True) == [
          Segment('<|im_end|>', True, special=False),
          Segment('<|im_end|>', True)]
  half = tokenizer.encode('ß')[:1]
  assert len(tokenizer.encode('ß')) == 2
  assert demonstrations.exact((*tokenizer.encode('a'), *half), tokenizer) == [
      Segment('a', False), Segment('', False, ids=half)]
  assert Segment('a', True).record == {'text': 'a', 'trained': True}


def test_a_turn_that_spells_a_special_token_keeps_its_ids():
  tokenizer = TOKENIZERS['qwen2']
  dialogue = dialogues.search_r1(tokenizer)
  trajectory = sampled(dialogue, tokenizer, '<answer> a </answer>')
  ids = tokenizer.encode_data('<answer> <|im_end|> </answer>')
  trajectory = dataclasses.replace(trajectory, turns=(
      Turn(ids, (0.0,) * len(ids), Action('answer', ('<|im_end|>',)),
           text='<answer> <|im_end|> </answer>'),))
  line = demonstrations.lines(trajectory, tokenizer)[0]['segments']
  assert {piece['text']: piece.get('special', True) for piece in line
          if piece['trained']} == {'<answer> <|im_end|> </answer>': False}
  untrained, = demonstrations.lines(trajectory, tokenizer, untrained=(0,))
  assert not any(piece['trained'] for piece in untrained['segments'])
