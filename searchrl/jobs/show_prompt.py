# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the exact texts around a policy's own text, before any training.

These are the prompt of a question, the observation after a search, the retry
message after an invalid action, and the ends of a turn and a conversation. No
weights are read and no device is used.
"""

from collections.abc import Iterator, Sequence
import itertools
import pathlib
import tempfile
from typing import Any

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.data import question_files
from searchrl.data import questions as questions_lib
from searchrl.evaluation.figures import plain
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import policy
from searchrl.experiment import run_defaults
from searchrl.runtime import gzip_files
from searchrl.runtime import processes
from searchrl.search import corpus as corpora
from searchrl.trajectory import Passage

_QUESTION = 'In which city was the author of the first novel born?'
_PASSAGE = Passage('0', 'A title', 'The text of a passage.')


def run(config, workdir: str, tokens: bool = False) -> None:
  """Prints what the policy of a config reads, and how many tokens it has.

  Args:
    config: Config of a recipe, or of another job with a dialogue and rollouts.
    workdir: Directory of the run, where nothing is written.
    tokens: True to print each token with its id.

  Raises:
    ValueError, FileNotFoundError: The config has no dialogue, or its model,
      questions or corpus cannot be read.
  """
  parts = build.beside_job(config, 'trainings') or {'': config}
  examples = build.beside_job(config, 'examples')
  for name, part in parts.items():
    lines = list(show(part, tokens, examples.get(name, ''),
                      pathlib.Path(workdir, name)))
    if processes.is_first():
      print(f'\nThe {name}:\n' if name else '', end='')
      print('\n'.join(lines))


def show(config, tokens: bool, example: str = '',
         folder: pathlib.Path | None = None) -> Iterator[str]:
  """Yields the lines that show the texts around a policy's own text.

  Args:
    config: Config of a training.
    tokens: True to print each token with its id.
    example: Text of the question. '': the first question of the config's data.
    folder: Directory of the run, which may have been started before.

  Raises:
    ValueError, FileNotFoundError: As in `run`.
  """
  if not {'model', 'dialogue', 'rollout'} <= {*config}:
    raise ValueError(
        'a prompt is shown of a config with a model, a dialogue and a rollout, '
        'but this one lacks some of them. Choose one of the recipes.')
  config = run_defaults.complete(config, *run_defaults.run_of(config), folder)
  config_checks.check(config)
  model, budgets = policy.folder_of(config), policy.budgets_of(config)
  dialogue, tokenizer = model.dialogue, model.tokenizer
  question, passages = _sample(config, budgets.top_k)
  question = example or question
  observed = dialogues.observation(
      dialogue, [passages], tokenizer, passage_tokens=budgets.passage_tokens)
  yield f'Model {model.path}, dialogue {config.dialogue}'
  for title, ids in (
      ('Prompt of a question',
       dialogues.opening(dialogue, question, tokenizer)),
      ('Observation after a search, with example passages of at most '
       f'{budgets.passage_tokens} tokens, {observed.passages_cut} of them cut',
       observed.tokens),
      ('Retry message after an invalid action',
       dialogues.retry(dialogue, tokenizer, ()))):
    yield f'\n== {title}: {len(ids)} tokens =='
    yield from (_by_token if tokens else _as_text)(ids, tokenizer)
  yield '\n== Ends =='
  yield from _ends(dialogue, tokenizer, budgets)


def _sample(config, top_k: int) -> tuple[str, tuple[Passage, ...]]:
  """Returns an example question and `top_k` example passages.

  They are the first ones of the config's data and corpus, if it has any.
  """
  question = _QUESTION
  if config.data.get('train'):
    file = question_files.named(config.data.train, 'data.train')[0].path
    question = questions_lib.read(file, needs_golds=False)[0].text
  elif 'train' in config.data and any(
      config.data.get('per_hop', ())) and not config.search.corpus:
    with tempfile.TemporaryDirectory() as folder:
      data = build.train_set(config, pathlib.Path(folder))
    passages = data.corpus if data.corpus is not None else (_PASSAGE,)
    return data.questions[0].text, tuple(
        passages[i] for i in range(min(top_k, len(passages))))
  if not config.search.corpus:
    return question, (_PASSAGE,) * top_k
  path = corpora.locate(config.search.corpus)
  with gzip_files.opened(path) as lines:
    return question, tuple(passage for _, _, passage in itertools.islice(
        corpora.parse_lines(lines, path), top_k))


def _as_text(ids: Sequence[int], tokenizer: tokenizers.Tokenizer
            ) -> Iterator[str]:
  """Yields the lines of a text, with visible special tokens."""
  text = ''.join(
      ''.join(map(tokenizer.token, group)) if is_special
      else tokenizer.decode([*group])
      for is_special, group in itertools.groupby(
          ids, tokenizer.special_ids.__contains__))
  yield from plain(text).split('\n')


def _by_token(ids: Sequence[int], tokenizer: tokenizers.Tokenizer
             ) -> Iterator[str]:
  """Yields a line for each token: its id and its text."""
  for number in ids:
    text = (tokenizer.token(number).encode()
            if number in tokenizer.special_ids
            else tokenizer.token_bytes[number])
    yield f'{number:>8}  {text.decode("utf-8", "backslashreplace")!r}'


def _ends(dialogue: dialogues.Dialogue, tokenizer: tokenizers.Tokenizer,
          budgets: Any) -> Iterator[str]:
  """Yields lines about the ends of a turn and of a conversation."""
  ids = dict.fromkeys((*chat.ends(tokenizer), *dialogue.end_ids))
  names = [f'{number} {tokenizer.token(number)!r}' for number in ids]
  stops = [repr(text) for text in dialogue.stop_strings]
  yield ('A turn of the policy ends with the token that completes '
         f'{" or ".join(stops) or "no text"}, with an id of '
         f'{", ".join(names) or "none"}, or after {budgets.max_new_tokens} '
         'tokens.')
  yield ('A conversation ends with an answer, or after '
         f'{budgets.max_turns} turns.')
