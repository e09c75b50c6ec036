# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Demonstrations: rollouts that a script or a served model writes, for tuning.

They have the dialogue, the engine and the budgets of the training that follows,
and are written in the form that configs/sft.py reads. A command that was killed
continues after the last complete round.
"""

from collections.abc import Callable, Sequence
import collections
import dataclasses
import functools
import pathlib
import sys
from typing import Any

from searchrl.agent import chains as chains_lib
from searchrl.agent import demonstrations
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tag_parser
from searchrl.data import datasets
from searchrl.data import jsonl
from searchrl.data import question_metadata
from searchrl.data import questions as questions_lib
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import fingerprint
from searchrl.experiment import model_folders
from searchrl.experiment import model_defaults
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.experiment import toolsets
from searchrl.rollouts import records
from searchrl.rollouts import scripted
from searchrl.rollouts import served_teacher
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.trajectory import Action, Question, Request, Trajectory

FILE = 'demonstrations.jsonl'
# Fields of config.teacher by which its server is reached; the demonstrations do
# not depend on them.
_OF_THE_SERVER = (
    'url', 'token_env', 'connections', 'deadline_secs', 'try_secs', 'tries')
_LEFT_OUT = {
    'no action': 'have a turn that is no action',
    'no end': 'reached a limit of rollout.budgets or rollout.max_length',
    'no search': 'had a search that failed',
    'no verdict': 'have no reward, because their judge failed',
    'not found': 'searched without finding the answer of a hop',
    'reward': 'have a lower reward',
    'most': 'are more than are kept of a question or of a hop count'}


@dataclasses.dataclass(frozen=True)
class Author:
  """Author of demonstrations: a function that writes turns, and its settings.

  `misses` returns whether some search of a trajectory did not find the answer
  that it was meant to find.
  """

  write: scripted.Write  # returns the text of the next turn
  questions: Sequence[Question]  # questions to answer, in their order
  samples: int = 1  # samples per question
  threads: int = 1  # simultaneous calls of `write`
  misses: Callable[[Trajectory], bool] = lambda trajectory: False
  # Function to the number of hops of a trajectory's question.
  hops: Callable[[Trajectory], int] = (
      lambda trajectory: trajectory.question.hops)
  # Function to the indices of a trajectory's turns that are not trained on.
  untrained: Callable[[Trajectory], Sequence[int]] = lambda trajectory: ()
  digest: str = ''  # digest of the chains that the author follows, if any


def run(config, workdir: str) -> None:
  """Writes demonstrations.jsonl in the directory of the job.

  Args:
    config: Config of the job; see configs/demonstrations.py.
    workdir: Directory for trajectories/ and demonstrations.jsonl.

  Raises:
    ValueError, FileNotFoundError: The config cannot be run, or no demonstration
      is kept.
  """
  folder = pathlib.Path(workdir)
  for check in (config_checks.check, config_checks.check_questions,
                config_checks.check_worlds, config_checks.check_training_data):
    check(config)
  if config.rollout.budgets.when_full != 'stop':
    raise ValueError(
        "rollout.budgets.when_full must be 'stop' for demonstrations, which "
        f'have one context, but is {config.rollout.budgets.when_full!r}. Leave '
        'it out, and raise rollout.max_length for long ones.')
  config = model_defaults.resolved(config, folder)
  model, scorer = policy.folder_of(config), build.scorer(config)
  check_writes(model.dialogue, config.dialogue)
  directory = workdirs.Workdir(folder, config, ('demonstrations.count', *(
      f'teacher.{name}' for name in _OF_THE_SERVER)))
  directory.check()
  reader = question_metadata.Reader(model.admit(policy.budgets_of(config)))
  data = datasets.shared(lambda: build.train_set(
      config, folder, admit=reader.admit))
  author = (by_teacher(config, data.questions, model)
            if config.demonstrations.source == 'teacher' else
            by_chains(config, data.questions, reader, model.dialogue))
  search = toolsets.binder(
      model.dialogue, model.tokenizer, seed=config.seed,
      result_tokens=policy.budgets_of(config).result_tokens)(
          searches.engine(config.search, data.corpus, seed=config.seed),
          data.corpus)
  directory.prepare()
  directory.note('questions', lambda: fingerprint.questions([data]),
                 alike=True)
  directory.note('chains', lambda: {'digest': author.digest}, alike=True)
  directory.note('search', lambda: searches.describe(
      config.search, data.corpus), alike=True)
  rounds = records.in_rounds(
      folder / 'trajectories', author.questions,
      config.demonstrations.questions_a_round,
      functools.partial(play, config, author, model, search))
  kept, left_out = select(config.demonstrations, author, (
      trajectory for trajectories in rounds
      for trajectory in scorer(trajectories)))
  processes.on_first('demonstrations', lambda: jsonl.write(
      folder / FILE, (
          line for trajectory in kept for line in demonstrations.lines(
              trajectory, model.tokenizer,
              untrained=author.untrained(trajectory)))))
  processes.say(describe(folder / FILE, kept, left_out), file=sys.stdout)
  if len(kept) < config.demonstrations.count:
    processes.say('All questions are used up before demonstrations.count='
                  f'{config.demonstrations.count} is reached.', file=sys.stdout)


def check_writes(dialogue: dialogues.Dialogue, name: str) -> None:
  """Raises a ValueError unless the dialogue can parse the turns it writes."""
  for action in (Action('search', ('a query',)), Action('answer', ('a word',))):
    text = tag_parser.until_stop(
        dialogue.write('A thought.', action), dialogue.stop_strings)
    if dialogue.parse(text) != action:
      raise ValueError(
          'dialogue must write turns that it reads, but the Dialogue of '
          f'{name} writes {text!r} for {action.kind} {action.texts[0]!r} and '
          f'reads it as {dialogue.parse(text)}. Give it a write(thought, '
          'action) that fits its parse.')


def by_chains(config, questions: Sequence[Question],
              reader: question_metadata.Reader,
              dialogue: dialogues.Dialogue) -> Author:
  """Returns a scripted author, which searches along each question's chain.

  A chain is the list of queries, with their answers, that lead to the answer of
  the question. The question files have it as metadata.

  Raises:
    ValueError: No question has a chain with one of the config's hop counts.
  """
  options = config.demonstrations
  metadata = reader.read(config.data.train)
  chains = {uid: chain for uid, (place, values) in metadata.items()
            if (chain := chains_lib.parse(values, place))}
  chosen = questions_lib.in_order([
      q for q in questions if q.uid in chains and (
          not options.hops or len(chains[q.uid].hops) in options.hops)],
                    config.seed)
  if not chosen:
    raise ValueError(
        'data.train must have questions with metadata.chain, [[query, answer], '
        '...], of the hop counts in demonstrations.hops='
        f'{tuple(options.hops)}, but {len(chains)} of {len(questions)} have a '
        'chain, and none of these counts. Add chains, or choose '
        "demonstrations.source='teacher'.")
  if len(chosen) < len(questions):
    processes.say(
        f'{len(questions) - len(chosen)} of the {len(questions)} questions of '
        'data.train have no metadata.chain'
        + f' of demonstrations.hops={tuple(options.hops)}' * bool(options.hops)
        + ', and are not demonstrated.')
  others = list(chains.values())
  scripts = {question.uid: chains_lib.script(
      question, chains[question.uid], others,
      retry_share=options.retry_share, seed=config.seed)
             for question in chosen}

  def write(request: Request, turns) -> str:
    return chains_lib.write(scripts[request.question.uid], request, turns,
                            dialogue=dialogue, seed=config.seed)

  def untrained(trajectory: Trajectory) -> Sequence[int]:
    retries = chains_lib.is_retry(scripts[trajectory.question.uid], trajectory)
    return (0,) if retries and not options.train_poor_queries else ()

  return Author(
      write, chosen, untrained=untrained,
      misses=lambda t: chains_lib.misses(scripts[t.question.uid], t),
      hops=lambda t: len(chains[t.question.uid].hops),
      digest=fingerprint.of({q.uid: chains[q.uid] for q in chosen}))


def by_teacher(config, questions: Sequence[Question],
               model: model_folders.ModelFolder) -> Author:
  """Returns an author whose turns are written by a model on a server.

  Args:
    config: Config of the job, whose `teacher` describes the server.
    questions: Questions of the training set.
    model: Model directory of the policy, with its dialogue and tokenizer.

  Raises:
    ValueError: An option of the teacher is out of range, or no question has one
      of the config's hop counts.
  """
  options, hops = dict(config.teacher), config.demonstrations.hops
  samples, threads = options.pop('samples'), options.pop('connections')
  chosen = [q for q in questions if not hops or q.hops in hops]
  if not chosen:
    raise ValueError(
        'data.train must have questions of the hop counts in demonstrations.'
        f'hops={tuple(hops)}, but none of {len(questions)} has one. Choose '
        'others.')
  teacher = served_teacher.Teacher(model.dialogue, model.tokenizer, **options)
  return Author(teacher, questions_lib.in_order(chosen, config.seed), samples,
                threads)


def play(config, author: Author, model: model_folders.ModelFolder, search: Any,
         number: int, questions: Sequence[Question]) -> list[Trajectory]:
  """Returns the trajectories that the author writes about some questions.

  There are `author.samples` of each question. `number` is not used.
  """
  del number
  return scripted.rollout(
      author.write, [Request(question, sample, group)
                     for group, question in enumerate(questions)
                     for sample in range(author.samples)],
      tokenizer=model.tokenizer, dialogue=model.dialogue,
      budgets=policy.budgets_of(config), length=config.rollout.max_length,
      search=search, threads=author.threads,
      search_timeout_secs=config.rollout.search_timeout_secs)


def select(options: Any, author: Author, trajectories
          ) -> tuple[list[Trajectory], collections.Counter[str]]:
  """Chooses the trajectories that become demonstrations.

  Args:
    options: The field config.demonstrations.
    author: The author of the trajectories.
    trajectories: Iterable of scored trajectories. It is read until enough are
      kept.

  Returns:
    The kept trajectories, and the number of those left out for each reason (a
    key such as 'no action').

  Raises:
    ValueError: No trajectory is kept.
  """
  kept: list[Trajectory] = []
  counts: collections.Counter[Any] = collections.Counter()
  left_out: collections.Counter[str] = collections.Counter()
  for trajectory in trajectories:
    reason = why_not(trajectory, author, options)
    keys = trajectory.question.uid, author.hops(trajectory)
    limits = options.most, options.most_per_hops or sys.maxsize
    if not reason and any(counts[key] >= limit
                          for key, limit in zip(keys, limits)):
      reason = 'most'
    if reason:
      left_out[reason] += 1
      continue
    counts.update(keys)
    kept.append(trajectory)
    if len(kept) == options.count:
      break
  if not kept:
    raise ValueError(
        'the options in config.demonstrations must keep a demonstration, but '
        f'leave out all: {reasons(left_out)}. Read them in trajectories/, and '
        'change these options or the questions.')
  return kept, left_out


def why_not(trajectory: Trajectory, author: Author, options: Any) -> str:
  """Returns the key of the reason to leave out a trajectory; '' to keep it."""
  if trajectory.stop_reason == 'search_error':
    return 'no search'
  if any(turn.action.kind == 'invalid' for turn in trajectory.turns):
    return 'no action'
  if trajectory.stop_reason != 'answer':
    return 'no end'
  if author.misses(trajectory):
    return 'not found'
  if trajectory.judge_error:
    return 'no verdict'
  return '' if trajectory.reward >= options.least_reward else 'reward'


def reasons(left_out: collections.Counter[str]) -> str:
  """Returns a text with the numbers of trajectories left out, by reason."""
  return ', '.join(f'{count} {_LEFT_OUT[reason]}'
                   for reason, count in left_out.items()) or 'none'


def describe(file: pathlib.Path, kept: Sequence[Trajectory],
             left_out: collections.Counter[str]) -> str:
  """Returns a text about the written demonstrations, for the terminal."""
  searched = collections.Counter(t.searches for t in kept)
  by_count = ', '.join(f'{number} with {count} search{"es" * (count != 1)}'
                       for count, number in sorted(searched.items()))
  longest = max(len(t.tokens) for t in kept)
  return (f'{file}: {len(kept)} demonstrations ({by_count}), the longest of '
          f'{longest} tokens. Left out: {reasons(left_out)}.')
