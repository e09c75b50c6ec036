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


def token_rewards(rewards, mask, penalty=None):
  out = np.zeros(np.shape(mask))
  for i, row in enumerate(mask):
    where = np.flatnonzero(row)
    for t in where:
      out[i, t] = float(rewards[i]) if t == where[-1] else 0.0
      out[i, t] -= 0.0 if penalty is None else float(penalty[i][t])
  return out


def gae(token_rewards, values, mask, *, discount=1.0, gae_lambda=1.0):
  """Advantages and returns, on lists without the retrieved tokens."""
  advantages, returns = np.zeros((2, *np.shape(mask)))
  for i, row in enumerate(mask):
    where = np.flatnonzero(row)
    r = [float(token_rewards[i][t]) for t in where]
    v = [float(values[i][t]) for t in where] + [0.0]
    advantage = 0.0
    for k in reversed(range(len(r))):
      delta = r[k] + discount * v[k + 1] - v[k]
      advantage = delta + discount * gae_lambda * advantage
      advantages[i, where[k]] = advantage
      returns[i, where[k]] = advantage + v[k]
  return advantages, returns


def returns_to_go(token_rewards, mask, *, discount=1.0):
  """Each a sum of its own over the policy tokens that are still to come."""
  out = np.zeros(np.shape(mask))
  for i, row in enumerate(mask):
    where = np.flatnonzero(row)
    for k, t in enumerate(where):
      out[i, t] = math.fsum(
          discount**steps * float(token_rewards[i][later])
          for steps, later in enumerate(where[k:]))
  return out


def whiten(x, where):
  out = np.zeros(np.shape(where))
  entries = [tuple(at) for at in np.argwhere(where)]
  if len(entries) > 1:
    mean, squares = _moments(x, entries)
    std = math.sqrt(squares / (len(entries) - 1) + 1e-8)
    for at in entries:
      out[at] = (float(x[at]) - mean) / std
  return out


def reinforce_plus_plus(token_rewards, mask, *, discount=1.0):
  return whiten(returns_to_go(token_rewards, mask, discount=discount), mask)


def reinforce_plus_plus_baseline(rewards, group_ids, mask, in_baseline=None):
  centred = group_relative(
      rewards, group_ids, in_baseline, normalize_std=False)
  per_token = np.zeros(np.shape(mask))
  for i, t in np.argwhere(mask):
    per_token[i, t] = centred[i]
  return whiten(per_token, mask)


def turns(turn_ids):
  """Returns for each row {turn: places of its tokens}."""
  return [{int(k): [t for t in range(len(row)) if row[t] == k]
           for k in sorted({*map(int, row)} - {0})} for row in turn_ids]


def turn_rewards_at_ends(turn_rewards, turn_ids):
  out = np.zeros(np.shape(turn_ids))
  for i, of_row in enumerate(turns(turn_ids)):
    for places in of_row.values():
      reward = float(turn_rewards[i][places[-1]])
      out[i, places[-1]] = 0.0 if math.isnan(reward) else reward
  return out


def mt_grpo(rewards, turn_rewards, turn_ids, group_ids, in_baseline, *,
            turn_coef=1.0, normalize_std=True):
  outcome = group_relative(
      rewards, group_ids, in_baseline, normalize_std=normalize_std)
  entries = []  # row, turn, reward
  for i, of_row in enumerate(turns(turn_ids)):
    for k, places in of_row.items():
      reward = float(turn_rewards[i][places[-1]])
      if in_baseline[i] and not math.isnan(reward):
        entries.append((i, k, reward))
  advantages = dict(zip([entry[:2] for entry in entries], group_relative(
      [reward for _, _, reward in entries],
      [(int(group_ids[i]), k) for i, k, _ in entries],
      normalize_std=normalize_std)))
  out = np.zeros(np.shape(turn_ids))
  for i, of_row in enumerate(turns(turn_ids)):
    for k, places in of_row.items():
      out[i, places] = outcome[i] + turn_coef * advantages.get((i, k), 0.0)
  return out


def gigpo(rewards, turn_rewards, turn_ids, state_ids, group_ids, in_baseline,
          *, step_coef=1.0, discount=0.95, normalize_std=True):
  own = turn_rewards_at_ends(turn_rewards, turn_ids)
  totals, entries = np.zeros(len(rewards)), []  # row, turn, state, return
  for i, of_row in enumerate(turns(turn_ids)):
    if not in_baseline[i]:
      continue
    totals[i] = float(rewards[i]) + math.fsum(own[i])
    steps = [[k, own[i, places[-1]], int(state_ids[i][places[0]])]
             for k, places in of_row.items()]
    if steps:
      steps[-1][1] += float(rewards[i])
    for n, (k, _, state) in enumerate(steps):
      entries.append((i, k, state, math.fsum(
          discount**gap * later[1] for gap, later in enumerate(steps[n:]))))
  episode = group_relative(
      totals, group_ids, in_baseline, normalize_std=normalize_std)
  advantages = dict(zip([entry[:2] for entry in entries], group_relative(
      [entry[3] for entry in entries], [entry[2] for entry in entries],
      normalize_std=normalize_std)))
  out = np.zeros(np.shape(turn_ids))
  for i, of_row in enumerate(turns(turn_ids)):
    for k, places in of_row.items():
      out[i, places] = episode[i] + step_coef * advantages.get((i, k), 0.0)
  return out


def weighted(rewards, weights, mask):
  entries = [float(weights[at]) for at in map(tuple, np.argwhere(mask))]
  out = np.zeros(np.shape(mask))
  for i, t in np.argwhere(mask):
    out[i, t] = float(rewards[i]) * float(weights[i, t]) * len(entries)
    out[i, t] /= math.fsum(entries)
  return out


def keep_mixed(outcome_rewards, question_ids):
  counts = ~np.isnan(outcome_rewards)
  return np.array([
      bool(members) and _spread(outcome_rewards, members) > 1e-6
      for _, members in _members(outcome_rewards, question_ids, counts)])


def observed_tokens(mask):
  """Returns True for tokens outside the mask that lie between tokens of it."""
  out = np.zeros(np.shape(mask), bool)
  for i, row in enumerate(mask):
    where = np.flatnonzero(row)
    for t in range(len(row)):
      out[i, t] = not row[t] and any(where < t) and any(where > t)
  return out


def held(advantages, mask):
  """Observations have the advantage of the policy token before them."""
  out = np.array(advantages, float)
  for i, t in np.argwhere(observed_tokens(mask)):
    out[i, t] = out[i, max(s for s in np.flatnonzero(mask[i]) if s < t)]
  return out


def token_ratio(logprobs, old_logprobs, mask):
  out = np.ones(np.shape(mask))
  for i, t in np.argwhere(mask):
    gap = float(logprobs[i][t]) - float(old_logprobs[i][t])
    out[i, t] = math.exp(min(max(gap, -20.0), 20.0))
  return out


def sequence_ratio(logprobs, old_logprobs, mask, count_mask=None):
  """`count_mask`, here and below: what denominators count, not the mask."""
  out = []
  for i, row in enumerate(mask):
    gaps = [float(logprobs[i][t]) - float(old_logprobs[i][t])
            for t in np.flatnonzero(row)]
    count = _count(row, i, count_mask)
    out.append(math.exp(sum(gaps) / count) if gaps else 1.0)
  return np.array(out)


def surrogate(ratio, advantage, low, high, dual=math.inf):
  """Returns the clipped loss of one ratio and one advantage."""
  clipped = min(max(ratio, 1 - low), 1 + high)
  loss = -min(ratio * advantage, clipped * advantage)
  return min(loss, -dual * advantage) if advantage < 0 else loss


def token_ratio_loss(logprobs, old_logprobs, advantages, mask, *clip):
  ratio = token_ratio(logprobs, old_logprobs, mask)
  out = np.zeros(np.shape(mask))
  for i, t in np.argwhere(mask):
    out[i, t] = surrogate(ratio[i, t], _advantage(advantages, i, t), *clip)
  return out


def sequence_ratio_loss(
    logprobs, old_logprobs, advantages, mask, *clip, count_mask=None):
  ratio = sequence_ratio(logprobs, old_logprobs, mask, count_mask)
  return np.array([
      surrogate(ratio[i], float(advantages[i]), *clip) if any(row) else 0.0
      for i, row in enumerate(mask)])


def geometric_mean_loss(
    logprobs, old_logprobs, advantages, mask, low, high, count_mask=None):
  """The ratio's range is [exp(-low), exp(high)], one-sided by sign."""
  out = np.zeros(len(mask))
  for i, row in enumerate(mask):
    product, where = 1.0, np.flatnonzero(row)
    for t in where:
      ratio = math.exp(float(logprobs[i][t]) - float(old_logprobs[i][t]))
      if advantages[i] > 0:
        ratio = min(ratio, math.exp(high))
      else:
        ratio = max(ratio, math.exp(-low))
      product *= ratio ** (1 / _count(row, i, count_mask))
    if where.size:
      out[i] = -float(advantages[i]) * product
  return out


def score_function_loss(logprobs, advantages, mask):
  out = np.zeros(np.shape(mask))
  for i, t in np.argwhere(mask):
    out[i, t] = -_advantage(advantages, i, t) * float(logprobs[i][t])
  return out


def value_loss(values, old_values, returns, mask, clip=None):
  out = np.zeros(np.shape(mask))
  for i, t in np.argwhere(mask):
    v, old, r = (float(x[i][t]) for x in (values, old_values, returns))
    errors = [(v - r) ** 2]
    if clip is not None:
      near = min(max(v, old - clip), old + clip)
      errors.append((near - r) ** 2)
    out[i, t] = max(errors) / 2
  return out


def entropy(logits, mask):
  out = np.zeros(np.shape(mask))
  for i, t in np.argwhere(mask):
    entries = [float(x) for x in logits[i][t]]
    top = max(entries)
    scale = math.fsum(math.exp(x - top) for x in entries)
    probs = [math.exp(x - top) / scale for x in entries]
    out[i, t] = -math.fsum(p * math.log(p) for p in probs if p > 0)
  return out


def weights(old_logprobs, behavior_logprobs, mask, level):
  """pi_old / pi_behavior of tokens or of whole rows; 1 outside the mask."""
  out = np.ones(np.shape(mask))
  for i, row in enumerate(mask):
    gaps = {t: float(old_logprobs[i][t]) - float(behavior_logprobs[i][t])
            for t in np.flatnonzero(row)}
    for t, gap in gaps.items():
      out[i, t] = math.exp(gap if level == 'token' else sum(gaps.values()))
  return out


def truncated_weights(old_logprobs, behavior_logprobs, mask, level, high):
  out = weights(old_logprobs, behavior_logprobs, mask, level)
  for at in map(tuple, np.argwhere(mask)):
    out[at] = min(out[at], high)
  return out


def masked_weights(old_logprobs, behavior_logprobs, mask, level, low, high):
  out = weights(old_logprobs, behavior_logprobs, mask, level)
  for at in map(tuple, np.argwhere(mask)):
    out[at] = out[at] if low <= out[at] <= high else 0.0
  return out


def overlong_penalty(lengths, max_length, buffer):
  """The three cases of the paper."""
  out = []
  for length in map(int, lengths):
    if length <= max_length - buffer:
      out.append(0.0)
    elif length <= max_length:
      out.append((max_length - buffer - length) / buffer)
    else:
      out.append(-1.0)
  return np.array(out)


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


def aggregate(per_token, mask, how, length=None, count_mask=None):
  """The sum and the count."""
  rows = [[float(per_token[i][t]) for t in np.flatnonzero(row)]
          for i, row in enumerate(mask) if any(row)]
  counts = [_count(row, i, count_mask)
            for i, row in enumerate(mask) if any(row)]
  if how == 'token_mean':
    return sum(map(sum, rows)), sum(counts)
  if how == 'sequence_mean':
    return sum(sum(row) / n for row, n in zip(rows, counts)), len(rows)
  if how == 'sequence_sum':
    return sum(map(sum, rows)), len(rows)
  if how == 'sequence_sum_norm':
    return sum(map(sum, rows)) / (length or np.shape(mask)[1]), len(rows)
  raise KeyError(how)


def clip_fractions(ratio, advantages, where, low, high, dual=math.inf):
  """Returns the shares of clipped entries: below, above, by the dual clip."""
  pairs = [(ratio[at], advantages[at[:np.ndim(advantages)]])
           for at in map(tuple, np.argwhere(where))]
  below = sum(a < 0 and r < 1 - low for r, a in pairs)
  above = sum(a > 0 and r > 1 + high for r, a in pairs)
  beyond = sum(a < 0 and r > dual for r, a in pairs)
  return tuple(n / max(len(pairs), 1) for n in (below, above, beyond))


def explained_variance(values, returns, mask):
  """1 - var(R - V) / var(R); 0 for returns that do not vary."""
  entries = list(map(tuple, np.argwhere(mask)))
  errors = {at: float(returns[at]) - float(values[at]) for at in entries}
  _, left = _moments(errors, entries)
  _, whole = _moments(returns, entries)
  return 1 - left / whole if whole > 0 else 0.0


def mismatch(old_logprobs, behavior_logprobs, mask):
  """Under verl's names."""
  gaps, probs, ratios = [], [], []
  for i, t in np.argwhere(mask):
    o, b = float(old_logprobs[i][t]), float(behavior_logprobs[i][t])
    gaps.append(o - b)
    probs.append(abs(math.exp(o) - math.exp(b)))
    ratios.append(math.exp(min(max(o - b, -20.0), 20.0)))
  n = len(gaps)
  mean, squares = _moments(probs, range(n))
  return {
      'training/rollout_logprobs_diff_mean': sum(map(abs, gaps)) / n,
      'training/rollout_logprobs_diff_max': max(map(abs, gaps)),
      'training/rollout_probs_diff_mean': mean,
      'training/rollout_probs_diff_max': max(probs),
      'training/rollout_probs_diff_std': math.sqrt(squares / n),
      'rollout_corr/kl': -sum(gaps) / n,
      'rollout_corr/k3_kl': sum(math.expm1(g) - g for g in gaps) / n,
      'rollout_corr/rollout_is_mean': sum(ratios) / n,
      'rollout_corr/rollout_is_max': max(ratios),
      'rollout_corr/rollout_is_min': min(ratios),
      'rollout_corr/rollout_is_eff_sample_size':
          sum(ratios) ** 2 / sum(w * w for w in ratios) / n,
  }


def gradient(function, x, where, step=1e-4):
  """Five-point differences of a scalar function, at the entries that count."""
  x = np.array(x, np.float64)
  out = np.zeros_like(x)
  for at in map(tuple, np.argwhere(where)):
    here = x[at]
    for steps, share in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
      x[at] = here + steps * step
      out[at] += share * function(x) / (12 * step)
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


def info_nce(queries, passages, positives, excluded, *, temperature):
  """The loss of each query, and whether its passage comes first."""
  losses, hits = [], []
  for i, own in enumerate(positives):
    scores = {}
    for j in range(len(passages)):
      if j == own or not excluded[i][j]:
        scores[j] = math.fsum(float(a) * float(b) for a, b in zip(
            queries[i], passages[j])) / temperature
    top = max(scores.values())
    total = math.fsum(math.exp(s - top) for s in scores.values())
    losses.append(math.log(total) + top - scores[own])
    hits.append(float(all(scores[own] > s for j, s in scores.items()
                          if j != own)))
  return np.array(losses), np.array(hits)


STUDY_TAGS = ('think', 'search', 'information', 'answer')


def study_format(text):
  """Appendix C of the Study, read afresh: a whole ChatML text, by character."""
  marker = '<|im_start|>assistant'
  if marker not in text:
    return False
  content = text[text.index(marker) + len(marker):]
  for name in STUDY_TAGS:
    if content.count(f'<{name}>') != content.count(f'</{name}>'):
      return False
  moves = {('start', '<think>'): 'think', ('informed', '<think>'): 'think',
           ('think', '</think>'): 'thought', ('thought', '<search>'): 'search',
           ('search', '</search>'): 'searched',
           ('searched', '<information>'): 'information',
           ('information', '</information>'): 'informed',
           ('thought', '<answer>'): 'answer', ('answer', '</answer>'): 'end'}
  tags, state, place = sorted({tag for _, tag in moves}), 'start', 0
  while place < len(content):
    tag = content[place] == '<' and next(
        (tag for tag in tags if content.startswith(tag, place)), None)
    if tag:
      if (state, tag) not in moves:
        return False
      state = moves[state, tag]
    elif state not in STUDY_TAGS and not content[place].isspace():
      return False
    place += len(tag or ' ')
  return state == 'end'


def _count(row, i, count_mask):
  return int(np.sum(row if count_mask is None else count_mask[i]))


def _advantage(advantages, i, t):
  return float(advantages[i] if np.ndim(advantages) == 1 else advantages[i][t])


def _members(rewards, group_ids, in_baseline):
  """Yields each row with the rows that make up its baseline."""
  for i in range(len(rewards)):
    yield i, [j for j in range(len(rewards)) if group_ids[j] == group_ids[i]
              and (in_baseline is None or in_baseline[j])]


def _moments(rewards, members):
  """The mean, and the sum of squared distances from it."""
  values = [float(rewards[j]) for j in members]
  mean = math.fsum(values) / len(values)
  return mean, math.fsum((v - mean) ** 2 for v in values)


def _spread(rewards, members):
  values = [float(rewards[j]) for j in members]
  return max(values) - min(values)
