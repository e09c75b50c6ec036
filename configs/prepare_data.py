# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Makes the files that the papers use from what is published.

  python -m searchrl.main --config=configs/prepare_data.py:search_r1 \
      --workdir=data

It writes data/train.jsonl (NQ and HotpotQA), data/train_nq.jsonl, data/test.jsonl
(51,713 questions of seven sets) and data/wiki-18.jsonl (21 million passages),
which are data.train, data.evaluate and search.corpus of the other configs. With
the name of another paper after the colon it makes that paper's files, and
without a name those of all papers. What is published where is in
searchrl/papers/data_sets.toml.

The files come from the hub. Or they come from a folder of downloads, which has
them under their paths on the hub, as in nq/train.jsonl (.jsonl, .jsonl.gz or
.parquet). Search-R1's train.parquet and test.parquet may take their place:

  python -m searchrl.main --config=configs/prepare_data.py:search_r1 \
      --workdir=data --config.source=downloads \
      --config.copy_to=gs://my-bucket/data

The numbers of rows are compared with the published ones. Rows and digests are
printed, and are in data/prepared.json. After a kill, the same command goes on.

Hardware: a CPU core of a shared machine, 20 GB of disk. Time: 26 CPU
microseconds a passage (of 200,000 made-up ones), so 9 minutes for wiki-18, and
the download. Result: not yet measured on the published files; tests read small
ones of the same schemas.
"""

import ml_collections

from configs import arguments
from searchrl.experiment.rules import field
from searchrl.papers import prepare_data


def get_config(text: str = '') -> ml_collections.ConfigDict:
  papers = prepare_data.TABLE['papers']
  paper = arguments.parse(text, size=(), model=(), setting=(),
                          paper=tuple(papers)).others['paper']
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.papers.prepare_data:run'
  config.allow_changes = False  # set by --allow_changes
  config.source = ''  # folder of downloaded files; '': the hub
  # Files to make. e5_Flat has Search-R1's vectors of wiki-18, 65 GB.
  config.files = field(
      tuple(papers[paper] if paper else prepare_data.names()),
      some_of=(*prepare_data.names(), 'e5_Flat'))
  # Models and encoders to fetch before they are used: names as after a colon,
  # or hub ids such as intfloat/e5-base-v2.
  config.models = ()
  config.copy_to = ''  # gs://, s3:// or a folder that gets a copy of the files
  config.seed = 0  # seed of the draw of study_512
  config.any_rows = False  # True: files may have other numbers of rows
  return config
