# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A model folder and budgets in, a Player out; params and questions in, trajectories out.

Here the three wings meet: the engine samples, the dialogue speaks, the search
answers, the reward judges. Training, evaluation and `ask` all play through it.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

from jax.sharding import Mesh

from searchrl.agent import dialogue as dialogues
from searchrl.agent import rewards as rewards_lib
from searchrl.agent import tokenizer as tokenizers
from searchrl.models.inference import engine as engines
from searchrl.models.inference import sampling
from searchrl.models.inference import stops
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts import driver
from searchrl.rollouts import weight_sync
from searchrl.runtime import mesh as meshes
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.search import factory
from searchrl.search import wrapped
from searchrl import trajectory as trajectory_lib
from searchrl.trajectory import (
    Passage, Passages, Query, Question, SearchError, SearchFn, Trajectory)

_PATIENCE_SECS = 24 * 3600  # others wait for the first one's searches
TINY_BASE = pathlib.Path(__file__).parents[1] / 'assets' / 'tiny_base'


@dataclasses.dataclass(frozen=True)
class Sampler:
  """A policy's surroundings, everything but its weights."""

  shape: transformer.TransformerConfig
  tokenizer: tokenizers.Tokenizer
  dialogue: dialogues.Dialogue
  budgets: driver.Budgets
  engine: engines.Engine
  hand_over: Callable[[Any], Any]  # the learner's params -> the engine's
  schedule: driver.Schedule = driver.Schedule()
  together: bool = False  # all processes are one engine, and play in lockstep

  def play(
      self,
      params: transformer.Params,
      requests: Sequence[tuple[Question, int]],
      *,
      search: SearchFn,
      reward: rewards_lib.RewardFn,
      outcome: rewards_lib.RewardFn,
      temperature: float,
      step: int,
      policy_step: int = 0,
      search_retries: int = 1,
      truncation: sampling.Truncation = sampling.Truncation(),
      progress: Callable[[int], None] = lambda finished: None,
      enough: Callable[[Sequence[Trajectory]], bool] | None = None,
      watch: Callable[[Trajectory], None] = lambda grown: None,
  ) -> list[Trajectory]:
    """Plays every (question, sample), and scores it.

    Each process plays its share with slots, searches and a course of its own;
    at the end all tell each other. Where a copy of the weights spans processes,
    all play everything in lockstep, and the first one searches.

    Args:
      params: the policy; on a mesh of all processes.
      requests: what to play; alike on all processes.
      search: the engine that answers.
      reward: what is trained on.
      outcome: what the filter reads and evaluation reports.
      temperature: of sampling; 0 is greedy.
      step: of the run; part of the randomness.
      policy_step: updates that the policy has seen.
      search_retries: times that a trajectory whose search failed is played
        again, from the start and with the same randomness.
      truncation: which tokens may be drawn.
      progress: told how many this process has finished.
      enough: asked now and then, with what this process has finished, whether
        the rest is not needed any more.
      watch: shown a trajectory of this process whenever it has grown, before it
        is scored; one that is played again starts anew.

    Returns:
      Trajectories in the order of `requests`, those not needed left out; those
      whose search failed have no reward.
    """
    self.engine.load(self.hand_over(params), temperature, truncation)
    scored = _Scored(reward, outcome)
    if not self.together:
      requests = processes.share(requests)
    elif not processes.is_first():
      search = _nothing
    once = functools.partial(
        driver.play, engine=self.engine, search=search, dialogue=self.dialogue,
        tokenizer=self.tokenizer, budgets=self.budgets,
        row_ids=engines.row_ids, append=engines.Append, step=step,
        policy_step=policy_step, schedule=self.schedule, progress=progress,
        watch=watch, **(dict(agree=_agreed) if self.together else {}))
    trajectories = _until_searched(once, requests, search, search_retries, scored,
                            enough)
    self.engine.unload()
    if not self.together:
      return _of_all(trajectories)
    processes.agree('trajectories', _digest(trajectories))
    return trajectories


def _until_searched(
    once: Callable[..., list[Trajectory | None]],
    requests: Sequence[tuple[Question, int]],
    search: SearchFn,
    search_retries: int,
    scored: '_Scored',
    enough: Callable[[Sequence[Trajectory]], bool] | None,
) -> list[Trajectory]:
  """Plays everything, and what a search failed once more; scored."""
  trajectories = [None] * len(requests)
  left = list(range(len(requests)))
  for retries in range(1 + search_retries):
    wrapped.wait(search)  # or only what needs no search would be learned from
    full = lambda finished, left=left: enough(
        [scored(g) for i, g in enumerate(trajectories) if g and i not in left] +
        [scored(g) for g in finished.values()])
    played = once([requests[i] for i in left],
                  **({} if enough is None else dict(enough=full)))
    for i, trajectory in zip(left, played, strict=True):
      trajectories[i] = trajectory and dataclasses.replace(trajectory, retries=retries)
    if None in played:
      break
    left = [i for i in left if trajectories[i].stop_reason == 'search_error']
    if not left:
      break
  return [scored(trajectory) for trajectory in trajectories if trajectory]


class _Scored:
  """Trajectories with their rewards; each is judged once."""

  def __init__(self, reward: rewards_lib.RewardFn,
               outcome: rewards_lib.RewardFn):
    self._reward, self._outcome = reward, outcome
    self._known = {}

  def __call__(self, trajectory: Trajectory) -> Trajectory:
    if trajectory.stop_reason == 'search_error':
      return trajectory
    key = trajectory.question.uid, trajectory.sample, trajectory.retries
    if key not in self._known or self._known[key][0] != trajectory.tokens:
      self._known[key] = trajectory.tokens, dataclasses.replace(
          trajectory, reward=float(self._reward(trajectory)),
          outcome_reward=float(self._outcome(trajectory)))
    return self._known[key][1]


def _of_all(trajectories: list[Trajectory]) -> list[Trajectory]:
  """The trajectories of all processes, in process order."""
  if processes.count() == 1:
    return trajectories
  mine = json.dumps([trajectory_lib.to_json(trajectory) for trajectory in trajectories]).encode()
  return [trajectory_lib.from_json(record)
          for theirs in processes.exchange('trajectories', mine)
          for record in json.loads(theirs)]


def _nothing(queries: Sequence[Query]) -> list[Passages]:
  """Searches nowhere: what the first process finds will count."""
  return [()] * len(queries)


def _agreed(found: driver.Found) -> driver.Found:
  """What searches of the first process found, on all."""
  def told(result):
    return dataclasses.asdict(result) if isinstance(result, SearchError) else [
        dataclasses.asdict(passage) for passage in result]

  def heard(record):
    return SearchError(**record) if isinstance(record, dict) else tuple(
        Passage(**passage) for passage in record)

  met = processes.on_first('searches', lambda: [
      [slot, [told(result) for result in results]]
      for slot, results in found.items()], _PATIENCE_SECS)
  return {slot: [heard(record) for record in records] for slot, records in met}


def _digest(trajectories: Sequence[Trajectory]) -> str:
  """Of ids and log-probs, to the bit."""
  text = json.dumps([trajectory_lib.to_json(trajectory) for trajectory in trajectories])
  return hashlib.sha256(text.encode()).hexdigest()


def build(config, mesh: Mesh) -> tuple[Sampler, transformer.Params]:
  """What a config plays with; see `load`."""
  options = config.rollout
  return load(
      config.model.path, dialogue=config.dialogue, seed=config.seed,
      slots=options.slots, length=options.length,
      budgets=driver.Budgets(**options.budgets), mesh=mesh,
      dtype=config.model.dtype, engine_dtype=options.dtype,
      tensor=options.tensor, schedule=schedule(
          mesh, options, remote=not factory.needs_corpus(
              config.search.engine, config.search.options)))


def schedule(mesh: Mesh, options: Any, *, remote: bool = False
          ) -> driver.Schedule:
  """How play proceeds, from config.rollout.

  Admission 'auto' waits for searches on a CPU, which does them itself, and
  where processes play in lockstep; not for searches elsewhere, nor on other
  devices, which would stand idle.

  Raises:
    ValueError: processes in lockstep cannot admit by arrival.
  """
  admission = options.admission
  together = weight_sync.spans_processes(mesh, options.tensor)
  if together and admission == 'arrival':
    raise ValueError(
        "rollout.admission must be 'deterministic' where rollout.tensor="
        f'{options.tensor} devices of several processes share a copy of the '
        "weights, but is 'arrival'. Leave it at 'auto', or lower "
        'rollout.tensor.')
  if admission == 'auto':
    here = mesh.devices.flat[0].platform == 'cpu' and not remote
    admission = 'deterministic' if here or together else 'arrival'
  return driver.Schedule(
      admission=admission, decodes_in_flight=options.decodes_in_flight,
      search_timeout_secs=options.search_timeout_secs,
      search_calls=options.search_calls)


def load(
    path: str,
    *,
    dialogue: str,
    seed: int,
    slots: int,
    length: int,
    budgets: driver.Budgets,
    mesh: Mesh,
    dtype: str = 'float32',
    engine_dtype: str = 'float32',
    tensor: int = 1,
    schedule: driver.Schedule = driver.Schedule(),
) -> tuple[Sampler, transformer.Params]:
  """Reads a model folder, checks it, and builds what plays with it.

  Args:
    path: a Hugging Face folder, or hub id; '' is the tiny base model.
    dialogue: 'module:function' that makes a Dialogue of a Tokenizer.
    seed: of all sampling.
    slots: conversations side by side, over all processes.
    length: tokens a conversation may have.
    budgets: limits of a conversation.
    mesh: of all processes.
    dtype: of the params.
    engine_dtype: of the engine's weights, activations and cache.
    tensor: devices that share a copy of the engine's weights; if they belong
      to several processes, these play in lockstep.
    schedule: how play proceeds.

  Returns:
    The Player, and the folder's params on the mesh.

  Raises:
    FileNotFoundError, ValueError: the folder is not whole, its parts do not
      belong together, or the budgets cannot hold one turn.
  """
  path = weights.locate(str(path or TINY_BASE))
  shape = weights.read_config(path)
  tokenizer, speech = _speech(path, shape, dialogue)
  if budgets.max_prompt_tokens + budgets.max_turn_tokens > length:
    raise ValueError(
        f'rollout.length must hold a prompt and a turn, '
        f'{budgets.max_prompt_tokens} + {budgets.max_turn_tokens} tokens, but '
        f'is {length}. Raise it, or lower the budgets.')
  if shape.num_key_value_heads % tensor:
    raise ValueError(
        f'rollout.tensor must divide the {shape.num_key_value_heads} KV heads '
        f'of the model, but is {tensor}.')
  axes = transformer.logical_axes(shape)
  hand_over = weight_sync.WeightSync(
      mesh, axes, tensor=tensor, dtype=engine_dtype)
  if slots % (mesh.size // tensor):
    raise ValueError(
        f'rollout.slots must be a multiple of the {mesh.size // tensor} copies '
        f'of the weights, on {mesh.size} devices, but is {slots}.')
  params = weights.load(
      path, shape, dtype=dtype,
      sharding_of=functools.partial(meshes.sharding, mesh))
  table = stops.compile_table(
      tokenizer.token_bytes, speech.stop_strings, shape.vocab_size)
  engine = engines.Engine(
      shape, slots=slots if hand_over.together else slots // processes.count(),
      length=length, stop_table=table,
      eos_ids=(*tokenizer.eos_ids, *speech.end_ids), seed=seed,
      dtype=engine_dtype,
      shardings=functools.partial(meshes.shardings, hand_over.mesh))
  return Sampler(
      shape, tokenizer, speech, budgets, engine, hand_over, schedule,
      hand_over.together), params


def _speech(path: str, shape: transformer.TransformerConfig, dialogue: str
           ) -> tuple[tokenizers.Tokenizer, dialogues.Dialogue]:
  """A folder's tokenizer, and the dialogue that it can write."""
  tokenizer = tokenizers.load(path)
  if tokenizer.vocab_size > shape.vocab_size:
    raise ValueError(
        f'tokenizer and model must belong together, but the tokenizer of {path} '
        f'has {tokenizer.vocab_size} ids and the model only {shape.vocab_size}. '
        'Copy the tokenizer that the model was trained with.')
  speech = plugins.resolve(
      dialogue, field='dialogue',
      ours='searchrl.agent.dialogue:laptop and :search_r1, '
      'searchrl.agent.chat:search_r1, searchrl.agent.tools:dr_zero and :dspo'
  )(tokenizer)
  dialogues.check_writable(speech, tokenizer)
  return tokenizer, speech
