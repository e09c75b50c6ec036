# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Serves a policy or any model folder with OpenAI's completions API.

  python -m searchrl.main --config=configs/serve_model.py \
      --config.ask.run=runs/dspo
  curl http://127.0.0.1:8001/v1/completions \
      -H 'Content-Type: application/json' -d \
      '{"model": "dspo", "prompt": "Search, then answer: ", "max_tokens": 40}'

It also serves /v1/chat/completions if the tokenizer has a chat template.
Without `ask.run` it serves `model.path`. The run may also stand after the
colon, as in --config=configs/serve_model.py:runs/dspo. So may a simulator; it
listens on the port on which configs/zerosearch.py asks for documents:

  python -m searchrl.main --config=configs/serve_model.py:simulator=google_14b

Result: not yet measured.
"""

from configs import ask
from searchrl.experiment.rules import field
from searchrl.papers.known_models import MODELS
from searchrl.papers.zerosearch import simulator_prompts
import ml_collections

SIMULATORS = simulator_prompts.PUBLISHED | simulator_prompts.PROMPTED
PORT = 6001  # where configs/zerosearch.py looks for its simulator


def get_config(text: str = '') -> ml_collections.ConfigDict:
  simulator = text.removeprefix('simulator=')
  is_simulator = text != simulator and simulator in SIMULATORS
  config = _simulator(simulator) if is_simulator else ask.get_config(text)
  config.job = 'searchrl.jobs.serve_model:run'
  config.ask = dict(run=config.ask.run)  # run to serve; '': the model itself
  config.serve = dict(
      name='',  # name of the model in requests; '': its directory's
      host='127.0.0.1',  # 0.0.0.0 opens it to other machines
      # Port to listen on; 0: a free one.
      port=PORT if is_simulator else 8001,
      token_env='',  # environment variable with a bearer token; '': none
      # Tokens decoded before new requests can join.
      steps=field(8, at_least=1),
      limits=dict(  # limits of a request
          body_bytes=2**20,
          choices=64,  # number of prompts times n
          stops=16,  # number of stop strings
          stop_chars=200,  # characters of each stop string
      ),
      waiting=256,  # choices that wait for a slot; beyond, requests get 429
      deadline_secs=600.0,  # seconds for a request, which then gets 504
      idle_secs=60.0,  # seconds until an idle connection is closed
      connections=1024,  # connections with a request; one more gets 503
  )
  return config


def _simulator(name: str) -> ml_collections.ConfigDict:
  """Returns the config of a simulator of ZeroSearch, by its name."""
  path = SIMULATORS[name]
  shape = simulator_prompts.SHAPES.get(path, path)
  model, = (key for key, model in MODELS.items() if model.hub_id == shape)
  config = ask.get_config(f'zerosearch/{model}')
  config.model.path = path
  # A prompt, and the 600 tokens of its documents.
  config.rollout.update(max_num_seqs=64, max_length=2048)
  return config
