# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every family of the papers, with each dialogue that a setting names for it.

A case is one step of training on passages of real length, from a tiny
checkpoint with the family's real tokenizer, and its export. The oracles are
transformers' tokenizer and chat template and, with the `parity` extra (torch),
transformers' models. Most cases are run by hand: BENCHMARKS.md says which ones
have been run, with their results.
"""

import json
import pathlib
from typing import NamedTuple

import family_models
import numpy as np
import pytest
import real_tokenizers
import transformers

from searchrl import main
from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tools
from searchrl.experiment import model_folders
from searchrl.models import weights
from searchrl.models.inference import engine as engines
from searchrl.models.inference import stops
from searchrl.papers import settings
from searchrl.papers.dr_zero import proposals
from searchrl.papers.known_models import MODELS
from searchrl.rollouts import records
from searchrl.runtime import plugins
from searchrl.trajectory import Trajectory

OPTIMIZATION_LEVEL = 1

MODEL_OF = {  # tokenizer -> a model of the papers
    family: hub_id.partition('/')[2].lower()
    for family, hub_id in family_models.HUB_IDS.items()}
ENDS = {'llama3-instruct': '<|eot_id|>', 'llama3': '<|end_of_text|>',
        'mistral': '</s>', 'r1-distill': '<｜end▁of▁sentence｜>'}
# With 0, the policy of these cases does not search, or learns nothing because
# all rewards of each group are equal.
SEEDS = {'mistral-study-grpo': 1, 'r1-distill-drzero_solver-grpo': 1,
         'llama3-drzero_solver-grpo': 1, 'llama3-instruct-study-grpo': 1,
         'llama3-instruct-study-ppo': 1, 'llama3-instruct-zerosearch-grpo': 1,
         'llama3-instruct-drzero_solver-grpo': 2}
DATE = '26 Jul 2024'  # the day of all our prompts
SYSTEM = {'searchrl.agent.tools:dspo':
          'You are a helpful and harmless assistant.'}
LENGTH, NEW_TOKENS, CONTINUED = 1792, 64, 40
PASSAGE = 200  # tokens


class Case(NamedTuple):
  """A family, and a setting with a dialogue of its own."""

  family: str
  recipe: str
  setting: str
  dialogue: str

  def __str__(self):
    return f'{self.family}-{self.setting}-{self.recipe}'

  @property
  def model(self):
    """Name of a model with the setting; no paper trains Mistral."""
    return MODEL_OF.get(self.family, 'qwen2.5-7b-instruct')


def named(family):
  """One setting for each dialogue that the settings name for a family."""
  found = {}
  for name in settings.SETTINGS:
    rows = {row.field: row for ancestor in settings.lineage(name)
            for row in settings.rows_for(
                ancestor, MODELS[MODEL_OF[family]], 'grpo', True)}
    found.setdefault(rows['dialogue'].value, name)
  return [(setting, dialogue) for dialogue, setting in found.items()]


IN_CHAT = 'searchrl.agent.chat:search_r1'
CASES = [Case(family, 'grpo', *pair) for family in MODEL_OF
         for pair in named(family)] + [
             Case('mistral', 'grpo', 'study', IN_CHAT),
             Case('llama3-instruct', 'ppo', 'study', IN_CHAT),
             Case('llama3', 'ppo', 'study', 'searchrl.agent.dialogue:search_r1')]
SLOW = ['qwen2.5-zerosearch-grpo']  # in the whole tier


def test_each_dialogue_of_the_settings_has_a_case():
  rows = [row.value for setting in settings.SETTINGS.values()
          for row in setting.rows if row.field == 'dialogue']
  assert {case.dialogue for case in CASES} == set(rows)
  assert {*SLOW, *SEEDS} < set(map(str, CASES))


def write_data(folder, case):
  """Writes questions, and passages of more than three hundred words."""
  words = ('The river Tarn flows past old towns, mills, bridges and vineyards '
           'in the south; its waters rose above every quay in March 1930. ')
  corpus = [{'id': str(n), 'title': f'Town {n}', 'text':
             f'Town number {n} is one of the river towns. ' + words * 20}
            for n in range(6)]
  texts = [f'Which town is number {n} by the river?' for n in range(4)]
  if case.setting == 'drzero_proposer':
    texts = [proposals.ask(passage['text'][:400], 2) for passage in corpus[:4]]
  questions = [{'id': f'q{n}', 'question': text, 'golden_answers': ['Paris']}
               for n, text in enumerate(texts)]
  for name, lines in (('corpus', corpus), ('questions', questions)):
    (folder / f'{name}.jsonl').write_text(
        ''.join(json.dumps(line) + '\n' for line in lines))


def fields(case, folder):
  """Returns the values that make a setting small."""
  ppo, proposes = case.recipe == 'ppo', case.setting == 'drzero_proposer'
  return {
      'seed': SEEDS.get(str(case), 0),
      'model.path': folder / 'source', 'model.dtype': 'float32',
      'data.train': folder / 'questions.jsonl',
      'search.corpus': folder / 'corpus.jsonl', 'search.engine': 'bm25',
      'search.options': {}, 'dialogue': case.dialogue,
      'evaluate.search.engine': '', 'evaluate.search.options': {},
      'rollout.dtype': 'float32', 'rollout.max_num_seqs': 4,
      'rollout.questions_per_step': 4 if ppo or proposes else 2,
      'rollout.group_size': 1 if ppo else 2, 'rollout.max_length': LENGTH,
      'rollout.budgets.max_turns': 3, 'rollout.budgets.top_k': 2,
      'rollout.budgets.passage_tokens': PASSAGE,
      'rollout.budgets.max_new_tokens': NEW_TOKENS,
      'rollout.budgets.max_prompt_tokens': 700,
      'learner.dtype': 'float32', 'learner.minibatches': 1,
      'optimizer.warmup_steps': 0, 'optimizer.learning_rate': 1e-4,
      'mesh.fsdp': 1, 'train.num_steps': 1, 'train.progress': False,
      'train.loggers': (), 'evaluate.initial': False,
  } | ({'solver.path': folder / 'source', 'reward_options.attempts': 2,
        'solver.budgets.max_turns': 1,
        'solver.budgets.max_new_tokens': NEW_TOKENS}
       if proposes else {})


class Trained(NamedTuple):
  """A run of a case."""

  case: Case
  run: pathlib.Path
  trajectories: list[Trajectory]
  exported: model_folders.ModelFolder
  auto: transformers.PreTrainedTokenizerBase  # transformers' own


@pytest.fixture(scope='module', params=[
    pytest.param(case, id=str(case), marks=(
        pytest.mark.slow if str(case) in SLOW else pytest.mark.long))
    for case in CASES])
def trained(request, tmp_path_factory):
  case = request.param
  real_tokenizers.folder(case.family)  # or skips
  folder = tmp_path_factory.mktemp('case')
  family_models.write(folder / 'source', case.family, plugins.resolve(
      case.dialogue, field='dialogue', ours=''))
  write_data(folder, case)
  with pytest.raises(SystemExit) as ended:
    main.run([f'--config=configs/{case.recipe}.py:{case.setting}/{case.model}',
              f'--workdir={folder / "run"}', *(
                  f'--config.{key}={value}'
                  for key, value in fields(case, folder).items())])
  assert ended.value.code is None
  run = folder / 'run'
  file, = (run / 'trajectories').glob('*.gz')
  return Trained(
      case, run, records.read(file),
      model_folders.read(str(run / 'model'), case.dialogue),
      transformers.AutoTokenizer.from_pretrained(run / 'model'))


def test_the_policy_acts(trained):
  turns = [turn for trajectory in trained.trajectories
           for turn in trajectory.turns]
  assert len(trained.trajectories) in (4, 8)
  assert any(turn.passages for turn in turns)
  assert len({turn.action.kind for turn in turns}) > 1


def render(trained, messages):
  """Returns the text that transformers itself makes of messages."""
  options = {}
  if trained.exported.dialogue.json_levels:
    options['tools'] = [tools.schema()]
  return trained.auto.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True, date_string=DATE,
      **options)


def first_messages(trained, question):
  content = trained.exported.dialogue.prompt(question).removeprefix(' ')
  system = SYSTEM.get(trained.case.dialogue)
  return [*[{'role': 'system', 'content': system}] * bool(system),
          {'role': 'user', 'content': content}]


def test_a_prompt_has_the_ids_of_transformers(trained):
  dialogue = trained.exported.dialogue
  for trajectory in trained.trajectories:
    question = trajectory.question.text
    expected = (trained.auto.encode(
        render(trained, first_messages(trained, question)),
        add_special_tokens=False) if dialogue.is_framed
                else trained.auto.encode(dialogue.prompt(question)))
    assert list(trajectory.prompt_tokens) == expected


def written(trained, ids):
  return trained.auto.decode(ids, skip_special_tokens=False,
                             clean_up_tokenization_spaces=False)


def shown(trained, passages):
  """Returns the passages of a search as text, each cut on its own."""
  levels, pieces = trained.exported.dialogue.json_levels, []
  for number, passage in enumerate(passages, 1):
    title, text = passage.title, passage.text
    if 'zerosearch' in trained.case.setting:
      piece = f'Doc {number}: {title} {text}'
    else:
      piece = (f'Doc {number} (Title: "{title}")\n{text}' if levels
               else f'Doc {number}(Title: "{title}") {text}')
    if levels:
      piece = '\n\n' * (number > 1) + piece
    elif number < len(passages):
      piece += '\n'
    for _ in range(levels):
      piece = json.dumps(piece)[1:-1]
    # SentencePiece writes a space before a text, but not within it.
    start = '\n' if trained.case.family == 'mistral' else ''
    first = len(trained.auto.encode(start, add_special_tokens=False))
    ids = trained.auto.encode(start + piece, add_special_tokens=False)
    pieces.append(continued(trained, ids[first:first + PASSAGE]))
  return ''.join(pieces)


def continued(trained, ids):
  """Returns the text that ids add to a text before them."""
  before = trained.auto.encode('x', add_special_tokens=False)
  return written(trained, [*before, *ids]).removeprefix('x')


def conversation(trained, trajectory):
  """Returns the text of a conversation in tags, all in one turn."""
  dialogue, question = trained.exported.dialogue, trajectory.question.text
  text = (render(trained, first_messages(trained, question))
          if dialogue.is_framed
          else (trained.auto.bos_token or '') + dialogue.prompt(question))
  for turn in trajectory.turns:
    text += continued(trained, turn.action_tokens)
    if turn.passages:
      text += (f'\n\n<information>{shown(trained, turn.passages)}'
               '</information>\n\n')
    elif turn.observation_tokens:
      text += dialogue.invalid
  return text


def conversation_with_tools(trained, trajectory):
  """Returns the text of a conversation by the chat template.

  Templates rewrite what the assistant says, so a word is rendered in its place.
  """
  end = ENDS.get(trained.case.family, '<|im_end|>')
  messages, last = first_messages(trained, trajectory.question.text), ''
  words, levels = {}, trained.exported.dialogue.json_levels
  for number, turn in enumerate(trajectory.turns):
    said = continued(trained, turn.action_tokens)
    if not turn.observation_tokens:
      last = said
      break
    words[f'Turn{number}'] = said.removesuffix(end)
    found = shown(trained, turn.passages) if turn.passages else ''
    words[f'Found{number}'] = found or dialogues.in_json(
        tools._INVALID, levels)
    messages += [
        {'role': 'assistant', 'content': f'Turn{number}'},
        {'role': 'tool', 'name': 'search', 'tool_call_id': '123456789',
         'content': json.dumps({'result': f'Found{number}'})}]
  text = render(trained, messages)
  for word, replacement in words.items():
    text = text.replace(word, replacement)
  return text + last


def test_a_conversation_is_the_text_of_transformers(trained):
  expected = (conversation_with_tools if trained.exported.dialogue.json_levels
              else conversation)
  for trajectory in trained.trajectories:
    assert written(trained, trajectory.tokens) == expected(
        trained, trajectory)


def test_sampler_and_learner_agree_at_each_sampled_token(trained):
  file, = (trained.run / 'learned').glob('*.gz')
  learned, compared = records.read_learned(file), 0
  for trajectory in trained.trajectories:
    values = learned.get((trajectory.group, trajectory.sample), {})
    if not values.get('old_logprobs'):  # not trained on
      continue
    sampled = [logprob for turn in trajectory.turns
               for logprob in turn.action_logprobs]
    assert len(sampled) == sum(trajectory.loss_mask)
    np.testing.assert_allclose(values['old_logprobs'], sampled, atol=1e-4)
    compared += 1
  assert compared


def test_an_export_has_the_tokenizer_and_the_ends_of_its_source(trained):
  source = trained.run.parent / 'source'
  auto, theirs = trained.auto, transformers.AutoTokenizer.from_pretrained(
      source)
  assert auto.chat_template == theirs.chat_template
  ours = trained.exported.tokenizer
  for trajectory in trained.trajectories:
    text = written(trained, trajectory.tokens)
    ids = auto.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert [tuple(ids)] == ours._ids([text])
  ends = (transformers.GenerationConfig.from_pretrained(path).eos_token_id
          for path in (source, trained.run / 'model'))
  published, exported = map(np.atleast_1d, ends)
  end = auto.convert_tokens_to_ids(ENDS.get(trained.case.family, '<|im_end|>'))
  assert {*published.tolist(), end} == set(exported.tolist())


def test_transformers_continues_an_export_as_our_engine_does(trained):
  torch = pytest.importorskip('torch', reason="pip install -e '.[parity]'")
  folder = trained.run / 'model'
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32).eval()
  shape, tokenizer = trained.exported.shape, trained.exported.tokenizer
  engine = engines.Engine(shape, slots=1, length=LENGTH, stop_table=(
      stops.compile_table((), (), shape.vocab_size, chat.ends(tokenizer))))
  engine.load(weights.load(str(folder), shape), 0.0)
  longest = max(trained.trajectories, key=lambda t: len(t.tokens))
  for ids in (longest.prompt_tokens, longest.tokens):
    with torch.no_grad():
      expected = theirs.generate(
          torch.tensor([ids]), do_sample=False, max_new_tokens=CONTINUED,
          pad_token_id=0)[0, len(ids):].tolist()
    engine.append([engines.Append(0, ids, CONTINUED, (0,) * 5, True)])
    stopped = []
    while not stopped:
      stopped = engine.decode()
    assert list(stopped[0].tokens) == expected
    engine.release(0)
