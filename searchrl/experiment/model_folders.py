# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Model directories: reads everything but the weights, without a device."""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.agent import tools as tool_calls
from searchrl.data import questions as questions_lib
from searchrl.models import products
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts import driver
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.trajectory import Question, Tool

_DIALOGUES = ('searchrl.agent.dialogue:laptop and :search_r1, '
              'searchrl.agent.chat:search_r1, searchrl.agent.tools:dr_zero, '
              ':dspo and :native')
TINY_BASE = pathlib.Path(__file__).parents[1] / 'assets' / 'tiny_base'
PLAIN_DIALOGUE = 'searchrl.agent.dialogue:search_r1'
CHAT_DIALOGUE = 'searchrl.agent.chat:search_r1'
NATIVE = 'searchrl.agent.tools:native'
CHAT_TOOLS = 'searchrl.agent.chat:with_tools'
PLAIN_TOOLS = 'searchrl.agent.dialogue:with_tools'
TINY_DIALOGUE = 'searchrl.agent.dialogue:laptop'  # its training dialogue
MERGED = 8  # tokens of a prompt that may merge if its question is empty


@dataclasses.dataclass(frozen=True)
class ModelFolder:
  """A model without its weights, and the dialogue that it uses.

  Attributes:
    path: Path of the directory on this machine.
    shape: Shape of the model.
    tokenizer: Tokenizer of the model.
    dialogue: Dialogue in the tokenizer's tokens.
  """

  path: str
  shape: transformer.TransformerConfig
  tokenizer: tokenizers.Tokenizer
  dialogue: dialogues.Dialogue

  def check(self, budgets: driver.Budgets, length: int) -> None:
    """Raises a ValueError unless conversations with these limits are possible.

    The dialogue must be able to ask for a summary if the budgets need one.

    Args:
      budgets: Limits of a conversation's parts.
      length: Maximum number of tokens of a conversation.
    """
    budgets.check(length)
    if budgets.when_full == 'summarise' and not self.dialogue.summary_request:
      raise ValueError(
          "rollout.budgets.when_full must be 'stop' or 'drop' for a dialogue "
          "that cannot ask for a summary, but is 'summarise'. Give the "
          'Dialogue a summary_request, or choose another rule.')
    limit = self.shape.max_position_embeddings
    if length > limit:
      raise ValueError(
          f'rollout.max_length must be at most {limit}, the positions that the '
          f'model of {self.path} knows (max_position_embeddings), but is '
          f'{length}. '
          'Lower it.')

  def admit(self, budgets: driver.Budgets) -> questions_lib.Admit:
    """Returns a function that raises a ValueError if a question is too long.

    Its arguments are a question, and the place where it is from, for the error.
    A question is too long if its prompt exceeds `budgets.max_prompt_tokens`.
    """
    limit = budgets.max_prompt_tokens
    bare = len(dialogues.opening(self.dialogue, '', self.tokenizer))

    def admit(question: Question, place: str) -> None:
      # A token has at least one byte, so short questions need no encoding.
      if bare + MERGED + len(question.text.encode()) <= limit:
        return
      tokens = len(dialogues.opening(
          self.dialogue, question.text, self.tokenizer))
      if tokens > limit:
        raise ValueError(
            'rollout.budgets.max_prompt_tokens must hold the prompt of every '
            f'question, but is {limit}, and that of {place} has {tokens}. '
            'Raise it, or leave the question out.')
    return admit


def read(path: str, dialogue: str, tools: Sequence[Tool] = (dialogues.SEARCH,),
         matmul_dtype: str = '') -> ModelFolder:
  """Reads a model directory, and makes the dialogue of its conversations.

  The weights are not read.

  Args:
    path: Path of a Hugging Face directory, or a hub id.
    dialogue: Name, as 'module:function', of a function that makes a Dialogue
      for a Tokenizer. '': the result of `default_dialogue`.
    tools: Tools that the dialogue lists.
    matmul_dtype: Dtype of the operands of matrix products. 'auto': the fastest
      dtype on the first process. '': the dtype of the activations.

  Raises:
    FileNotFoundError, ValueError: The directory is incomplete, model and
      tokenizer do not match, or the dialogue does not suit them.
  """
  path, shape, tokenizer = parts(path, matmul_dtype)
  return ModelFolder(path, shape, tokenizer, load_dialogue(
      dialogue or default_dialogue(path, tokenizer, tools), tokenizer,
      tools=tools))


def is_tiny(path: str) -> bool:
  """Returns whether a model is a shipped tiny base, or was trained from one.

  These models have the vocabulary of the tiny base, and no other model has it.

  Args:
    path: Path of the model's directory. '': the tiny base.
  """
  if not path:
    return True
  file = pathlib.Path(path) / 'tokenizer.json'
  return file.is_file() and _vocabulary(file) == _vocabulary(
      TINY_BASE / 'tokenizer.json')


def _vocabulary(file: pathlib.Path) -> Any:
  """Returns the tokens in a tokenizer.json; None if it cannot be read."""
  try:
    return json.loads(file.read_bytes())['model']['vocab']
  except (ValueError, KeyError, TypeError):
    return None


def default_dialogue(path: str, tokenizer: tokenizers.Tokenizer,
                     tools: Sequence[Tool] = (dialogues.SEARCH,)) -> str:
  """Returns the name of a model's dialogue, for a config that names none.

  A tiny base is a small model for tests and laptops. For it, and for a model
  that was trained from it, the result is the dialogue of its training, whatever
  the tools are. For other models, it depends on the tools:

  - Only the search: Search-R1's dialogue.
  - Others: the chat template's own form of tool calls, or, if the template has
    none, tags that the prompt describes.

  Tags and Search-R1's dialogue are in the chat template if the template can
  write them, and otherwise plain text.

  Args:
    path: Path of the model's directory. '': the tiny base.
    tokenizer: Tokenizer of the model.
    tools: Tools that the dialogue lists.
  """
  if is_tiny(path):
    return TINY_DIALOGUE
  searches_alone = [tool.name for tool in tools] == ['search']
  framed: dict[str, Callable[[], Any]] = {
      CHAT_DIALOGUE: lambda: chat.search_r1(tokenizer)} if searches_alone else {
          NATIVE: lambda: tool_calls.native(tokenizer, tools),
          CHAT_TOOLS: lambda: chat.with_tools(tokenizer, tools)}
  for name, make in framed.items():
    try:
      make()
      return name
    except ValueError:  # the chat template cannot write it
      continue
  return PLAIN_DIALOGUE if searches_alone else PLAIN_TOOLS


def parts(path: str, matmul_dtype: str = '') -> tuple[
    str, transformer.TransformerConfig, tokenizers.Tokenizer]:
  """Returns the local path, the shape and the tokenizer of a model.

  The shape's field `unused_ids` has the ids that are neither sampled nor
  trained on.

  Args:
    path: Path of a Hugging Face directory, or a hub id.
    matmul_dtype: Dtype of the operands of matrix products. 'auto': the fastest
      dtype on the first process. '': the dtype of the activations.

  Raises:
    FileNotFoundError, ValueError: The directory is incomplete, or the model and
      the tokenizer do not belong together.
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
  padding = range(tokenizer.vocab_size, shape.vocab_size)
  return path, dataclasses.replace(
      shape, unused_ids=(*tokenizer.missing_ids, *padding),
      matmul_dtype=product_dtype(matmul_dtype)), tokenizer


def product_dtype(name: str) -> str:
  """Returns the dtype of the operands of matrix products, with 'auto' resolved.

  For 'auto' it is the fastest dtype on the first process. Any other name is
  returned unchanged.
  """
  if name == 'auto':
    return processes.on_first('matmul_dtype', products.fastest)
  return name


def load_dialogue(name: str, tokenizer: Any, field: str = 'dialogue',
                  ours: str = _DIALOGUES,
                  tools: Sequence[Tool] = (dialogues.SEARCH,)
                 ) -> dialogues.Dialogue:
  """Returns the dialogue that a config names, in the tokens of a tokenizer.

  Args:
    name: Name, as 'module:function', of the function that makes the dialogue.
    tokenizer: Tokenizer; see `agent.tokenizer`.
    field: Config field that has the name, for the error.
    ours: Names of existing functions, for the error.
    tools: Tools that the dialogue lists. If there are others than the search,
      the function gets all of them as its keyword `tools`.

  Raises:
    ValueError: There is no such dialogue, it does not take the tools, or the
      tokenizer cannot write it.
  """
  make = plugins.resolve(name, field=field, ours=ours)
  keywords: dict[str, Any] = {}
  if [tool.name for tool in tools] != ['search']:
    keywords['tools'] = tuple(tools)
    if 'tools' not in plugins.keywords(make):
      raise ValueError(
          f'{field} must be a function with a keyword tools where tools are '
          f'given, {", ".join(tool.name for tool in tools)}, but {name} has '
          'none. Choose searchrl.agent.tools:native, searchrl.agent.chat:'
          'with_tools or searchrl.agent.dialogue:with_tools.')
  try:
    dialogue = make(tokenizer, **keywords)
  except (TypeError, AttributeError) as error:
    dialogue = error
  if not isinstance(dialogue, dialogues.Dialogue):
    raise ValueError(
        f'{field} must name a function of a tokenizer that returns a Dialogue, '
        f'but {name} gave {dialogue!r}. Ours are {ours}.')
  dialogues.check_writable(dialogue, tokenizer)
  return dialogue
