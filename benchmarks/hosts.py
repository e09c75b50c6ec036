# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Many hosts, rehearsed as processes of one machine over loopback.

  python benchmarks/hosts.py                  # disturbed runs
  python benchmarks/hosts.py --scaling        # equal work for each process
  python benchmarks/hosts.py --table
  python benchmarks/hosts.py --simulate=1024  # on paper: many_hosts.py

A process has one simulated CPU device and one XLA thread. It trains the tiny
base by GRPO and searches through an engine with a log-normal latency
(benchmarks/hosts_worker.py). Each disturbed run is started again by the same
command, and its last checkpoint and metrics are compared with those of a run
that nothing disturbed.
"""

import argparse
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import shutil
import signal
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / 'tests'), str(ROOT / 'benchmarks/faults')]
# pylint: disable=g-import-not-at-top
import faults
import loopback
import many_hosts

RECORDS = pathlib.Path(__file__).with_name('hosts.jsonl')
STEPS = 4  # number of steps of a disturbed run
EVERY = 2  # number of steps between two of its checkpoints
PATIENCE = 900  # seconds after which a run counts as one that hangs
HEARTBEAT, SHUTDOWN = 20, 40  # seconds; shorter than by default
LATENCY = 0.05  # seconds of a search, median
COMMON = (
    '--config=configs/grpo.py:smoke', '--config.train.loggers=()',
    '--config.train.progress=False', '--config.evaluate.worlds.kinds=()',
    '--config.rollout.search_order=deterministic',
    '--config.search.engine=hosts_worker:slow')
SHORT = (  # one search, then an answer
    f'--config.train.num_steps={STEPS}',
    f'--config.train.checkpoint_every={EVERY}',
    '--config.data.mix=(1,)', '--config.data.per_hop=(100,)',
    '--config.rollout.budgets.max_turns=2', '--config.rollout.budgets.top_k=1')
SAVED = 5  # the step in which the checkpoint of the step before is saved
MEASURED = (3, 4, 6, 7, 8)  # steps without compilation and without a save
WHOLE = 'undisturbed'
# Parts of a step, as the columns of the table of equal work.
PARTS = ('rollout', 'scoring', 'update', 'control', 'rest')


@dataclasses.dataclass(frozen=True)
class Case:
  """A disturbance of a run.

  Attributes:
    text: What happens, for the table.
    strikes: (seconds before it, signal, process; None: all), in order.
    at: Text in the file `where` of the run's folder upon which they come.
    engine: Options of the slow engine.
    env: More environment variables.
    counts: Numbers of processes.
  """

  text: str
  strikes: tuple[tuple[float, signal.Signals, int | None], ...] = ()
  at: str = '"training/global_step": 2,'
  where: str = 'metrics.jsonl'
  engine: tuple[tuple[str, float], ...] = ()
  env: tuple[tuple[str, str], ...] = ()
  counts: tuple[int, ...] = (2, 4, 8)


CASES = {
    WHOLE: Case('nothing', counts=(1, 2, 4, 8)),
    'slow searches': Case('the last host: each search .5 s longer',
                          engine=(('more_secs', 0.5),)),
    'stall': Case(f'the last host: {HEARTBEAT + 10} s without a word, once',
                  engine=(('stalled_step', 2),
                          ('stalled_secs', HEARTBEAT + 10.0))),
    'stall past the limit': Case(
        'the last host: 40 s, where meetings wait for 15 s', counts=(2, 4),
        engine=(('stalled_step', 2), ('stalled_secs', 40.0)),
        env=(('SEARCHRL_MEETING_SECS', '15'),)),
    'lost last': Case('SIGKILL of the last host',
                      ((0.2, signal.SIGKILL, -1),)),
    'lost first': Case('SIGKILL of the first host',
                       ((0.2, signal.SIGKILL, 0),), counts=(2, 4)),
    'lost while saving': Case(
        'SIGKILL of the last host while a checkpoint is written',
        ((0, signal.SIGKILL, -1),), at='', where='checkpoints/2',
        counts=(2,)),
    'hung': Case('SIGSTOP of the last host: it no longer answers',
                 ((0.2, signal.SIGSTOP, -1),), counts=(2,)),
    'preempted one': Case('SIGTERM to the last host',
                          ((0.2, signal.SIGTERM, -1),)),
    'preempted all': Case('SIGTERM to all hosts',
                          ((0.2, signal.SIGTERM, None),), counts=(1, 2, 4, 8)),
    'preempted early': Case(
        'SIGTERM to the last host before the first step', ((
            0, signal.SIGTERM, -1),), at='', where='checkpoints/0',
        counts=(2,)),
    'no grace': Case('SIGTERM to the last host, and SIGKILL .2 s later', ((
        0, signal.SIGTERM, -1), (0.2, signal.SIGKILL, -1)), counts=(2,)),
}


@dataclasses.dataclass
class Outcome:
  """The ends of the processes of a run.

  Attributes:
    codes: Exit codes, in the order of the processes. None: it did not end.
    secs: Seconds from the strike (or the start) to each process's end.
    texts: What each process wrote on stderr.
  """

  codes: list[int | None]
  secs: list[float]
  texts: list[str]


def flags(count: int, folder: pathlib.Path, engine: dict[str, float]
         ) -> list[str]:
  """Returns the flags of a run of so many processes."""
  options = dict(engine=dict(name='bm25'), secs=LATENCY, process=count - 1,
                 **engine)
  return [*COMMON, f'--config.search.options={options!r}',
          f'--config.rollout.questions_per_step={4 * count}',
          f'--config.rollout.max_num_seqs={16 * count}',
          f'--config.learner.microbatch_rows={count}',
          '--config.algorithm.kl_coef=0.001',  # so that each row has a gradient
          f'--workdir={folder}', '--allow_changes']


def run(count: int, folder: pathlib.Path, more: Sequence[str],
        case: Case = CASES[WHOLE], engine: dict[str, float] | None = None
       ) -> Outcome:
  """Runs processes, disturbs them as a case says and waits for their ends."""
  folder.mkdir(parents=True, exist_ok=True)
  command = [str(folder), *flags(count, folder, engine or {}), *more]
  env = {'NPROC': '1', 'SEARCHRL_HEARTBEAT_SECS': str(HEARTBEAT),
         'SEARCHRL_START_SECS': '300', 'SEARCHRL_SHUTDOWN_SECS': str(SHUTDOWN),
         'PYTHONPATH': f'{ROOT}:{ROOT / "benchmarks"}', **dict(case.env)}
  with loopback.start(count, 'hosts_worker', *command, devices=1,
                      env=env) as group:
    began = strike(group, folder, case)
    return outcome(group, began)


def strike(group: loopback.Group, folder: pathlib.Path, case: Case) -> float:
  """Sends the signals of a case; returns the time of the first one."""
  file = folder / case.where
  while case.strikes and not (file.exists() and (
      not case.at or case.at in file.read_text())):
    if any(process.poll() is not None for process in group.popen):
      raise RuntimeError(f'ended before it was disturbed:\n{group.logs()}')
    time.sleep(0.01)
  began = time.monotonic()
  for wait, number, victim in case.strikes:
    time.sleep(wait)
    for process in group.popen if victim is None else [group.popen[victim]]:
      process.send_signal(number)
  return began


def outcome(group: loopback.Group, began: float) -> Outcome:
  """Waits for the ends of all processes, except for those that are stopped."""
  ends: dict[int, float] = {}
  while time.monotonic() - began < PATIENCE and len(ends) < len(group.popen):
    for number, process in enumerate(group.popen):
      if number not in ends and process.poll() is not None:
        ends[number] = time.monotonic() - began
    if ends and all(number in ends or is_stopped(process.pid)
                    for number, process in enumerate(group.popen)):
      break
    time.sleep(0.02)
  return Outcome(
      [process.poll() for process in group.popen],
      [ends.get(number, -1) for number in range(len(group.popen))],
      [(group.folder / f'{number}.err').read_text(errors='replace')
       for number in range(len(group.popen))])


def is_stopped(process: int) -> bool:
  """Returns whether a process is stopped by SIGSTOP."""
  text = pathlib.Path(f'/proc/{process}/stat').read_text()
  return text.rpartition(')')[2].split()[0] == 'T'


def rehearse(work: pathlib.Path, name: str, count: int) -> dict:
  """Disturbs a run, starts it again, and returns the record of both."""
  case, folder = CASES[name], work / f'{name.replace(" ", "_")}_{count}'
  whole = work / f'{WHOLE}_{count}'
  shutil.rmtree(folder, ignore_errors=True)
  first = run(count, folder, SHORT, case, dict(case.engine))
  saved, reached = saved_steps(folder), faults.step_of(folder)
  again = None
  if any(first.codes):
    again = run(count, folder, SHORT)
  others = [number for number in range(count)
            if number not in {victim % count for _, kind, victim in case.strikes
                              if kind in (signal.SIGKILL, signal.SIGSTOP)}]
  return dict(
      case=name, count=count, codes=first.codes, saved=saved, reached=reached,
      secs=max(first.secs[number] for number in others),
      said=sorted({sentence(first.texts[number]) for number in others}),
      again=again and again.codes, resumed=again and resumed(again.texts[0]),
      equal=faults.equals(folder, whole))


def saved_steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps whose checkpoints are whole."""
  return sorted(int(file.parent.name) for file in folder.glob(
      'checkpoints/*/integrity.json'))


def resumed(text: str) -> int:
  """Returns the step at which a run says that it goes on; 0 if it says none."""
  found = re.search(r'Resumed at step (\d+)', text)
  return int(found[1]) if found else 0


def sentence(text: str) -> str:
  """Returns what a process said of its end."""
  found = re.search(
      r'(Stopped after step|Ended by|TimeoutError: all|Process \d+ has ended '
      r'early|The following tasks are unhealthy|[^:]*heartbeat timeout|Failed '
      r'to send RPC|Shutdown barrier has failed|ValueError: UNKNOWN)[^\n]*',
      text)
  return found[0][:100] if found else ''


def scale(work: pathlib.Path, count: int, joint: bool, number: int) -> dict:
  """Runs equal work in so many processes: one run of all, or one run of each.

  `number` is the number of the round. Run i has the seed `number` + i.

  Returns:
    The record: CPU seconds by part and tokens, summed over processes and
    measured steps; what each process exchanged in a step, and in one after
    which a checkpoint was saved.
  """
  folder = work / f'scaling_{"joint" if joint else "apart"}_{count}_{number}'
  shutil.rmtree(folder, ignore_errors=True)
  groups = [(count, folder / 'run')] if joint else [
      (1, folder / f'run_{i}') for i in range(count)]
  with futures.ThreadPoolExecutor(len(groups)) as pool:
    ends = list(pool.map(lambda i: run(
        *groups[i], [*equal_work(groups[i][0]), f'--config.seed={number + i}'],
        Case('equal work', env=(('HOSTS_UNORDERED', '1'),))),
                         range(len(groups))))
  if any(code for end in ends for code in end.codes):
    raise RuntimeError(f'a run failed:\n{ends}')
  return scaled(folder, count, joint, number)


def scaled(folder: pathlib.Path, count: int, joint: bool, number: int) -> dict:
  """Returns the record of runs of equal work; see `scale`."""
  counted = [lines_of(file) for file in sorted(folder.glob('*/counts_*.jsonl'))]
  tokens = [{line['training/global_step']: line['perf/total_num_tokens']
             for line in lines_of(file) if 'perf/total_num_tokens' in line}
            for file in folder.glob('*/metrics.jsonl')]
  parts = {part for lines in counted for line in lines for part in line['cpu']}
  return dict(
      scaling='joint' if joint else 'apart', count=count, round=number,
      steps=len(MEASURED),
      tokens=sum(of_run[step] for of_run in tokens for step in MEASURED),
      cpu={part: round(sum(
          lines[step - 1]['cpu'].get(part, 0) for lines in counted
          for step in MEASURED), 3) for part in sorted(parts)},
      step_tokens=sum(of_run[MEASURED[0]] for of_run in tokens),
      step=[lines[MEASURED[0] - 1]['counts'] for lines in counted],
      save=[lines[SAVED - 1]['counts'] for lines in counted])


def equal_work(count: int) -> list[str]:
  """Returns flags that give each process 16 trajectories and 8 rows a step.

  The 8 trajectories of a mini-batch fit into the 4 rows of one micro-batch.
  """
  return ['--config.train.num_steps=9', '--config.train.checkpoint_every=4',
          f'--config.rollout.questions_per_step={4 * count}',
          f'--config.rollout.max_num_seqs={16 * count}',
          f'--config.learner.microbatch_rows={4 * count}']


def hash_rate() -> float:
  """Returns the bytes per CPU second of SHA-256."""
  data, began = bytes(1 << 28), time.process_time()
  hashlib.sha256(data)
  return len(data) / (time.process_time() - began)


def lines_of(file: pathlib.Path) -> list[dict]:
  """Returns the records of a file, one a line."""
  return list(map(json.loads, file.read_text().splitlines()))


def records() -> list[dict]:
  """Returns the lines of the file of records."""
  return lines_of(RECORDS) if RECORDS.exists() else []


def record(line: dict) -> None:
  """Adds a line to the file of records."""
  print(json.dumps(line), flush=True)
  with RECORDS.open('a') as file:
    file.write(json.dumps(line) + '\n')


def rehearse_all(work: pathlib.Path, counts: Sequence[int],
                 only: Sequence[str]) -> None:
  """Rehearses what has no record yet."""
  done = {(line['case'], line['count']) for line in records() if 'case' in line}
  for count in counts:
    for name, case in CASES.items():
      whole = work / f'{WHOLE}_{count}' / 'summary.txt'
      if count in case.counts and (not only or name in only) and (
          (name, count) not in done or name == WHOLE and not whole.exists()):
        line = rehearse(work, name, count)
        if (name, count) not in done:
          record(line)


def scale_all(work: pathlib.Path, counts: Sequence[int], rounds: int) -> None:
  """Measures what has no record yet, in rounds of all counts."""
  done = {(line['round'], line['count'], line['scaling'] == 'joint')
          for line in records() if 'scaling' in line}
  if not any('sha256' in line for line in records()):
    record(dict(sha256=hash_rate()))
  for number, count, joint in itertools.product(
      range(rounds), counts, (True, False)):
    if (number, count, joint) not in done and (joint or count > 1):
      record(scale(work, count, joint, number))


def cases_table(lines: Sequence[dict]) -> str:
  """Returns what happened in the disturbed runs, as a Markdown table."""
  rows = ['| disturbance | processes | the others end after | exit codes | '
          'whole checkpoints | goes on at; bits equal |', '|' + '---|' * 6]
  for name, line in ((name, line) for name in CASES for line in sorted(
      (line for line in lines if line.get('case') == name),
      key=lambda line: line['count'])):
    codes = ', '.join('stopped' if code is None else f'{128 - code}'
                      if code < 0 else f'{code}' for code in line['codes'])
    rows.append(
        f'| {CASES[name].text} | {line["count"]} | '
        + (f'{line["secs"]:.1f} s' if CASES[name].strikes else '')
        + f' | {codes} | {", ".join(map(str, line["saved"]))} | '
        + (f'step {line["resumed"]}; ' if line['again'] else '')
        + ('yes' if line['equal'] else 'no') + ' |')
  return '\n'.join(rows)


def scaling_table(lines: Sequence[dict]) -> str:
  """Returns the CPU microseconds per token of equal work, as Markdown."""
  rows = ['| round | processes | runs | ' + ' | '.join(PARTS) + ' | all | '
          'relative to runs of their own |', '|' + '---|' * (len(PARTS) + 5)]
  lines = [line for line in lines if 'scaling' in line]
  apart = {(line['round'], line['count']): sum(of_a_token(line))
           for line in lines if line['scaling'] == 'apart'}
  for line in sorted(lines, key=lambda line: (line['round'], line['count'])):
    of_part = of_a_token(line)
    key, is_joint = (line['round'], line['count']), line['scaling'] == 'joint'
    rows.append(
        f'| {line["round"] + 1} | {line["count"]} | '
        f'{"one" if is_joint else "each its own"} | '
        + ' | '.join(f'{x:.0f}' for x in of_part) + f' | {sum(of_part):.0f} | '
        + (f'{sum(of_part) / apart[key]:.2f}' if is_joint and key in apart
           else '') + ' |')
  return '\n'.join(rows)


def of_a_token(line: dict) -> list[float]:
  """Returns the CPU microseconds per token of each part."""
  return [line['cpu'].get(part, 0) / line['tokens'] * 1e6 for part in PARTS]


def traffic_table(lines: Sequence[dict]) -> str:
  """Returns what the first and the last process exchange in a step."""
  rows = ['| processes | process | in a step with a save | barriers | other '
          'calls | bytes sent | bytes received | device gathers, bytes |',
          '|' + '---|' * 8]
  for line in lines:
    if line.get('scaling') != 'joint' or line['count'] == 1 or line['round']:
      continue
    for when, counts in itertools.product(('step', 'save'), (0, -1)):
      found = line[when][counts]
      calls = sum(n for name, n in found.items()
                  if name.startswith('calls/key_value')
                  or name.startswith('calls/blocking'))
      rows.append(
          f'| {line["count"]} | {"last" if counts else "first"} | '
          f'{"yes" if when == "save" else "no"} | '
          f'{found.get("calls/wait_at_barrier", 0)} | {calls} | '
          f'{found.get("bytes_sent", 0):,} | '
          f'{found.get("bytes_received", 0):,} | '
          f'{found.get("calls/process_allgather", 0)}, '
          f'{found.get("bytes_gathered", 0):,} |')
  return '\n'.join(rows)


def simulated(chips: int, lines: Sequence[dict]) -> str:
  """Returns a step on paper: one host, eight, and all, by 8 and 4 chips."""
  jobs = [many_hosts.Job(hosts=1), many_hosts.Job(hosts=8),
          many_hosts.Job(hosts=chips // 8),
          many_hosts.Job(hosts=chips // 4, chips=4, conversations=32)]
  constants = many_hosts.measured(lines)
  return f'{constants}\n\n{many_hosts.table(jobs, constants)}'


def main() -> None:
  """Runs what the flags ask for."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--work', type=pathlib.Path,
                      default=pathlib.Path('runs/hosts'))
  parser.add_argument('--counts', type=int, nargs='+', default=[1, 2, 4, 8])
  parser.add_argument('--scaling', action='store_true')
  parser.add_argument('--rounds', type=int, default=3,
                      help='rounds of --scaling')
  parser.add_argument('--only', nargs='+', choices=CASES, default=[])
  parser.add_argument('--table', action='store_true')
  parser.add_argument('--simulate', type=int, metavar='CHIPS', default=0)
  options = parser.parse_args()
  if options.simulate:
    print(simulated(options.simulate, records()))
  elif options.table:
    print(cases_table(records()), scaling_table(records()),
          traffic_table(records()), sep='\n\n')
  elif options.scaling:
    scale_all(options.work.absolute(), options.counts, options.rounds)
  else:
    rehearse_all(options.work.absolute(), options.counts, options.only)


if __name__ == '__main__':
  main()
