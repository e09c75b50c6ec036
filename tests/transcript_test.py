# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The page's transcript: an excerpt of what its commands print."""

import pathlib
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / 'docs' / 'transcripts' / 'first_command.txt'


def recorded() -> tuple[list[str], list[str]]:
  """The commands of the record, and the lines that the last one printed."""
  lines = RECORD.read_text().splitlines()
  commands = [line[2:] for line in lines if line.startswith('$ ')]
  return commands, [line for line in lines if not line.startswith(('$ ', '# '))]


def excerpt() -> list[str]:
  """The lines of the page's transcript."""
  text = (ROOT / 'docs' / 'laptop.md').read_text()
  block = text[text.index('    Question: '):].partition('\n\n')[0]
  return [line[4:] for line in block.splitlines()]


def is_excerpt(part: list[str], whole: list[str]) -> bool:
  """Returns whether lines are an excerpt, where `...` stands for omissions."""
  rest = iter(whole)
  gap, ok = False, True
  for line in part:
    if line.strip() == '...':
      gap = True
      continue
    start = line.removesuffix(' ...')
    fits = lambda real, start=start, cut=start != line: (
        real.startswith(start) if cut else real == start)
    if gap:
      ok &= any(map(fits, rest))
    else:
      ok &= fits(next(rest, ''))
    gap = False
  return ok and (gap or next(rest, None) is None)


def test_an_excerpt_is_told_from_another_text():
  whole = ['a', 'b c', 'd', 'e']
  for part in (whole, ['a', '...', 'e'], ['a', 'b ...', 'd', 'e'],
               ['a', '  ...'], ['...', 'd', 'e']):
    assert is_excerpt(part, whole), part
  for part in (['a'], ['a', 'b', 'd', 'e'], ['a', 'e'], ['...', 'f'],
               ['a', 'b ...', 'e'], [*whole, 'f']):
    assert not is_excerpt(part, whole), part


def test_the_page_shows_an_excerpt_of_the_record():
  commands, lines = recorded()
  assert is_excerpt(excerpt(), lines)
  page = ' '.join((ROOT / 'docs' / 'laptop.md').read_text().replace('\\\n', '').split())
  for command in commands:  # so that a reader can run what was recorded
    assert command in page


@pytest.mark.long
def test_the_commands_print_the_record(tmp_path):
  commands, lines = recorded()
  printed = ''
  for command in commands:
    arguments = [word.replace('=runs/', f'={tmp_path}/')
                 for word in shlex.split(command)[1:]]
    if '--config=configs/dspo.py' in arguments:
      arguments.append(f'--workdir={tmp_path / "dspo"}')
    printed = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
  assert printed.splitlines() == lines
