# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Fine-tunes a language model on conversations or questions, with supervision.

  python -m searchrl.main --config=configs/sft.py

It writes runs/sft/model, a Hugging Face folder: the tiny base model, trained on
2,000 faultless demonstrations of search in generated worlds.

For your own model and conversations (docs/sft.md has the formats of a line):

  python -m searchrl.main --config=configs/sft.py --workdir=runs/mine \
      --config.model.path=Qwen/Qwen2.5-3B-Instruct \
      --config.data.train=my.jsonl --config.learner.pack_length=4096 \
      --config.optimizer.learning_rate=1e-5 --config.learner.remat=nothing

Search-R1 fine-tunes on questions without a search: below the prompt of the
method `direct` of evaluate.py stands the question's first gold answer. The
tuned model is then evaluated with the same prompt. A model after the colon has
bfloat16 activations, and weights that are split over all devices:

  python -m searchrl.main --config=configs/sft.py:qwen2.5-7b \
      --workdir=runs/sft-qwen2.5-7b --config.data.train=data/train.jsonl
  python -m searchrl.main --config=configs/evaluate.py:methods/qwen2.5-7b \
      --config.model.path=runs/sft-qwen2.5-7b/model \
      --config.evaluate.order="('direct',)" \
      --config.data.evaluate=data/test.jsonl \
      --config.search.corpus=data/wiki-18.jsonl

Hardware: 2 CPU cores. Time: 107 seconds (163 CPU seconds), 63 updates.
Result: the validation loss, on demonstrations of other worlds, falls from .094
to .017 nats a token. Exact match of greedy answers, 1 to 3 hops, names of known
parts: .97 .91 .91 (means of three seeds; 129 CPU seconds on an AMD EPYC).
"""

import ml_collections

from configs import arguments
from configs.common import DTYPES, KERNELS, REMAT, mesh, plan
from searchrl.agent import prompts
from searchrl.experiment.rules import field, seed, tracked
from searchrl.papers.known_models import MODELS


def get_config(text: str = '') -> ml_collections.ConfigDict:
  args = arguments.parse(text, size=('laptop', 'smoke'), setting=())
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.finetune:run'
  config.seed = seed(0)  # seed of the order, of the split and of the adapters
  config.allow_changes = False  # set by --allow_changes
  config.model = dict(
      path='',  # Hugging Face folder or hub id; '': the shipped tiny base
      # Attention kernel: auto, xla, cudnn (GPUs since Hopper), cudnn_padded
      # (older GPUs) or splash (TPU).
      attention=field('auto', one_of=KERNELS),
      # Tokens per block, to bound memory.
      attention_block=field(0, zero='the default'),
      # Dtype of a frozen policy with adapters.
      dtype=field('float32', one_of=DTYPES),
      # Dtype to which operands of float32 products are rounded; '': none, auto:
      # bfloat16 on CPUs with AMX, and AMD's with AVX512_BF16 (much faster).
      matmul_dtype=field('', one_of=('', 'auto', 'bfloat16')),
      save_dtype=field('float32', one_of=DTYPES),  # dtype of the written model
      lora=dict(
          # Rank of the adapters, which are merged at the end.
          rank=field(0, zero='no LoRA, all parameters train'),
          alpha=16.0,  # numerator of the adapters' scale, alpha / rank
          targets=('q', 'k', 'v', 'o', 'gate', 'up', 'down'),
      ),
  )
  config.data = dict(
      # jsonl of conversations, or a file of questions; '': demonstrations in
      # worlds.
      train='',
      validation='',  # file that is not trained on; '': a share of train
      # Prompt of questions, as evaluate.prompts.
      prompts=field('plain' if args.model else 'laptop',
                    one_of=tuple(prompts.SETS)),
      question_mark=bool(args.model),  # adds a missing ? to questions
      # Share of train, drawn by the seed.
      validation_share=field(0.05, below=1, zero='no validation'),
      demonstrations=dict(
          count=field(2000, at_least=1),
          # Demonstrations from other worlds, for validation.
          validation=field(200, at_least=1),
          # Seed of the first world; the seeds of runs are smaller.
          world_seed=seed(3_000_000),
          a_world=field(40, at_least=1),
          mix=field(  # shares of 1, 2, ... hops
              (4, 4, 2, 2), lambda mix: mix and min(mix) >= 0 < max(mix),
              'shares from 0 on, one of them above 0'),
          # Rate of errors; 1: as tiny_instruct's teacher.
          sloppiness=field(0.0, at_least=0, at_most=2),
      ),
  )
  # Dialogue of the demonstrations, as in configs/common.py; '': the model's.
  config.dialogue = ''
  config.batch = dict(  # limits of an update; one of the two must be above 0
      documents=field(32, zero='any number'),  # largest number of documents
      # Largest number of tokens, without padding.
      tokens=field(0, zero='any number'),
  )
  config.optimizer = dict(
      learning_rate=tracked(3e-4),
      b2=0.99,
      weight_decay=0.01,
      max_grad_norm=1.0,
      warmup_steps=5,  # updates of the warm-up
      schedule='cosine',
      final_fraction=0.1,  # share of the learning rate left at the end
      mu_dtype='float32',  # dtype of the first moment; bfloat16 saves memory
  )
  config.learner = dict(
      # Rows on the devices at a time.
      microbatch_rows=field(0, zero='2, or data * fsdp'),
      # Tokens per row; longer documents are left out.
      pack_length=field(1024 if args.model else 512, at_least=0),
      # Largest number of documents per row.
      max_segments=field(16, at_least=1),
      # Activations to save; '': all; auto: by memory.
      remat=field('', one_of=REMAT),
      dtype=field('float32', one_of=DTYPES),  # dtype of activations
      # True: AdamW's moments are in the hosts' memory between updates.
      offload_optimizer=False,
  )
  config.mesh = mesh()
  config.plan = plan()
  config.train = dict(
      # Passes over the data.
      epochs=field(1, zero='as many as the steps need'),
      # Largest number of updates.
      steps=field(0, zero='as many as the epochs need'),
      # Updates between validations.
      validate_every=field(20, zero='only before and after training'),
      # Updates from one checkpoint to the next.
      save_every=field(20, at_least=1),
      loggers=('tensorboard',),
      progress=True,
  )
  if args.size == 'smoke':  # a run of seconds, for tests
    config.data.demonstrations.update(count=24, validation=8, a_world=8)
    config.batch.documents = 4
    config.train.update(validate_every=3, save_every=2)
    config.optimizer.warmup_steps = 2
  if args.model:
    config.model.update(path=MODELS[args.model].hub_id, save_dtype='bfloat16')
    config.batch.documents = 256
    config.learner.update(remat='auto', dtype='bfloat16')
    config.mesh.update(data=1, fsdp=-1)
    config.train.save_every = 100
  return config
