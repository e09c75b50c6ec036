# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints and what transformers computes with them.

In an environment of its own, for torch is no dependency of ours:

  python3.11 -m venv golden_venv
  golden_venv/bin/pip install torch==2.13.0 transformers==5.23.0
  golden_venv/bin/python tests/golden/make_golden.py

For each family that has none yet, writes a folder beside itself: config.json,
model.safetensors, and, in float32 from float64 arithmetic,

  golden.npz  prompts [N T], logits [N T V], greedy continuations [N M]; of the
              encoder tokens and mask [N T], hidden [N T D], embeddings [N D]
  more.npz    hidden [N T D], log-probs [N T] with entry 0 left 0, and
              gradients of their mean by the tensors' names

Delete a file, or a folder, to have it made again. Torch's random numbers may
differ between versions; each folder agrees with itself.
"""

import itertools
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
CONTINUED = 24  # tokens
EOS = 0  # never met, so that every continuation has its full length
_DECODER = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=128,
    rms_norm_eps=1e-5, eos_token_id=EOS, bos_token_id=None,
    rope_parameters={'rope_type': 'default', 'rope_theta': 50_000.0})
_LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 500.0, 'factor': 8.0,
           'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
           'original_max_position_embeddings': 32}
DECODERS = {  # name -> config, rows and length of the prompts
    'qwen2_tied': (transformers.Qwen2Config(
        **_DECODER, tie_word_embeddings=True), (3, 20)),
    'qwen2_untied': (transformers.Qwen2Config(
        **_DECODER, tie_word_embeddings=False), (3, 20)),
    'qwen3': (transformers.Qwen3Config(
        **_DECODER, tie_word_embeddings=True, head_dim=16), (2, 40)),
    'qwen3_moe': (transformers.Qwen3MoeConfig(
        **_DECODER, tie_word_embeddings=True, head_dim=16, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
                  (2, 40)),
    'llama': (transformers.LlamaConfig(
        **_DECODER | {'rope_parameters': _LLAMA3}, tie_word_embeddings=True,
        pretraining_tp=1), (2, 40)),
    'mistral': (transformers.MistralConfig(
        **_DECODER | {'num_hidden_layers': 3}, tie_word_embeddings=False,
        sliding_window=8), (2, 40)),
}


def random_model(config, seed: int):
  torch.manual_seed(seed)
  kinds = {'bert': transformers.BertModel}
  kind = kinds.get(config.model_type, transformers.AutoModelForCausalLM)
  model = (kind(config) if kind in kinds.values() else kind.from_config(config))
  with torch.no_grad():  # far from uniform; biases and norms not trivial
    for name, leaf in model.named_parameters():
      norm = 'norm' in name.lower() and name.endswith('weight')
      centre, spread = ((1.0, 0.3) if norm else
                        (0.0, 1.0) if 'bias' in name else (0.0, 0.2))
      leaf.copy_(centre + spread * torch.randn_like(leaf))
  return model.eval()


@torch.no_grad()
def measure(model, shape):
  """Prompts, logits, greedy continuations; and whether they test fairly."""
  model = model.double()
  model.config._experts_implementation = 'eager'  # the other has no float64
  prompts = ids = torch.randint(1, model.config.vocab_size, shape)
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


def save(file: pathlib.Path, **arrays) -> None:
  as_32 = {name: array.astype(np.int32 if array.dtype.kind in 'ib' else
                              np.float32) for name, array in arrays.items()}
  np.savez_compressed(file, **as_32, versions=np.array(
      [torch.__version__, transformers.__version__]))
  print(file, {name: array.shape for name, array in as_32.items()})


def write(model, folder: pathlib.Path) -> None:
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink(missing_ok=True)
  (folder / 'model.safetensors').chmod(0o644)


def make_decoder(folder: pathlib.Path, config, shape) -> None:
  for seed in itertools.count():
    model = random_model(config, seed)
    write(model, folder)
    prompts, logits, continued, fair = measure(model, shape)
    if fair:
      break
  save(folder / 'golden.npz', prompts=prompts, logits=logits,
       continued=continued)


def make_more(folder: pathlib.Path) -> None:
  """Makes further golden values for the existing checkpoint and prompts."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float64)
  model.config._experts_implementation = 'eager'
  ids = torch.tensor(np.load(folder / 'golden.npz')['prompts']).long()
  out = model(ids, output_hidden_states=True)
  logprobs = out.logits[:, :-1].log_softmax(-1).gather(
      -1, ids[:, 1:, None])[..., 0]
  logprobs.mean().backward()
  leaves = dict(model.named_parameters())
  last = model.config.num_hidden_layers - 1
  names = ['model.embed_tokens.weight', 'model.norm.weight',
           'model.layers.0.self_attn.k_proj.weight',
           'model.layers.0.input_layernorm.weight']
  names += [name for name in (f'model.layers.{last}.mlp.down_proj.weight',
                              f'model.layers.{last}.mlp.gate.weight',
                              'model.layers.0.self_attn.q_norm.weight',
                              'model.layers.0.self_attn.q_proj.bias',
                              'lm_head.weight') if name in leaves]
  save(folder / 'more.npz', hidden=out.hidden_states[-1].detach().numpy(),
       logprobs=np.pad(logprobs.detach().numpy(), ((0, 0), (1, 0))),
       **{name: leaves[name].grad.numpy() for name in names})


def make_encoder(folder: pathlib.Path) -> None:
  model = random_model(transformers.BertConfig(
      vocab_size=96, hidden_size=32, num_hidden_layers=2,
      num_attention_heads=4, intermediate_size=48, max_position_embeddings=64),
      seed=0)
  write(model, folder)
  model = model.double()
  tokens = torch.randint(1, 96, (4, 24))
  lengths = torch.tensor([24, 17, 3, 1])
  mask = torch.arange(24) < lengths[:, None]
  tokens = torch.where(mask, tokens, 0)
  with torch.no_grad():
    hidden = model(tokens, attention_mask=mask.long()).last_hidden_state
  mean = (hidden * mask[..., None]).sum(1) / lengths[:, None]
  save(folder / 'golden.npz', tokens=tokens.numpy(), mask=mask.numpy(),
       hidden=hidden.numpy(),
       embeddings=torch.nn.functional.normalize(mean).numpy())


if __name__ == '__main__':
  for name, (config, shape) in DECODERS.items():
    if not (HERE / name / 'golden.npz').exists():
      make_decoder(HERE / name, config, shape)
    if not (HERE / name / 'more.npz').exists():
      make_more(HERE / name)
  if not (HERE / 'bert' / 'golden.npz').exists():
    make_encoder(HERE / 'bert')
