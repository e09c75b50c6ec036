# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler: weights and requests in, finished trajectories out.

The engine samples, the dialogue parses and renders, the search engine answers.
Training, evaluation and `ask` all use it; `rollouts.scoring` gives rewards.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
import json
from typing import Any

from searchrl import trajectory as trajectory_lib
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.models.inference import sampling
from searchrl.models.inference import stops
from searchrl.rollouts import driver
from searchrl.rollouts import weight_sync
from searchrl.runtime import processes
from searchrl.search import engine_wrappers
from searchrl.search.call_metrics import Call
from searchrl.trajectory import (
    Passage, Passages, Query, Request, SearchError, SearchFn, Trajectory)

_SEARCH_WAIT_SECS = 24 * 3600  # of all for the first process's searches


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """Finished trajectories, and the search calls made for them."""

  trajectories: list[Trajectory]
  calls: list[Call]


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Everything that a policy needs for sampling, except its weights."""

  shape: transformer.TransformerConfig
  tokenizer: tokenizers.Tokenizer
  dialogue: dialogues.Dialogue
  budgets: driver.Budgets
  engine: engines.Engine
  sync: Callable[[Any], weight_sync.Synced]  # the learner's params -> weights
  schedule: driver.Schedule = driver.Schedule()
  together: bool = False  # all processes are one engine, and run in lockstep
  stop_table: stops.StopTable | None = None  # None: the engine's own

  def speaking(self, dialogue: dialogues.Dialogue, budgets: driver.Budgets
              ) -> 'Sampler':
    """A sampler of another dialogue with the same engine.

    Slots and compiled programs are shared: one of the two plays at a time, with
    the weights that its rollout is given, and nothing is compiled anew unless
    the stop strings have more than 64 states (see `stops.StopTable`), or only
    one of the two truncates. Make it once for many rollouts.

    A sample's randomness has the seed, the step, the question's uid, the sample
    and the turn in it, and not the dialogue: give the questions of a second
    dialogue uids of their own ('judge:q7'), or both draw with equal numbers.

    Args:
      dialogue: the protocol.
      budgets: limits of its conversations.

    Raises:
      ValueError: the tokenizer cannot write the dialogue, or the budgets cannot
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
      enough: Callable[[Sequence[Trajectory]], bool] | None = None,
      watch: Callable[[Trajectory], None] = lambda grown: None,
  ) -> Rollouts:
    """Samples a trajectory for every request.

    Each process samples its share with slots, searches and a schedule of its
    own; at the end all processes exchange the results. Where a copy of the
    weights spans processes, all sample everything in lockstep, and the first
    one searches.

    Args:
      weights: from `sync`.
      requests: what to sample; the same on all processes.
      search: the search engine.
      temperature: of sampling; 0 is greedy.
      step: of the run; part of the randomness.
      policy_step: updates that the policy has had.
      search_retries: times that a trajectory whose search failed is sampled
        again, from the start and with the same randomness.
      truncation: which tokens may be drawn.
      enough: called now and then with what this process has finished; true if
        the rest is no longer needed.
      watch: receives each trajectory of this process whenever it has grown; one
        that is sampled again starts anew.

    Returns:
      Trajectories in the order of `requests`, without rewards and without those
      not needed; and the search calls of all processes.
    """
    self.engine.load(weights, temperature, truncation, self.stop_table)
    if not self.together:
      requests = processes.share(requests)
    elif not processes.is_first():
      search = _no_search
    once = functools.partial(
        driver.run, engine=self.engine, search=search, dialogue=self.dialogue,
        tokenizer=self.tokenizer, budgets=self.budgets, step=step,
        policy_step=policy_step, schedule=self.schedule, watch=watch,
        **(dict(agree=_found_by_first) if self.together else {}))
    found = _with_retries(once, requests, search, search_retries, enough)
    self.engine.unload()
    if not self.together:
      return _of_all(found)
    processes.agree('trajectories', _digest(found.trajectories))
    return found


def compile_stops(dialogue: dialogues.Dialogue, tokenizer: tokenizers.Tokenizer,
                  vocab_size: int) -> stops.StopTable:
  """What ends a turn of a dialogue: stop strings, and ids of an end."""
  return stops.compile_table(
      tokenizer.token_bytes, dialogue.stop_strings, vocab_size,
      (*tokenizer.eos_ids, *dialogue.end_ids))


def _with_retries(
    once: Callable[..., tuple[list[Trajectory | None], list[Call]]],
    requests: Sequence[Request],
    search: SearchFn,
    search_retries: int,
    enough: Callable[[Sequence[Trajectory]], bool] | None,
) -> Rollouts:
  """Samples all requests, and again those whose search failed."""
  results, calls = [None] * len(requests), []
  left = list(range(len(requests)))
  for retries in range(1 + search_retries):
    engine_wrappers.wait(search)  # else only what needs no search would be learned from
    full = lambda finished, left=left: enough(
        [t for i, t in enumerate(results) if t and i not in left] +
        list(finished.values()))
    sampled, more = once([requests[i] for i in left],
                         **({} if enough is None else dict(enough=full)))
    calls += more
    for i, trajectory in zip(left, sampled, strict=True):
      results[i] = trajectory and dataclasses.replace(
          trajectory, retries=retries)
    if None in sampled:
      break
    left = [i for i in left if results[i].stop_reason == 'search_error']
    if not left:
      break
  return Rollouts([t for t in results if t], calls)


def _of_all(found: Rollouts) -> Rollouts:
  """The rollouts of all processes, in process order."""
  if processes.count() == 1:
    return found
  payload = json.dumps([_records(found.trajectories),
                        [dataclasses.asdict(call) for call in found.calls]])
  everyone = [json.loads(received) for received in processes.exchange(
      'trajectories', payload.encode())]
  return Rollouts(
      [trajectory_lib.from_json(r) for records, _ in everyone for r in records],
      [Call(**fields) for _, calls in everyone for fields in calls])


def _records(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
  return [trajectory_lib.to_json(t) for t in trajectories]


def _no_search(queries: Sequence[Query]) -> list[Passages]:
  """Finds nothing: the results of the first process are used instead."""
  return [()] * len(queries)


def _found_by_first(found: driver.Found) -> driver.Found:
  """The search results of the first process, on all processes."""
  def to_json(result):
    return dataclasses.asdict(result) if isinstance(result, SearchError) else [
        dataclasses.asdict(passage) for passage in result]

  def from_json(record):
    return SearchError(**record) if isinstance(record, dict) else tuple(
        Passage(**passage) for passage in record)

  shared = processes.on_first('searches', lambda: [
      [slot, [to_json(result) for result in results]]
      for slot, results in found.items()], _SEARCH_WAIT_SECS)
  return {slot: [from_json(r) for r in records] for slot, records in shared}


def _digest(trajectories: Sequence[Trajectory]) -> str:
  """SHA-256 of all ids and log-probs, to the bit."""
  return hashlib.sha256(
      json.dumps(_records(trajectories)).encode()).hexdigest()
