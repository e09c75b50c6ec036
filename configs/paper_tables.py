# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""A table of a paper: its numbers, ours, and the commands that are to run.

  python -m searchrl.main --config=configs/paper_tables.py:search_r1/table2
  python -m searchrl.main \
      --config=configs/paper_tables.py:search_r1/table2,small=smoke

It lists the commands of the runs that do not exist yet. Once they do, the same
command has the paper's number beside ours, with its interval, the difference,
and whether the paper's number is in the interval. It writes table.txt,
table.html, table.tex and table.json, and to_run.txt, from which a cluster can
start the runs side by side (docs/evaluation.md). With `small`, the tiny bases
replace the paper's models, and generated questions replace its data sets. The
table then has the means beside each other, and is no test of the paper.

Hardware: any. Time: seconds, without the runs. Result: the numbers of the papers
are in searchrl/papers; ours are not yet measured.
"""

import ml_collections

from configs import arguments
from searchrl.experiment.rules import field
from searchrl.papers import tables


def get_config(text: str = '') -> ml_collections.ConfigDict:
  papers, numbers = zip(*(name.split('/') for name in tables.names()))
  others = arguments.parse(
      text, size=(), model=(), setting=(), small=('laptop', 'smoke'),
      paper=tuple(dict.fromkeys(papers)),
      table=tuple(dict.fromkeys(numbers))).others
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.papers.tables:run'
  config.table = dict(
      name=field(
          '/'.join((others['paper'] or 'search_r1',
                    others['table'] or 'table2')), one_of=tables.names()),
      small=others['small'],  # size of the tiny bases; '': the paper's models
      runs='runs',  # folder of the runs
      seeds=(),  # seeds of every run, as in (0,1,2); (): one run
      # Flags of each command; data.train is left out in self-play.
      flags='' if others['small'] else (
          '--config.data.train=data/train.jsonl '
          '--config.data.evaluate=data/test.jsonl '
          '--config.search.corpus=data/wiki-18.jsonl'),
  )
  return config
