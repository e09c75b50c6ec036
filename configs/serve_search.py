# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Serves a search engine with Search-R1's /retrieve protocol.

  python -m searchrl.main --config=configs/serve_search.py

Without `search.corpus` it serves the generated training world. A run on the
same machine searches it with the lines below. For a run on another machine, set
--config.serve.host=0.0.0.0, and put the server's name into the URL.

  config.search.engine = 'remote'
  config.search.options = dict(urls=('http://127.0.0.1:8000/retrieve',))

Every engine of common.py can be served, including engines over engines.
docs/search.md lists the guarantees of the server.

Hardware: 2 CPU cores, shared with the client.
Result: 0.16 to 0.25 CPU ms of the server per request, 16 or 64 at a time, over
an engine that does nothing; 1,519 to 1,642 queries per second with BM25 over
20,000 passages, one query per request (BENCHMARKS.md).
"""

from configs import common
from searchrl.experiment.rules import seed
import ml_collections


def get_config(text: str = '') -> ml_collections.ConfigDict:
  base = common.as_evaluated(common.get_config(text))
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.serve_search:run'
  config.seed = seed(0)  # seed of the noise engine
  config.search = base.search
  config.data = dict(
      # Seed of the generated world.
      world_seed=base.data.get_ref('world_seed'),
      # Its questions, which are not served.
      per_hop=base.data.get_ref('per_hop'),
      # Above 0: also questions on common knowledge.
      common=base.data.get_ref('common'),
  )
  config.world = base.world  # options: common knowledge, hard worlds
  config.serve = dict(
      host='127.0.0.1',  # 0.0.0.0 opens it to other machines
      port=8000,  # port to listen on; 0: a free one
      token_env='',  # environment variable with a bearer token; '': none
      top_k=3,  # passages per query, if a request does not say
      limits=dict(  # limits of a request
          body_bytes=2**24,
          queries=4096,
          query_chars=2000,  # characters of a query; a longer one is cut
          top_k=100,
      ),
      batch_queries=512,  # largest number of queries per call of the engine
      gather_secs=0.002,  # seconds that an idle engine waits for more queries
      waiting_queries=16_384,  # queries that wait; beyond, requests get 429
      deadline_secs=30.0,  # seconds for a request, which then gets 504
      idle_secs=60.0,  # seconds until an idle connection is closed
      connections=1024,  # connections with a request; one more gets 503
  )
  return config
