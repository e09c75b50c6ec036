# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every formula of `searchrl.rl` as its definition: float64, plain loops.

Slow on purpose, and nothing shared with the library: the tests compare the two.
At the end, the ragged inputs that they are compared on.
"""

import math

import numpy as np


def group_relative(
    rewards, group_ids, in_baseline=None, *, normalize_std=True, ddof=1):
  out = []
  for i, members in _members(rewards, group_ids, in_baseline):
    if i not in members or _spread(rewards, members) <= 1e-6:
      out.append(0.0)
      continue
    mean, squares = _moments(rewards, members)
    std = math.sqrt(squares / (len(members) - ddof))
    advantage = float(rewards[i]) - mean
    out.append(advantage / (std + 1e-6) if normalize_std else advantage)
  return np.array(out)


def leave_one_out(rewards, group_ids, in_baseline=None):
  out = []
  for i, members in _members(rewards, group_ids, in_baseline):
    others = [float(rewards[j]) for j in members if j != i]
    if i not in members or not others:
      out.append(0.0)
    else:
      out.append(float(rewards[i]) - sum(others) / len(others))
  return np.array(out)


def hop_group_relative(rewards, group_ids, in_baseline=None, *, delta=1e-6):
  out = []
  for i, members in _members(rewards, group_ids, in_baseline):
    if i not in members:
      out.append(0.0)
      continue
    mean, squares = _moments(rewards, members)
    std = math.sqrt(squares / len(members) + delta)
    out.append((float(rewards[i]) - mean) / std)
  return np.array(out)


def keep_mixed(outcome_rewards, question_ids):
  counts = ~np.isnan(outcome_rewards)
  return np.array([
      bool(members) and _spread(outcome_rewards, members) > 1e-6
      for _, members in _members(outcome_rewards, question_ids, counts)])


def token_ratio(logprobs, old_logprobs, mask):
  out = np.ones(np.shape(mask))
  for i, t in np.argwhere(mask):
    gap = float(logprobs[i][t]) - float(old_logprobs[i][t])
    out[i, t] = math.exp(min(max(gap, -20.0), 20.0))
  return out


def sequence_ratio(logprobs, old_logprobs, mask):
  out = []
  for i, row in enumerate(mask):
    gaps = [float(logprobs[i][t]) - float(old_logprobs[i][t])
            for t in np.flatnonzero(row)]
    out.append(math.exp(sum(gaps) / len(gaps)) if gaps else 1.0)
  return np.array(out)


def surrogate(ratio, advantage, low, high):
  """Of one ratio and one advantage."""
  clipped = min(max(ratio, 1 - low), 1 + high)
  return -min(ratio * advantage, clipped * advantage)


def token_ratio_loss(logprobs, old_logprobs, advantages, mask, low, high):
  ratio = token_ratio(logprobs, old_logprobs, mask)
  out = np.zeros(np.shape(mask))
  for i, t in np.argwhere(mask):
    a = advantages[i] if np.ndim(advantages) == 1 else advantages[i][t]
    out[i, t] = surrogate(ratio[i, t], float(a), low, high)
  return out


def sequence_ratio_loss(logprobs, old_logprobs, advantages, mask, low, high):
  ratio = sequence_ratio(logprobs, old_logprobs, mask)
  return np.array([
      surrogate(ratio[i], float(advantages[i]), low, high) if any(row) else 0.0
      for i, row in enumerate(mask)])


def kl(logprobs, ref_logprobs, mask, estimator):
  out = np.zeros(np.shape(mask))
  for i, t in np.argwhere(mask):
    x = float(ref_logprobs[i][t]) - float(logprobs[i][t])
    out[i, t] = {
        'k1': -x,
        'abs': abs(x),
        'k2': x * x / 2,
        'k3': math.expm1(x) - x,
    }[estimator]
  return out


def aggregate(per_token, mask, how, length=None):
  """The sum and the count."""
  rows = [[float(per_token[i][t]) for t in np.flatnonzero(row)]
          for i, row in enumerate(mask) if any(row)]
  if how == 'token_mean':
    return sum(map(sum, rows)), sum(map(len, rows))
  if how == 'sequence_mean':
    return sum(sum(row) / len(row) for row in rows), len(rows)
  if how == 'sequence_sum':
    return sum(map(sum, rows)), len(rows)
  if how == 'sequence_sum_norm':
    return sum(map(sum, rows)) / (length or np.shape(mask)[1]), len(rows)
  raise KeyError(how)


def clip_fractions(ratio, advantages, where, low, high):
  """Of entries by side: below, above."""
  pairs = [(ratio[at], advantages[at[:np.ndim(advantages)]])
           for at in map(tuple, np.argwhere(where))]
  below = sum(a < 0 and r < 1 - low for r, a in pairs)
  above = sum(a > 0 and r > 1 + high for r, a in pairs)
  return below / max(len(pairs), 1), above / max(len(pairs), 1)


def gradient(function, x, where, step=1e-6):
  """Central differences of a scalar function, at the entries that count."""
  x = np.array(x, np.float64)
  out = np.zeros_like(x)
  for at in map(tuple, np.argwhere(where)):
    here = x[at]
    x[at] = here + step
    above = function(x)
    x[at] = here - step
    out[at] = (above - function(x)) / (2 * step)
    x[at] = here
  return out


def ragged_mask(rng, rows, length):
  """Turns with holes between them, cut anywhere; every third row is empty."""
  mask = np.zeros((rows, length), bool)
  for i in range(rows):
    if i % 3 != 2:
      mask[i] = rng.random(length) < 0.6
      mask[i, rng.integers(length)] = True
  return mask


def poison(rng, x, where):
  """`x` with infinities and NaN wherever it must not be read."""
  bad = rng.choice([np.nan, np.inf, -np.inf], np.shape(x))
  return np.where(where, x, bad).astype(x.dtype)


def _members(rewards, group_ids, in_baseline):
  """For each row the rows that make up its baseline."""
  for i in range(len(rewards)):
    yield i, [j for j in range(len(rewards)) if group_ids[j] == group_ids[i]
              and (in_baseline is None or in_baseline[j])]


def _moments(rewards, members):
  values = [float(rewards[j]) for j in members]
  mean = math.fsum(values) / len(values)
  return mean, math.fsum((v - mean) ** 2 for v in values)


def _spread(rewards, members):
  values = [float(rewards[j]) for j in members]
  return max(values) - min(values)
