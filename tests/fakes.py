# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that tests share: engines, a search, a sampler."""

import threading
import types

import tiny

from searchrl.agent import rewards
from searchrl.models.inference import engine as engines
from searchrl.models.inference import pages
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import scoring
from searchrl.rollouts import weight_sync
from searchrl.trajectory import (Action, Passage, Question, SearchError,
                                 Trajectory)

TOKENIZER = tiny.Tokenizer()
STEP = 9  # of every scripted rollout


class Killed(BaseException):
  """Stands for a kill: an exception that no program catches."""


class Engine:
  """An engine whose actions are scripted, some sooner than others.

  It checks the preconditions of a real one.
  """

  def __init__(self, script, slots=2, length=400, steps=(STEP,),
               encode=TOKENIZER.encode):
    self.slots, self.length, self._encode = slots, length, encode
    self.records = False
    self._script = script  # (uid, sample) -> what the policy writes, by turn
    self._names = {engines.row_ids(step, uid, sample, turn): (uid, sample, turn)
                   for uid, sample in script for turn in range(20)
                   for step in steps}
    self._held = [[] for _ in range(slots)]
    self._decoding = {}  # slot -> [decodes left, tokens]
    self._idle = set(range(slots))  # slots that may start afresh
    self._decoded = []
    self.feeds = []

  def compile(self):
    """Compiles nothing, as there are no programs."""

  def name(self, feed):
    """The (uid, sample, turn) that an append is for."""
    return self._names[feed.row_ids]

  def admit(self, feeds):
    return [True] * len(feeds)

  def append(self, feeds):
    assert feeds
    for feed in feeds:
      uid, sample, turn = self.name(feed)
      assert feed.slot not in self._decoding and feed.tokens
      assert (turn == 0) <= feed.fresh == (feed.slot in self._idle)
      if feed.fresh:
        self._held[feed.slot] = []
        self._idle.remove(feed.slot)
      self._held[feed.slot] += feed.tokens
      assert 1 <= feed.budget <= self.length - len(self._held[feed.slot])
      tokens = self._encode(self._script[uid, sample][turn])
      wait = (7 * sample + 3 * turn + len(uid)) % 3
      self._decoding[feed.slot] = [wait, tokens[:feed.budget]]
      self.feeds.append(feed)

  def dispatch(self):
    stopped = []
    for slot in sorted(self._decoding):
      self._decoding[slot][0] -= 1
      if self._decoding[slot][0] < 0:
        tokens = self._decoding.pop(slot)[1]
        stopped.append((slot, tokens))
    self._decoded.append(stopped)

  def read(self):
    stopped = []
    for slot, tokens in self._decoded.pop(0):
      self._held[slot] += tokens
      stopped.append(engines.Stopped(slot, tokens, tuple(
          -0.1 * (len(self._held[slot]) + n) for n in range(len(tokens)))))
    return stopped

  def abandon(self):
    self._decoded.clear()
    self._decoding.clear()
    self._held = [[] for _ in range(self.slots)]
    self._idle = set(range(self.slots))

  def used(self, slot):
    return len(self._held[slot])

  def release(self, slot):
    assert slot not in self._decoding
    self._held[slot] = []
    self._idle.add(slot)

  def load(self, weights, temperature, truncation, stop_table=None):
    """A script has no use for weights."""

  unload = lambda self: None
  placed = lambda self, stop_table: stop_table


class PagedEngine(Engine):
  """A scripted engine whose slots share few pages; see `pages.Pages`."""

  def __init__(self, script, *, total, **options):
    super().__init__(script, **options)
    self._pages = pages.Pages(self.slots, 10, -(-self.length // 10), total)
    self.refused = 0

  def admit(self, feeds):
    granted = self._pages.admit([
        (feed.slot, self._needed(feed)) for feed in feeds])
    self.refused += granted.count(False)
    return granted

  def _needed(self, feed):
    held = 0 if feed.fresh else self.used(feed.slot)
    return held + len(feed.tokens) + feed.budget

  def append(self, feeds):
    for feed in feeds:
      self._pages.take(feed.slot, self._needed(feed))
    super().append(feeds)

  def read(self):
    stopped = super().read()
    for one in stopped:
      self._pages.trim(one.slot, self.used(one.slot))
    return stopped

  def release(self, slot):
    self._pages.trim(slot, 0)
    super().release(slot)


class GatedEngine:
  """A real engine; each of its decodes waits for `go`."""

  def __init__(self, engine):
    self._engine, self.slots = engine, engine.slots
    self.go, self.passes = threading.Semaphore(0), 0

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def decode(self, **options):
    assert self.go.acquire(timeout=20)
    self.passes += 1
    return self._engine.decode(**options)


def by_length(text):
  """Garbage has no grammar, so its length decides what it means."""
  kind = ('search', 'invalid', 'search', 'search', 'answer')[len(text) % 5]
  return Action(kind, () if kind == 'invalid' else (text,))


class Search:
  """Finds a passage that repeats the query; queries with 'fail' fail."""

  def __init__(self):
    self.calls = []

  def __call__(self, queries):
    assert queries
    self.calls.append([q.text for q in queries])
    return [SearchError('timeout', 'after 3 s') if 'fail' in q.text else
            (Passage(q.text, 'on', f'{q.text} of {q.question.uid}', 1.0),)
            for q in queries]


class Noting(Search):
  """Keeps every query that it is asked."""

  def __init__(self):
    super().__init__()
    self.asked = []

  def __call__(self, queries):
    self.asked += queries
    return super().__call__(queries)


def asked_by(trajectories):
  """(uid, sample, turn, text) of all that trajectories had searched for."""
  return sorted(
      (t.question.uid, t.sample, number, text) for t in trajectories
      for number, turn in enumerate(t.turns) if turn.action.is_search
      and (turn.observation_tokens or t.stop_reason == 'search_error')
      for text in turn.action.texts)


def draw(position, count, step=0):
  """A stream of questions q0, q1, ..."""
  start, = position or (0,)
  return [Question(f'q{start + i}', 'x', ('y',)) for i in range(count)], (
      start + count,)


class Sampler:
  """Gives each sample an outcome of its own; None: its search failed."""

  engine = types.SimpleNamespace(records=False)

  def __init__(self, outcome_of):
    self._outcome_of = outcome_of  # (question number, sample) -> outcome

  def rollout(self, weights, requests, **_):
    return samplers.Rollouts(list(map(self.trajectory, requests)), [])

  def trajectory(self, request):
    outcome = self._outcome_of(
        int(request.question.uid[1:]), request.sample)
    return Trajectory(
        request.question, request.sample, 0, (1,), (),
        'search_error' if outcome is None else 'answer', outcome, outcome,
        group=request.group)


# Leaves a trajectory of `Sampler` with the outcome that it has.
SCORER = scoring.Scorer(rewards.each(lambda t: t.reward),
                        lambda t: t.outcome_reward)
SYNCED = weight_sync.Synced(None)
