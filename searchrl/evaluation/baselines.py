# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Methods that need no training, each a function of a model and questions.

A trained agent reads its own conversation, which only grows. These methods
instead write a new prompt for every turn, such as a question below passages.
Their samples are therefore not training data, and are only scored.

Sources: RAG (Lewis et al. 2020, arXiv:2005.11401), IRCoT (Trivedi et al. 2023,
arXiv:2212.10509) in the form of FlashRAG, Search-o1 (Li et al. 2025,
arXiv:2501.05366). RA-Agent is Search-o1 without Reason-in-Documents.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.agent import prompts
from searchrl.rollouts import sampler as samplers
from searchrl.trajectory import (
    Action, Passage, Passages, Query, Question, Request, SearchError, SearchFn,
    StopReason, Trajectory, Turn)

_IRCOT_ROUNDS = 3
_CONCLUSION = re.compile(r'\bso the answer is:?\s*(.+?)[.\s]*\Z',
                         re.DOTALL | re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class PromptedModel:
  """The model, the engine and the prompts that a method uses."""

  sampler: samplers.Sampler
  weights: Any  # weights that the sampler's `sync` returned
  search: SearchFn
  templates: Mapping[str, str]  # templates by the names of `agent.prompts`
  step: int = 0  # seed of the samples
  temperature: float = 0.0  # 0 is greedy

  def write(self, kind: str, prompts_of: Sequence[tuple[Question, str]],
            **changes: Any) -> list[Trajectory]:
    """Samples one turn of the model for each prompt.

    Args:
      kind: Name of the template.
      prompts_of: Questions, whose uids determine the randomness, and the texts
        that fill the template.
      **changes: Changed fields of the dialogue, such as `stop_strings`.

    Returns:
      A trajectory for each prompt. If a prompt is too long, its trajectory has
      no turn, and the stop reason is 'length_limit'.
    """
    questions = [dataclasses.replace(q, text=text) for q, text in prompts_of]
    tokenizer, budgets = self.sampler.tokenizer, self.sampler.budgets
    dialogue = dataclasses.replace(
        prompts.framed(tokenizer, self.templates[kind]), **changes)
    room = self.sampler.engine.length - budgets.max_new_tokens
    speaking = self.sampler.with_dialogue(dialogue, dataclasses.replace(
        budgets, max_turns=1, max_prompt_tokens=room))
    fits = [len(dialogues.opening(dialogue, q.text, tokenizer)) <= room
            for q in questions]
    trajectories = iter(speaking.rollout(
        self.weights, [Request(q, 0, n) for n, q in enumerate(questions)
                       if fits[n]],
        search=self.search, step=self.step,
        temperature=self.temperature).trajectories)
    return [next(trajectories) if fit else Trajectory(
        question, 0, 0, (), stop_reason='length_limit')
            for question, fit in zip(questions, fits)]

  def find(self, attempts: Sequence['_Attempt']
          ) -> list[Passages | SearchError]:
    """Searches for each attempt's query; returns the results in order."""
    top_k = self.sampler.budgets.top_k
    return samplers.search_with_retry(self.search, [
        Query(x.query, top_k, x.question, self.step) for x in attempts])

  def below(self, passages: Sequence[Passage], text: str) -> str:
    """Returns a part of a prompt: lines with the passages, and then the text.

    Each passage is cut to the sampler's number of tokens per passage.
    """
    tokenizer = self.sampler.tokenizer
    lines = [tokenizer.decode(
        tokenizer.encode_data(dialogues.tag_passage(n, passage))[
            :self.sampler.budgets.passage_tokens])
             for n, passage in enumerate(passages, start=1)]
    return '\n'.join([*lines, text])


Method = Callable[[PromptedModel, Sequence[Question]], list[Trajectory]]


@dataclasses.dataclass
class _Attempt:
  """A question, and the progress of a method on it."""

  question: Question
  query: str = ''  # the latest query
  written: str = ''  # text that the model has written and read
  turns: list[Turn] = dataclasses.field(default_factory=list)
  stop_reason: StopReason | None = None  # None: not finished
  error: SearchError | None = None

  def searched(self, turn: Turn, result: Passages | SearchError) -> None:
    """Adds a search turn with its result; a failed search ends the attempt."""
    self.turns.append(dataclasses.replace(turn, passages=_passages(result)))
    if isinstance(result, SearchError):
      self.stop_reason, self.error = 'search_error', result

  def retrieved(self, result: Passages | SearchError) -> None:
    """Adds a search by the method itself, as a turn without sampled tokens."""
    self.searched(Turn((), (), Action('search', (self.query,))), result)


def _passages(result: Passages | SearchError) -> Passages:
  return () if isinstance(result, SearchError) else tuple(result)


def _open(attempts: Sequence[_Attempt]) -> list[_Attempt]:
  return [attempt for attempt in attempts if not attempt.stop_reason]


def _trajectories(attempts: Sequence[_Attempt]) -> list[Trajectory]:
  return [Trajectory(x.question, 0, 0, (), tuple(x.turns),
                     x.stop_reason or 'turn_limit', search_error=x.error)
          for x in attempts]


def direct(model: PromptedModel, questions: Sequence[Question]
          ) -> list[Trajectory]:
  """Answers each question at once, from the model's memory."""
  return model.write('direct', [(q, q.text) for q in questions])


def cot(model: PromptedModel, questions: Sequence[Question]
       ) -> list[Trajectory]:
  """Answers each question from memory, after a chain of thought."""
  return model.write('cot', [(q, q.text) for q in questions])


def rag(model: PromptedModel, questions: Sequence[Question]
       ) -> list[Trajectory]:
  """Answers each question from the passages that one search for it returns."""
  attempts = [_Attempt(q, query=q.text) for q in questions]
  for attempt, result in zip(attempts, model.find(attempts)):
    attempt.retrieved(result)
  answering = _open(attempts)
  answers = model.write('rag', [(x.question, model.below(
      x.turns[0].passages, x.query)) for x in answering])
  for attempt, answer in zip(answering, answers):
    attempt.turns += answer.turns
    attempt.stop_reason = answer.stop_reason
  return _trajectories(attempts)


def ircot(model: PromptedModel, questions: Sequence[Question]
         ) -> list[Trajectory]:
  """Answers each question in rounds of a search and one sentence of thought.

  The first query is the question, and each later query is the previous
  sentence. The prompt has the passages of all rounds above the question, the
  best passage first. The method ends at a sentence with 'So the answer is', as
  the prompt asks for, or after three rounds. A sentence ends at its first full
  stop.
  """
  attempts = [_Attempt(q, query=q.text) for q in questions]
  for _ in range(_IRCOT_ROUNDS):
    searching = _open(attempts)
    for attempt, result in zip(searching, model.find(searching)):
      attempt.retrieved(result)
    thinking = _open(attempts)
    thoughts = model.write('ircot', [(x.question, model.below(
        _best(x.turns), f'Question: {x.question.text}\n'
        f'Thought: {x.written}')) for x in thinking], stop_strings=('.', '\n'))
    for attempt, thought in zip(thinking, thoughts):
      attempt.query = ''.join(turn.text for turn in thought.turns).strip() or (
          attempt.question.text)
      attempt.written = f'{attempt.written} {attempt.query}'.strip()
      conclusion = _CONCLUSION.search(attempt.query)
      action = Action('answer', (conclusion[1].strip(),)) if conclusion else (
          Action('invalid'))
      attempt.turns += [dataclasses.replace(turn, action=action)
                        for turn in thought.turns]
      if conclusion or not thought.turns:
        attempt.stop_reason = 'answer' if conclusion else 'length_limit'
  return _trajectories(attempts)


def ra_agent(model: PromptedModel, questions: Sequence[Question]
            ) -> list[Trajectory]:
  """Answers each question by an agent that searches and reads the passages."""
  return _agent(model, questions, lambda attempts, results: [
      model.below(_passages(result), '').rstrip('\n') for result in results])


def search_o1(model: PromptedModel, questions: Sequence[Question]
             ) -> list[Trajectory]:
  """Answers each question by an agent that searches and reads only notes.

  The model writes the notes on the passages that a search returned.
  """
  room = 4 * model.sampler.budgets.max_prompt_tokens  # characters

  def notes(attempts, results):  # Reason-in-Documents
    written = model.write('note', [(
        dataclasses.replace(x.question, uid=f'note:{x.query}:{x.question.uid}'),
        f'Question: {x.question.text}\nThought: {x.written[-room:]}\n'
        f'Query: {x.query}\n{model.below(_passages(result), "")}'.rstrip())
                                   for x, result in zip(attempts, results)])
    return [note.answer or 'nothing' for note in written]

  return _agent(model, questions, notes)


def _agent(model: PromptedModel, questions: Sequence[Question],
           read: Callable[..., list[str]]) -> list[Trajectory]:
  """Answers each question by an agent that may search in each of its turns.

  An agent ends when it answers, when a search fails, when its prompt is full,
  or after the last turn. `read` takes the agents that search and the results of
  their searches, and returns the texts that these agents read.
  """
  attempts = [_Attempt(q) for q in questions]
  for _ in range(model.sampler.budgets.max_turns):
    acting = _open(attempts)
    written = model.write('agent', [
        (x.question, f'{x.question.text}\n{x.written}') for x in acting])
    for attempt, trajectory in zip(acting, written):
      if not trajectory.turns:
        attempt.stop_reason = 'length_limit'
        continue
      attempt.turns += trajectory.turns
      attempt.written += trajectory.turns[0].text
      if trajectory.answer:
        attempt.stop_reason = 'answer'
    searching = [x for x in _open(attempts)
                 if x.turns[-1].action.is_search]
    for attempt in searching:
      attempt.query = attempt.turns[-1].action.texts[0]
    results = model.find(searching)
    for attempt, result, text in zip(
        searching, results, read(searching, results)):
      observation = f'\n\n<information>{text}</information>\n\n'
      attempt.written += observation
      attempt.searched(dataclasses.replace(
          attempt.turns.pop(), observation=observation), result)
  return _trajectories(attempts)


METHODS: dict[str, Method] = {function.__name__: function for function in (
    direct, cot, rag, ircot, ra_agent, search_o1)}


def _best(turns: Sequence[Turn]) -> list[Passage]:
  """Returns the passages of all searches, each once, the best first."""
  best: dict[str, Passage] = {}
  for passage in (p for turn in turns for p in turn.passages):
    if passage.id not in best or passage.score > best[passage.id].score:
      best[passage.id] = passage
  return sorted(best.values(), key=lambda p: -p.score)
