# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks of the site: pages beside docs/, links between them, the API.

A page of the site has the name that it has in docs/, another file of the
repository has its path from the root, and README.md is the home page. Formulas
become MathML, so that no script draws them. The page of an algorithm ends with
its docstring, and that of a paper with the paper's tables.
"""

from collections.abc import Iterator
import functools
import os
import pathlib
import re
import tomllib

from latex2mathml import converter
from mkdocs.structure import files as site_files
from pymdownx import slugs

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CODE = re.compile(r'^ *```.*?^ *```$|`[^`\n]+`', re.M | re.S)
_LINK = re.compile(
    r'(?P<before>\]\(|\b(?:src|srcset|href)=")(?P<target>[^)\s"#:]+)(?=[)"#])')
_FORMULA = re.compile(r'^\$\$\n(.*?)\n\$\$$', re.M | re.S)
_API = {'advantages': 'searchrl.rl.advantages',
        'algorithms': 'searchrl.rl.algorithms',
        'bridge': 'searchrl.models.bridge', 'losses': 'searchrl.rl.losses',
        'masked': 'searchrl.rl.masked', 'packing': 'searchrl.packing',
        'trajectory': 'searchrl.trajectory'}
# Files that are shown as pages with their text, and the language of each.
_SHOWN = {'.py': 'python', '.sbatch': 'sh', '.sh': 'sh', '.toml': 'toml',
          '.yaml': 'yaml', '.yml': 'yaml'}


def on_config(config):
  """Names headings as GitHub does, so that links to them work in both."""
  config.mdx_configs['toc'] = {
      'permalink': True, 'slugify': slugs.slugify(case='lower')}
  return config


def on_files(files, config):
  """Adds the files that pages link to, and a page for each public module."""
  for path in sorted(_reached()):
    if not files.get_file_from_path(_uri(path)):
      files.append(site_files.File.generated(
          config, _uri(path), **_source(path)))
  css = pathlib.Path(__file__).with_name('site.css')
  files.append(site_files.File.generated(
      config, 'site.css', abs_src_path=str(css)))
  for name, module in _API.items():
    files.append(site_files.File.generated(
        config, f'api/{name}.md', content=f'# searchrl.{name}\n\n::: {module}\n'))
  return files


def on_page_markdown(markdown, page, config, files):
  """Returns a page with its links, formulas and tables as the site has them."""
  del config, files
  if page.file.abs_src_path is None:  # the API
    return markdown
  source = pathlib.Path(page.file.abs_src_path)
  folder = os.path.dirname(page.file.src_uri)

  def moved(link):
    target = _file(source, link['target'])
    return link['before'] + (os.path.relpath(_uri(target), folder or '.')
                             if target else link['target'])

  markdown = _outside_code(functools.partial(_LINK.sub, moved), markdown)
  markdown = _FORMULA.sub(
      lambda formula: converter.convert(formula[1], display='block'), markdown)
  if folder == 'algorithms':
    markdown += ('\n## Options\n\nRecipes share some options, [those of their '
                 f'module](../api/algorithms.md).\n\n::: {_API["algorithms"]}.{source.stem}\n'
                 '    options:\n      heading_level: 3\n      show_root_heading: true\n')
  if folder == 'papers':
    markdown += ''.join(map(_table, sorted(
        (_ROOT / 'searchrl' / 'papers' / source.stem).glob('table*.toml'))))
  return markdown


def _table(file: pathlib.Path) -> str:
  """Returns a paper's table as Markdown, with a part for each model."""
  table = tomllib.loads(file.read_text('utf-8'))
  lines = ['', f'### {table["title"]}', '', f'Score: `{table["score"]}`.']
  for model, rows in table['groups'].items():
    lines += ['', f'| {model} | {" | ".join(table["sets"])} |',
              '|---' * (1 + len(table['sets'])) + '|']
    lines += [f'| {name} | {" | ".join(f"{x:.3f}" for x in numbers)} |'
              for name, numbers in rows.items()]
  return '\n'.join([*lines, ''])


def _reached() -> set[pathlib.Path]:
  """Returns the files that the pages link to, and those that these link to."""
  waiting = [*(_ROOT / 'docs').rglob('*.md'), _ROOT / 'README.md']
  reached = set(waiting)
  while waiting:
    page = waiting.pop()
    new = set(_targets(page)) - reached
    reached |= new
    waiting += [path for path in new if path.suffix == '.md']
  return reached


def _targets(page: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the files of the repository that a page links to."""
  for link in _LINK.finditer(_CODE.sub('', page.read_text('utf-8'))):
    target = _file(page, link['target'])
    if target:
      yield target


def _file(page: pathlib.Path, target: str) -> pathlib.Path | None:
  """Returns the file that a link leads to, a folder's README.md; else None."""
  path = (page.parent / target).resolve()
  path = path / 'README.md' if path.is_dir() else path
  return path if path.is_file() and path.is_relative_to(_ROOT) else None


def _uri(path: pathlib.Path) -> str:
  """Returns a file's place in the site."""
  path = path.relative_to(_ROOT)
  if path.parts[0] == 'docs' and path.parts[1] != 'site':
    path = path.relative_to('docs')
  if path == pathlib.Path('README.md'):
    return 'index.md'
  return path.as_posix() + '.md' * (path.suffix in _SHOWN)


def _source(path: pathlib.Path) -> dict[str, str]:
  """Returns where the content of a file of the site comes from."""
  if path.suffix not in _SHOWN:
    return {'abs_src_path': str(path)}
  return {'content': (
      f'# {path.relative_to(_ROOT)}\n\n``````{_SHOWN[path.suffix]}\n'
      f'{path.read_text("utf-8")}\n``````\n')}


def _outside_code(change, text: str) -> str:
  """Applies a function to a text, but not to the code in it."""
  spans, start = [], 0
  for code in _CODE.finditer(text):
    spans += [change(text[start:code.start()]), code[0]]
    start = code.end()
  return ''.join([*spans, change(text[start:])])
