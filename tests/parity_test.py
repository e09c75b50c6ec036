# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""transformers, live, against ours; needs the `parity` extra (torch)."""

import jax
import numpy as np
import pytest
from searchrl import player
from searchrl.agent import tokenizer as tokenizers
from searchrl.models import engine as engines
from searchrl.models import policy
from searchrl.models import stops
from searchrl.models import weights

torch = pytest.importorskip('torch', reason="pip install -e '.[parity]'")
transformers = pytest.importorskip('transformers')
CONTINUED = 40  # tokens


@pytest.fixture(scope='module')
def both(tmp_path_factory):
  """A policy that has moved away from the shipped one, exported; and theirs."""
  path = str(player.TINY_BASE)
  shape, folder = weights.read_config(path), tmp_path_factory.mktemp('export')
  rng = np.random.default_rng(0)
  params = jax.tree.map(
      lambda x: x + 0.01 * rng.normal(size=x.shape).astype(np.float32),
      weights.load(path, shape))
  tokenizer = tokenizers.load(path)
  weights.save(folder, params, shape, tokenizer_from=path,
               eos_id=tokenizer.eos_ids[0])
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  return folder, shape, params, tokenizer, theirs


def prompt(tokenizer):
  return tokenizer.encode('Search, then answer: What is the river of Zeston?\n')


def test_log_probs_are_those_of_transformers(both):
  _, shape, params, tokenizer, theirs = both
  ids = np.array([prompt(tokenizer)])
  ours, _ = policy.token_logprobs(params, ids, shape)
  with torch.no_grad():
    logits = theirs(torch.tensor(ids)).logits.log_softmax(-1).numpy()
  expected = np.take_along_axis(logits[0, :-1], ids[0, 1:, None], -1)[:, 0]
  np.testing.assert_allclose(ours[0, 1:], expected, atol=2e-4)


def test_exported_policy_continues_identically_under_greedy_decoding(both):
  _, shape, params, tokenizer, theirs = both
  ids = prompt(tokenizer)
  with torch.no_grad():
    expected = theirs.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=CONTINUED,
        eos_token_id=None, pad_token_id=0)[0, len(ids):].tolist()
  never = stops.compile_table(tokenizer.token_bytes, ['\0'], shape.vocab_size)
  engine = engines.Engine(shape, slots=1, length=128, stop_table=never,
                          eos_ids=tokenizer.eos_ids)
  engine.load(params, 0.0)
  engine.append([engines.Append(0, ids, CONTINUED, (0, 0, 0, 0, 0), True)])
  stopped = []
  while not stopped:
    stopped = engine.decode()
  ours = list(stopped[0].tokens)
  assert ours == expected[:len(ours)] and (
      len(ours) == CONTINUED or ours[-1] in tokenizer.eos_ids)


def test_tokenizer_is_that_of_transformers(both):
  folder, _, _, tokenizer, _ = both
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  text = 'Search, then answer: 3 naïve rivers?\n<search> Zeston</search>'
  assert list(tokenizer.encode(text)) == theirs.encode(
      text, add_special_tokens=False)
  assert tokenizer.decode(tokenizer.encode(text)) == text
