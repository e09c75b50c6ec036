# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""One GRPO step or one update of tuning, ours and others', in turns.

  python benchmarks/peers.py --trl=V1/bin/python --tunix=V2/bin/python
  python benchmarks/peers.py --model=smollm2 --trl=V1/bin/python \
      --rounded                             # the shape of SmolLM2-135M
  python benchmarks/peers.py --step=sft --model=smollm2 --trl=V1/bin/python \
      --rounded

with V1 and V2 environments of their own: `pip install trl==1.16.0` (torch for
CPUs first), and `pip install google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2`.
The work is the same for all: a random Qwen2 of 1.05 million parameters (or of
the shape of SmolLM2-135M, without Tunix), float32, 4 prompts of 16 tokens x 4
samples x 64 tokens, none of which ends early, a reward, a KL term to a frozen
reference, one AdamW update. Each peer runs as its users run it, in a process of
its own, and they take turns step by step; the table has medians of all steps
but the first two, and the largest memory of each process. With `--rounded`,
another worker is ours with products whose operands are rounded to bfloat16.

With `--step=sft`, the work is one supervised update on 8 documents of 64 to 192
tokens, all of which are trained on. Ours packs them into rows of 512 tokens,
one per micro-batch; TRL's SFTTrainer pads them to the longest one, as it does
by default.

The functions that make the toy in each environment serve `peers_rollout.py`,
too.
"""

import argparse
import functools
import pathlib
import random as stdlib_random
import sys
import tempfile
import zlib

import turns

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUESTIONS, SAMPLES = 4, 4
PROMPT_TOKENS, NEW_TOKENS = 16, 64
SHAPE = dict(vocab_size=512, hidden_size=128, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=512)
SHAPES = {
    'toy': SHAPE,
    'smollm2': dict(vocab_size=49_152, hidden_size=576, num_hidden_layers=30,
                    num_attention_heads=9, num_key_value_heads=3,
                    intermediate_size=1536)}
BETA = 0.04
DOCUMENTS = 8  # in an update of tuning
PACK_LENGTH = 512


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--trl', help='its python')
  parser.add_argument('--tunix', help='its python')
  parser.add_argument('--rounds', type=int, default=16)
  parser.add_argument('--model', choices=SHAPES, default='toy')
  parser.add_argument('--rounded', action='store_true',
                      help='also ours with model.matmul_dtype=bfloat16')
  parser.add_argument('--step', choices=('grpo', 'sft'), default='grpo')
  parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.worker:
    WORKERS[options.worker][options.step](
        options.rounds + turns.WARM, SHAPES[options.model])
    return
  if options.tunix and (options.model, options.step) != ('toy', 'grpo'):
    parser.error('--tunix takes part with --model=toy --step=grpo only.')
  pythons = {'searchrl': sys.executable,
             'rounded': options.rounded and sys.executable,
             'trl': options.trl, 'tunix': options.tunix}
  workers = [turns.Worker(python, __file__, name, f'--rounds={options.rounds}',
                          f'--model={options.model}', f'--step={options.step}')
             for name, python in pythons.items() if python]
  print(f'before: {turns.load()}')
  taken = turns.run(workers, rounds=options.rounds)
  print(f'after: {turns.load()}\n')
  for worker in workers:
    worker.close()
  print('| | seconds per step | CPU seconds per step | GiB '
        '| seconds / searchrl | CPU seconds / searchrl |\n' + '|---' * 6 + '|')
  ours = {fact: turns.median(taken['searchrl'], fact)
          for fact in ('secs', 'cpu_secs')}
  for name, steps in taken.items():
    secs, cpu = turns.median(steps), turns.median(steps, 'cpu_secs')
    print(f'| {name} | {secs:.3f} | {cpu:.3f} '
          f'| {max(step["gib"] for step in steps):.1f} '
          f'| {secs / ours["secs"]:.2f} | {cpu / ours["cpu_secs"]:.2f} |')


class Characters:
  """A tokenizer of 512 tokens of one character each, as Tunix takes it."""

  def encode(self, text, **_):
    return [ord(c) % 512 for c in text]

  def decode(self, ids, **_):
    return ''.join(chr(0x4E00 + int(i)) for i in ids)  # a multiple of 512

  def bos_id(self):
    return 1

  def eos_id(self):
    return 2

  def pad_id(self):
    return 0


def numbered(count: int, start: int = 0) -> list[str]:
  """Different prompts, each of PROMPT_TOKENS characters."""
  return [f'{i:0{PROMPT_TOKENS}d}' for i in range(start, start + count)]


def odd(completions) -> list[float]:
  """A reward of texts that has no meaning."""
  return [sum(map(ord, c)) % 7 / 7 for c in completions]


def searchrl(steps: int, sizes: dict[str, int], matmul_dtype: str = ''
            ) -> None:
  """Engine, learner and reward, as `experiment.loop` puts them together."""
  sys.path.insert(0, str(ROOT))
  import numpy as np
  from searchrl import trajectory
  from searchrl.models.inference import engine as engines
  from searchrl.rl import algorithms
  from searchrl.runtime import mesh as meshes
  from searchrl.training import learner as learners
  from searchrl.training import optimizer
  shape, params = random_model(sizes, matmul_dtype)
  learner = learners.make(
      shape, algorithms.grpo(kl_coef=BETA),
      optimizer.adamw(learning_rate=1e-4), meshes.make(data=1),
      rows=QUESTIONS * SAMPLES, length=PROMPT_TOKENS + NEW_TOKENS,
      microbatch_rows=QUESTIONS * SAMPLES // 2)
  engine = engines.Engine(
      shape, slots=QUESTIONS * SAMPLES, length=PROMPT_TOKENS + NEW_TOKENS,
      stop_table=never_stops(shape.vocab_size), steps=NEW_TOKENS)
  state = learner.init(params)
  rng = np.random.default_rng(0)
  clock = turns.Clock()
  for step in range(steps):
    questions = [trajectory.Question(f'{step}-{i}', '', ('',))
                 for i in range(QUESTIONS)]
    prompts = rng.integers(0, 256, (QUESTIONS, PROMPT_TOKENS)).tolist()
    engine.load(learner.policy(state, params), 1.0)
    trajectories = rollout(engine, questions, prompts, step)
    engine.unload()
    batch = trajectory.collate(
        trajectories, group_ids=[t.question.uid for t in trajectories],
        policy_step=step, length=PROMPT_TOKENS + NEW_TOKENS)
    packed = learner.score(state, batch, params)
    state, *_ = learner.update(state, packed, params)
    clock()


def random_model(sizes: dict[str, int], matmul_dtype: str):
  """The shape and the params of ours."""
  import jax
  from searchrl.models import transformer
  from searchrl.runtime import host_memory
  host_memory.keep()  # as main does
  shape = transformer.TransformerConfig(
      head_dim=sizes['hidden_size'] // sizes['num_attention_heads'],
      matmul_dtype=matmul_dtype, **sizes)
  return shape, transformer.init(shape, jax.random.key(0))


def documents(steps: int) -> list[list[list[int]]]:
  """The token ids of the documents of each update of tuning."""
  random = stdlib_random.Random(0)
  return [[[random.randrange(256) for _ in range(random.randint(64, 192))]
           for _ in range(DOCUMENTS)] for _ in range(steps)]


def searchrl_sft(steps: int, sizes: dict[str, int], matmul_dtype: str = ''
                ) -> None:
  """Learner and update, as `jobs.finetune` puts them together."""
  sys.path.insert(0, str(ROOT))
  from searchrl.runtime import mesh as meshes
  from searchrl.training import optimizer
  from searchrl.training import supervised
  shape, params = random_model(sizes, matmul_dtype)
  learner = supervised.language_learner(
      shape, optimizer.adamw(learning_rate=1e-4), meshes.make(data=1),
      pack_length=PACK_LENGTH, rows=DOCUMENTS, microbatch_rows=1)
  state, update = learner.init(params), supervised.language_update(learner)
  del params
  clock = turns.Clock()
  for batch in documents(steps):
    state, metrics = update(state, supervised.to_batch(
        [supervised.Document(ids, [1.0] * len(ids)) for ids in batch],
        rows=DOCUMENTS, length=PACK_LENGTH, pad_id=0))
    clock(loss=float(metrics['loss']))


def rollout(engine, questions, prompts, step: int) -> list:
  """Trajectories of one turn, of SAMPLES a question, with a reward."""
  from searchrl import trajectory
  from searchrl.models.inference import engine as engines
  engine.append([engines.Append(
      q * SAMPLES + i, prompts[q], NEW_TOKENS,
      engines.row_ids(step, questions[q].uid, i, 0), True)
                 for q in range(QUESTIONS) for i in range(SAMPLES)])
  stopped = {}
  while len(stopped) < QUESTIONS * SAMPLES:
    stopped |= {s.slot: s for s in engine.decode()}
  trajectories = []
  for slot, one in sorted(stopped.items()):
    turn = trajectory.Turn(one.tokens, one.logprobs,
                           trajectory.Action('answer', ('',)))
    reward = sum(t % 2 for t in one.tokens) / NEW_TOKENS
    trajectories.append(trajectory.Trajectory(
        questions[slot // SAMPLES], slot % SAMPLES, step,
        tuple(prompts[slot // SAMPLES]), (turn,), 'answer', reward, reward))
    assert len(one.tokens) == NEW_TOKENS
    engine.release(slot)
  return trajectories


def never_stops(vocabulary: int, end_ids=()):
  """A stop table whose string no token can write."""
  from searchrl.models.inference import stops
  return stops.compile_table([b''], ['never said'], vocabulary, end_ids)


def trl(steps: int, sizes: dict[str, int]) -> None:
  """TRL's GRPOTrainer, generation by transformers."""
  with tempfile.TemporaryDirectory() as folder:
    trl_trainer(folder, steps, sizes, callbacks=[each_step()]).train()


def trl_sft(steps: int, sizes: dict[str, int]) -> None:
  """TRL's SFTTrainer."""
  import datasets
  from trl import SFTConfig, SFTTrainer
  with tempfile.TemporaryDirectory() as folder:
    tokenizer = random_folder(folder, sizes)
    SFTTrainer(
        folder, args=SFTConfig(
            folder + '/out', per_device_train_batch_size=DOCUMENTS,
            max_steps=steps, max_length=PACK_LENGTH, **TRL_OPTIONS),
        train_dataset=datasets.Dataset.from_list(
            [{'input_ids': ids} for batch in documents(steps)
             for ids in batch]),
        processing_class=tokenizer,
        callbacks=[each_step()]).train()


def each_step():
  """A callback of transformers' trainer that ends a turn with every step."""
  import transformers
  clock = turns.Clock()

  class EachStep(transformers.TrainerCallback):

    def on_step_end(self, *args, **kwargs):
      clock()

  return EachStep()


TRL_OPTIONS = dict(
    use_cpu=True, bf16=False, learning_rate=1e-4, gradient_checkpointing=False,
    report_to=[], save_strategy='no', logging_steps=10**6, disable_tqdm=True)


def trl_trainer(folder: str, steps: int, sizes=SHAPE, **more):
  """The trainer of a random model, which is kept in a folder."""
  import datasets
  from trl import GRPOConfig, GRPOTrainer
  tokenizer = random_folder(folder, sizes)
  return GRPOTrainer(
      folder, reward_funcs=lambda completions, **_: odd(completions),
      args=GRPOConfig(
          folder + '/out', per_device_train_batch_size=QUESTIONS * SAMPLES,
          num_generations=SAMPLES, max_completion_length=NEW_TOKENS, beta=BETA,
          max_steps=steps, generation_kwargs=dict(min_new_tokens=NEW_TOKENS),
          **TRL_OPTIONS),
      train_dataset=datasets.Dataset.from_dict(
          {'prompt': numbered(QUESTIONS * steps)}),
      processing_class=tokenizer, **more)


def random_folder(folder: str, sizes):
  """Writes a random model to a folder, and returns its tokenizer."""
  import tokenizers
  import torch
  import transformers
  torch.manual_seed(0)
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  words = {c: i for i, c in enumerate(alphabet)} | {'<e>': 256, '<p>': 257}
  core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
  core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  core.decoder = tokenizers.decoders.ByteLevel()
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_object=core, eos_token='<e>', pad_token='<p>')
  config = transformers.Qwen2Config(
      **sizes, tie_word_embeddings=True, eos_token_id=256, pad_token_id=257)
  transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
  tokenizer.save_pretrained(folder)
  return tokenizer


def tunix(steps: int, _) -> None:
  """Tunix's GRPOLearner, generation by its vanilla sampler."""
  from flax import nnx
  import jax
  import numpy as np
  from tunix.rl.grpo import grpo_learner
  cluster, mesh = tunix_cluster(
      steps, max_prompt_length=64, kv_cache_size=128, eos_tokens=[2])
  clock = turns.Clock()
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
      reward_fns=lambda prompts, completions, **_: odd(completions))
  with mesh:
    learner.train([{
        'prompts': np.array(numbered(QUESTIONS, QUESTIONS * step)),
        'answer': np.array(['1'] * QUESTIONS)} for step in range(steps)])


def tunix_cluster(steps: int, **rollout):
  """A cluster of random toys, actor and reference, and their mesh."""
  from flax import nnx
  import jax
  import numpy as np
  import optax
  from tunix.models.qwen2 import model as qwen2
  from tunix.rl import rl_cluster
  from tunix.rl.rollout import base_rollout
  shape = qwen2.ModelConfig(
      num_layers=4, vocab_size=512, embed_dim=128, hidden_dim=512, num_heads=4,
      num_kv_heads=2, head_dim=32, norm_eps=1e-6, rope_theta=10_000,
      use_tied_embedding=True)
  mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))

  def drawn(path, leaf):
    """Draws weights like the others'; Tunix's norms of 0 repeat one token."""
    name = jax.tree_util.keystr(path)
    if leaf.ndim == 1:
      return jax.numpy.full(leaf.shape, float('norm' in name))
    key = jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode()))
    return 0.02 * jax.random.normal(key, leaf.shape)

  @nnx.jit
  def model():
    made = qwen2.Qwen2(shape, rngs=nnx.Rngs(0))
    state = jax.tree_util.tree_map_with_path(drawn, nnx.state(made))
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
          max_tokens_to_generate=NEW_TOKENS, temperature=1.0, top_p=1.0,
          **rollout))
  return rl_cluster.RLCluster(
      actor=actor, reference=reference, tokenizer=Characters(),
      cluster_config=config), mesh


_ROUNDED = {'matmul_dtype': 'bfloat16'}
WORKERS = {
    'searchrl': {'grpo': searchrl, 'sft': searchrl_sft},
    'rounded': {'grpo': functools.partial(searchrl, **_ROUNDED),
                'sft': functools.partial(searchrl_sft, **_ROUNDED)},
    'trl': {'grpo': trl, 'sft': trl_sft},
    'tunix': {'grpo': tunix}}

if __name__ == '__main__':
  main()
