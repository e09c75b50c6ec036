# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An evaluation's questions in, the same with passages to read in front, out.

What retrieval-augmented generation asks: BM25 finds passages by the question as
it stands, once, and the policy answers from them.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

from configs import evaluate
from searchrl.agent import dialogue
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.experiment import build
from searchrl.search import corpus as corpora
from searchrl.search import engines
from searchrl.trajectory import Passages, Query, Question


def prepare(options: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
  """Writes the questions of an evaluation, with passages.

  Args:
    options: Options of configs/evaluate.py, by name.
    folder: Directory of the files.

  Returns:
    The arguments by which main evaluates on them instead.
  """
  config = evaluate.get_config()
  config.update_from_flattened_dict(options)
  sets = build.evaluation_sets(config, folder)
  files = {}
  for data in sets:
    files[data.name] = (folder / f'{data.name}.jsonl').resolve()
    questions_lib.write(files[data.name], with_passages(
        data, config.rollout.budgets.top_k))
  corpus = (folder / 'corpus.jsonl').resolve()  # asked for, but never searched
  corpora.write(corpus, sets[0].corpus)
  named = ','.join(f'{name}={file}' for name, file in files.items())
  return [f'--config.data.evaluate={named}', f'--config.search.corpus={corpus}']


def with_passages(data: datasets.Dataset, top_k: int) -> list[Question]:
  """The questions of a set, each below what BM25 finds for it."""
  search = engines.make('bm25', data.corpus)
  queries = [Query(question.text, top_k, question)
             for question in data.questions]
  return [dataclasses.replace(question, text=below(found, question.text))
          for question, found in zip(data.questions, search(queries))]


def below(passages: Passages, question: str) -> str:
  """A question below passages, which are written as a search shows them."""
  shown = ''.join(dialogue.in_a_row(dialogue.tag_passage, [passages]))
  return f'{shown}\n{question}'
