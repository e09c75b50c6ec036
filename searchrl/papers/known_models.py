# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Known models, which a config takes by name, as in model=qwen2.5-7b.

These are the models of the papers and some small models. The config.json of
each model is in searchrl/assets/shapes, so that every setting of every model
can be printed and planned offline.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
  """Facts about a model that the settings need.

  Attributes:
    hub_id: Hub id of its weights.
    billions: Number of its parameters in billions, as in its name.
    chat: True if it has a chat template. Qwen's base models have one too.
    tools: True if the chat template can write the answers of tools, and leaves
      the text of earlier turns as it was.
  """

  hub_id: str
  billions: float
  chat: bool = True
  tools: bool = True


MODELS = {model.hub_id.rpartition('/')[2].lower(): model for model in (
    Model('HuggingFaceTB/SmolLM2-135M-Instruct', 0.135, tools=False),
    Model('HuggingFaceTB/SmolLM2-360M-Instruct', 0.36, tools=False),
    Model('Qwen/Qwen2.5-0.5B', 0.5),
    Model('Qwen/Qwen2.5-0.5B-Instruct', 0.5),
    Model('Qwen/Qwen2.5-1.5B', 1.5),
    Model('Qwen/Qwen2.5-1.5B-Instruct', 1.5),
    Model('Qwen/Qwen2.5-3B', 3),
    Model('Qwen/Qwen2.5-3B-Instruct', 3),
    Model('Qwen/Qwen2.5-7B', 7),
    Model('Qwen/Qwen2.5-7B-Instruct', 7),
    Model('Qwen/Qwen2.5-14B', 14),
    Model('Qwen/Qwen2.5-14B-Instruct', 14),
    Model('Qwen/Qwen2.5-32B', 32),
    Model('Qwen/Qwen2.5-32B-Instruct', 32),
    Model('Qwen/Qwen3-0.6B', 0.6),
    Model('Qwen/Qwen3-1.7B', 1.7),
    Model('Qwen/Qwen3-4B', 4),
    Model('Qwen/Qwen3-4B-Instruct-2507', 4),
    Model('Qwen/Qwen3-8B', 8),
    Model('Qwen/Qwen3-30B-A3B', 30),
    Model('meta-llama/Llama-3.2-1B', 1, chat=False, tools=False),
    Model('meta-llama/Llama-3.2-1B-Instruct', 1),
    Model('meta-llama/Llama-3.2-3B', 3, chat=False, tools=False),
    Model('meta-llama/Llama-3.2-3B-Instruct', 3),
    Model('deepseek-ai/DeepSeek-R1-Distill-Qwen-7B', 7, tools=False),
    Model('deepseek-ai/DeepSeek-R1-Distill-Qwen-14B', 14, tools=False),
)}
