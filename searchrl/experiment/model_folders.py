# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A model folder, read but for its weights: no device takes part."""

import dataclasses
from typing import Any

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.data import questions as questions_lib
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts import driver
from searchrl.runtime import plugins
from searchrl.trajectory import Question

_DIALOGUES = ('searchrl.agent.dialogue:laptop and :search_r1, '
              'searchrl.agent.chat:search_r1, searchrl.agent.tools:dr_zero and '
              ':dspo')
_MERGED = 8  # tokens that may be one where no question stands between them


@dataclasses.dataclass(frozen=True)
class Folder:
  """A model, but for its weights, and the dialogue that it speaks.

  Attributes:
    path: of the folder on this machine.
    shape: of the model.
    tokenizer: of the model.
    dialogue: in the tokenizer's tokens.
  """

  path: str
  shape: transformer.TransformerConfig
  tokenizer: tokenizers.Tokenizer
  dialogue: dialogues.Dialogue

  def check(self, budgets: driver.Budgets, length: int) -> None:
    """Raises a ValueError unless the model has room for a conversation."""
    budgets.check(length)
    most = self.shape.max_position_embeddings
    if length > most:
      raise ValueError(
          f'rollout.length must be at most {most}, the positions that the '
          f'model of {self.path} knows (max_position_embeddings), but is '
          f'{length}. '
          'Lower it.')

  def admit(self, budgets: driver.Budgets) -> questions_lib.Admit:
    """What refuses a question that is too long to be asked."""
    most = budgets.max_prompt_tokens
    bare = len(dialogues.opening(self.dialogue, '', self.tokenizer))

    def admit(question: Question, place: str) -> None:
      # A token is a byte at least, so that few questions must be encoded.
      if bare + _MERGED + len(question.text.encode()) <= most:
        return
      tokens = len(dialogues.opening(
          self.dialogue, question.text, self.tokenizer))
      if tokens > most:
        raise ValueError(
            'rollout.budgets.max_prompt_tokens must hold the prompt of every '
            f'question, but is {most}, and that of {place} has {tokens}. Raise '
            'it, or leave the question out.')
    return admit


def read(path: str, dialogue: str) -> Folder:
  """Reads a model folder that speaks a dialogue.

  Args:
    path: a Hugging Face folder, or hub id.
    dialogue: 'module:function' that makes a Dialogue of a Tokenizer.

  Raises:
    FileNotFoundError, ValueError: as of `parts` and `speaking`.
  """
  path, shape, tokenizer = parts(path)
  return Folder(path, shape, tokenizer, speaking(dialogue, tokenizer))


def parts(path: str) -> tuple[
    str, transformer.TransformerConfig, tokenizers.Tokenizer]:
  """The local path of a model folder or hub id, its shape, its tokenizer.

  Raises:
    FileNotFoundError, ValueError: they do not belong together, or the folder
      is not whole.
  """
  path = weights.locate(path)
  shape = weights.read_config(path)
  tokenizer = tokenizers.load(path)
  if tokenizer.vocab_size > shape.vocab_size:
    raise ValueError(
        f'tokenizer and model must belong together, but the tokenizer of '
        f'{path} has {tokenizer.vocab_size} ids and the model only '
        f'{shape.vocab_size}. '
        'Copy the tokenizer that the model was trained with.')
  return path, shape, tokenizer


def speaking(name: str, tokenizer: Any, field: str = 'dialogue',
             ours: str = _DIALOGUES) -> dialogues.Dialogue:
  """The dialogue that a config names, in the tokens of a tokenizer.

  Args:
    name: 'module:function'.
    tokenizer: see `agent.tokenizer`.
    field: of the config that has the name, for the error.
    ours: names that exist, for the error.

  Raises:
    ValueError: there is none, or the tokenizer cannot write it.
  """
  make = plugins.resolve(name, field=field, ours=ours)
  try:
    dialogue = make(tokenizer)
  except (TypeError, AttributeError) as error:
    dialogue = error
  if not isinstance(dialogue, dialogues.Dialogue):
    raise ValueError(
        f'{field} must name a function of a tokenizer that returns a Dialogue, '
        f'but {name} gave {dialogue!r}. Ours are {ours}.')
  dialogues.check_writable(dialogue, tokenizer)
  return dialogue
