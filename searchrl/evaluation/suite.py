# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A policy and evaluation sets in; scores by data source, and every record, out."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import pathlib

import jax
import numpy as np

from searchrl.agent import rewards as rewards_lib
from searchrl.data import datasets
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.evaluation import figures
from searchrl.models import lora as loras
from searchrl.rollouts import sampler as samplers
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.search import factory
from searchrl.search import wrapped
from searchrl.trajectory import SearchFn, Trajectory, to_json

COLUMNS = ('set', 'engine', 'decoding', 'hops', 'n', 'em', '95% interval',
           'subem', 'f1', 'searches')


@dataclasses.dataclass(frozen=True)
class EvalCase:
  """One set, answered through one engine, decoded in one way."""

  set: datasets.Dataset
  engine: str
  search: SearchFn
  decoding: str  # 'greedy' or 'sampled'


def cases(
    sets: Sequence[datasets.Dataset],
    engine: str,
    options: Mapping[str, object],
    *,
    noise: bool = True,
    seed: int = 0,
) -> list[EvalCase]:
  """Every set greedily and sampled; the first also with random passages.

  The last shows whether answers come from retrieval: it should score about 0.
  """
  result = []
  for dataset in sets:
    search = wrapped.with_typed_errors(factory.make(
        engine, dataset.corpus, seed=seed, load_encoder=embedder.load_again,
        load_judge=reranker.load, **options))
    result += [EvalCase(dataset, engine, search, decoding)
               for decoding in ('greedy', 'sampled')]
  if noise and sets and sets[0].corpus is not None:
    search = wrapped.with_typed_errors(factory.make('noise', sets[0].corpus, seed=seed))
    result.append(EvalCase(sets[0], 'noise', search, 'greedy'))
  return result


def run(
    sampler: samplers.Sampler,
    params,
    taken: Sequence[EvalCase],
    *,
    step: int = 0,
    progress=lambda done: None,
) -> tuple[list[dict], list[tuple[EvalCase, list[Trajectory]]]]:
  """Sits every exam.

  Args:
    player: the policy's surroundings.
    params: the policy.
    taken: what to sit.
    step: randomness of the sampled ones; equal steps, equal samples.
    progress: told how many questions are done, over all exams.

  Returns:
    Rows for `figures.table`, a row per exam and hop count, and the
    trajectories. Searches that failed count as wrong here.
  """
  rows, records, done = [], [], 0
  for case in taken:
    trajectories = sampler.play(
        params, [(q, 0) for q in case.set.questions], search=case.search,
        reward=rewards_lib.em, outcome=rewards_lib.em, step=step,
        temperature=0.0 if case.decoding == 'greedy' else 1.0,
        progress=lambda n: progress(done + n))  # pylint: disable=cell-var-from-loop
    done += len(trajectories)
    records.append((case, trajectories))
    by_hops = defaultdict(list)
    for trajectory in trajectories:
      by_hops[trajectory.question.hops].append(trajectory)
    for hops, group in sorted(by_hops.items()):
      rows.append(_row(case, hops, group))
  return rows, records


def _row(case: EvalCase, hops: int, trajectories: Sequence[Trajectory]) -> dict:
  n = len(trajectories)
  scores = np.array([rewards_lib.em(g) for g in trajectories])
  low, high = wilson(int(scores.sum()), n)
  return {
      'set': case.set.name, 'engine': case.engine, 'decoding': case.decoding,
      'hops': hops, 'n': n, 'em': float(scores.mean()),
      '95% interval': f'{low:.2f}-{high:.2f}',
      'subem': float(np.mean([rewards_lib.subem(g) for g in trajectories])),
      'f1': float(np.mean([rewards_lib.f1(g) for g in trajectories])),
      'searches': float(np.mean([g.searches for g in trajectories])),
      'search_errors': sum(g.stop_reason == 'search_error' for g in trajectories)}


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
  """The score interval of a proportion (Wilson 1927), 95 % by default."""
  p = hits / n
  centre = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  return max(centre - half, 0.0), min(centre + half, 1.0)


def scalars(rows: Sequence[Mapping]) -> dict[str, float]:
  """Rows as metrics: 'val/<set>_<hops>hop/em/greedy' and so on."""
  result = {}
  for row in rows:
    name = row['set'] if row['engine'] != 'noise' else f'{row["set"]}_noise'
    where = f'val/{name}_{row["hops"]}hop'
    for score in ('em', 'subem', 'f1', 'searches'):
      result[f'{where}/{score}/{row["decoding"]}'] = row[score]
  return result


def save(folder: pathlib.Path, rows, records, tokenizer) -> None:
  """Writes table.json, and one line a question to records.jsonl."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'table.json').write_text(json.dumps(list(rows), indent=1) + '\n')
  with (folder / 'records.jsonl').open('w', encoding='utf-8') as file:
    for case, trajectories in records:
      for trajectory in trajectories:
        file.write(json.dumps({
            'set': case.set.name, 'engine': case.engine,
            'decoding': case.decoding, 'question': trajectory.question.text,
            'golds': trajectory.question.answers, 'answer': trajectory.answer,
            'em': rewards_lib.em(trajectory), 'text': tokenizer.decode(trajectory.tokens),
            'trajectory': to_json(trajectory)}, ensure_ascii=False) + '\n')


def trained(run: pathlib.Path, base, shape):
  """The policy of a run's newest checkpoint; its adapters need its base."""
  wanted = base
  lora = _recorded(run).get('model', {}).get('lora', dict(rank=0))
  if lora['rank']:
    lora = loras.Lora(**lora)
    wanted = loras.init(lora, shape, jax.random.key(0))
    lies = jax.tree.leaves(base)[0].sharding
    if isinstance(lies, jax.sharding.NamedSharding):  # whole, beside the base
      wanted = jax.tree.map(lambda x: meshes.place(
          x, meshes.sharding(lies.mesh, ())), wanted)
  found = checkpoint.restore(
      run / 'checkpoints', {'policy': {'params': wanted}}, partial=True)
  if found is None:
    raise FileNotFoundError(
        f'evaluate.run must be the folder of a run with checkpoints, but {run} '
        'has none.')
  params = found[1]['policy']['params']
  return params if wanted is base else loras.merge(base, params, lora)


def _recorded(run: pathlib.Path) -> dict:
  """The config of a run, as far as it noted one."""
  file = run / 'config.json'
  return json.loads(file.read_text()) if file.exists() else {}


def own_search(run: str) -> tuple[str, dict]:
  """The engine that a run was trained with, and its options; else BM25."""
  search = _recorded(pathlib.Path(run)).get('search', {}) if run else {}
  return search.get('engine', 'bm25'), search.get('options', {})


def job(config, workdir: str) -> None:
  """Evaluates a model folder or a run's newest checkpoint; prints the table."""
  path = pathlib.Path(workdir)
  if not config.search.engine:
    config.search.engine, config.search.options = own_search(
        config.evaluate.run)
  mesh = meshes.make(**config.mesh)
  sampler, params = samplers.build(config, mesh)
  if config.evaluate.run:
    params = trained(pathlib.Path(config.evaluate.run), params, sampler.shape)
  processes.on_first('workdir', lambda: workdirs.prepare(
      workdir, config, allow_changes=config.allow_changes))
  sets = datasets.shared(lambda: datasets.evaluation_sets(
      path / 'data', evaluate=config.data.evaluate,
      corpus=config.search.corpus, own_train=bool(config.data.train),
      is_remote=not factory.needs_corpus(
          config.search.engine, config.search.options),
      **config.evaluate.worlds))
  processes.on_first('search', lambda: workdirs.note(
      path, 'search', {dataset.name: factory.describe(
          config.search.engine, dataset.corpus, config.search.options,
          load_encoder=embedder.load_again) for dataset in sets},
      allow_changes=config.allow_changes))
  taken = cases(sets, config.search.engine, config.search.options,
                noise=config.evaluate.noise, seed=config.seed)
  rows, records = run(sampler, params, taken, step=config.evaluate.step)
  if processes.is_first():
    save(path, rows, records, sampler.tokenizer)
    print(figures.table(rows, COLUMNS))
