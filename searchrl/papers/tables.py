# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of the papers, filled from runs: a paper's number beside ours.

A table is a file such as search_r1/table2.toml. Its keys are

  title, page, arxiv   what it is, and where it is in the paper
  score                the score of the numbers, one of `scores.ANSWERS`
  sets                 the columns: names of evaluation sets, and their 'mean'
  rows                 for each row, how to measure it with a named model
  small                the same with the tiny bases, on generated questions
  groups               for each model, the rows with the paper's numbers

  config, flags        the config of the run, with {model} or {size}, and flags
                       of its own, with {runs}
  needs                a config whose run must exist before
  method               the method's name in a comparison of several; '': none
  within               a folder of the run that has the scores; '': the run's
  name                 the folder of the run; by default made of the config

A row without a config cannot be measured yet.
"""

from collections.abc import Iterator, Mapping, Sequence
import html
import json
import math
import pathlib
import re
import shlex
import sys
import tomllib
from typing import Any, NamedTuple

from searchrl.data import datasets
from searchrl.evaluation import evaluator
from searchrl.evaluation import figures
from searchrl.runtime import atomic_files
from searchrl.runtime import processes

_HERE = pathlib.Path(__file__).parent
COLUMNS = ('model', 'row', 'set', 'paper', 'ours', '95% interval', 'difference',
           'verdict')
NOT_RUN = 'not run'


def names() -> list[str]:
  """Returns the names of all tables, such as 'search_r1/table2'."""
  return sorted(f'{file.parent.name}/{file.stem}'
                for file in _HERE.glob('*/table*.toml'))


def load(name: str) -> dict[str, Any]:
  """Returns a table by its name."""
  return tomllib.loads((_HERE / f'{name}.toml').read_text('utf-8'))


class Source(NamedTuple):
  """The runs from which a row is measured, in order, and the method's name."""

  commands: tuple[tuple[str, str, str], ...]  # config, flags, folder of the run
  method: str
  within: str = ''

  @property
  def scores(self) -> pathlib.Path | None:
    """The file of scores; None if it does not exist."""
    return _table_of(pathlib.Path(self.commands[-1][2]) / self.within
                    ) if self.commands else None


def source(way: Mapping[str, str], runs: str, **fields: str) -> Source:
  """Returns the runs from which a row is measured.

  Without a config, the row cannot be measured.

  Args:
    way: An entry of the table's `rows` or `small`.
    runs: Folder of the runs.
    **fields: The {model} or the {size}.
  """
  def fill(text: str) -> str:
    return text.format(runs=runs, **fields)

  commands = []
  for key in ('needs', 'config'):
    if way.get(key):
      config = fill(way[key])
      folder = re.sub(r'[:/]', '-', config.replace('.py', ''))
      is_last = key == 'config'
      commands.append((config, fill(way.get('flags', '')) * is_last, str(
          pathlib.Path(runs) / (fill(way.get('name', '')) * is_last or folder))))
  return Source(tuple(commands), way.get('method', ''), way.get('within', ''))


def run(config, workdir: str) -> None:
  """Prints a table from the existing runs, and commands for the missing runs.

  Args:
    config: Config of the job; see configs/paper_tables.py.
    workdir: Directory that gets table.txt, table.json, table.html and
      table.tex.
  """
  options = config.table
  table = load(options.name)
  rows, commands = [], []
  for model, row, paper, way in _lines(table, options):
    if not way.scores:
      commands += [command for command in way.commands[:-1]
                   if not _is_there(command[2])] + [*way.commands[-1:]]
    rows += cells(table, model, row, paper, way, is_small=bool(options.small))
  text = '\n\n'.join(filter(None, (
      f'{table["title"]} of arXiv:{table["arxiv"]}, in '
      f'{evaluator.NAMED[table["score"]]}',
      figures.table([row for row in rows if row['verdict'] != NOT_RUN or
                     row['set'] == table['sets'][-1]], COLUMNS),
      _to_run(commands, options.flags))))
  folder = pathlib.Path(workdir)
  for name, written in (('txt', text), ('html', as_html(table, rows)),
                        ('tex', as_latex(table, rows)),
                        ('json', json.dumps(rows, indent=1))):
    atomic_files.write(folder / f'table.{name}', written + '\n')
  processes.say(text, sys.stdout)


def _lines(table: Mapping[str, Any], options: Any
          ) -> Iterator[tuple[str, str, Sequence[float], Source]]:
  """Yields model, row, the paper's numbers and the source of each row."""
  for model, group in table['groups'].items():
    for row, paper in group.items():
      way = table['small' if options.small else 'rows'].get(row, {})
      yield (options.small or model), row, paper, source(
          way, options.runs, model=model, size=options.small)
    if options.small:  # one model stands for all
      return


def cells(table: Mapping[str, Any], model: str, row: str,
          paper: Sequence[float], way: Source, *, is_small: bool = False
         ) -> list[dict[str, Any]]:
  """Returns a row of COLUMNS for each set of the paper and of the run.

  The verdict says whether the paper's number is in our interval. In the small
  version, only the paper's mean is shown, and if a run has one set, its score
  is compared with the mean.
  """
  papers = dict(zip(table['sets'], paper))
  measured = _measured(way, table['score'])
  if is_small:
    papers = {datasets.MEAN: papers[datasets.MEAN]}
    if measured:
      measured.setdefault(datasets.MEAN, next(iter(measured.values())))
  result = []
  for name in dict.fromkeys((*papers, *measured)):
    cell = {'model': model, 'row': row, 'set': name, 'paper': papers.get(name)}
    if name in measured:
      ours, low, high = measured[name]
      cell |= {'ours': ours, '95% interval': f'{low:.3f}-{high:.3f}'}
      if name in papers:
        cell |= {'difference': ours - papers[name], 'verdict': (
            'lower' if high < papers[name] else
            'higher' if low > papers[name] else 'agrees')}
    result.append({'verdict': '' if name in measured else NOT_RUN} | cell)
  return result


def _measured(way: Source, score: str
             ) -> dict[str, tuple[float, float, float]]:
  """Returns each set's score and its 95 % interval; {} without a run.

  The interval of the mean is computed from the intervals of the sets. F1 has
  the interval of a fraction of questions, which is wider than its own interval.
  """
  file = way.scores
  rows = [row for row in json.loads(file.read_text()) if
          row.get('method', '') == way.method and row.get('hops') == 'all'
          and row['decoding'] == 'greedy' and row['engine'] != 'noise'
         ] if file else []
  means = {row['set']: row[score] for row in rows}
  result = {row['set']: (row[score], *evaluator.wilson(
      row[score] * row['n'], row['n'])) for row in rows
            if row['set'] != datasets.MEAN}
  if datasets.MEAN in means:
    halves = [(high - low) / 2 for name, (_, low, high) in result.items()
              if name not in datasets.COMMON]
    mean, half = means[datasets.MEAN], math.hypot(*halves) / len(halves)
    result[datasets.MEAN] = mean, max(mean - half, 0.0), min(mean + half, 1.0)
  return result


def _table_of(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the scores of a run or an evaluation; None if there are none."""
  return next((file for file in (
      folder / place / evaluator.TABLE
      for place in ('', 'evaluation/after')) if file.is_file()), None)


def _is_there(folder: str) -> bool:
  """Returns whether a run has scores or a model."""
  place = pathlib.Path(folder)
  return bool(_table_of(place)) or (place / 'model').is_dir()


def _to_run(commands: Sequence[tuple[str, str, str]], flags: str) -> str:
  """Returns the commands whose runs do not exist, each once."""
  lines = []
  for config, own, folder in dict.fromkeys(commands):
    shared = [flag for flag in flags.split() if config[:4] != 'sft.' or (
        flag.startswith('--config.data.train='))]  # it reads nothing else
    values = {flag.partition('=')[0]: flag for flag in (*shared, *own.split())}
    lines.append(' \\\n    '.join((
        f'python -m searchrl.main --config=configs/{config}',
        f'--workdir={folder}', *map(shlex.quote, values.values()))))
  return 'To run:\n\n' + '\n'.join(lines) if lines else ''


def as_html(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns a page with the table."""
  lines = [''.join(f'<td>{html.escape(figures.cell(row.get(name)))}</td>'
                   for name in COLUMNS) for row in rows]
  head = ''.join(f'<th>{name}</th>' for name in COLUMNS)
  return (f'<!doctype html><meta charset="utf-8"><title>{table["title"]}'
          f'</title>\n<h1>{table["title"]}</h1>\n<table><tr>{head}</tr>\n'
          + '\n'.join(f'<tr>{line}</tr>' for line in lines) + '\n</table>')


def as_latex(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
            ) -> str:
  """Returns the table as LaTeX's tabular."""
  def escaped(text: str) -> str:
    return re.sub(r'([&%$#_{}])', r'\\\1', text)

  lines = [' & '.join(escaped(figures.cell(row.get(name)))
                      for name in COLUMNS) for row in rows]
  return '\n'.join((
      f'% {table["title"]}, arXiv:{table["arxiv"]}',
      r'\begin{tabular}{lllrrrrl}',
      *(f'{line} \\\\' for line in (
          ' & '.join(map(escaped, COLUMNS)), *lines)), r'\end{tabular}'))
