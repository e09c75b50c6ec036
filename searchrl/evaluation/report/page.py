# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The HTML page of runs, which needs no network and no other file.

Texts from models and engines are data on the page: they are compressed, decoded
by the page's own script, and shown only as text, never as HTML.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import gzip
import hashlib
import json
import math
import pathlib
from typing import Any

import jinja2
import numpy as np

from searchrl.agent import rewards
from searchrl.agent import tokenizer as tokenizers
from searchrl.evaluation import evaluator
from searchrl.evaluation import figures
from searchrl.evaluation import scores
from searchrl.evaluation.report import plots
from searchrl.evaluation.report import reading
from searchrl.evaluation.report import stories
from searchrl.evaluation.report import tokens
from searchrl.runtime import alerts

_HERE = pathlib.Path(__file__).parent
_CHUNK = 25  # trajectories that are decompressed together
TokenizerOf = Callable[[reading.Run], tokenizers.Tokenizer | None]


def render(runs: Sequence[reading.Run], tokenizer_of: TokenizerOf, *,
           title: str, most: int) -> str:
  """Returns the HTML of a report: curves, tables and trajectories of runs.

  Args:
    runs: Runs to show.
    tokenizer_of: Function from a run to its policy's tokenizer; None if that is
      missing.
    title: Title of the page.
    most: Maximum number of trajectories. If there are more, an even selection
      is shown, and the page says so.
  """
  entries, total = reading.entries(runs, most)
  tokenizers_of = {run.name: tokenizer_of(run) for run in runs}
  bodies = [[_segment(segment, rewards.normalised(
      entry.trajectory.question.answers)) for segment in tokens.segments(
          entry.trajectory, tokenizers_of[entry.run.name], entry.learned)]
            for entry in entries]
  script = (_HERE / 'script.js').read_text(encoding='utf-8')
  environment = jinja2.Environment(
      loader=jinja2.FileSystemLoader(_HERE), autoescape=True,
      trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
  return environment.get_template('template.html').render(
      title=title, runs=[_card(run) for run in runs],
      legend=plots.legend(runs), curves=list(plots.curves(runs).values()),
      stories=stories.stories(runs), overview=_overview(runs),
      sets_left_out=plots.sets_left_out(runs),
      times=[plots.times(run) for run in runs[:4] if run.steps],
      more_times=max(len(runs) - 4, 0),
      tables=[table for run in runs for table in (
          *_compared(run), *_tables(run))],
      shown=len(entries), total=total, chunk=_CHUNK,
      index=_packed([_head(n, entry) for n, entry in enumerate(entries)]),
      chunks=[_packed(bodies[n:n + _CHUNK])
              for n in range(0, len(bodies), _CHUNK)],
      style=(_HERE / 'style.css').read_text(encoding='utf-8'), script=script,
      script_hash=base64.b64encode(
          hashlib.sha256(script.encode()).digest()).decode())


def _packed(value: Any) -> str:
  """Returns base64 of gzipped JSON, which the page's script unpacks."""
  return base64.b64encode(gzip.compress(
      json.dumps(value, ensure_ascii=True, allow_nan=False).encode(),
      mtime=0)).decode()


def _card(run: reading.Run) -> dict[str, Any]:
  """Returns the facts about a run that the top of the page shows."""
  headlines = [
      (where, f'{evaluator.main_score(row):.3f}', _described(row, rows))
      for where in ('before', 'after') if (row := evaluator.headline_row(
          rows := run.tables.get(where, [])))]
  last = run.steps[-1] if run.steps else {}
  return {
      'name': run.name, 'folder': str(run.folder),
      'algorithm': str(run.config.get('algorithm', {}).get('name', '')
                      ).rpartition(':')[2],
      'seed': run.config.get('seed', ''), 'steps': len(run.steps),
      'updates': len(run.updates),
      'rollouts': int(last.get('training/rollouts', 0)),
      'revision': str(run.environment.get('git', ''))[:12],
      'scores': headlines or _losses(run),
      'alerts': _rolled_back(run) + [
          (text, alerts.format_steps(steps))
          for text, steps in alerts.history(run.steps)]}


def _described(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
              ) -> str:
  """Returns a text about a row's score, such as 'exact match, greedy, nq'."""
  engines = {row['engine'] for row in rows} - {'noise'}
  return (f'{evaluator.score_name(row)}, greedy, {row["set"]}'
          + f', {row["engine"]}' * (len(engines) > 1))


def _losses(run: reading.Run) -> list[tuple[str, str, str]]:
  """Returns (when, loss, label) of the first and last validation, or []."""
  losses = [line['sft/val_loss'] for line in run.lines
            if 'sft/val_loss' in line]
  return [(where, f'{loss:.3f}', 'validation loss, nats a token')
          for where, loss in zip(('before', 'after'), (losses[0], losses[-1]))
         ] if len(losses) > 1 else []


def _rolled_back(run: reading.Run) -> list[tuple[str, str]]:
  """Returns two texts for each rollback of a run: the reason, and its steps."""
  return [(f'rolled back, and on with other questions: {record["why"]}',
           f'from step {record["at"]} to step {record["to"]}')
          for record in run.rollbacks]


def _overview(runs: Sequence[reading.Run]) -> list[dict[str, str]]:
  """Returns a row per recipe: mean scores over its seeds; [] for one run."""
  result = []
  trained = [run for run in runs if run.steps]
  for same in plots.groups(trained).values() if len(runs) > 1 else ():
    row = {'recipe': same[0].config.get('algorithm', {}).get(
        'name', '').rpartition(':')[2] or same[0].name,
           'runs': ', '.join(run.name for run in same)}
    for where in ('before', 'after'):
      found = [value for run in same if (value := evaluator.headline(
          run.tables.get(where, []))) is not None]
      row[where] = f'{np.mean(found):.3f}' if found else '–'
      if len(found) > 1:
        row[where] += f' ± {np.std(found, ddof=1):.3f}'
    result.append(row)
  return result


def _compared(run: reading.Run) -> list[dict[str, Any]]:
  """Returns [table of the scores before and after training], or []."""
  before, after = ({tuple(row[key] for key in evaluator.KEYS): row
                    for row in run.tables.get(where, [])}
                   for where in ('before', 'after'))
  rows = []
  for key, now in after.items():
    if (then := before.get(key)) is None:
      continue
    old, new = evaluator.main_score(then), evaluator.main_score(now)
    cells = [*map(str, key), now['n'], old, new, f'{new - old:+.3f}',
             then['searches'], now['searches']]
    rows.append([(figures.cell(value), n >= len(key))
                 for n, value in enumerate(cells)])
  if not rows:
    return []
  score = evaluator.score_name(now)
  return [{
      'title': f'{run.name}, before and after', 'open': True, 'rows': rows,
      'columns': [*evaluator.KEYS, 'n', f'{score} before', 'after', 'change',
                  'searches before', 'after'], 'fingerprint': ''}]


def _tables(run: reading.Run) -> list[dict[str, Any]]:
  """Returns a run's evaluation tables.

  The table of a folder with only an evaluation is shown open.
  """
  result = []
  for where, rows in run.tables.items():
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [key for key in columns if key != 'fingerprint']
    result.append({
        'title': f'{run.name}{", " + where if where else ""}',
        'open': not where, 'columns': columns,
        'rows': [[(figures.cell(row.get(key)),
                   isinstance(row.get(key), int | float)) for key in columns]
                 for row in rows],  # a text, and whether it is a number
        'fingerprint': next((row['fingerprint'] for row in rows
                             if row.get('fingerprint')), '')})
  return result


def _head(number: int, entry: reading.Entry) -> dict[str, Any]:
  """Returns the fields by which the page lists and finds a trajectory."""
  trajectory = entry.trajectory
  question = trajectory.question
  return {
      'id': number, 'run': entry.run.name, 'where': entry.where,
      'set': entry.set, 'question': question.text,
      'golds': list(question.answers), 'answer': trajectory.answer,
      'score': _number(entry.score), 'stop': trajectory.stop_reason,
      'parts': {name: _number(value)
                for name, value in trajectory.parts.items()},
      'searches': trajectory.searches, 'hops': question.hops}


def _segment(segment: tokens.Segment, golds: Sequence[str]) -> dict[str, Any]:
  """Returns a part of a conversation as data for the page's script."""
  result: dict[str, Any] = {'role': segment.role, 'texts': segment.texts}
  for name in ('logprobs', 'ratios', 'advantages'):
    if values := getattr(segment, name):
      # Ratios are close to 1, and their differences from 1 count.
      digits = 9 if name == 'ratios' else 5
      result[name] = [_number(value, digits) for value in values]
  if segment.role == tokens.POLICY and segment.turn:
    result |= {'trained': segment.trained, 'action': segment.turn.action.kind}
  elif segment.turn:
    result['passages'] = [
        {'title': passage.title, 'text': passage.text,
         'score': _number(passage.score),
         'gold': scores.has_gold(passage, golds)}
        for passage in segment.turn.passages]
  return result


def _number(value: float | None, digits: int = 5) -> float | str | None:
  """Returns a number of `digits` significant digits; a text for NaN and inf."""
  if value is None:
    return None
  return float(f'{value:.{digits}g}') if math.isfinite(value) else str(value)
