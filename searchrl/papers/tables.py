# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of the papers, filled from runs: a paper's numbers beside ours.

A table is described by a file such as search_r1/table2.toml. A figure without
printed numbers also has a file for its runs, such as
empirical_study/figure1.toml. The keys of a file are

  title, page, arxiv   title of the table, its page, and the paper's id
  score                score of the numbers, one of `scores.ANSWERS`
  note                 text that is printed under the table; by default none
  sets                 columns: names of evaluation sets, and 'mean', their mean
  rows                 for each row, how to measure it with a model of `groups`
  small                for each row, how to measure it with the tiny bases, on
                       generated questions
  groups               for each model, its rows with the paper's numbers; []
                       where the paper prints none

An entry of `rows` or `small` has the keys

  config, flags        config of the run (with {model} or {size}), and the
                       run's own flags (with {needed}, the folder of the run
                       in `needs`)
  name                 folder of the run; by default made from the config
  arm                  name of the one run of a sweep that is needed, if the
                       config is a sweep, such as configs/engines.py
  needs                config of a run that must exist before, or a dict with
                       the keys above for this run
  method               name of the method, if the run compares several; '': none
  engine               engine of the evaluation, if there are several; '': one
  within               folder inside the run that has the scores; '': the run's

A row without a config cannot be measured yet.
"""

from collections.abc import Iterator, Mapping, Sequence
import html
import json
import math
import pathlib
import re
import statistics
import sys
import tomllib
from typing import Any, NamedTuple

from searchrl.data import datasets
from searchrl.evaluation import evaluator
from searchrl.evaluation import figures
from searchrl.papers import deviations
from searchrl.papers import table_commands
from searchrl.papers.table_commands import Command
from searchrl.runtime import atomic_files
from searchrl.runtime import processes

_HERE = pathlib.Path(__file__).parent
COLUMNS = ('model', 'row', 'set', 'paper', 'ours', 'n', '95% interval',
           'difference', 'verdict')
NOT_RUN = 'not run'
_SHOWN = 6  # fields of a run with another config


def names() -> list[str]:
  """Returns the names of all tables, such as 'search_r1/table2'."""
  return sorted(f'{file.parent.name}/{file.stem}'
                for file in _HERE.glob('*/*.toml')
                if file.stem != file.parent.name)  # those are settings


def load(name: str) -> dict[str, Any]:
  """Returns the content of a table's file; see `names` for its name."""
  return tomllib.loads((_HERE / f'{name}.toml').read_text('utf-8'))


class Measured(NamedTuple):
  """The score of a run on one evaluation set, with its 95 % interval.

  Attributes:
    score: Mean over questions, and over seeds.
    low, high: Bounds of the 95 % interval.
    n: Number of questions.
    lost: Number of answers whose search failed, over all seeds.
  """

  score: float
  low: float
  high: float
  n: int
  lost: int


class Source(NamedTuple):
  """The runs that measure one row of a table with one seed.

  Attributes:
    commands: Commands of the runs, in order. Each run needs the run before it.
    scored: Folder in which the last run writes the scores.
    method: Name of the row's method, if the last run compares several methods;
      otherwise ''.
    engine: Name of the test's search engine, if the last run has several
      engines; otherwise ''.
    arms: Name of the run within a sweep, for each command; '' if the command is
      not a sweep.
  """

  commands: tuple[Command, ...]
  scored: str = ''
  method: str = ''
  engine: str = ''
  arms: tuple[str, ...] = ()

  @property
  def scores(self) -> pathlib.Path | None:
    """The file of scores; None if it does not exist."""
    return _table_of(pathlib.Path(self.scored)) if self.commands else None

  @property
  def is_begun(self) -> bool:
    """True if a run of the row has begun."""
    return any((pathlib.Path(command[2], arm) / 'config.json').is_file()
               for command, arm in zip(self.commands, self.arms))

  @property
  def missing(self) -> list[Command]:
    """The commands that must still be run; [] if the scores exist."""
    return [] if self.scores else [
        command for command in self.commands
        if command == self.commands[-1] or not _is_there(command[2])]

  def deviations(self, shared: str) -> list[str]:
    """Returns the config fields in which the runs differ from their commands.

    Args:
      shared: Flags that all commands have, in addition to their own.
    """
    return [text for command, arm in zip(self.commands, self.arms)
            for text in deviations.of_run(
                pathlib.Path(command[2], arm), command[0],
                table_commands.flags(command, shared), arm)]


def source(way: Mapping[str, Any], runs: str, *, seed: int | None = None,
           **fields: str) -> Source:
  """Returns the runs that measure a row of a table with one seed.

  If the entry names no config, the result has no commands, and the row cannot
  be measured.

  Args:
    way: Entry of the table's `rows` or `small`, which says how to measure the
      row.
    runs: Folder of the runs.
    seed: Seed of the runs. Each run is then in a subfolder seed_<seed>. None:
      the seed of the config, without a subfolder.
    **fields: Values that replace {model} and {size} in the entry.
  """
  needs = way.get('needs', {})
  commands, arms, needed = [], [], ''
  needs = needs if isinstance(needs, Mapping) else {'config': needs}
  for entry in (needs, way):
    config, name, arm, *flags = (
        text.format(needed=needed, **fields) for text in (
            *(entry.get(key, '') for key in ('config', 'name', 'arm')),
            *entry.get('flags', '').split()))
    if config:
      name = name or re.sub(r'[:/]', '-', config.replace('.py', ''))
      place = pathlib.Path(runs) / '-'.join(filter(None, (name, arm)))
      if seed is not None:
        place /= f'seed_{seed}'
        flags.append(f'--config.seed={seed}')
      if arm:
        flags.append(f"--config.sweep.order=('{arm}',)")
      commands.append((config, tuple(flags), str(place)))
      arms.append(arm)
      needed = str(place / arm)
  return Source(
      tuple(commands), str(pathlib.Path(needed) / way.get('within', '')),
      way.get('method', ''), way.get('engine', ''), tuple(arms))


def run(config, workdir: str) -> None:
  """Prints a table of the existing runs, and the commands of the missing runs.

  Args:
    config: Config of the job; see configs/paper_tables.py.
    workdir: Directory for table.txt, table.json, table.html, table.tex and
      to_run.txt. Each line of to_run.txt has the flags of a run that can begin
      now.
  """
  options = config.table
  table = load(options.name)
  rows, commands, ready = [], [], []
  notes: dict[tuple[str, ...], list[str]] = {}  # rows by differing fields
  for model, row, paper, ways in _lines(table, options):
    for way in ways:
      commands += way.missing
      ready += way.missing[:1]
    differing = [] if any(way.missing for way in ways) else dict.fromkeys(
        text for way in ways for text in way.deviations(options.flags))
    if differing:
      notes.setdefault((*differing,), []).append(f'{model} {row}')
    rows += cells(table, model, row, paper, ways, is_small=bool(options.small),
                  is_other=bool(differing))
  table_commands.check(commands, options.flags)
  note = '\n'.join(filter(None, (
      ' '.join(table.get('note', '').split()), _described(notes))))
  text = '\n\n'.join(filter(None, (
      _title(table),
      figures.table([row for row in rows if 'ours' in row or
                     row['set'] == table['sets'][-1]], COLUMNS),
      note, f'Runs are looked for in {options.runs} (--config.table.runs).',
      'To run:\n\n' + '\n'.join(
          ' \\\n    '.join(('python -m searchrl.main ' + flags[0], *flags[1:]))
          for flags in table_commands.quoted(commands, options.flags))
      if commands else '')))
  folder = pathlib.Path(workdir)
  for name, written in (
      ('table.txt', text), ('table.html', as_html(table, rows, note)),
      ('table.tex', as_latex(table, rows, note)),
      ('table.json', json.dumps(rows, indent=1)),
      ('to_run.txt', '\n'.join(map(' '.join, table_commands.quoted(
          ready, options.flags))))):
    atomic_files.write(folder / name, written + '\n' * bool(written))
  processes.say(text, sys.stdout)


def _described(notes: Mapping[tuple[str, ...], Sequence[str]]) -> str:
  """Returns a line for each group of rows whose runs differ from the command.

  `notes` has the names of rows, by the config fields in which they differ.
  """
  return '\n'.join(
      f'{", ".join(rows)}: other config than in the command: '
      + '; '.join(fields[:_SHOWN])
      + (f'; and {len(fields) - _SHOWN} more' if len(fields) > _SHOWN else '')
      for fields, rows in notes.items())


def _lines(table: Mapping[str, Any], options: Any
          ) -> Iterator[tuple[str, str, Sequence[float], list[Source]]]:
  """Yields each line of a table: model, row, the paper's numbers, and sources.

  There is one `Source` of our numbers for each seed.
  """
  for model, group in table['groups'].items():
    for row, paper in group.items():
      way = table['small' if options.small else 'rows'].get(row, {})
      yield (options.small or model), row, paper, [
          source(way, options.runs, seed=seed, model=model, size=options.small)
          for seed in options.seeds or (None,)]
    if options.small:  # one model stands for all
      return


def cells(table: Mapping[str, Any], model: str, row: str,
          paper: Sequence[float], ways: Sequence[Source], *,
          is_small: bool = False, is_other: bool = False
         ) -> list[dict[str, Any]]:
  """Returns the lines of the printed table for one row, one per evaluation set.

  A line is a dict with keys of COLUMNS. It compares the paper's number with
  ours. The verdict says whether the paper's number lies in our interval. It
  does so only if all searches were answered and each run has the config of its
  command. A row has our numbers only once the runs of all its seeds have
  scores.

  In the small version, only the paper's mean is shown. If a run has only one
  evaluation set, its score on that set is compared with the mean.

  Args:
    table: Content of the table's file.
    model: Name of the model, as it is shown.
    row: Name of the row, as it is shown.
    paper: Numbers of the paper, one for each set; may be empty.
    ways: Runs that measure the row, with one `Source` for each seed.
    is_small: Whether the tiny base models replace the paper's models.
    is_other: Whether a run has another config than its command.
  """
  names = [datasets.MEAN] if is_small else table['sets']
  papers = dict(zip(table['sets'], paper))
  measured = _measured(ways, table['score'])
  if is_small:
    papers = {name: papers[name] for name in names if paper}
    if measured:
      measured.setdefault(datasets.MEAN, next(iter(measured.values())))
  absent = 'not finished' if any(way.is_begun for way in ways) else NOT_RUN
  result = []
  for name in dict.fromkeys((*names, *measured)):
    cell: dict[str, Any] = {
        'model': model, 'row': row, 'set': name, 'paper': papers.get(name)}
    if name in measured:
      ours, low, high, n, lost = measured[name]
      cell |= {'ours': ours, 'n': n, '95% interval': f'{low:.3f}-{high:.3f}',
               'verdict': f'{lost} searches failed' if lost else ''}
      if name in papers:
        cell['difference'] = ours - papers[name]
        cell['verdict'] = cell['verdict'] or (
            'other config' if is_other else
            'lower' if high < papers[name] else
            'higher' if low > papers[name] else 'agrees')
    result.append({'verdict': '' if name in measured else absent} | cell)
  return result


def _measured(ways: Sequence[Source], score: str
             ) -> dict[str, Measured]:
  """Returns each set's score and 95 % interval; {} unless all runs have scores.

  With several seeds, the score is the mean over the seeds. The interval then
  combines the spread of the seeds, by Student's t, with the spread of the
  questions, which are the same for all seeds.
  """
  from scipy import special  # slow to import
  files = [way.scores for way in ways]
  of_seeds = [_measured_once(_read(file), way, score)
              for way, file in zip(ways, files) if file and all(files)]
  result = {}
  for name in of_seeds[0] if of_seeds else ():
    values, lows, highs, counts, lost = zip(
        *(seed[name] for seed in of_seeds))
    middle, spread = statistics.mean(values), 0.0
    if len(values) > 1:
      spread = (special.stdtrit(len(values) - 1, 0.975)
                * statistics.stdev(values) / math.sqrt(len(values)))
    below = math.hypot(spread, middle - statistics.mean(lows))
    above = math.hypot(spread, statistics.mean(highs) - middle)
    result[name] = Measured(
        middle, max(middle - below, 0.0), min(middle + above, 1.0),
        min(counts), sum(lost))
  return result


def _measured_once(rows: Sequence[Mapping[str, Any]], way: Source, score: str
                  ) -> dict[str, Measured]:
  """Returns the scores of one run and their 95 % intervals, by evaluation set.

  F1 is given the interval of a fraction of questions, which is too wide for it.
  """
  rows = [row for row in rows if
          row.get('method', '') == way.method and row.get('hops') == 'all'
          and row['decoding'] == 'greedy' and (
              row['engine'] == way.engine if way.engine
              else row['engine'] != 'noise')]
  result = {row['set']: Measured(
      row[score], *evaluator.wilson(row[score] * row['n'], row['n']),
      row['n'], row.get('search_errors', 0)) for row in rows}
  if datasets.MEAN in result:
    low, high = evaluator.interval_of_mean([
        of_set[:3] for name, of_set in result.items()
        if name not in (*datasets.COMMON, datasets.MEAN)])
    result[datasets.MEAN] = result[datasets.MEAN]._replace(low=low, high=high)
  return result


def _read(file: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of a file of scores.

  Raises:
    ValueError: The file is damaged.
  """
  try:
    return json.loads(file.read_text())
  except ValueError as error:
    raise ValueError(
        f'{file} must be the table of an evaluation, but is damaged: {error}. '
        'Delete it and repeat the command of that run, which writes it again '
        'from its records.') from error


def _table_of(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the file of scores of a run or an evaluation; None if missing."""
  return next((file for file in (
      folder / place / evaluator.TABLE
      for place in ('', 'evaluation/after')) if file.is_file()), None)


def _is_there(folder: str) -> bool:
  """Returns whether a folder has scores or a model.

  They may also be in a direct subfolder, such as that of a sweep's run.
  """
  place = pathlib.Path(folder)
  return any(_table_of(folder) or (folder / 'model').is_dir()
             for folder in (place, *place.glob('*/')))


def as_html(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
            note: str = '') -> str:
  """Returns a page with the table."""
  lines = [''.join(f'<td>{html.escape(figures.cell(row.get(name)))}</td>'
                   for name in COLUMNS) for row in rows]
  head = ''.join(f'<th>{name}</th>' for name in COLUMNS)
  title = html.escape(_title(table))
  return (f'<!doctype html><meta charset="utf-8"><title>{title}</title>\n'
          f'<h1>{title}</h1>\n<table><tr>{head}</tr>\n'
          + '\n'.join(f'<tr>{line}</tr>' for line in lines) + '\n</table>\n'
          + ''.join(f'<p>{html.escape(line)}</p>\n'
                    for line in note.splitlines()))


def as_latex(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
             note: str = '') -> str:
  """Returns the table as LaTeX's tabular, with its title in comments."""
  def escaped(text: str) -> str:
    return re.sub(r'([&%$#_{}])', r'\\\1', text)

  lines = [' & '.join(escaped(figures.cell(row.get(name)))
                      for name in COLUMNS) + r' \\' for row in rows]
  return '\n'.join((
      *(f'% {line}' for line in (_title(table), *note.splitlines())),
      r'\begin{tabular}{lllrrrrrl}', r'\hline',
      ' & '.join(map(escaped, COLUMNS)) + r' \\', r'\hline', *lines,
      r'\hline', r'\end{tabular}'))


def _title(table: Mapping[str, Any]) -> str:
  return (f'{table["title"]} of arXiv:{table["arxiv"]}, in '
          f'{evaluator.NAMED[table["score"]]}')
