# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Measures how fast a policy of some size is trained on trajectories.

  python benchmarks/train_step.py --size toy --torch     # a CPU
  python benchmarks/train_step.py --size 3b --dtype bfloat16 \
      --remat nothing                                    # a GPU
  python benchmarks/train_step.py --size 135m --trajectories 16 --length 512 \
      --all-logits --steps 3                             # SmolLM2's shape

A step is one GRPO update with random weights: forward, backward, clipping,
AdamW, on trajectories of lengths that occur in rollouts. Model FLOPs count
useful tokens alone, logits of sampled tokens alone, and nothing that is
recomputed:

  6 P n + 6 V D s + 6 L H d sum(length^2)    n tokens, of which s are sampled;
                                             P: all but embedding and head

and are divided by the rate of one large matrix product, measured in the same
run. `--torch` runs the same step on the same weights and tokens in torch, with
transformers' model on length-sorted padded micro-batches, in turns with ours;
the first gradients of both are compared. So does `--all-logits` with our step
that computes the logits of all tokens, and not of the sampled ones alone.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# pylint: disable=g-import-not-at-top
from searchrl.experiment import policy as policies
from searchrl.models import attention
from searchrl.models import sizes
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rl import algorithms
from searchrl.runtime import mesh as meshes
from searchrl.runtime import workdir
from searchrl.training import learner as learners
from searchrl.training import optimizer
import workload

_QWEN = functools.partial(transformer.TransformerConfig, rope_theta=1e6)
SIZES = {
    'toy': _QWEN(
        vocab_size=1792, hidden_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=352),
    '135m': _QWEN(
        vocab_size=49_152, hidden_size=576, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        intermediate_size=1536),
    '0.5b': _QWEN(
        vocab_size=151_936, hidden_size=896, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, head_dim=64,
        intermediate_size=4864),
    '3b': _QWEN(
        vocab_size=151_936, hidden_size=2048, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, head_dim=128,
        intermediate_size=11_008),
}
ADAMW = dict(learning_rate=1e-6, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0)
CLIP = 1.0  # of the gradient's norm


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--size', choices=SIZES, default='toy')
  parser.add_argument('--trajectories', type=int, default=64)
  parser.add_argument('--length', type=int, default=512,
                      help='tokens of the longest trajectory and of a row')
  parser.add_argument('--rows', type=int, default=2, help='a micro-batch')
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--remat', default='')
  parser.add_argument('--attention', default='auto')
  parser.add_argument('--steps', type=int, default=5)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--all-logits', action='store_true',
                      help='also a step with the logits of all tokens')
  parser.add_argument('--torch', action='store_true', help='beside ours')
  parser.add_argument('--torch-rows', type=int, default=8)
  options = parser.parse_args()
  print(f'    python benchmarks/train_step.py {" ".join(sys.argv[1:])}\n')
  device = jax.devices()[0]
  print(f'{device.device_kind}, jax {jax.__version__}, revision '
        f'{workdir.environment()["git"]}, seed {options.seed}')
  shape = SIZES[options.size]
  params = jax.jit(functools.partial(transformer.init, shape))(
      jax.random.key(options.seed))
  batch = workload.batch(options.trajectories, options.length,
                         shape.vocab_size, options.seed)
  steps = {'searchrl': Ours(options, shape, params, batch)}
  scored = steps['searchrl'].batch
  if options.all_logits:
    steps['all logits'] = Ours(options, shape, params, batch, skips=False)
  if options.torch:
    steps['torch'] = Torch(options, shape, params, scored)
  del params
  report(options, shape, scored, steps)


class Ours:
  """The learner's step; a call is one update."""

  def __init__(self, options, shape, params, batch, skips=True):
    mesh = meshes.make(data=1, fsdp=-1)
    name, note = attention.resolve(
        options.attention, platform=jax.devices()[0].platform,
        dtype=options.dtype, heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads, head_dim=shape.head_dim,
        length=options.length, rows=options.rows, max_segments=16)
    print(note)
    algorithm = dataclasses.replace(
        algorithms.grpo(kl_coef=0.0, aggregation='token_mean'),
        skips_unsampled=skips)
    self._learner = learners.make(
        shape, algorithm, optimizer.adamw(**ADAMW, max_grad_norm=CLIP), mesh,
        rows=options.trajectories, length=options.length,
        microbatch_rows=options.rows * mesh.size, remat=options.remat,
        dtype=options.dtype, fit_segments=name == 'cudnn_padded',
        attend=functools.partial(
            attention.causal, implementation=name,
            sharding=meshes.sharding(mesh, ('batch', None, 'heads', None))))
    self._state = self._learner.init(params)
    # Both receive the old log-probs, as in the second step on a batch.
    self.batch = dataclasses.replace(self._learner, minibatches=2).score(
        self._state, batch).batch

  def __call__(self) -> tuple[float, float]:
    """The gradient's norm, and the useful share of the tokens computed."""
    self._state, metrics, *_ = self._learner.update(
        self._state, self._learner.pack(self.batch))
    return metrics['actor/grad_norm'], metrics['perf/useful_tokens']


class Torch:
  """The same in torch, with transformers' model; a call is one update."""

  def __init__(self, options, shape, params, batch):
    import torch
    import transformers
    self._torch = torch
    with tempfile.TemporaryDirectory() as folder:
      weights.save(folder, params, shape, eos_id=0,
                   tokenizer_from=str(policies.TINY_BASE))
      self._model = transformers.AutoModelForCausalLM.from_pretrained(
          folder, dtype=torch.float32, attn_implementation='sdpa')
    self._adam = torch.optim.AdamW(
        self._model.parameters(), lr=ADAMW['learning_rate'],
        betas=(ADAMW['b1'], ADAMW['b2']), eps=ADAMW['eps'],
        weight_decay=ADAMW['weight_decay'], fused=True)
    advantages = np.asarray(algorithms.grpo(
        kl_coef=0.0, aggregation='token_mean').advantages(batch))
    order = np.argsort(-np.asarray(batch.lengths), kind='stable')
    self._parts, computed = [], 0
    for start in range(0, len(order), options.torch_rows):
      rows = order[start:start + options.torch_rows]
      width = int(batch.lengths[rows].max())
      computed += len(rows) * width
      take = lambda x: torch.from_numpy(np.ascontiguousarray(x))
      self._parts.append((
          take(batch.tokens[rows, :width].astype(np.int64)),
          take(np.arange(width) < batch.lengths[rows][:, None]),
          take(batch.loss_mask[rows, :width]),
          take(batch.old_logprobs[rows, :width]),
          take(advantages[rows])))
    self._count = int(batch.loss_mask.sum())
    self._useful = float(batch.lengths.sum() / computed)

  def __call__(self) -> tuple[float, float]:
    torch = self._torch
    self._adam.zero_grad(set_to_none=True)
    for tokens, real, mask, old, advantages in self._parts:
      logits = self._model(
          tokens, attention_mask=real, use_cache=False).logits[:, :-1]
      logprobs = torch.log_softmax(logits.float(), -1).gather(
          -1, tokens[:, 1:, None])[..., 0]
      ratio = torch.exp(logprobs - old[:, 1:])
      gain = advantages[:, None]
      loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2))
      (loss[mask[:, 1:]].sum() / self._count).backward()
    norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
    self._adam.step()
    return float(norm), self._useful


def report(options, shape, batch, steps) -> None:
  """Runs the steps in turns, and prints the table."""
  seconds = {name: [] for name in steps}
  cpu = {name: [] for name in steps}
  first, useful = {}, {}
  for turn in range(options.steps + 2):  # two to compile and warm up
    for name, step in steps.items():
      start = time.perf_counter(), time.process_time()
      norm, useful[name] = step()
      taken = time.perf_counter() - start[0], time.process_time() - start[1]
      first.setdefault(name, norm)
      if turn > 1:
        seconds[name].append(taken[0])
        cpu[name].append(taken[1])
  tokens = int(batch.lengths.sum())
  flops = model_flops(shape, np.asarray(batch.lengths),
                      int(batch.loss_mask.sum()))
  rate = matmul_rate(options.dtype)
  print(f'matrix product: {rate / 1e12:.3g} TFLOP/s in {options.dtype}\n')
  print('| step | seconds | CPU seconds | tokens/s | useful tokens/s '
        '| of tokens useful | share of the matrix product\'s rate '
        '| norm of the first gradient |\n|---|---|---|---|---|---|---|---|')
  for name in steps:
    each = statistics.median(seconds[name])
    print(f'| {name} | {each:.3f} | {statistics.median(cpu[name]):.3f} '
          f'| {tokens / useful[name] / each:.0f} | {tokens / each:.0f} '
          f'| {useful[name]:.3f} | {flops / each / rate:.3f} '
          f'| {first[name]:.6f} |')
  ours = 'searchrl'
  for other in steps.keys() - {ours}:
    if not np.isclose(first[ours], first[other], rtol=1e-2):
      raise SystemExit(f'the first gradients differ: {first}')
    ratio = lambda taken: statistics.median(
        mine / theirs for mine, theirs in zip(taken[ours], taken[other]))
    print(f'\n{ours} / {other}, median of pairs: {ratio(seconds):.2f} of the '
          f'seconds, {ratio(cpu):.2f} of the CPU seconds')


def model_flops(shape: transformer.TransformerConfig, lengths: np.ndarray,
                sampled: int | None = None) -> float:
  """Forward and backward of these documents; see the top of this file.

  By default, all tokens are sampled.
  """
  _, parameters = sizes.parameters(shape)
  head = shape.vocab_size * shape.hidden_size
  parameters -= head if shape.tie_word_embeddings else 2 * head
  tokens = int(lengths.sum())
  per_pair = (6 * shape.num_hidden_layers * shape.num_attention_heads
              * shape.head_dim)
  return (6 * parameters * tokens
          + 6 * head * (tokens if sampled is None else sampled)
          + per_pair * float((lengths.astype(float) ** 2).sum()))


def matmul_rate(dtype: str, repeats: int = 5) -> float:
  """FLOP/s of a square product, as large as the device deserves."""
  side = 1024 if jax.devices()[0].platform == 'cpu' else 8192
  a, b = (jax.random.normal(jax.random.key(i), (side, side), dtype)
          for i in range(2))
  chain = 4
  run = jax.jit(lambda a, b: functools.reduce(
      lambda x, _: (x @ b) / side ** 0.5, range(chain), a))
  taken = []
  for _ in range(repeats + 2):
    start = time.perf_counter()
    jax.block_until_ready(run(a, b))
    taken.append(time.perf_counter() - start)
  return chain * 2 * side ** 3 / statistics.median(taken[2:])


if __name__ == '__main__':
  main()
