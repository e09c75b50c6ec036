# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""A policy, or any model folder, behind OpenAI's completions API.

  python -m searchrl.main --config=configs/serve_model.py --config.ask.run=runs/dspo
  curl http://127.0.0.1:8001/v1/completions -H 'Content-Type: application/json' \
      -d '{"model": "dspo", "prompt": "Search, then answer: ", "max_tokens": 40}'

Also /v1/chat/completions, where the tokenizer has a chat template. Without
`ask.run` it serves `model.path`; the size may also be a run's folder, as in
configs/ask.py.

Result: not yet measured.
"""

from configs import ask
import ml_collections


def get_config(size: str = 'laptop') -> ml_collections.ConfigDict:
  config = ask.get_config(size)
  config.job = 'searchrl.jobs.serve_model:run'
  config.ask = dict(run=config.ask.run)  # '': the model itself
  config.serve = dict(
      name='',  # that requests call the model; '': its folder's
      host='127.0.0.1',  # 0.0.0.0 opens it to other machines
      port=8001,  # 0: a free one
      token_env='',  # variable of the environment with a bearer token; '': none
      steps=8,  # tokens that are decoded until new requests can join
      limits=dict(  # of a request
          body_bytes=2**20,
          choices=64,  # prompts times n
          stops=16,  # stop strings
          stop_chars=200,  # of each
      ),
      waiting=256,  # choices without a slot; above these, requests get 429
      deadline_secs=600.0,  # of a request; then it gets 504
      idle_secs=60.0,  # until a connection that asks nothing more is closed
      connections=1024,  # with a request under way; one more gets 503
  )
  return config
