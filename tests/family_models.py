# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of real families, which write the turns of a dialogue.

A checkpoint has the family's published config.json with small sizes, all rows
of its vocabulary, and its real tokenizer. The weights are random, except for a
path through the first MLP, the embedding and the head, which makes some tokens
likely after others. So the policy thinks, searches, answers or is invalid.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import pathlib
import random
import re
from typing import Any

import jax
import numpy as np
import real_tokenizers

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.models import transformer
from searchrl.models import weights

SHAPES = pathlib.Path(weights.__file__).parents[1] / 'assets' / 'shapes'
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16)
# Values of Mistral-7B-Instruct-v0.3.
MISTRAL = {
    'architectures': ['MistralForCausalLM'], 'model_type': 'mistral',
    'hidden_act': 'silu', 'vocab_size': 32_768,
    'max_position_embeddings': 32_768, 'rms_norm_eps': 1e-5,
    'rope_theta': 1_000_000.0, 'sliding_window': None,
    'tie_word_embeddings': False, 'bos_token_id': 1, 'eos_token_id': 2}
HUB_IDS = {  # tokenizer -> shape
    'qwen2.5': 'Qwen/Qwen2.5-7B',
    'qwen2.5-instruct': 'Qwen/Qwen2.5-3B-Instruct',  # tied embeddings
    'qwen3': 'Qwen/Qwen3-8B',
    'qwen3-instruct': 'Qwen/Qwen3-4B-Instruct-2507',  # tied
    'r1-distill': 'deepseek-ai/DeepSeek-R1-Distill-Qwen-7B',
    'llama3': 'meta-llama/Llama-3.2-3B',  # tied
    'llama3-instruct': 'meta-llama/Llama-3.2-3B-Instruct'}  # tied
# Turns without their last bracket. White space may be at each ~.
_THOUGHT = '<think> hm </think>'
_SEARCH = '<search> river towns </search'
_CALL = ('<tool_call>~{~"name"~:~"search"~,~"arguments"~:~{~"query_list"~:~[~'
         '"river towns"~]~}~}~</tool_call')
_ANSWER = '<answer> Paris </answer'
_PROPOSAL = '<question> Which? </question>' + _ANSWER
_SPACES = ('', '', ' ', '  ', '\n', '\t')
_BRACKET = re.compile(rb'>\s*')  # a token that may close a tag
_LIKELY = 4.0  # norm of the rows of tokens of the path


def config(family: str) -> dict[str, Any]:
  """Returns the content of the family's config.json, in small."""
  if family == 'mistral':
    return MISTRAL | SMALL
  return json.loads(
      (SHAPES / HUB_IDS[family] / 'config.json').read_text()) | SMALL


def write(folder: pathlib.Path, family: str, make: Callable[..., Any]) -> None:
  """Writes a model folder whose policy writes turns of a dialogue.

  Args:
    folder: Path of a new folder.
    family: Name of the family's tokenizer.
    make: Function that makes the dialogue of a tokenizer.
  """
  files = real_tokenizers.folder(family)
  tokenizer = tokenizers.load(str(files))
  content = json.dumps(config(family), indent=2)
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(content)
  shape = weights.read_config(str(folder))
  following = transitions(make(tokenizer), tokenizer)
  weights.save(folder, params(shape, following), shape, tokenizer_from=files,
               eos_id=())
  # As they are published; `weights.save` writes its own.
  (folder / 'config.json').write_text(content)
  (folder / 'generation_config.json').write_bytes(
      (files / 'generation_config.json').read_bytes())


def transitions(dialogue: dialogues.Dialogue, tokenizer: tokenizers.Tokenizer
               ) -> dict[int, tuple[int, ...]]:
  """Returns the ids that are likely after each id of a turn."""
  starts = {dialogues.opening(dialogue, 'x', tokenizer)[-1],
            tokenizer.encode(dialogue.after)[-1],
            dialogues.retry(dialogue, tokenizer, ())[-1]}
  search = _CALL if '</tool_call>' in dialogue.stop_strings else _SEARCH
  proposes = '<question>' in dialogue.template
  answer = _PROPOSAL if proposes else _ANSWER
  pieces = tokenizer.token_bytes
  last = next(pieces.index(text) for text in (b'>.', b'></') if text in pieces)
  ids: dict[bytes, list[int]] = {}
  for id_, piece in enumerate(pieces):
    if id_ not in starts and id_ != last:
      ids.setdefault(piece, []).append(id_)
  *actions, nonsense = turns = next(filter(None, (
      spell(ids, (thought + search, answer, 'nonsense'), seed)
      for thought in (_THOUGHT, '') for seed in range(300))))
  end = (*dialogue.end_ids, *tokenizer.eos_ids)[0]
  following = {last: nonsense[:1], nonsense[-1]: (end,)}
  for turn in (*(action + (last,) for action in actions), nonsense):
    following |= {a: (b,) for a, b in zip(turn, turn[1:])}
  if proposes:  # the first is the likeliest
    turns = actions[1], actions[0], nonsense
  return following | {id_: tuple(turn[0] for turn in turns) for id_ in starts}


def spell(ids: Mapping[bytes, Sequence[int]], texts: Sequence[str], seed: int
         ) -> list[tuple[int, ...]]:
  """Returns ids that write each text, all of them different; [] if none fit.

  Args:
    ids: Ids of each piece.
    texts: Texts. White space is drawn for each ~.
    seed: Seed of the choice.
  """
  rng, spelled, used = random.Random(seed), [], set()
  brackets = [id_ for piece in sorted(filter(_BRACKET.fullmatch, ids))
              for id_ in ids[piece]]
  for text in texts:
    data = re.sub('~', lambda _: rng.choice(_SPACES), text).encode()
    turn: list[int] = []
    while data:
      options = [(id_, data[1:]) for id_ in brackets] if data[:1] == b'>' else [
          (id_, data[size:]) for size in range(min(16, len(data)), 0, -1)
          if b'>' not in data[:size] for id_ in ids.get(data[:size], ())]
      options = [(id_, rest) for id_, rest in options if id_ not in used]
      if not options:
        return []
      id_, data = options[0] if rng.random() < 0.7 else rng.choice(options)
      turn.append(id_)
      used.add(id_)
    spelled.append(tuple(turn))
  return spelled


def params(shape: transformer.TransformerConfig,
           following: dict[int, Sequence[int]]) -> transformer.Params:
  """Returns weights that make some ids likely after others, in float32."""
  rng = np.random.default_rng(0)
  spread = {'embed': 0.02, 'head': 0.02, 'q': 0.3, 'k': 0.3}

  def draw(path, leaf):
    x = rng.normal(size=leaf.shape).astype(np.float32)
    return 1 + 0.1 * x if path[-1].key == 'scale' else (
        spread.get(path[-2].key, 0.1) * x)

  tree = jax.tree_util.tree_map_with_path(draw, jax.eval_shape(
      lambda key: transformer.init(shape, key), jax.random.key(0)))
  ids = sorted({*following, *(id_ for after in following.values()
                              for id_ in after)})
  assert len(ids) <= shape.hidden_size
  rows, _ = np.linalg.qr(rng.normal(size=(shape.hidden_size, len(ids))))
  rows = dict(zip(ids, np.float32(rows.T)))
  for id_, row in rows.items():
    tree['embed']['embedding'][id_] = _LIKELY * row
    if not shape.tie_word_embeddings:
      tree['head']['kernel'][:, id_] = _LIKELY * row
  # A neuron for each id: it sees the id's row, and writes those that follow.
  gate, up, down = (tree['layers'][name]['kernel'][0]
                    for name in ('gate', 'up', 'down'))
  for neuron, (id_, after) in enumerate(following.items()):
    gate[:, neuron] = up[:, neuron] = rows[id_]
    down[neuron] = sum((1 - 0.03 * n) * rows[next_id]
                       for n, next_id in enumerate(after))
  return tree
