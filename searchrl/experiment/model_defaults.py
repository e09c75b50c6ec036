# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Defaults that depend on the model and the data: dialogue, lengths and slots.

The numbers of configs/common.py suit the tiny bases, which are small models
that the library includes. For any other model, unset fields are chosen before
anything is built: from the longest prompt of the questions, from the passages
of the corpus, and from the device. docs/data.md has the rules.
"""

from collections.abc import Callable, Iterator
import copy
import math
import pathlib
from typing import Any

import jax

from searchrl.agent import dialogue as dialogues
from searchrl.agent import tools as tool_calls
from searchrl.data import datasets
from searchrl.data import question_files
from searchrl.data import questions as questions_lib
from searchrl.experiment import config_checks
from searchrl.experiment import model_folders
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.experiment import rules
from searchrl.experiment import toolsets
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.runtime import devices as devices_lib
from searchrl.runtime import gzip_files
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.search import corpus as corpora
from searchrl.trajectory import Passage, Question

_BUDGETS = 'rollout.budgets.'
# Fields that are chosen by the accelerators' memory.
_MAX_NUM_SEQS, _TENSOR = 'rollout.max_num_seqs', 'rollout.tensor'
# In the order in which they are chosen: later ones read earlier ones.
SAMPLING = (
    *(_BUDGETS + name for name in ('max_turns', 'top_k', 'max_new_tokens',
                                   'passage_tokens', 'max_prompt_tokens')),
    'rollout.max_length', _MAX_NUM_SEQS)
TRAINING = (_TENSOR, 'optimizer.learning_rate', 'algorithm.length',
            'algorithm.max_length', 'algorithm.buffer',
            'tuning.learner.pack_length', 'tuning.optimizer.learning_rate')

# Fields of configs/sft.py that follow the model and the data.
TUNING = 'learner.pack_length', 'optimizer.learning_rate'

# Options of configs/grpo.py for the shipped encoder, which knows generated
# worlds alone.
_SHIPPED = dict(encoder='tiny_e5', backend='scann')
_QUERIES = 2  # queries per turn that are counted if a call may have several
_ROOM = 64  # tokens by which a later question may be longer
_SAMPLE = 500  # passages that are measured
_UNKNOWN = 128  # tokens of a question or passage that cannot be measured
_MOST_PASSAGE = 512  # maximum tokens of a passage
_MOST_ON_CPU, _MOST = 2048, 4096  # maximum tokens of a conversation
_ROW = 1024  # minimum tokens of a row, in which several conversations fit
SLOTS = 64  # per copy of the weights, if a job only samples, on accelerators
_SMALL = 10**9  # models with fewer parameters are tuned at a higher rate


def resolved(config, folder: pathlib.Path | None = None, *,
             trains: bool = False, devices: str = '') -> Any:
  """Returns a copy of a config whose unset fields suit its model and data.

  An unset dialogue is chosen for every model. A frozen solver (config.solver)
  without a dialogue gets the policy's. An unset engine is chosen by
  `set_engine`. Unset numbers, such as lengths and budgets, are chosen only for
  models other than the tiny bases. If the run was started before with the same
  model, its recorded values fill the unset fields instead.

  Args:
    config: Config of a job with a model, a dialogue and rollouts.
    folder: Directory of the run. None: the job has no directory and therefore
      no recorded config.
    trains: Whether the job trains. If so, further numbers are chosen, such as
      the learning rate. On accelerators, the number of slots is then not chosen
      here, but later by `memory_plan.chosen`.
    devices: Value of `config.plan.devices`, which may describe the devices of
      another machine; '': the devices of this machine.

  Raises:
    FileNotFoundError, ValueError: The model, the questions or the corpus cannot
      be read.
  """
  config = _resolved(copy.deepcopy(config), folder, trains, devices)
  solver = config.get('solver', {})
  if solver.get('dialogue') == '':
    solver.dialogue = config.dialogue
  return config


def _resolved(config, folder: pathlib.Path | None, trains: bool, devices: str
             ) -> Any:
  """Returns the config itself, in which the fields of `resolved` are set."""
  set_engine(config, folder)
  names = (*SAMPLING, *(TRAINING if trains else ()))
  unset = {name: field for name, field in rules.unset(config) if name in names}
  measured = {*unset} - {_TENSOR}
  if config.dialogue and (
      not measured or trains and measured == {_MAX_NUM_SEQS}
      and not _machine(config, devices)[0]):
    return config
  with progress.phase('Reading the tokenizer'):
    path = weights.locate(str(config.model.path or policy.TINY_BASE))
    is_tiny = model_folders.is_tiny(path)
  if is_tiny:
    config.dialogue = config.dialogue or model_folders.TINY_DIALOGUE
    return config
  config_checks.check(config)
  if 'data' in config:
    config_checks.check_questions(config)
  past = past_runs.recorded(folder) if folder else {}
  if past and past['model']['path'] == config.model.path:
    chosen = {name: rules.get(past, name) for name in ('dialogue', *unset)}
    _assign(config, {name: value for name, value in chosen.items()
                     if value is not None}, unset)
    return config
  with progress.phase('Measuring prompts and passages'):
    chosen = processes.on_first('defaults', lambda: _chosen(
        config, path, [name for name in names if name in measured], devices,
        trains))
  _assign(config, chosen, unset)
  _say_chosen(config, chosen)
  return config


def unset_of_tuning(config, folder: pathlib.Path, path: str
                   ) -> dict[str, rules.Field]:
  """Returns the unset fields of configs/sft.py that depend on model and data.

  These are the row length and the learning rate. There are none for the tiny
  bases. If the run was started before, there are none either, because its
  recorded values are set here.

  Args:
    config: Config of configs/sft.py.
    folder: Directory of the run.
    path: Path of the model's directory.

  Returns:
    The fields by their dotted names, for `follow_in_tuning`.
  """
  past = past_runs.recorded(folder)
  unset = {name: field for name, field in rules.unset(config)
           if name in TUNING and not model_folders.is_tiny(path)}
  for name, field in unset.items() if past else ():
    field.set(rules.get(past, name))
  return {} if past else unset


def follow_in_tuning(unset: dict[str, rules.Field], config,
                     shape: transformer.TransformerConfig, longest: int
                    ) -> None:
  """Sets the row length and learning rate of configs/sft.py if they are unset.

  Args:
    unset: Fields to set, from `unset_of_tuning`.
    config: Config of configs/sft.py.
    shape: Shape of the model, from whose size a learning rate is chosen.
    longest: Number of tokens of the longest conversation in the data.
  """
  if not unset:
    return
  most = _MOST_ON_CPU if jax.default_backend() == 'cpu' else _MOST
  size = sum(x.size for x in jax.tree.leaves(transformer.abstract(shape)))
  full = 1e-4 if size < _SMALL else 2e-5
  chosen = {
      'learner.pack_length': min(max(_rounded(longest, 64), _ROW), most),
      'optimizer.learning_rate': 2e-4 if config.model.lora.rank else full}
  for name, field in unset.items():
    field.set(chosen[name])
  _say_chosen(config, {name: chosen[name] for name in unset})


def _say_chosen(config, chosen: dict[str, Any]) -> None:
  processes.say(f'Chosen for {config.model.path} and its data: ' + ', '.join(
      f'{name}={value}' for name, value in chosen.items()) + '.')


def named_dialogue(config, folder: pathlib.Path) -> str:
  """Returns the name of a config's dialogue.

  If config.dialogue is empty, it is the dialogue that the run has recorded, or
  else the default dialogue of the model.

  Args:
    config: Config with a model and a dialogue.
    folder: Directory of the run.
  """
  known = config.dialogue or past_runs.recorded(folder).get('dialogue')
  if known:
    return known
  path, _, tokenizer = model_folders.parts(
      str(config.model.path or policy.TINY_BASE))
  return model_folders.default_dialogue(path, tokenizer)


def set_engine(config, folder: pathlib.Path | None) -> None:
  """Sets the engine to BM25 if a corpus file is searched by an unset engine.

  A run that was started before keeps its recorded engine. The options of the
  shipped encoder are removed if the engine is not 'dense'.
  """
  search = config.get('search', {})
  engine = dict(rules.unset(config)).get('search.engine')
  if search and search.engine != 'dense' and (
      search.options.to_dict() == _SHIPPED):
    search.options = {}
  past = past_runs.recorded(folder) if folder else {}
  if engine is None or not search.corpus or (
      search.options.to_dict() not in ({}, _SHIPPED)) or (
          past and past['search']['engine'] == search.engine):
    return
  engine.set('bm25')
  search.options = {}
  if not past:
    processes.say(f'Chosen for {search.corpus}: search.engine=bm25.')


def _assign(config, values: dict[str, Any], unset: dict[str, rules.Field]
           ) -> None:
  for name, value in values.items():
    if name in unset:
      unset[name].set(value)
    elif not config.dialogue:
      config.dialogue = value


def _chosen(config, path: str, names: list[str], devices: str, trains: bool
           ) -> dict[str, Any]:
  """Returns {name: value} for the fields `names` and for an unset dialogue.

  If the job trains, the number of slots on accelerators is left out, because
  `memory_plan` chooses it later.
  """
  _, shape, tokenizer = model_folders.parts(path)
  chosen: dict[str, Any] = {}
  if not config.dialogue:
    chosen['dialogue'] = model_folders.default_dialogue(
        path, tokenizer, toolsets.listed(config))
  dialogue = model_folders.load_dialogue(
      chosen.get('dialogue', config.dialogue), tokenizer,
      tools=toolsets.listed(config))

  def get(name):
    return chosen[name] if name in chosen else rules.get(config, name)

  on_cpu, copies = _machine(config, devices)
  questions = list(_questions(config))
  choices: dict[str, Callable[[], Any]] = {
      # As Search-R1, four searches and an answer; more for many hops.
      'max_turns': lambda: max(
          5, 2 + max((question.hops for question in questions), default=1)),
      'top_k': lambda: 3,  # as Search-R1
      'max_new_tokens': lambda: 128 if on_cpu else 500,  # as Search-R1
      'passage_tokens': lambda: _passage_tokens(config, dialogue, tokenizer),
      'max_prompt_tokens': lambda: _rounded(
          _longest_prompt(questions, dialogue, tokenizer) + _ROOM, 64),
  }
  choices = {_BUDGETS + name: choice for name, choice in choices.items()} | {
      'rollout.max_length': lambda: min(
          _longest_conversation(get, dialogue, tokenizer),
          max(_MOST_ON_CPU if on_cpu else _MOST,
              get(_BUDGETS + 'max_prompt_tokens')
              + get(_BUDGETS + 'max_new_tokens')),
          shape.max_position_embeddings),
      _MAX_NUM_SEQS: lambda: (
          _rounded(16, copies) if on_cpu else
          None if trains else SLOTS * copies),
      'optimizer.learning_rate': lambda: _rate(config.model),
      'algorithm.length': lambda: _most_written(get),
      'algorithm.max_length': lambda: _most_written(get),
      'algorithm.buffer': lambda: max(get('algorithm.max_length') // 5, 1),
      'tuning.learner.pack_length': lambda: get('rollout.max_length'),
      'tuning.optimizer.learning_rate': lambda: _rate(config.tuning.model),
  }
  for name in names:
    chosen[name] = choices[name]()
  return {name: value for name, value in chosen.items() if value is not None}


def _rate(model: Any) -> float:
  """Returns a learning rate: 2e-4 for LoRA adapters, 1e-5 for all weights."""
  return 2e-4 if model.lora.rank else 1e-5


def _machine(config, devices: str) -> tuple[bool, int]:
  """Returns whether the devices are CPUs, and the number of rollout copies.

  A copy of the model's weights is shared by rollout.tensor devices.
  """
  if devices:
    on_cpu, (kind, count) = False, devices_lib.parse(devices)
    processes = max(count // kind.a_process, 1)
  else:
    on_cpu = jax.default_backend() == 'cpu'
    count, processes = len(meshes.all_devices()), jax.process_count()
  apart = config.get('train', {}).get('rollout_devices', 0)
  count = apart * processes or count
  return on_cpu, max(count // config.rollout.tensor, 1)


def _questions(config) -> Iterator[Question]:
  """Yields the questions of the config's files, and then ask.question."""
  data = config.get('data', {})
  for field in ('train', 'evaluate'):
    names = data.get(field, '')
    for file in question_files.named(
        '' if names == datasets.WORLDS else names, f'data.{field}',
        may_be_folder=field == 'evaluate'):
      yield from questions_lib.read(
          file.path, needs_golds=False,
          question_mark=data.get('question_mark', False))
  asked = config.get('ask', {}).get('question')
  if asked:
    yield Question(asked, asked, ())


def _longest_prompt(questions: list[Question], dialogue: dialogues.Dialogue,
                    tokenizer: Any) -> int:
  """Returns the number of tokens of the longest prompt of a question.

  Without questions, it is a guess.
  """
  def tokens(text):
    return len(dialogues.opening(dialogue, text, tokenizer))

  bare = tokens('')
  longest = 0 if questions else bare + _UNKNOWN
  for text in sorted((question.text for question in questions),
                     key=lambda text: -len(text.encode())):
    # A token has at least one byte, so that all others are shorter.
    if bare + len(text.encode()) + model_folders.MERGED <= longest:
      break
    longest = max(longest, tokens(text))
  return longest


def _passage_tokens(config, dialogue: dialogues.Dialogue, tokenizer: Any
                   ) -> int:
  """Returns a number of tokens that 95 % of a corpus's passages do not exceed.

  A passage is counted as the dialogue writes it. The number is a multiple of 16
  and at most 512. Without a corpus file, it is 128.
  """
  if not config.search.corpus:
    return _UNKNOWN
  lengths = sorted(
      len(tokenizer.encode_data(dialogues.in_json(piece, dialogue.json_levels)))
      for passage in sample(config.search.corpus, _SAMPLE)
      for piece in dialogue.arrange(dialogue.passage, [(passage,)]))
  return min(_rounded(lengths[math.ceil(0.95 * len(lengths)) - 1], 16),
             _MOST_PASSAGE)


def sample(file: str, count: int) -> Iterator[Passage]:
  """Yields passages at evenly spaced positions of a corpus file.

  A file with fewer passages gives some of them several times. A compressed file
  gives its first passages.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: A line is not a passage.
  """
  path = corpora.locate(file)
  size = path.stat().st_size
  with gzip_files.opened(path) as lines:
    if path.suffix == '.gz':
      for _, (_, _, passage) in zip(range(count), corpora.parse_lines(
          lines, path)):
        yield passage
      return
    for place in range(count):
      lines.seek(size * place // count)
      if place:
        lines.readline()  # the rest of a line
      start, line = lines.tell(), lines.readline()
      if line.strip():
        yield corpora.parse(line, f'the line at byte {start} of {path}')


def _longest_conversation(get: Callable[[str], Any],
                          dialogue: dialogues.Dialogue, tokenizer: Any) -> int:
  """Returns the number of tokens of a conversation that uses all its budgets.

  A search has one query, or two if a call may have several. The number is
  rounded up to a multiple of 64.

  Args:
    get: Function from the dotted name of a config field to its value.
    dialogue: Dialogue, whose text around passages is counted, too.
    tokenizer: Tokenizer of the model.
  """
  turns, top_k, new, passage, prompt = (get(name) for name in SAMPLING[:5])
  queries = _QUERIES if dialogue.arrange is tool_calls.by_query else 1
  frame = len(dialogues.observation(
      dialogue, [()] * queries, tokenizer, passage_tokens=passage).tokens)
  searched = queries * top_k * passage + frame
  return _rounded(prompt + turns * new + (turns - 1) * searched, 64)


def _most_written(get: Callable[[str], Any]) -> int:
  """Returns the most tokens that the policy can write in all of its turns."""
  return min(get(_BUDGETS + 'max_turns') * get(_BUDGETS + 'max_new_tokens'),
             get('rollout.max_length'))


def _rounded(number: int, multiple: int) -> int:
  """Returns the smallest multiple that is not below the number."""
  return -(-number // multiple) * multiple
