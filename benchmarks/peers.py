# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""One GRPO step on a toy, ours and others', in turns on one machine.

  python benchmarks/peers.py --trl=V1/bin/python --tunix=V2/bin/python

with V1 and V2 environments of their own: `pip install trl==1.16.0` (torch for
CPUs first), and `pip install google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2`.
The work is the same for all: a random Qwen2 of 1.05 million parameters,
float32, 4 prompts of 16 tokens x 4 samples x 64 tokens, none of which ends
early, a reward, a KL term to a frozen reference, one AdamW update. Each peer
runs as its users run it, in a process of its own, one after the other, and
again in reverse; medians of all steps but each process's first two.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUESTIONS, SAMPLES, PROMPT, SAID = 4, 4, 16, 64
SHAPE = dict(vocab_size=512, hidden_size=128, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=512)
BETA = 0.04


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--trl', help='its python')
  parser.add_argument('--tunix', help='its python')
  parser.add_argument('--steps', type=int, default=8)
  parser.add_argument('--rounds', type=int, default=2)
  parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.worker:
    WORKERS[options.worker](options.steps + 2)
    return
  pythons = {'searchrl': sys.executable, 'trl': options.trl,
             'tunix': options.tunix}
  names = [name for name in pythons if pythons[name]]
  steps = {name: [] for name in names}
  for turn in range(options.rounds):
    for name in names if turn % 2 == 0 else names[::-1]:
      steps[name] += run(pythons[name], name, options.steps)[2:]
  print('| | seconds a step | CPU seconds a step | of searchrl\'s seconds '
        '| of its CPU seconds |\n|---|---|---|---|---|')
  wall, cpu = (
      {name: statistics.median(s[i] for s in steps[name]) for name in names}
      for i in (0, 1))
  for name in names:
    print(f'| {name} | {wall[name]:.3f} | {cpu[name]:.3f} '
          f'| {wall[name] / wall["searchrl"]:.2f} '
          f'| {cpu[name] / cpu["searchrl"]:.2f} |')


def run(python: str, name: str, steps: int) -> list[tuple[float, float]]:
  """(seconds, CPU seconds) of each step of a worker."""
  done = subprocess.run(
      [python, __file__, f'--worker={name}', f'--steps={steps}'],
      capture_output=True, text=True, check=False,
      env={**__import__('os').environ, 'JAX_PLATFORMS': 'cpu',
           'TOKENIZERS_PARALLELISM': 'false'})
  told = [json.loads(line) for line in done.stdout.splitlines()
          if line.startswith('[')]
  if done.returncode or len(told) != steps + 2:
    raise SystemExit(f'{name} failed:\n{done.stdout}\n{done.stderr}')
  return told


class Clock:
  """Prints what passed since the last call."""

  def __init__(self):
    self._last = time.perf_counter(), time.process_time()

  def __call__(self) -> None:
    now = time.perf_counter(), time.process_time()
    print(json.dumps([n - last for n, last in zip(now, self._last)]),
          flush=True)
    self._last = now


def searchrl(steps: int) -> None:
  """Engine, learner and reward, as `train.step` puts them together."""
  sys.path.insert(0, str(ROOT))
  import jax
  import numpy as np
  from searchrl import learner as learners
  from searchrl import mesh as meshes
  from searchrl import optimizer
  from searchrl import trajectory
  from searchrl.models import engine as engines
  from searchrl.models import stops
  from searchrl.models import transformer
  from searchrl.rl import algorithms
  shape = transformer.TransformerConfig(head_dim=32, **SHAPE)
  params = transformer.init(shape, jax.random.key(0))
  learner = learners.make(
      shape, algorithms.grpo(kl_coef=BETA),
      optimizer.adamw(learning_rate=1e-4), meshes.make(data=1),
      rows=QUESTIONS * SAMPLES, length=PROMPT + SAID,
      microbatch_rows=QUESTIONS * SAMPLES)
  pieces = [bytes([i % 256]) for i in range(shape.vocab_size)]
  engine = engines.Engine(
      shape, slots=QUESTIONS * SAMPLES, length=PROMPT + SAID, eos_ids=(),
      stop_table=stops.compile_table(pieces, ['never said']), steps=SAID)
  state = learner.init(params)
  rng = np.random.default_rng(0)
  clock = Clock()
  for step in range(steps):
    asked = [trajectory.Question(f'{step}-{i}', '', ('',))
             for i in range(QUESTIONS)]
    prompts = rng.integers(0, 256, (QUESTIONS, PROMPT)).tolist()
    engine.load(learner.policy(state, params), 1.0)
    engine.append([engines.Append(
        q * SAMPLES + i, prompts[q], SAID,
        engines.row_ids(step, asked[q].uid, i, 0), True)
                   for q in range(QUESTIONS) for i in range(SAMPLES)])
    stopped = {}
    while len(stopped) < QUESTIONS * SAMPLES:
      stopped |= {s.slot: s for s in engine.decode()}
    games = []
    for slot, said in sorted(stopped.items()):
      turn = trajectory.Turn(said.tokens, said.logprobs,
                             trajectory.Action('answer', ('',)))
      reward = sum(t % 2 for t in said.tokens) / SAID
      games.append(trajectory.Trajectory(
          asked[slot // SAMPLES], slot % SAMPLES, step,
          tuple(prompts[slot // SAMPLES]), (turn,), 'answer', reward, reward))
      assert len(said.tokens) == SAID
      engine.release(slot)
    batch = trajectory.pack(
        games, group_ids=[g.question.uid for g in games], policy_step=step,
        length=PROMPT + SAID)
    batch = learner.score(state, batch, params)
    state, _ = learner.update(state, batch, params)
    clock()


def trl(steps: int) -> None:
  """TRL's GRPOTrainer, generation by transformers."""
  import datasets
  import tokenizers
  import torch
  import transformers
  from trl import GRPOConfig, GRPOTrainer
  torch.manual_seed(0)
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  words = {c: i for i, c in enumerate(alphabet)} | {'<e>': 256, '<p>': 257}
  core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
  core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  core.decoder = tokenizers.decoders.ByteLevel()
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_object=core, eos_token='<e>', pad_token='<p>')
  clock = Clock()

  class Told(transformers.TrainerCallback):

    def on_step_end(self, *args, **kwargs):
      clock()

  with tempfile.TemporaryDirectory() as folder:
    config = transformers.Qwen2Config(
        **SHAPE, tie_word_embeddings=True, eos_token_id=256, pad_token_id=257)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompts = [f'{i:0{PROMPT}d}' for i in range(QUESTIONS * steps)]
    trainer = GRPOTrainer(
        folder, reward_funcs=lambda completions, **_: [
            sum(map(ord, c)) % 7 / 7 for c in completions],
        args=GRPOConfig(
            folder + '/out', per_device_train_batch_size=QUESTIONS * SAMPLES,
            num_generations=SAMPLES, max_completion_length=SAID, beta=BETA,
            max_steps=steps, use_cpu=True, bf16=False, learning_rate=1e-4,
            gradient_checkpointing=False, report_to=[], save_strategy='no',
            logging_steps=10**6, disable_tqdm=True,
            generation_kwargs=dict(min_new_tokens=SAID)),
        train_dataset=datasets.Dataset.from_dict({'prompt': prompts}),
        processing_class=tokenizer, callbacks=[Told()])
    trainer.train()


def tunix(steps: int) -> None:
  """Tunix's GRPOLearner, generation by its vanilla sampler."""
  from flax import nnx
  import jax
  import numpy as np
  import optax
  from tunix.models.qwen2 import model as qwen2
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text, **_):
      return [3 + b for b in text.encode()]

    def decode(self, ids, **_):
      return bytes(max(0, int(i) - 3) % 256 for i in ids).decode('latin1')

    def bos_id(self):
      return 1

    def eos_id(self):
      return 2

    def pad_id(self):
      return 0

  shape = qwen2.ModelConfig(
      num_layers=4, vocab_size=512, embed_dim=128, hidden_dim=512, num_heads=4,
      num_kv_heads=2, head_dim=32, norm_eps=1e-6, rope_theta=10_000,
      use_tied_embedding=True)
  mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))

  @nnx.jit
  def model():
    made = qwen2.Qwen2(shape, rngs=nnx.Rngs(0))
    state = nnx.state(made)
    nnx.update(made, jax.lax.with_sharding_constraint(
        state, nnx.get_partition_spec(state)))
    return made

  with mesh:
    actor, reference = model(), model()
  role = rl_cluster.Role
  config = rl_cluster.ClusterConfig(
      role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
      rollout_engine='vanilla', offload_to_cpu=False,
      training_config=rl_cluster.RLTrainingConfig(
          actor_optimizer=optax.adamw(1e-4), eval_every_n_steps=10**6,
          max_steps=steps, mini_batch_size=QUESTIONS,
          train_micro_batch_size=QUESTIONS),
      rollout_config=base_rollout.RolloutConfig(
          max_tokens_to_generate=SAID, max_prompt_length=64, kv_cache_size=128,
          temperature=1.0, top_p=1.0, eos_tokens=[2]))
  cluster = rl_cluster.RLCluster(
      actor=actor, reference=reference, tokenizer=Bytes(),
      cluster_config=config)
  clock = Clock()
  update = cluster.update_actor

  def timed(*args, **kwargs):
    result = update(*args, **kwargs)
    jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
    clock()
    return result

  cluster.update_actor = timed
  learner = grpo_learner.GRPOLearner(
      rl_cluster=cluster, algo_config=grpo_learner.GRPOConfig(
          num_generations=SAMPLES, num_iterations=1, beta=BETA),
      reward_fns=lambda prompts, completions, **_: [
          sum(map(ord, c)) % 7 / 7 for c in completions])
  prompts = [f'{i:0{PROMPT}d}' for i in range(QUESTIONS * steps)]
  with mesh:
    learner.train([{
        'prompts': np.array(prompts[i:i + QUESTIONS]),
        'answer': np.array(['1'] * QUESTIONS)}
                   for i in range(0, len(prompts), QUESTIONS)])


WORKERS = {'searchrl': searchrl, 'trl': trl, 'tunix': tunix}

if __name__ == '__main__':
  main()
