# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Commands in the documents run, excerpts equal the files, and links exist."""

import ast
import doctest
import functools
import importlib.util
import itertools
import pathlib
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import types

from configs import dspo
import fakes
import faulty
import ml_collections
import pytest
import sampler_test
import tiny
import train_test
import yaml

import searchrl
from searchrl import algorithms
from searchrl.agent import dialogue as dialogues
from searchrl.experiment import solver
from searchrl.jobs import train
from searchrl.rollouts import scoring
from searchrl.runtime import foreign_names, plugins
from searchrl.trajectory import Request, Trajectory, Turn

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob('docs/**/*.md'))
DOCUMENTS = ['README.md', *PAGES]
CONFIGS = ['tools/tiny_base.py', *sorted(
    str(f.relative_to(ROOT)) for f in ROOT.glob('configs/*.py')
    if f.stem != '__init__')]
TEXTS = [*DOCUMENTS, 'BENCHMARKS.md', 'launch/README.md', 'launch/xpk.md',
         'benchmarks/speed.md', 'benchmarks/compiled/README.md',
         'benchmarks/faults/README.md', 'benchmarks/study/README.md',
         'benchmarks/atlas/README.md', 'benchmarks/archive/README.md',
         'benchmarks/gpu.md',
         'benchmarks/study/simulator_samples.md']
COMMAND = re.compile(r'-m searchrl\.main\s+(?:\\\s+)?--config=([^\s:`]+)')
FOLDERS = 'searchrl|configs|docs|launch|benchmarks|tests|third_party|tools'


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
  monkeypatch.syspath_prepend(ROOT)  # for docs.cispo, as `python -m` does


def read(name: str) -> str:
  return (ROOT / name).read_text(encoding='utf-8')


def python_blocks(text: str) -> list[str]:
  """Fenced Python without prompts: what a reader would paste into a file."""
  blocks = re.findall(r'^```python\n(.*?)^```$', text, re.M | re.S)
  return [block for block in blocks if not block.startswith('>>>')]


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES)
def test_examples_run_and_give_what_is_shown(page):
  text = read(page)
  assert '# doctest:' not in text, 'show the result instead of hiding it'
  # As doctest.testfile does, but the report goes where pytest shows it.
  test = doctest.DocTestParser().get_doctest(
      text, {'__name__': '__main__'}, page, page, 0)
  report = []
  doctest.DocTestRunner(verbose=False).run(test, out=report.append)
  if report:
    pytest.fail(''.join(report), pytrace=False)
  assert len(test.examples) == len(re.findall(r'^>>> ', text, re.M))


def test_a_wrong_result_is_reported():
  test = doctest.DocTestParser().get_doctest('>>> 1 + 1\n3\n', {}, '', '', 0)
  report = []
  doctest.DocTestRunner(verbose=False).run(test, out=report.append)
  assert 'Got:\n    2' in ''.join(report)


def test_the_shown_algorithm_is_the_file_and_short():
  source = read('docs/cispo.py')
  assert source in python_blocks(read('docs/compose.md'))
  assert len(source.splitlines()) <= 32


def module_of(page: str, marker: str, folder: pathlib.Path
             ) -> types.SimpleNamespace:
  """The block of a page that holds a marker, as the module it would be."""
  block, = (b for b in python_blocks(read(page)) if marker in b)
  (folder / 'shown.py').write_text(block)
  return types.SimpleNamespace(**runpy.run_path(str(folder / 'shown.py')))


def trajectory(text, *, searches=0, group=0):
  """A trajectory with the right answer 'here' after so many searches."""
  asked = [Turn((1,), (0.0,), dialogues.parse_tags('<search> x </search>'),
                (2,), text='<search> x </search>')] * searches
  last = Turn((1,), (0.0,), dialogues.parse_tags(text), text=text)
  return Trajectory(tiny.question(), 0, 0, (1,), (*asked, last), 'answer',
                    group=group)


RIGHT, WRONG = '<answer> here </answer>', '<answer> there </answer>'


def test_the_reward_of_the_page_gives_what_it_says(tmp_path):
  module = module_of('docs/rewards.md', 'def brief', tmp_path)
  scores = module.brief(trajectory('x' * 400 + RIGHT, searches=2), fee=0.05)
  assert scores.reward == pytest.approx(1 - 2 * 0.05 - 0.1)
  assert scores.parts == {'em': 1.0, 'long': 1.0}
  assert module.brief(trajectory(RIGHT)).reward == 1.0
  assert '--config.reward=my_rewards:brief' in read('docs/rewards.md')


@pytest.mark.slow
def test_the_reward_of_the_page_is_trained_on(tmp_path, monkeypatch):
  module_of('docs/rewards.md', 'def brief', tmp_path)
  (tmp_path / 'shown.py').rename(tmp_path / 'my_rewards.py')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'my_rewards', raising=False)  # another's
  config = train_test.tiny(dspo, steps=1)
  config.evaluate.worlds.kinds = ()
  config.reward = 'my_rewards:brief'
  train.run(config, str(tmp_path / 'run'))
  line, = train_test.lines(tmp_path / 'run')
  costs = line['reward/em/mean'] - line['critic/rewards/mean']
  assert costs == pytest.approx(
      .02 * line['search/calls_per_traj'] + .1 * line['reward/long/mean'])
  assert line['critic/score/mean'] == line['reward/em/mean']


def test_the_judges_that_are_shown_judge(tmp_path):
  page = 'docs/rewards.md'
  found = module_of(page, 'def fewest', tmp_path).fewest([
      trajectory(RIGHT, searches=2), trajectory(RIGHT, searches=1, group=1),
      trajectory(WRONG), trajectory(RIGHT, searches=1),
      trajectory(WRONG, group=2)], bonus=.5)
  assert [s.reward for s in found] == [1, 1.5, 0, 1.5, 0]
  with faulty.Server([], lambda path, request: b'[0.25, 0.5]') as server:
    found = module_of(page, 'def asked', tmp_path).asked(
        [trajectory(RIGHT)] * 2, url=server.url)
  assert [s.reward for s in found] == [.25, .5]


def test_the_judge_that_plays_rollouts_uses_the_engine_between_rounds(
    tmp_path):
  again = module_of('docs/rewards.md', 'def answered_again', tmp_path)
  script = {(f'{which}{uid}', k): [RIGHT if uid == 'easy' or k % 2 else WRONG]
            for uid in ('easy', 'hard') for k in range(4)
            for which in ('', 'again:')}
  script = {(uid + ':0' * uid.startswith('again'), k): texts
            for (uid, k), texts in script.items()}
  sampler = sampler_test.sampler(script, steps=(fakes.STEP, 0))
  judge = again.answered_again(
      solver.Solver(sampler, None, None, 1.0))
  assert judge.collective
  asked = [Request(tiny.question(uid), 0, n) for n, uid in enumerate(
      ('easy', 'hard'))]
  first = sampler.rollout(None, asked, search=None, temperature=1.0,
                          step=fakes.STEP, policy_step=fakes.STEP)
  scored = scoring.Scorer(judge)(first.trajectories)
  assert [t.reward for t in scored] == [1.0, 0.5]
  assert [t.outcome_reward for t in scored] == [1.0, 0.0]


def named(block: str) -> set[tuple[str, str]]:
  """Returns the attributes of our modules that a block uses, by module."""
  tree = ast.parse(block)
  modules = {
      alias.asname or alias.name: f'{node.module}.{alias.name}'
      for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
      for alias in node.names if node.module.partition('.')[0] == 'searchrl'}
  return {
      (modules[node.value.id], node.attr) for node in ast.walk(tree)
      if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
      and node.value.id in modules}


@pytest.mark.parametrize('document', DOCUMENTS)
def test_python_blocks_compile_and_name_what_exists(document):
  for block in python_blocks(read(document)):
    for module, attribute in sorted(named(block)):
      found = pkgutil.resolve_name(module)  # also names that are lazy
      assert hasattr(found, attribute), (
          f'{document} shows {module}.{attribute}, which does not exist.')


@pytest.mark.parametrize('document', DOCUMENTS)
def test_commands_name_configs_that_exist(document):
  configs = COMMAND.findall(read(document))
  assert configs or document in (  # pages without a command
      'docs/style.md', 'docs/pages.md', 'docs/peers.md')
  missing = [config for config in configs if not (ROOT / config).is_file()]
  assert not missing, f'{document} runs {missing}, but there is no such file.'


def links(text: str) -> list[str]:
  """Targets of the links and pictures of a text that lead to files of ours."""
  found = re.findall(r'\]\(([^)\s]+)\)', text)
  return [link for link in found if '://' not in link]


def anchors(text: str) -> set[str]:
  """Returns the anchors of a text's headings, as GitHub makes them."""
  headings = re.findall(r'^#+ (.+)$', text, re.M)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
          for heading in headings}


@pytest.mark.parametrize('document', TEXTS)
def test_links_lead_to_files_and_headings(document):
  for link in links(read(document)):
    file, _, anchor = link.partition('#')
    path = ((ROOT / document).parent / file).resolve() if file else (
        ROOT / document)
    assert path.exists(), f'{document} links to {link}: there is no such file.'
    assert not anchor or anchor in anchors(path.read_text(encoding='utf-8')), (
        f'{document} links to {link}, but {path.name} has no such heading.')


def migrated() -> list[tuple[str, list[str]]]:
  """(their name, our fields) of each row of the tables of migration.md."""
  rows = re.findall(r'^\| `([^`]+)` \| (`[^|]+) \| ', read('docs/migration.md'),
                    re.M)
  return [(theirs, re.findall('`([^`]+)`', ours)) for theirs, ours in rows
          if 'configs/' not in ours]


def test_migration_leads_to_fields_that_exist():
  fields = {name for config in ('ppo', 'grpo', 'zerosearch')
            for name in dotted(config_of(f'configs/{config}.py', ''))} | {
                f'algorithm.{keyword}'
                for keyword in plugins.keywords(algorithms.grpo)}
  for theirs, ours in migrated():
    assert set(ours) <= fields, f'{theirs} leads to what is no field of ours.'
  assert len(migrated()) > 80


def test_migration_agrees_with_the_error_messages():
  known = [(theirs, ours, foreign_names.OURS[key]) for theirs, ours in migrated()
           for key in foreign_names.OURS if f'.{theirs}'.endswith(f'.{key}')]
  for theirs, ours, named_fields in known:
    assert all(field.removeprefix('critic.') in named_fields
               for field in ours), f'{theirs} is not as in foreign_names.py.'
  assert len(known) > 75


def test_each_algorithm_has_a_page_with_its_result_in_the_study():
  sources = [ast.parse(read(f'searchrl/rl/{name}.py'))
             for name in ('algorithms', 'turn_recipes')]
  recipes = {node.name for source in sources for node in source.body
             if isinstance(node, ast.FunctionDef)
             and not node.name.startswith('_')} - {'sft'}
  pages = {pathlib.Path(page).stem: read(page) for page in PAGES
           if page.startswith('docs/algorithms/')}
  assert set(pages) == recipes
  rows = re.findall(r'^\| ([^|]+) \| ([^|]+) \|', read(
      'benchmarks/study/README.md'), re.M)
  results = {(re.sub(r', two updates$', '', name), score) for name, score in rows}
  for page in pages.values():
    if 'Not yet measured.' in page:
      continue
    title = page.splitlines()[0].removeprefix('# ')
    score, *larger = re.findall(r'\.\d{3} ± \.\d{3}', page)
    assert (title, score) in results
    assert {(f'{title}, stress_3', more) for more in larger} <= results


def dotted(config, prefix='') -> set[str]:
  """Names of all fields of a config, and of its groups."""
  names = set()
  for key, value in config.items():
    names.add(prefix + key)
    if isinstance(value, ml_collections.ConfigDict):
      names |= dotted(value, f'{prefix}{key}.')
  return names


def navigation(entry) -> list[str]:
  """Pages of the site, in the order of its navigation."""
  if isinstance(entry, str):
    return [entry]
  entries = entry.values() if isinstance(entry, dict) else entry
  return list(itertools.chain.from_iterable(map(navigation, entries)))


def test_the_site_leads_to_every_page_once():
  site = yaml.safe_load(read('docs/site/mkdocs.yml'))
  places = navigation(site['nav'])
  api = {f'api/{name}.md' for name in (*searchrl._PUBLIC, 'packing')}
  assert len(set(places)) == len(places)
  assert set(places) - api == {
      {'README.md': 'index.md'}.get(name, name.removeprefix('docs/'))
      for name in (*TEXTS, 'CONTRIBUTING.md', 'CHANGELOG.md')}
  assert api <= set(places)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
  if not importlib.util.find_spec('mkdocs'):
    pytest.skip("needs mkdocs: pip install -e '.[docs]'")
  built = subprocess.run(
      [sys.executable, '-m', 'mkdocs', 'build', '--strict', '-f',
       ROOT / 'docs/site/mkdocs.yml', '-d', tmp_path],
      capture_output=True, text=True, check=False)
  assert built.returncode == 0, built.stderr
  for page, text in (
      ('scale', 'href="../launch/#what-all-processes-share"'),
      ('algorithms/grpo', '<msub><mi>A</mi><mi>i</mi></msub>'),
      ('algorithms/grpo', 'advantages relative to the group'),  # the docstring
      ('papers/search_r1', '<td>0.412</td>'),
      ('api/losses', '  L = -min(rho A, clip(rho, 1 - clip_low, 1 +'),
      ('api/trajectory', 'True where the policy sampled the token'),
      ('tools/tiny_base.py', '<code>')):
    assert text in (tmp_path / page / 'index.html').read_text('utf-8'), page


def test_a_page_that_the_readme_links_to_leads_to_every_page():
  assert 'docs/pages.md' in links(read('README.md'))
  shown = {f'docs/{link}' for link in (
      *links(read('docs/pages.md')), *links(read('docs/recipes.md')))}
  assert set(PAGES) - {'docs/pages.md'} <= shown


def test_the_readme_can_be_read_in_a_minute():
  assert len(read('README.md').splitlines()) <= 150


@pytest.mark.parametrize('document', [*TEXTS, *CONFIGS])
def test_paths_that_are_named_exist(document):
  named_paths = re.findall(
      rf'(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w', read(document))
  for path in filter(lambda path: 'NAME' not in path, named_paths):
    assert (ROOT / path).exists() or (ROOT / f'{path}.py').exists(), (
        f'{document} names {path}, which does not exist.')


def definitions(path: str) -> set[str]:
  """Names that a module defines: functions, classes, methods and constants."""
  nodes = list(ast.walk(ast.parse(read(path))))
  targets = itertools.chain.from_iterable(
      node.targets for node in nodes if isinstance(node, ast.Assign))
  return {node.name for node in nodes if isinstance(
      node, (ast.FunctionDef, ast.ClassDef))} | {
          target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize('document', TEXTS)
def test_functions_that_are_named_exist(document):
  for path, name in re.findall(r'`([\w/]+\.py):(\w+)`', read(document)):
    assert name in definitions(path), (
        f'{document} names {name} of {path}, which has none.')


def test_the_layout_names_a_function_for_what_strangers_look_for():
  where = dict(re.findall(
      r'^\| (the [^|]+) \| (.+) \|$', read('docs/layout.md'), re.M))
  for looked_for in ('the DSPO filter', 'the passage budget',
                     'the `/retrieve` route', 'the KL estimator',
                     'the checkpoint digest', 'the resume logic'):
    assert re.search(r'`[\w/]+\.py:\w+`', where[looked_for])


@functools.cache
def config_of(file: str, size: str) -> ml_collections.ConfigDict:
  spec = importlib.util.spec_from_file_location('shown', ROOT / file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(*([size] if size else []))


def commands(text: str) -> list[tuple[str, list[str]]]:
  """(config, its flags) of every command of ours, joined over its lines."""
  joined = re.sub(r'\s*\\\n\s*', ' ', text)
  lines = re.findall(r'-m searchrl\.main (--config=[^`\n]+)', joined)
  parsed = [shlex.split(line.partition('  #')[0]) for line in lines]
  return [(words[0].removeprefix('--config='), words[1:]) for words in parsed]


@pytest.mark.parametrize('document', CONFIGS)
def test_flags_of_commands_exist(document):
  for config, words in commands(read(document)):
    file, _, size = config.partition(':')
    size = '' if '/' in size else size  # a folder of a run, as in ask.py
    for word in words:
      flag = word.partition('=')[0]
      if flag.startswith('--config.'):
        value = config_of(file, size)
        for part in flag.removeprefix('--config.').split('.'):
          assert part in value, f'{document} shows {flag} with {config}.'
          value = value[part]
      elif flag.startswith('--'):
        assert flag.removeprefix('--') in (
            'workdir', 'plan', 'question', 'allow_changes', 'seeds',
            'show_prompt', 'trajectory', 'help'), (
                f'{document} shows {flag}, which is no flag of ours.')


@pytest.mark.parametrize('document', TEXTS)
def test_benchmarks_that_are_named_take_the_flags_shown(document):
  joined = re.sub(r'\s*\\\n\s*', ' ', read(document))
  for script, line in re.findall(
      r'python (benchmarks/[\w/]+\.py)([^`\n|]*)', joined):
    source = read(script)
    for flag in re.findall(r'(?<=\s)--[\w-]+', line.partition('#')[0]):
      assert f"'{flag}'" in source, f'{document} shows {flag} with {script}.'


@pytest.mark.parametrize('config', CONFIGS)
def test_every_config_is_a_lab_note(config):
  source = read(config)
  note = ' '.join(ast.get_docstring(ast.parse(source)).split())
  folder = config.partition('/')[0]
  assert f'python -m searchrl.main --config={folder}/' in note
  assert re.search(r'Results?\b', note), (
      f'{config} must give its result, or "Result: not yet measured."')
  if 'import common' in source and 'config.algorithm = ' in source:
    for part in ('Hardware: ', 'Time: ', 'Result: ', 'Source: '):
      assert part in note, f'{config} has no "{part}"'
    assert 'Differs: ' in note or 'are ours' in note


METRIC_ROOMS = ('actor', 'critic', 'data', 'env', 'format', 'num_turns', 'perf',
                'prompt_length', 'response_length', 'reward', 'rollout',
                'rollout_corr', 'search', 'sft', 'timing_s',
                'tool_call_counts', 'train', 'training', 'val')


def documented_metrics() -> set[str]:
  """Names of docs/metrics.md, with every choice of {a,b} spelt out."""
  names = set()
  for span in re.findall(r'`([^`]+)`', read('docs/metrics.md')):
    parts = [part.split(',') for part in re.split(r'[{}]', span)]
    names |= {''.join(choice) for choice in itertools.product(*parts)}
  return names


def metrics_of(source: str) -> set[tuple[str, bool]]:
  """Strings that read as a metric's name, and whether an f-string goes on."""
  name = re.compile(rf'(?:{"|".join(METRIC_ROOMS)})/[a-z0-9_/]*')
  nodes = list(ast.walk(ast.parse(source)))
  formatted = {id(node.values[0]) for node in nodes
               if isinstance(node, ast.JoinedStr)}
  return {(node.value, id(node) in formatted) for node in nodes
          if isinstance(node, ast.Constant) and isinstance(node.value, str)
          and name.fullmatch(node.value)
          and (id(node) in formatted or not node.value.endswith('/'))}


def test_metrics_that_are_written_are_described():
  names, count = documented_metrics(), 0
  for file in sorted((ROOT / 'searchrl').rglob('*.py')):
    for written, goes_on in sorted(metrics_of(file.read_text('utf-8'))):
      count += 1
      # The rest of an f-string, or /mean, /max and /min of `_spread`.
      assert written in names or any(name.startswith(
          written if goes_on else f'{written}/') for name in names), (
              f'{file.name} writes {written}: describe it in docs/metrics.md.')
  assert count > 50


@pytest.mark.parametrize('page', sorted(
    file.name for file in ROOT.glob('docs/gallery/*')))
def test_a_page_of_the_gallery_is_small_and_loads_nothing(page):
  assert f'gallery/{page}' in links(read('docs/gallery.md'))
  text = read(f'docs/gallery/{page}')
  assert "default-src 'none'" in text and len(text) < 400_000
