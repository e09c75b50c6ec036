# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Tunes the language model of a simulated engine: from queries to documents.

  python -m searchrl.main --config=configs/finetune_simulator.py

Run it after configs/dspo.py and configs/collect_simulation_data.py. The trainer
is that of configs/sft.py, and the loss is on the documents only. It writes
runs/finetune_simulator/model, a Hugging Face folder, which
configs/evaluate_simulator.py evaluates and configs/zerosearch.py trains with.

The paper's sizes use the chat template of the model and the prompts of the
published simulators:

  python -m searchrl.main --config=configs/finetune_simulator.py:qwen2.5-3b

Hardware: 2 CPU cores. Time: 899 CPU seconds, 1,660 updates, beside other work.
Result: the validation loss falls from 2.65 to .62 nats a token; what is written
for a new world: BENCHMARKS.md. At the size of Qwen2.5: not yet measured.

Source: Sun et al. 2025, ZeroSearch, arXiv:2505.04588, section 3.2: learning
rate 1e-6; it gives no other value.
"""

from configs import arguments
from configs import sft
from searchrl.papers.known_models import MODELS

COLLECTED = 'runs/collect_simulation_data'


def get_config(text: str = ''):
  args = arguments.parse(text, size=('laptop', 'smoke'), setting=())
  config = sft.get_config(args.size)
  config.data.update(train=f'{COLLECTED}/train.jsonl',
                     validation=f'{COLLECTED}/validation.jsonl')
  if args.model:
    config.model.path = MODELS[args.model].hub_id
    config.model.save_dtype = 'bfloat16'
    config.optimizer.learning_rate = 1e-6
    config.batch.documents = 64
    config.learner.update(pack_length=2048, remat='auto', dtype='bfloat16')
    config.mesh.update(data=1, fsdp=-1)
  elif args.size == 'laptop':
    config.optimizer.update(learning_rate=1.5e-3, warmup_steps=20)
    config.learner.pack_length = 256
    config.batch.documents = 16
    config.train.update(epochs=1, validate_every=200, save_every=200)
  return config
