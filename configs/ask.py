# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""One question to a trained policy, each turn shown as it happens.

  python -m searchrl.main --config=configs/ask.py --config.ask.run=runs/dspo \
      --question "What is the city of birth of the person who wrote The Naflirsong Garden?"

Without --question it proposes some. The answer alone goes to stdout. The size
may also be a run's folder, --config=configs/ask.py:runs/mine, from which model,
dialogue, budgets and search come, too; after it any of them can be set.

Hardware: 2 CPU cores (AMD EPYC, family 25). Time: 7 seconds, start included.
Result: after dspo.py, seed 0, the answer above in 3 turns, and it is right.
"""

import pathlib

from configs import common
import ml_collections
from searchrl.runtime import workdir

_ROLLOUT = ('slots', 'length', 'dtype', 'attention', 'cache_tokens', 'tensor',
            'admission', 'decodes_in_flight', 'search_timeout_secs',
            'search_calls', 'budgets')


def get_config(size: str = 'laptop') -> ml_collections.ConfigDict:
  run = pathlib.Path(size) / 'config.json'
  try:
    base = common.as_evaluated(
        common.get_config('laptop' if run.is_file() else size))
  except ValueError as error:
    raise ValueError('size must be the folder of a run, with its config.json, '
                     f'but {size!r} is none; else a {error}') from error
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.ask:run'
  config.seed = base.seed  # of sampling, and of the noise
  config.model = dict(
      path=base.model.path,  # a Hugging Face folder or hub id; '': tiny base
      dtype=base.model.dtype,  # as it is kept
  )
  config.dialogue = base.dialogue  # that the policy was trained with
  config.search = base.search  # no corpus: the run's, or a generated world
  config.data = dict(
      world_seed=base.data.world_seed,  # of the generated world
      per_hop=base.data.per_hop,  # its questions, of which some are proposed
      common=base.data.common,  # above 0: others, about common knowledge
  )
  config.world = base.world  # common knowledge, hard
  config.rollout = {name: base.rollout[name] for name in _ROLLOUT}
  config.mesh = base.mesh
  config.ask = dict(
      question='',  # set by --question; '' proposes some
      examples='',  # questions, jsonl, to propose; '': beside the corpus
      run='',  # the run whose newest checkpoint answers; '': the model itself
      samples=1,  # a single one is greedy; several vote
      temperature=1.0,  # of several samples
  )
  if run.is_file():
    _as_in(config, workdir.read_config(size), size)
  return config


def _as_in(config: ml_collections.ConfigDict, past: dict, folder: str) -> None:
  """Takes from a run's config what its policy was trained with."""
  config.ask.run = folder
  config.ask.examples = past['data']['evaluate'] or past['data']['train']
  config.dialogue = past['dialogue']
  own = past['evaluate'].get('search', {})  # evaluation's engine, if any
  config.search = past['search'] | (own if own.get('engine') else {})
  for part in ('model', 'rollout'):
    config[part].update({name: value for name, value in past[part].items()
                         if name in config[part]})
