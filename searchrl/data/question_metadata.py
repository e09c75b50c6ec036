# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the metadata of questions, which most jobs do not need."""

from collections.abc import Mapping
import json
from typing import Any

from searchrl.data import question_files
from searchrl.data import questions as questions_lib
from searchrl.trajectory import Question


class Reader:
  """A reader of questions' metadata, which first records the questions' places.

  The method `admit` is passed to `questions.read`, which calls it with each
  question and its place (file and line). Then the method `read` returns the
  metadata of these questions.

  Args:
    admit: Another function to call with each question and its place.
  """

  def __init__(self, admit: questions_lib.Admit = questions_lib.admit_all):
    self._admit = admit
    self._uids: dict[str, str] = {}  # place in a file -> uid

  def admit(self, question: Question, place: str) -> None:
    """Lets the inner `admit` check a question, and remembers its place.

    Args:
      question: Question that was read.
      place: Its place, such as 'FILE, line 3'.
    """
    self._admit(question, place)
    self._uids[place] = question.uid

  def read(self, train: str) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Returns the place and the metadata of each admitted question, by uid.

    Args:
      train: Files of questions: 'path' or 'name=path,name=path'.
    """
    result = {}
    for file in question_files.named(train, 'data.train'):
      for place, record in question_files.records(
          file.path, needs_golds=False):
        values = record.get('metadata') or {}
        if isinstance(values, str):
          values = json.loads(values)
        if place in self._uids:
          result[self._uids[place]] = place, values
    return result
