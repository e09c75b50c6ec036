# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A question in, its answer out, each turn told as it happens.

A policy of a run or of a model folder searches a corpus for it. What happens
goes to stderr, the answer alone to stdout.
"""

from collections.abc import Callable, Sequence
import collections
import itertools
import json
import pathlib
import shlex
import sys

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.encoders import embedder
from searchrl.encoders import reranker
from searchrl.evaluation import suite
from searchrl.rollouts import sampler as samplers
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.search import corpus as corpora
from searchrl.search import factory
from searchrl.search import mapped_corpus
from searchrl.search import wrapped
from searchrl.trajectory import (Passage, Question, SearchError, SearchFn,
                                 Trajectory)

_WIDTH = 100  # characters of a passage's line
_EXAMPLES = 5
_WHY = {'turn_limit': 'the turns were used up',
        'length_limit': 'the conversation became too long',
        'search_error': 'a search failed'}


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def run(config, workdir: str) -> None:
  """Answers `ask.question`; without one, proposes questions.

  Raises:
    ValueError, FileNotFoundError: the config cannot be run.
    SystemExit: no sample came to an answer.
  """
  _check(config)
  run = pathlib.Path(config.ask.run) if config.ask.run else None
  if run:
    check_run(run, config)
  file = corpus_file(config, run, pathlib.Path(workdir))
  corpus = mapped_corpus.load(file)
  if not config.ask.question:
    _propose(config, file, corpus)
    return
  search = wrapped.with_typed_errors(factory.make(
      config.search.engine, corpus, seed=config.seed,
      load_encoder=embedder.load_again, load_judge=reranker.load,
      **config.search.options))
  sampler, params = policy(config, config.ask.samples)
  _say(f'Question: {plain(config.ask.question)}')
  trajectories = ask(sampler, params, config.ask.question, search=search,
              samples=config.ask.samples, temperature=config.ask.temperature,
              watch=Narrator(sampler.tokenizer, config.ask.samples))
  winner = vote(trajectories, _say)
  if winner is None:
    sys.exit('No answer: ' + ', '.join(sorted({
        _WHY[trajectory.stop_reason] for trajectory in trajectories})) + '.')
  print(plain(winner))


def _check(config) -> None:
  if processes.count() > 1:
    raise ValueError(f'ask needs one process, but there are '
                     f'{processes.count()}. Start it alone.')
  for name, legal, rule in (
      ('samples', config.ask.samples >= 1, 'at least 1'),
      ('temperature', config.ask.temperature > 0, 'above 0')):
    if not legal:
      raise ValueError(
          f'ask.{name} must be {rule}, but is {config.ask[name]}.')


def check_run(run: pathlib.Path, config) -> None:
  """Raises unless a run has a checkpoint, of the policy that config is for."""
  file = run / 'config.json'
  if not (file.is_file() and (run / 'checkpoints').is_dir()):
    raise FileNotFoundError(
        f'ask.run must be the folder of a run with checkpoints, but {run} is '
        'none. Name for instance runs/dspo, the --workdir of a training run.')
  past = json.loads(file.read_text())
  for name, was, now in (
      ('model.path', past['model']['path'], config.model.path),
      ('dialogue', past['dialogue'], config.dialogue)):
    if was != now:
      raise ValueError(
          f'{name} must be what {run} was trained with, {was!r}, but is '
          f"{now!r}. Write the run's folder after the config's name, as in "
          f'--config=configs/ask.py:{run}: it takes all that from the run.')


def corpus_file(config, run: pathlib.Path | None, workdir: pathlib.Path
               ) -> pathlib.Path:
  """The corpus: the config's, the run's, or a generated world's."""
  if config.search.corpus:
    return pathlib.Path(config.search.corpus)
  if run and (run / 'data' / 'train' / 'corpus.jsonl').is_file():
    return run / 'data' / 'train' / 'corpus.jsonl'
  datasets.train_set(
      workdir / 'data', train='', corpus='', world_seed=config.data.world_seed,
      per_hop=config.data.per_hop)
  return workdir / 'data' / 'train' / 'corpus.jsonl'


def policy(config, most: int):
  """The config's player, with at most so many slots as are used; and params."""
  mesh = meshes.make(**config.mesh)
  copies = mesh.size // config.rollout.tensor
  used = -(-min(most, config.rollout.slots) // max(copies, 1)) * max(copies, 1)
  config = config.copy_and_resolve_references()
  config.rollout.slots = used
  sampler, params = samplers.build(config, mesh)
  if config.ask.run:
    params = suite.trained(
        pathlib.Path(config.ask.run), params, sampler.shape)
  return sampler, params


def ask(sampler: samplers.Sampler, params, question: str, *, search: SearchFn,
        samples: int, temperature: float,
        watch: Callable[[Trajectory], None]) -> list[Trajectory]:
  """Trajectories about one question; a single one is greedy.

  Args:
    player: the policy's surroundings.
    params: the policy.
    question: as a person writes it; with the config's seed it names the
      randomness.
    search: what answers.
    samples: how many.
    temperature: of several samples.
    watch: as in `Player.play`.
  """
  asked = Question(question, question, ())
  return sampler.play(
      params, [(asked, sample) for sample in range(samples)],
      search=telling(search, _say), reward=lambda trajectory: 0.0,
      outcome=lambda trajectory: 0.0, step=0, watch=watch,
      temperature=temperature if samples > 1 else 0.0)


def telling(search: SearchFn, say: Callable[[str], None]) -> SearchFn:
  """The same search, which says why it fails."""
  def told(queries):
    results = search(queries)
    for error in dict.fromkeys(
        r for r in results if isinstance(r, SearchError)):
      say(f'Warning: a search failed: {plain(f"{error.kind} {error.detail}")}')
    return results
  return wrapped.Wrapped(told, (search,))


class Narrator:
  """Says what has been added to a trajectory since it was last shown.

  Args:
    tokenizer: reads what the policy said.
    samples: played side by side; of several each says which it is.
    say: takes lines.
  """

  def __init__(self, tokenizer, samples: int = 1,
               say: Callable[[str], None] = _say):
    self._tokenizer, self._samples, self._say = tokenizer, samples, say
    self._told = {}  # sample -> parts of its trajectory that were said

  def __call__(self, trajectory: Trajectory) -> None:
    parts = list(self._parts(trajectory))
    told = self._told.get(trajectory.sample, 0)
    if len(parts) < told:  # it is played again
      self._say(f'{self._who(trajectory)}Again, for a search had failed.')
      told = 0
    for part in parts[told:]:
      self._say(part)
    self._told[trajectory.sample] = len(parts)

  def _parts(self, trajectory: Trajectory):
    for number, turn in enumerate(trajectory.turns, start=1):
      said = plain(self._tokenizer.decode(turn.action_tokens)).strip()
      yield f'{self._who(trajectory)}Turn {number}\n' + _indented(said)
      if not turn.observation_tokens:
        continue
      if turn.action.kind == 'search':
        found = [passage_line(n, p) for n, p in enumerate(turn.passages, 1)]
        yield self._who(trajectory) + 'Found\n' + _indented(
            '\n'.join(found) or 'nothing')
      else:
        yield f'{self._who(trajectory)}That was no action; the policy is told so.'

  def _who(self, trajectory: Trajectory) -> str:
    return f'[{trajectory.sample + 1}] ' if self._samples > 1 else ''


def passage_line(number: int, passage: Passage) -> str:
  """A passage's title, and a line of it."""
  text = ' '.join(plain(passage.text).split())
  if len(text) > _WIDTH:
    text = text[:_WIDTH - 1] + '…'
  return f'{number}. {" ".join(plain(passage.title).split())}: {text}'


def vote(trajectories: Sequence[Trajectory], say: Callable[[str], None]) -> str | None:
  """The most frequent answer, the earliest of equals; None if there is none.

  Answers that differ in case, punctuation and articles alone are one.
  """
  answers = [trajectory.answer for trajectory in trajectories]
  counts = collections.Counter(
      rewards.normalise(answer) for answer in answers if answer is not None)
  forms = {}
  for answer in answers:
    if answer is not None:
      forms.setdefault(rewards.normalise(answer), answer)
  ranked = counts.most_common()  # equal counts in the order of their arrival
  if len(trajectories) > 1:
    say('Votes')
    for key, count in ranked:
      say(f'  {count} of {len(trajectories)}  {plain(forms[key])}')
    if None in answers:
      say(f'  {answers.count(None)} of {len(trajectories)}  no answer')
  return forms[ranked[0][0]] if ranked else None


def _propose(config, file: pathlib.Path, corpus: corpora.Corpus) -> None:
  """Prints what could be asked."""
  source = pathlib.Path(config.ask.examples or file.parent / 'questions.jsonl')
  print(f'{len(corpus)} passages of {file} can be asked about', end='')
  if config.ask.examples or source.is_file():
    examples = [q.text for q in spread(questions_lib.read(source))]
    print(', for instance:')
  else:
    step = max(len(corpus) // _EXAMPLES, 1)
    titles = [corpus[i].title for i in range(0, len(corpus), step)]
    examples = [f'Who or what is {title}?' for title in titles[:_EXAMPLES]]
    print(', though no file of questions lies beside them. By their titles:')
  for question in examples:
    print('  ' + plain(question))
  again = '--config=configs/ask.py'
  if config.ask.run:
    again += f':{config.ask.run}'
  where = [f'--config.search.corpus={config.search.corpus}'] * bool(
      config.search.corpus)
  print('Ask:\n  python -m searchrl.main ' + shlex.join(
      [again, *where, '--question', plain(examples[0])]))


def spread(questions: Sequence[Question]) -> list[Question]:
  """A few questions, of each hop count in turn."""
  by_hops = collections.defaultdict(list)
  for question in questions:
    by_hops[question.hops].append(question)
  rounds = itertools.zip_longest(*(by_hops[hops] for hops in sorted(by_hops)))
  dealt = (q for one in rounds for q in one if q is not None)
  return list(itertools.islice(dealt, _EXAMPLES))


def plain(text: str) -> str:
  """Text that a terminal shows and does not obey."""
  return ''.join(c if c.isprintable() or c == '\n' else ' ' for c in text)


def _indented(text: str) -> str:
  return '\n'.join('  ' + line for line in text.splitlines())
