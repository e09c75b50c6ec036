# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Answers a question with a policy, and prints each turn as it happens.

The policy, from a run or a model directory, searches a corpus. The turns are
printed on stderr, and only the answer on stdout.
"""

from collections.abc import Callable, Mapping, Sequence
import collections
import itertools
import pathlib
import shlex
import sys

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.data import question_files
from searchrl.data import questions as questions_lib
from searchrl.evaluation.figures import plain
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.experiment import run_defaults
from searchrl.experiment import search as searches
from searchrl.experiment import toolsets
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.search import corpus as corpora
from searchrl.search import mapped_corpus
from searchrl.search import engine_wrappers
from searchrl.trajectory import (Passage, Question, Request, SearchError,
                                 SearchFn, Trajectory)

_WIDTH = 100  # largest number of characters of a passage's line
_EXAMPLES = 5  # largest number of questions that are proposed
_WHY = {'turn_limit': 'the turns were used up',
        'length_limit': 'the conversation became too long',
        'search_error': 'a search failed'}


def run(config, workdir: str) -> None:
  """Prints the policy's answer to `ask.question`.

  Of several samples, the most frequent answer is printed. If the question is
  empty, questions that can be asked are printed instead. If neither the config
  nor its run names a corpus, a world is generated in `workdir`/data, and its
  corpus is searched.

  Raises:
    ValueError, FileNotFoundError: The config cannot be run.
    SystemExit: No sample has an answer.
  """
  config_checks.check(config)
  if processes.count() > 1:
    raise ValueError(f'ask needs one process, but there are '
                     f'{processes.count()}. Start it alone.')
  flags = {'--config.model.path': config.model.path,
           '--config.search.corpus': config.search.corpus}
  config = run_defaults.complete(config, config.ask.run, 'ask.run')
  config_checks.check(config)  # again, with the filled-in values
  config_checks.check_worlds(config)
  options = config.ask
  file = corpus_file(config, options.run, pathlib.Path(workdir))
  with progress.phase(f'Reading {file}'):
    corpus = mapped_corpus.load(file)
  if not options.question:
    propose(file, corpus, run=options.run, flags=flags,
            examples=options.examples or _examples(options.run))
    return
  model = policy.folder_of(config)
  model.admit(policy.budgets_of(config))(
      Question(options.question, options.question, ()), '--question')
  search = searches.engine(config.search, corpus, seed=config.seed)
  sampler, params = policy.of_run(
      config, options.run, limit=options.samples, folder=model)
  search = toolsets.of_sampler(sampler, config.seed)(search, corpus)
  processes.say(f'Question: {plain(options.question)}')
  trajectories = ask(
      sampler, params, options.question, search=search,
      samples=options.samples, temperature=options.temperature,
      watch=TurnPrinter(sampler.tokenizer, options.samples))
  winner = vote(trajectories, processes.say)
  if winner is None:
    sys.exit('No answer: ' + ', '.join(sorted({
        _WHY[str(t.stop_reason)] for t in trajectories})) + '.')
  print(plain(winner))


def corpus_file(config, run: str, workdir: pathlib.Path) -> pathlib.Path:
  """Returns the path of the corpus to search.

  It is the config's, or else the run's. If neither has a file, a world is
  generated in `workdir`/data, and its corpus is used.
  """
  file = config.search.corpus or (
      run and run_defaults.corpus_of(past_runs.parse_run(run)[0]))
  if file:
    return pathlib.Path(file)
  datasets.train_set(
      workdir / 'data', train='', corpus='', world_seed=config.data.world_seed,
      per_hop=config.data.per_hop, common=config.data.common,
      world=build.world(config))
  return workdir / 'data' / 'train' / 'corpus.jsonl'


def _examples(run: str) -> str:
  """Returns the question files of a run, as its config names them.

  These are the files that the run is evaluated on. If there are none, they are
  the files that it was trained on. The result is '' if the run has neither.
  """
  folder = past_runs.parse_run(run)[0]
  data = past_runs.recorded(folder).get('data', {}) if run else {}
  judged = data.get('evaluate', '')
  return data.get('train', '') if judged in ('', datasets.WORLDS) else judged


def ask(sampler: Sampler, params, question: str, *, search: SearchFn,
        samples: int, temperature: float,
        watch: Callable[[Trajectory], None]) -> list[Trajectory]:
  """Returns trajectories in which the policy answers one question.

  A single trajectory is sampled greedily.

  Args:
    sampler: Sampler that plays the rollouts.
    params: Parameters of the policy.
    question: Text of the question. With the config's seed, it seeds the
      samples.
    search: Search engine.
    samples: Number of trajectories.
    temperature: Sampling temperature, if there are several samples.
    watch: Function that receives a trajectory whenever it has grown.
  """
  whole = Question(question, question, ())
  weights = sampler.sync(params).weights
  with progress.phase('The policy writes'):
    return sampler.rollout(
        weights, [Request(whole, sample) for sample in range(samples)],
        search=with_warnings(search, processes.say), step=0, watch=watch,
        temperature=temperature if samples > 1 else 0.0).trajectories


def with_warnings(search: SearchFn, say: Callable[[str], None]) -> SearchFn:
  """Returns a search like the given one, which also reports its failures.

  In each call of the search or of one of its tools, `say` gets a line for each
  distinct SearchError. The results are the same.
  """
  def warn_of(tool):
    def call_and_warn(queries):
      results = tool(queries)
      for error in dict.fromkeys(
          r for r in results if isinstance(r, SearchError)):
        say('Warning: a search failed: '
            f'{plain(f"{error.kind} {error.detail}")}')
      return results
    return engine_wrappers.Wrapped(call_and_warn, (tool,))
  return engine_wrappers.each(search, warn_of)


class TurnPrinter:
  """A function that prints what is new in a trajectory since its last call.

  Args:
    tokenizer: Tokenizer that decodes the actions.
    samples: Number of concurrent trajectories. If there are several, lines
      begin with the trajectory's number.
    say: Function that receives lines.
  """

  def __init__(self, tokenizer, samples: int = 1,
               say: Callable[[str], None] = processes.say):
    self._tokenizer, self._samples, self._say = tokenizer, samples, say
    self._printed: dict[int, int] = {}  # sample -> number of printed blocks

  def __call__(self, trajectory: Trajectory) -> None:
    """Prints the turns and observations that are new in a trajectory."""
    label = f'[{trajectory.sample + 1}] ' if self._samples > 1 else ''
    blocks = list(self._blocks(trajectory))
    printed = self._printed.get(trajectory.sample, 0)
    if len(blocks) < printed:  # it is being sampled again
      self._say(f'{label}Again, for a search had failed.')
      printed = 0
    for block in blocks[printed:]:
      self._say(label + block)
    self._printed[trajectory.sample] = len(blocks)

  def _blocks(self, trajectory: Trajectory):
    for number, turn in enumerate(trajectory.turns, start=1):
      if turn.opens_context:
        yield 'The context was full. A new one begins.'
      text = plain(self._tokenizer.decode(turn.action_tokens)).strip()
      yield f'Turn {number}\n' + _indented(text)
      if not turn.observation_tokens:
        continue
      if turn.action.is_search:
        shown = [passage_line(n, p) for n, p in enumerate(turn.passages, 1)]
        title, text = 'Found', '\n'.join(shown) or 'nothing'
      else:
        title = f'{turn.action.kind} returned' if turn.action.is_call else (
            'That was no action; the policy is asked to retry and reads')
        text = plain(turn.observation).strip()
      yield f'{title}\n' + _indented(text)


def passage_line(number: int, passage: Passage) -> str:
  """Returns 'NUMBER. TITLE: TEXT', with at most 100 characters of the text."""
  text = ' '.join(plain(passage.text).split())
  if len(text) > _WIDTH:
    text = text[:_WIDTH - 1] + '…'
  return f'{number}. {" ".join(plain(passage.title).split())}: {text}'


def vote(trajectories: Sequence[Trajectory], say: Callable[[str], None]
        ) -> str | None:
  """Returns the most frequent answer of some trajectories of one question.

  Answers that differ only in case, punctuation and articles count as one. Among
  equally frequent answers, the earliest wins. The result is None if no
  trajectory has an answer. With several trajectories, the counts are printed.

  Args:
    trajectories: Finished trajectories.
    say: Function that prints a line.
  """
  answers = [t.answer for t in trajectories if t.answer is not None]
  counts = collections.Counter(map(rewards.normalise, answers))
  forms = {rewards.normalise(answer): answer
           for answer in reversed(answers)}  # the first form of each
  ranked = counts.most_common()  # equal counts stay in order of arrival
  if len(trajectories) > 1:
    say('Votes')
    for key, count in ranked:
      say(f'  {count} of {len(trajectories)}  {plain(forms[key])}')
    if without := len(trajectories) - len(answers):
      say(f'  {without} of {len(trajectories)}  no answer')
  return forms[ranked[0][0]] if ranked else None


def propose(
    file: pathlib.Path, corpus: corpora.Corpus | mapped_corpus.MappedCorpus, *,
    examples: str, run: str, flags: Mapping[str, str]) -> None:
  """Prints questions that could be asked, and the command that asks one.

  Args:
    file: File of the corpus.
    corpus: Passages of the corpus.
    examples: Question files: 'path', 'name=path,name=path', or a directory. '':
      the file questions.jsonl beside the corpus, if there is one.
    run: Directory of the run, for the printed command.
    flags: Values of flags, for the printed command. Empty ones are left out.
  """
  beside = file.parent / 'questions.jsonl'
  sources = question_files.named(
      examples or (str(beside) if beside.is_file() else ''), 'ask.examples',
      may_be_folder=True)
  head = f'{len(corpus)} passages of {file} can be asked about'
  if sources:
    questions = [q.text for q in spread([
        q for source in sources for q in questions_lib.read(
            source.path, needs_golds=False)])]
    print(f'{head}, for instance:')
  else:
    step = max(len(corpus) // _EXAMPLES, 1)
    titles = [corpus[i].title for i in range(0, len(corpus), step)]
    questions = [f'Who or what is {title}?'
                 for title in titles[:_EXAMPLES] if title.strip()]
    print(f'{head}, though no file of questions lies beside them.'
          + ' By their titles:' * bool(questions))
  for question in questions:
    print('  ' + plain(question))
  config = '--config=configs/ask.py' + (f':{run}' if run else '')
  given = [f'{flag}={value}' for flag, value in flags.items() if value]
  print('Ask:\n  python -m searchrl.main ' + shlex.join(
      [config, *given, '--question', plain((questions or ['YOUR QUESTION'])[0])]
      ))


def spread(questions: Sequence[Question]) -> list[Question]:
  """Returns at most five questions, in an order in which hop counts take turns.

  The first question has the smallest hop count, the second has the next larger
  hop count, and so on.
  """
  by_hops = collections.defaultdict(list)
  for question in questions:
    by_hops[question.hops].append(question)
  rounds = itertools.zip_longest(*(by_hops[hops] for hops in sorted(by_hops)))
  dealt = (q for turn in rounds for q in turn if q is not None)
  return list(itertools.islice(dealt, _EXAMPLES))


def _indented(text: str) -> str:
  return '\n'.join('  ' + line for line in text.splitlines())
