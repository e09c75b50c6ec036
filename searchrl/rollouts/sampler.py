# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler: weights and requests in, finished trajectories out.

The engine samples, the dialogue parses and renders, and the search engine
answers. Training, evaluation and `ask` all use the sampler. Rewards are given
by `rollouts.scoring`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
import json
from typing import Any

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.models.inference import sampling
from searchrl.models.inference import stops
from searchrl.rollouts import driver
from searchrl.rollouts import records
from searchrl.rollouts import weight_sync
from searchrl.runtime import host_memory
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.search import engine_wrappers
from searchrl.search.call_metrics import Call
from searchrl.trajectory import (
    Passage, Query, Request, SearchError, SearchFn, ToolResult,
    Trajectory)

_SEARCH_WAIT_SECS = 24 * 3600  # limit of the wait for the first process


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """Finished trajectories, and records of the search calls made for them."""

  trajectories: list[Trajectory]
  calls: list[Call]


@dataclasses.dataclass(frozen=True)
class Sampler:
  """All that is needed to sample from a policy, except its weights."""

  shape: transformer.TransformerConfig
  tokenizer: tokenizers.Tokenizer
  dialogue: dialogues.Dialogue
  budgets: driver.Budgets
  engine: engines.Engine
  sync: weight_sync.WeightSync  # copies the learner's params into weights
  schedule: driver.Schedule = driver.Schedule()
  together: bool = False  # all processes are one engine and run in lockstep
  stop_table: stops.StopTable | None = None  # None: the engine's own

  def with_dialogue(self, dialogue: dialogues.Dialogue,
                    budgets: driver.Budgets) -> 'Sampler':
    """Returns a sampler of another dialogue on the same engine.

    Both samplers share slots and compiled programs. Only one of them may run at
    a time, with the weights that are passed to its `rollout`. Nothing is
    compiled again unless the new stop strings have more than 64 states (see
    `stops.StopTable`), or only one of the two samplers is called with a
    `truncation`. Make such a sampler once for many rollouts.

    A sample's randomness depends on the seed, the step, the question's uid, the
    sample and the turn, but not on the dialogue. Give the questions of a second
    dialogue other uids ('judge:q7'); otherwise both dialogues draw the same
    random numbers.

    Raises:
      ValueError: The tokenizer cannot write the dialogue, or the budgets cannot
        hold one turn.
    """
    dialogues.check_writable(dialogue, self.tokenizer)
    budgets.check(self.engine.length)
    table = compile_stops(dialogue, self.tokenizer, self.shape.vocab_size)
    return dataclasses.replace(self, dialogue=dialogue, budgets=budgets,
                               stop_table=self.engine.placed(table))

  def rollout(
      self,
      weights: transformer.Params,
      requests: Sequence[Request],
      *,
      search: SearchFn,
      temperature: float,
      step: int,
      policy_step: int = 0,
      search_retries: int = 1,
      truncation: sampling.Truncation = sampling.Truncation(),
      enough: Callable[[Sequence[Trajectory]], bool] = lambda finished: False,
      watch: Callable[[Trajectory], None] = lambda grown: None,
      routing: bool = False,
  ) -> Rollouts:
    """Samples a trajectory for every request.

    Each process samples its share with its own slots, searches and schedule. At
    the end all processes exchange the results. If the weights are split over
    devices of several processes, these sample everything in lockstep, and the
    first one searches. All processes compute a joint search together
    (`engine_wrappers.is_joint`): each waits until the others search, too, or
    have finished.

    Args:
      weights: Weights that `sync` returned.
      requests: The samples to draw; the same on all processes.
      search: The search engine, or an `engine_wrappers.toolset`.
      temperature: Sampling temperature; 0 is greedy.
      step: Step of the run; a part of the randomness.
      policy_step: Number of updates that the policy has had.
      search_retries: Number of times that a trajectory whose search failed is
        sampled again, from the start and with the same randomness.
      truncation: Rule for which tokens may be drawn.
      enough: Predicate that is called repeatedly with the trajectories that
        this process has finished. True means that the rest is not needed.
      watch: Callback that receives each trajectory of this process whenever it
        has grown. A trajectory that is sampled again starts from nothing.
      routing: True: the trajectories record the experts that mixture-of-experts
        layers chose for each token. The engine must support this.

    Returns:
      Trajectories without rewards in the order of `requests`, and the search
      calls of all processes. Requests that were not needed have no trajectory.
    """
    host_memory.give_back()  # memory of an update, or of earlier rollouts
    self.engine.load(weights, temperature, truncation, self.stop_table)
    schedule = self.schedule
    if engine_wrappers.is_joint(search):
      schedule = dataclasses.replace(
          schedule, search_order='deterministic', search_calls=1,
          search_timeout_secs=_SEARCH_WAIT_SECS)
    if not self.together:
      requests = processes.share(requests)
    else:
      search = engine_wrappers.each(search, _searches_of_first)
    sample = functools.partial(
        driver.run, engine=self.engine, search=search, dialogue=self.dialogue,
        tokenizer=self.tokenizer, budgets=self.budgets, step=step,
        policy_step=policy_step, schedule=schedule, watch=watch,
        routing=routing,
        agree=_results_of_first if self.together else lambda results: results)
    if requests:
      with progress.phase('Compiling the programs that sample'):
        self.engine.compile()
      host_memory.give_back()  # memory of the compiler
    rollouts = _with_retries(sample, requests, search, search_retries, enough)
    self.engine.unload()
    if not self.together:
      engine_wrappers.finish(search)
      return _of_all_processes(rollouts)
    processes.agree('trajectories', hashlib.sha256(json.dumps(
        _records(rollouts.trajectories)).encode()).hexdigest())
    return rollouts


def compile_stops(dialogue: dialogues.Dialogue, tokenizer: tokenizers.Tokenizer,
                  vocab_size: int) -> stops.StopTable:
  """Returns the table with which the engine notices that a turn has ended.

  A turn ends at one of the dialogue's stop strings or at an end-of-turn id.
  """
  return stops.compile_table(
      tokenizer.token_bytes, dialogue.stop_strings, vocab_size,
      (*chat.ends(tokenizer), *dialogue.end_ids))


def _with_retries(
    sample: Callable[..., tuple[list[Trajectory | None], list[Call]]],
    requests: Sequence[Request],
    search: SearchFn,
    search_retries: int,
    enough: Callable[[Sequence[Trajectory]], bool],
) -> Rollouts:
  """Samples all requests, and samples again those whose search failed.

  Args:
    sample: Function that samples a list of requests.
    requests: The samples to draw.
    search: Search engine, which is waited for if it is out of service.
    search_retries: Maximum number of times that a request is sampled again.
    enough: Predicate on the finished trajectories. True: the rest is dropped.
  """
  results: list[Trajectory | None] = [None] * len(requests)
  calls: list[Call] = []
  missing = list(range(len(requests)))
  for retries in range(1 + search_retries):
    # Without it, only trajectories without a search would be learned from.
    engine_wrappers.wait(search)
    earlier = [t for i, t in enumerate(results) if t and i not in missing]
    sampled, more_calls = sample(
        [requests[i] for i in missing],
        enough=lambda finished: enough([*earlier, *finished]))
    calls += more_calls
    for i, trajectory in zip(missing, sampled, strict=True):
      results[i] = trajectory and dataclasses.replace(
          trajectory, retries=retries)
    missing = [i for i, trajectory in zip(missing, sampled)
               if trajectory and trajectory.stop_reason == 'search_error']
    if not missing or None in sampled:
      break
  return Rollouts([t for t in results if t], calls)


def search_with_retry(search: SearchFn, queries: Sequence[Query]
                     ) -> list[Any]:
  """Returns the search result of each query; failed queries are tried twice.

  Before each try, it waits while the engine is out of service. The result of a
  query that failed twice is a SearchError.
  """
  results: dict[int, Any] = {}
  missing = [*range(len(queries))]
  for _ in range(2):
    if missing:
      engine_wrappers.wait(search)
      results |= zip(missing, search([queries[n] for n in missing]))
      missing = [n for n in missing if isinstance(results[n], SearchError)]
  return [results[n] for n in range(len(queries))]


def _of_all_processes(rollouts: Rollouts) -> Rollouts:
  """Returns the rollouts of all processes, in process order."""
  if processes.count() == 1:
    return rollouts
  payload = json.dumps([_records(rollouts.trajectories),
                        [dataclasses.asdict(call) for call in rollouts.calls]])
  payloads = [json.loads(received) for received in processes.exchange(
      'trajectories', payload.encode())]
  return Rollouts(
      [records.from_json(r) for sampled, _ in payloads for r in sampled],
      [Call(**fields) for _, calls in payloads for fields in calls])


def _records(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
  return [records.to_json(t) for t in trajectories]


def _searches_of_first(search: SearchFn) -> engine_wrappers.Wrapped:
  """Returns a search that only the first process makes.

  In the other processes it returns (), which `_results_of_first` replaces. If
  `search` is joint, they take part in it.
  """
  def search_on_first(queries: Sequence[Any]) -> Sequence[Any]:
    results = search(queries) if processes.is_first() else [()] * len(queries)
    engine_wrappers.finish(search)
    return results

  inner = (search,) if processes.is_first() else ()
  return engine_wrappers.Wrapped(search_on_first, inner)


def _results_of_first(results: driver.Results) -> driver.Results:
  """Returns the first process's search results on all processes."""
  def to_json(result):
    if isinstance(result, SearchError | ToolResult):
      return dataclasses.asdict(result)
    return [dataclasses.asdict(passage) for passage in result]

  def from_json(record):
    if isinstance(record, list):
      return tuple(Passage(**passage) for passage in record)
    if 'kind' in record:
      return SearchError(**record)
    return ToolResult(record['text'], record['is_error'],
                      from_json(record['passages']))

  shared = processes.on_first('searches', lambda: [
      [slot, [to_json(result) for result in of_slot]]
      for slot, of_slot in results.items()], _SEARCH_WAIT_SECS)
  return {slot: [from_json(r) for r in records] for slot, records in shared}
