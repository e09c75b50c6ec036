# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny random Qwen2 folders and what transformers computes with them.

In an environment of its own, for torch is no dependency of ours:

  python3.11 -m venv golden_venv
  golden_venv/bin/pip install torch==2.13.0 transformers==5.23.0
  golden_venv/bin/python tests/golden/make_golden.py

Writes qwen2_tied/ and qwen2_untied/ beside itself: config.json,
model.safetensors, and golden.npz with prompts [N T], logits [N T V] in float32
(from float64 arithmetic) and greedy continuations [N M]. Torch's random
numbers may differ between versions; each folder agrees with itself.
"""

import itertools
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
CONTINUED = 24  # tokens
EOS = 0  # never met, so that every continuation has its full length


def random_model(config, seed: int):
  torch.manual_seed(seed)
  model = transformers.Qwen2ForCausalLM(config)
  with torch.no_grad():  # far from uniform; biases and norms not trivial
    for name, leaf in model.named_parameters():
      centre, spread = ((1.0, 0.3) if 'norm' in name else
                        (0.0, 1.0) if 'bias' in name else (0.0, 0.2))
      leaf.copy_(centre + spread * torch.randn_like(leaf))
  return model


@torch.no_grad()
def measure(model):
  """Prompts, logits, greedy continuations; and whether they test fairly."""
  model = model.double()
  prompts = ids = torch.randint(1, model.config.vocab_size, (3, 20))
  gap = 1.0
  for _ in range(CONTINUED):
    scores = model(ids).logits[:, -1]
    best = scores.topk(2).values
    gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
    ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
  continued = ids[:, prompts.shape[1]:].numpy()
  varied = min(len(set(row)) for row in continued.tolist()) >= 6
  fair = varied and gap > 1e-3 and (continued != EOS).all()
  return prompts.numpy(), model(prompts).logits.numpy(), continued, fair


def make(tied: bool) -> None:
  config = transformers.Qwen2Config(
      vocab_size=96, hidden_size=32, num_hidden_layers=2,
      num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
      max_position_embeddings=128, rms_norm_eps=1e-5,
      rope_parameters={'rope_type': 'default', 'rope_theta': 50_000.0},
      tie_word_embeddings=tied, eos_token_id=EOS, bos_token_id=None)
  folder = HERE / ('qwen2_tied' if tied else 'qwen2_untied')
  for seed in itertools.count():
    model = random_model(config, seed)
    model.save_pretrained(folder)
    prompts, logits, continued, fair = measure(model)
    if fair:
      break
  (folder / 'generation_config.json').unlink(missing_ok=True)
  (folder / 'model.safetensors').chmod(0o644)
  np.savez_compressed(
      folder / 'golden.npz', prompts=prompts.astype(np.int32),
      logits=logits.astype(np.float32), continued=continued.astype(np.int32),
      versions=np.array([torch.__version__, transformers.__version__]))
  print(folder, 'seed', seed, continued.tolist())


if __name__ == '__main__':
  make(tied=True)
  make(tied=False)
