# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The models that the papers train, by the names that a size can have.

  python -m searchrl.main --config=configs/grpo.py:qwen2.5-3b --plan

The shape of each, its config.json, is in searchrl/assets/shapes, so that every
setting of every model is printed and planned offline. Any other folder or hub
id of a family that is built here goes into model.path: docs/settings.md.

Result: of no model measured yet.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
  """What a setting has to know of a model.

  Attributes:
    hub_id: where its weights are.
    billions: of its parameters, as in its name.
    chat: it has a chat template; Qwen's base models have, too.
    tools: which can frame the answers of a tool, and keeps earlier turns.
  """

  hub_id: str
  billions: int
  chat: bool = True
  tools: bool = True


MODELS = {model.hub_id.rpartition('/')[2].lower(): model for model in (
    Model('Qwen/Qwen2.5-3B', 3),
    Model('Qwen/Qwen2.5-3B-Instruct', 3),
    Model('Qwen/Qwen2.5-7B', 7),
    Model('Qwen/Qwen2.5-7B-Instruct', 7),
    Model('Qwen/Qwen2.5-14B', 14),
    Model('Qwen/Qwen2.5-14B-Instruct', 14),
    Model('Qwen/Qwen2.5-32B', 32),
    Model('Qwen/Qwen2.5-32B-Instruct', 32),
    Model('Qwen/Qwen3-4B', 4),
    Model('Qwen/Qwen3-4B-Instruct-2507', 4),
    Model('Qwen/Qwen3-8B', 8),
    Model('meta-llama/Llama-3.2-3B', 3, chat=False, tools=False),
    Model('meta-llama/Llama-3.2-3B-Instruct', 3),
    Model('deepseek-ai/DeepSeek-R1-Distill-Qwen-7B', 7, tools=False),
    Model('deepseek-ai/DeepSeek-R1-Distill-Qwen-14B', 14, tools=False),
)}
