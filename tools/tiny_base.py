# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Makes the tiny models that are shipped and used by default.

  python -m searchrl.main --config=tools/tiny_base.py:instruct \
      --workdir=runs/instruct
  python -m searchrl.main --config=tools/tiny_base.py
  python -m searchrl.main --config=tools/tiny_base.py:raw --workdir=runs/raw
  python -m searchrl.main --config=tools/tiny_base.py:proposer \
      --workdir=runs/proposer

Each command writes a Hugging Face folder, RUN/model, whose README.md has its
scores, data and digests. The models in searchrl/assets were made in this way.
tiny_instruct is trained from random parameters and has every skill. tiny_base
and tiny_raw are tiny_instruct after a few more lessons from an agent with other
habits: tiny_base answers at once or after one search, and tiny_raw breaks the
format more often than not. tiny_proposer is tiny_base after lessons in writing
questions. These commands make tiny_instruct at another size, and tiny_base from
it:

  python -m searchrl.main --config=tools/tiny_base.py:instruct/4m \
      --workdir=runs/instruct_4m
  python -m searchrl.main --config=tools/tiny_base.py \
      --config.model.path=runs/instruct_4m/model

Hardware: one core of an AMD EPYC (family 26, model 2). Time: 1,560 CPU seconds
for tiny_instruct, 35 and 38 for tiny_base and tiny_raw; 550 on another host for
tiny_proposer. Result: before any RL, exact match of greedy answers to fresh
questions of 1 to 4 hops, for tiny_instruct .97 .83 .81 .60, for tiny_base .95
.00 .00 .00; the cards and BENCHMARKS.md have more. Other sizes: with 0.25m,
1,077 CPU seconds of an AMD EPYC (family 25, model 17), tiny_instruct answers
.83 .00 .00 .00 and its tiny_base .81 .00 .00 .00, because both stop after one
search: the model is too small for the lessons. 4m: not yet measured.
"""

import ml_collections

from configs import arguments
from searchrl.experiment.rules import field, seed

_SIZES = {  # sizes of tiny_instruct, with keys as in config.json
    '0.25m': dict(hidden_size=48, intermediate_size=128, head_dim=12),
    '1m': dict(),
    '4m': dict(hidden_size=256, num_hidden_layers=5, intermediate_size=704,
               head_dim=64),
}
_HABITS = dict(  # probabilities of the teacher's errors; world.teacher.Habits
    at_once=0.30, recite=0.5, wrong_plan=0.10, bad_query=0.15, wrong_fact=0.15,
    stop_early=0.85, give_up=0.5, go_on=0.06, wrong_answer=0.10, broken=0.05)


def get_config(text: str = ''):
  """Returns the config of a model: of tiny_base, or the one with a `kind`."""
  args = arguments.parse(
      text, size=('laptop', 'smoke'), model=(), setting=(),
      kind=('instruct', 'raw', 'proposer'), parameters=tuple(_SIZES))
  kind, parameters = args.others['kind'], args.others['parameters']
  if parameters and kind != 'instruct':
    raise ValueError(f'parameters must come with kind=instruct, but kind is '
                     f'{kind!r}.')
  config = ml_collections.ConfigDict()
  config.job = 'tools.make_tiny_base:run'
  config.seed = seed(0)  # random seed of new parameters
  config.allow_changes = False  # set by the flag --allow_changes
  config.tokenizer = dict(  # tokenizer of a new model
      # Number of ids, including tags and end of text.
      vocab_size=field(2816, at_least=300),
      worlds=24,  # number of worlds with known names
      fresh_worlds=6,  # number of worlds with new words in their names
      hard_worlds=4,  # number of hard worlds; see world.hard in common.py
  )
  config.model = dict(
      path='tiny_instruct',  # model to start from; '': random parameters
      shape=dict(  # shape of a new model, with keys as in config.json
          hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
          num_key_value_heads=2, head_dim=32, intermediate_size=352,
          rope_theta=10_000.0, max_position_embeddings=1024),
  )
  config.lessons = dict(
      # Seed of the first world; the seeds of runs are smaller.
      seed=seed(1_500_000),
      worlds=dict(
          common=True,  # True: worlds have common knowledge
          fresh=0.4,  # share of worlds with new words in their names
          hard=0.2,  # share of hard worlds
      ),
      kinds=dict(  # lesson function, prompt and options, by kind
          drill=dict(lesson='tools.lessons:drill'),
          reading=dict(lesson='tools.lessons:reading'),
          search=dict(
              lesson='tools.lessons:search',
              prompt='Search, then answer: {question}\n',
              hops=(7, 6, 4, 3),  # shares of questions with 1, 2, ... hops
              common=0.4,  # share of questions about common knowledge
              habits=dict(_HABITS)),
          recall=dict(
              lesson='tools.lessons:recall', prompt='Answer: {question}\n',
              hops=(75, 18, 7),  # shares of questions with 1, 2, ... hops
              fresh=0.1,  # share of questions that nobody can remember
              thought=0.5),  # share of answers with a thought before them
          given=dict(
              lesson='tools.lessons:given',
              prompt='Read, then answer: {question}\n',
              hops=(3, 2, 1),  # shares of questions with 1, 2, ... hops
              common=0.15,  # share of questions about common knowledge
              top_k=3),  # number of passages
      ),
      # Stages in order: numbers of worlds, of echoes, and of lessons per world.
      stages=(
          dict(worlds=60, echoes=0, counts=dict(
              drill=2, reading=5, search=20, recall=12, given=3)),
      ),
      pack_length=512,  # tokens per packed row; longer lessons are left out
      batch_tokens=4096,  # tokens per update, without padding
  )
  config.optimizer = dict(
      learning_rate=6e-4, b2=0.98, weight_decay=0.05,
      warmup_steps=20,  # updates until the full learning rate
      schedule='cosine',  # learning rate: constant, cosine or linear
      final_fraction=0.1,  # share of the learning rate left at the end
      save_every=50,  # updates between checkpoints
  )
  config.learner = dict(
      microbatch_rows=field(2, at_least=1),  # packed rows per micro-batch
      max_segments=field(16, at_least=1),  # most lessons per packed row
  )
  config.card = dict(  # contents of the model's README.md
      command='tools/tiny_base.py' + f':{text}' * bool(kind),
      title='The base model of searchrl',
      about='It has bad habits: it answers at once, or after one search.',
      scores=dict(
          world_seed=101,  # random seed of the world of the questions
          questions_per_hop=100,  # number of questions of each hop count
          max_hops=4,  # most hops per question
          slots=72,  # number of concurrent conversations
          length=512,  # most tokens per conversation
          prompts=dict(
              search=dict(
                  dialogue='searchrl.agent.dialogue:laptop', passages=0,
                  sets=('known', 'unseen', 'famous', 'outdated'),
                  budgets=_budgets(max_turns=6, max_prompt_tokens=96)),
              answer=dict(
                  dialogue='searchrl.agent.dialogue:laptop_answer', passages=0,
                  sets=('known', 'famous', 'outdated'),
                  budgets=_budgets(max_turns=1, max_prompt_tokens=96)),
              read=dict(
                  dialogue='searchrl.agent.dialogue:laptop_read', passages=3,
                  sets=('known', 'famous', 'outdated'),
                  budgets=_budgets(max_turns=1, max_prompt_tokens=440)),
          )))
  if kind == 'instruct' or args.size == 'smoke':
    _from_nothing(config)
    config.model.shape.update(_SIZES.get(parameters, {}))
  elif kind == 'raw':
    config.card.update(
        title='The raw model of searchrl',
        about='It breaks the format of a turn more often than not.')
    config.lessons.seed = 1_600_000
    config.lessons.kinds.search.habits.update(broken=0.7)
  elif kind == 'proposer':
    _proposer(config)
  if args.size == 'smoke':
    _smoke(config)
  return config


def _budgets(**budgets) -> dict[str, int]:
  return dict(max_new_tokens=48, passage_tokens=96, top_k=2, **budgets)


def _from_nothing(config) -> None:
  """Sets tiny_instruct: echoes, then reading, then all kinds of lessons."""
  config.model.path = ''
  config.lessons.seed = 1_000_000
  config.lessons.kinds.search.update(
      habits=dict(), common=0.15)  # dict(): the defaults of world.teacher
  config.lessons.stages = (
      dict(worlds=0, echoes=3600, counts=dict()),
      dict(worlds=150, echoes=100, counts=dict(
          drill=14, reading=24, search=4, recall=10)),
      dict(worlds=1300, echoes=200, counts=dict(
          drill=3, reading=10, search=33, recall=15, given=4)),
  )
  config.lessons.batch_tokens = 3072
  config.optimizer.update(
      learning_rate=1.5e-3, warmup_steps=50, final_fraction=0.05,
      save_every=200)
  config.card.update(
      title='The disciplined model of searchrl',
      about='It can read, copy and search, but makes some mistakes.')


def _proposer(config) -> None:
  """Sets tiny_proposer: tiny_base learns proposals and keeps its skills."""
  config.model.path = 'tiny_base'
  config.lessons.seed = 1_700_000
  config.lessons.kinds.propose = dict(
      lesson='tools.proposer:propose',
      prompt='Write a question. {question}\n',
      hops=(1, 1))  # shares of questions with 1, 2, ... hops
  config.lessons.stages = (
      dict(worlds=400, echoes=0, counts=dict(propose=20, search=6, recall=2)),)
  config.card.update(
      title='The proposer of searchrl',
      about='It writes questions of one or two hops about a passage, often bad '
      'ones, and answers as tiny_base does.')


def _smoke(config) -> None:
  """Sets a run of a minute, for tests."""
  config.tokenizer.update(
      worlds=1, fresh_worlds=1, hard_worlds=1, vocab_size=512)
  config.model.shape.update(hidden_size=32, num_hidden_layers=2, head_dim=8,
                            intermediate_size=64)
  config.lessons.update(
      stages=(dict(worlds=2, echoes=2, counts=dict(
          drill=4, reading=4, search=3, recall=2, given=1)),),
      batch_tokens=1024)
  config.optimizer.update(warmup_steps=2, save_every=2)
  config.card.scores.update(questions_per_hop=2, max_hops=2, slots=8)
