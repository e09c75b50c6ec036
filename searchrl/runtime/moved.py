# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Old names of modules, jobs and options, and what they are called today.

Whoever uses an old name gets one sentence with the new one. The config.json of
an old run alone is read as if it had been written with the new names.
"""

from collections.abc import Sequence
import copy
import functools
import sys
from typing import Any

MODULES = {f'searchrl.{old}': f'searchrl.{new}' for old, new in {
    'agent.questions': 'data.questions',
    'agent.rollout': 'rollouts.driver',
    'agent.searches': 'rollouts.pending_searches',
    'ahead': 'rollouts.asynchronous',
    'ask': 'jobs.ask',
    'checkpoint': 'runtime.checkpoint',
    'collect': 'rollouts.collect',
    'completions': 'serving.openai_api',
    'contrast': 'jobs.train_encoder',
    'datasets': 'data.datasets',
    'devices': 'runtime.devices',
    'embedder': 'encoders.embedder',
    'evaluate': 'evaluation.suite',
    'finetune': 'jobs.make_tiny_base',
    'generation': 'rollouts.generation',
    'handover': 'rollouts.weight_sync',
    'index': 'jobs.build_index',
    'learner': 'training.learner',
    'listener': 'serving.asgi',
    'mesh': 'runtime.mesh',
    'metrics': 'runtime.metrics',
    'model_server': 'serving.model_server',
    'models.engine': 'models.inference.engine',
    'models.sampling': 'models.inference.sampling',
    'models.slots': 'models.inference.slots',
    'models.stops': 'models.inference.stops',
    'optimizer': 'training.optimizer',
    'pairs': 'data.encoder_pairs',
    'parts': 'experiment.build',
    'plan': 'jobs.plan',
    'player': 'rollouts.sampler',
    'plugins': 'runtime.plugins',
    'processes': 'runtime.processes',
    'programs': 'training.train_step',
    'reranker': 'encoders.reranker',
    'retrieval': 'jobs.evaluate_search',
    'search.adapters': 'search.index.bm25_others',
    'search.approximate': 'search.index.approximate',
    'search.backends': 'search.index.open_index',
    'search.batcher': 'serving.batcher',
    'search.bm25': 'search.index.bm25',
    'search.bm25_index': 'search.index.bm25_files',
    'search.dense': 'search.index.dense',
    'search.device_index': 'search.index.exact_device',
    'search.embeddings': 'search.index.vector_store',
    'search.engines': 'search.factory',
    'search.foreign': 'search.index.faiss_import',
    'search.gauges': 'serving.prometheus',
    'search.hnsw_index': 'search.index.hnsw',
    'search.in_memory': 'search.index.in_memory',
    'search.mapped': 'search.mapped_corpus',
    'search.measures': 'search.ir_metrics',
    'search.meter': 'search.calls',
    'search.nearest': 'search.index.exact_host',
    'search.over': 'search.wrapped',
    'search.scann_index': 'search.index.scann',
    'search.server': 'serving.search_server',
    'search.transport': 'search.remote.transport',
    'search.web': 'search.remote.web',
    'search.wire': 'search.remote.wire',
    'serve': 'jobs.serve_search',
    'serve_model': 'jobs.serve_model',
    'summary': 'evaluation.summary',
    'train': 'jobs.train',
    'watchdog': 'runtime.watchdog',
    'workdir': 'runtime.workdir',
}.items()}

JOBS = {  # whose function has another name, too: each is now its file's `run`
    'searchrl.ask:job': 'searchrl.jobs.ask:run',
    'searchrl.contrast:encoder': 'searchrl.jobs.train_encoder:run',
    'searchrl.evaluate:job': 'searchrl.jobs.evaluate:run',
    'searchrl.finetune:tiny_base': 'searchrl.jobs.make_tiny_base:run',
    'searchrl.index:job': 'searchrl.jobs.build_index:run',
    'searchrl.retrieval:job': 'searchrl.jobs.evaluate_search:run',
    'searchrl.serve:search': 'searchrl.jobs.serve_search:run',
    'searchrl.serve_model:job': 'searchrl.jobs.serve_model:run',
}

OPTIONS = {  # of configs, by their path
    'rollout.ahead': 'rollout.decodes_in_flight',
}

ADDED = {  # options newer than some configs -> what a run without them did
    'algorithm.trained_on': 'policy',
    'data.common': 0.0,
    'data.golds': True,
    'data.limit': 0,
    'data.question_mark': False,
    'data.weights': [],
    'evaluate.decodings': ['greedy', 'sampled'],
    'evaluate.during': 0,
    'evaluate.engines': {},
    'evaluate.every': 0,
    'evaluate.limit': 0,
    'evaluate.search.engine': '',
    'evaluate.search.options': {},
    'evaluate.worlds.common_per_hop': 0,
    'evaluate.worlds.few_per_hop': 0,
    'guards': ...,  # it may be what it is today
    'reward_options': {},
    'rollout.attention': 'auto',
    'rollout.cache_tokens': 0,
    'train.init_from': '',
    'train.keep_best': ...,
    'train.stop_after': 0,
    'world.common': False,
    'world.hard': False,
    'world.outdated': 0.15,
    'world.scale': 1.0,
}

FIRST_TINY_BASE = 'tiny_base_1'  # the '' of model.path, before config.world
ONLY_OF_EVALUATION = ('evaluate.run', 'evaluate.step')  # once of every config


class Finder:
  """A meta-path finder: to import an old module raises the new name."""

  @staticmethod
  def find_spec(name: str, path=None, target=None) -> None:
    del path, target
    if name in MODULES:
      # An error with a `name` would be hidden by `from searchrl import player`.
      raise ModuleNotFoundError(f'{name} is now {MODULES[name]}.')


def install() -> None:
  """Asks `Finder` for modules that no other finder has found."""
  sys.meta_path.append(Finder)


def function(name: str) -> str:
  """Today's 'module:function' of a name; most names are today's."""
  module, colon, rest = name.partition(':')
  return JOBS.get(name) or MODULES.get(module, module) + colon + rest


def config(recorded: dict[str, Any]) -> dict[str, Any]:
  """A recorded config with today's names of options and functions."""
  result = _with_functions(recorded)
  for old, new in OPTIONS.items():
    if _has(result, old):
      _put(result, new, _take(result, old))
  if result.get('job') == 'searchrl.jobs.train:run':
    for old in filter(lambda name: _has(result, name), ONLY_OF_EVALUATION):
      _take(result, old)
    if not (_has(result, 'world') or result.get('model', {}).get('path', 1)):
      result['model']['path'] = FIRST_TINY_BASE
  return result


def completed(recorded: dict[str, Any], present: dict[str, Any]
             ) -> dict[str, Any]:
  """A recorded config with those options of today's that are newer than it."""
  result = copy.deepcopy(recorded)
  for name, value in ADDED.items():
    if _has(present, name) and not _has(result, name):
      _put(result, name, _get(present, name) if value is ... else value)
  return result


def refuse_flags(arguments: Sequence[str]) -> None:
  """Raises a ValueError if a command line sets an option by its old name."""
  for argument in arguments:
    option = argument.lstrip('-').partition('=')[0].removeprefix('config.')
    if argument.startswith('-') and option in OPTIONS:
      raise ValueError(_sentence(option))


def refuse_options(options: dict[str, Any]) -> None:
  """Raises a ValueError if a config has an option by its old name."""
  for old in OPTIONS:
    if _has(options, old):
      raise ValueError(_sentence(old))


def _sentence(option: str) -> str:
  return f'--config.{option} is now --config.{OPTIONS[option]}.'


def _with_functions(value: Any) -> Any:
  """A copy of a tree, with today's name of each function in it."""
  if isinstance(value, dict):
    return {key: _with_functions(child) for key, child in value.items()}
  return function(value) if isinstance(value, str) else value


def _has(tree: Any, path: str) -> bool:
  head, _, rest = path.partition('.')
  return isinstance(tree, dict) and head in tree and (
      not rest or _has(tree[head], rest))


def _get(tree: Any, path: str) -> Any:
  return functools.reduce(lambda node, name: node[name], path.split('.'), tree)


def _take(tree: dict[str, Any], path: str) -> Any:
  head, _, rest = path.partition('.')
  return _take(tree[head], rest) if rest else tree.pop(head)


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
  head, _, rest = path.partition('.')
  if rest:
    _put(tree.setdefault(head, {}), rest, value)
  else:
    tree[head] = value
