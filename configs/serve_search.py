# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""A search server of Search-R1's /retrieve protocol.

  python -m searchrl.main --config=configs/serve_search.py

Without `search.corpus` it serves the generated training world. A run on another
machine searches it with

  config.search.engine = 'remote'
  config.search.options = dict(urls=('http://127.0.0.1:8000/retrieve',))

Every engine of common.py can be served, engines over engines too.
docs/search.md lists what the server guarantees.

Hardware: 2 CPU cores, shared with the client.
Result: 0.16 to 0.25 CPU ms of the server a request, 16 or 64 at a time, over an
engine that does nothing; 1,519 to 1,642 queries a second of BM25 over 20,000
passages, one query a request (BENCHMARKS.md).
"""

from configs import common
import ml_collections


def get_config(size: str = 'laptop') -> ml_collections.ConfigDict:
  base = common.as_evaluated(common.get_config(size))
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.serve_search:run'
  config.seed = base.seed  # of the noise
  config.search = base.search
  config.data = dict(
      world_seed=base.data.world_seed,  # of the generated world
      per_hop=base.data.per_hop,  # its questions, which are not served
      common=base.data.common,  # above 0: others, about common knowledge
  )
  config.world = base.world  # common knowledge, hard
  config.serve = dict(
      host='127.0.0.1',  # 0.0.0.0 opens it to other machines
      port=8000,  # 0: a free one
      token_env='',  # variable of the environment with a bearer token; '': none
      top_k=3,  # passages a query, where a request does not say
      limits=dict(  # of a request
          body_bytes=2**24,
          queries=4096,
          query_chars=2000,  # a query; a longer one is cut
          top_k=100,
      ),
      batch_queries=512,  # of a call of the engine, at most
      gather_secs=0.002,  # for which an idle engine waits for more queries
      waiting_queries=16_384,  # above these, requests get 429
      deadline_secs=30.0,  # of a request; then it gets 504
      idle_secs=60.0,  # until a connection that asks nothing more is closed
      connections=1024,  # with a request under way; one more gets 503
  )
  return config
