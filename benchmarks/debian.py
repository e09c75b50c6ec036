# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""A corpus and questions about it, made from Debian's package descriptions.

  apt-get -o Acquire::Languages=en update
  /usr/lib/apt/apt-helper cat-file \
      /var/lib/apt/lists/*_debian_dists_*_main_i18n_Translation-en.lz4 |
      python benchmarks/debian.py --out runs/debian

Any text of "Package:" and "Description-en:" with long descriptions will do.
A passage is a package's long description, at most 100 words; a question is the
one-line synopsis, which is not in the passage, and its answer the package's
name.
"""

import argparse
import itertools
import json
import pathlib
import re
import sys

_WORDS = 100  # of a passage, as in the Wikipedia that the field uses
_LEAST = 15  # words; shorter descriptions tell nothing
_EVERY = 20  # one question for so many passages


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', required=True, type=pathlib.Path)
  parser.add_argument('--passages', type=int, help='at most; default: all')
  options = parser.parse_args()
  folder = options.out
  folder.mkdir(parents=True, exist_ok=True)
  passages, questions = [], []
  found = packages(sys.stdin.read())
  for name, synopsis, words in itertools.islice(found, options.passages):
    if len(passages) % _EVERY == 0:
      questions.append({'id': f'q{len(passages)}', 'question': synopsis,
                        'golden_answers': [name]})
    passages.append({'id': str(len(passages)), 'contents':
                     f'"{name}"\n{" ".join(words[:_WORDS])}'})
  for file, lines in (('corpus', passages), ('questions', questions)):
    (folder / f'{file}.jsonl').write_text(
        ''.join(json.dumps(line) + '\n' for line in lines))
  print(f'{len(passages)} passages, {len(questions)} questions in {folder}')


def packages(text):
  """(name, synopsis, words of the long description) of each package, once."""
  names = set()
  for block in text.split('\n\n'):
    name = re.search(r'^Package: (.+)$', block, re.M)
    found = re.search(
        r'^Description(?:-en)?: (.+)$\n((?: .*\n?)*)', block, re.M)
    if not name or not found or name[1] in names:
      continue
    names.add(name[1])
    words = found[2].replace(' .\n', ' ').split()
    if len(words) >= _LEAST:
      yield name[1], found[1], words


if __name__ == '__main__':
  main()
