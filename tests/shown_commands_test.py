# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Each command that a document shows is read as it would be; no job starts."""

import re
import shlex

from configs import dspo
import docs_test
import launch_test
import pytest

from searchrl import main
from searchrl.runtime import command
from searchrl.runtime import config_fields
from searchrl.runtime import config_files

ROOT = docs_test.ROOT
TEXTS = [*docs_test.TEXTS, 'CONTRIBUTING.md']
CODE = re.compile(
    r'^```\w*\n(.*?)^```$|(?<!`)`([^`\n]+)`(?!`)|^ {4}([^\n]+)$', re.M | re.S)
OURS = re.compile(r'(?:^|\s)(?:python3? -m searchrl\.main|searchrl(?! import)|'
                  r'launch/(?P<script>\w+\.sh)) (?P<words>.+)')


def shown(document: str) -> list[tuple[str | None, list[str]]]:
  """(script of launch/ or None, arguments) of each command in a document."""
  text = re.sub(r'\s*\\\n\s*', ' ', docs_test.read(document))
  lines = '\n'.join(''.join(code) for code in CODE.findall(text)).splitlines()
  parts = [part for line in lines
           for part in re.split(r' && | \| |; | &$| +#', line)]
  return [(match['script'], [word for word in shlex.split(match['words'])
                             if not word.startswith('$')])
          for match in map(OURS.search, parts) if match]


def begin(words: list[str]) -> None:
  """Does all that the program does before the job."""
  settings, others = config_fields.split(command.expand(words))
  options = main._parse(others)
  if options.config and '$' not in options.config:
    config = config_files.load(options.config)
    config_fields.assign(config, settings, options.config)
    assert main._job(config, options)


@pytest.fixture(name='folder')
def _folder(tmp_path, monkeypatch):
  """A clone in which every run that is named has been run."""
  for name in ('configs', 'docs', 'tools'):
    (tmp_path / name).symlink_to(ROOT / name)
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize('document', TEXTS)
def test_commands_that_are_shown_can_begin(document, folder):
  for script, words in shown(document):
    for run in re.findall(r'runs/[\w/]+', ' '.join(words)):
      (folder / run).mkdir(parents=True, exist_ok=True)
      (folder / run / 'config.json').write_text(
          dspo.get_config('smoke').to_json())
    flags = [word for word in words if word.startswith('--config')]
    if script is None:
      begin(words)
    elif flags:
      done = launch_test.launch(script, '--dry-run', *words,
                                **launch_test.VARIABLES.get(script, {}))
      assert done.returncode == 0 and flags[0] in done.stdout, done.stderr
      begin(words[words.index(flags[0]):])


def test_most_commands_are_found():
  assert sum(len(shown(document)) for document in TEXTS) > 150


def test_a_command_that_cannot_begin_is_refused(folder):
  with pytest.raises(ValueError, match='rollout.group_sise'):
    begin(['train', 'configs/grpo.py', '--config.rollout.group_sise=2'])


@pytest.mark.parametrize('document', [*TEXTS, 'launch/skypilot.yaml'])
def test_extras_that_are_installed_exist(document):
  setup = docs_test.read('setup.py')
  for extras in re.findall(r'install [^`\n]*\[([a-z0-9,]+)\]',
                           docs_test.read(document)):
    if 'jax[' not in extras:
      for extra in extras.split(','):
        assert f"'{extra}': " in setup, f'{document} installs {extra}'
