# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Writes demonstrations for configs/sft.py: rollouts of a script or a teacher.

  python -m searchrl.main --config=configs/demonstrations.py \
      --config.data.train=train.jsonl --config.search.corpus=corpus.jsonl

It writes runs/demonstrations/demonstrations.jsonl. The questions of train.jsonl
have chains, {"metadata": {"chain": [["capital of Norway", "Oslo"], ...]}}, a
query and its answer for each hop. The script says what it looks for, searches,
reads what the engine found, and answers. docs/own_data.md has the next steps.

Hardware: any. Time: the searches alone, about 1 ms each. Result: text; the
training after it is measured by its own config.
"""

from configs import common
import ml_collections
from searchrl.experiment.rules import field

_PARTS = ('seed', 'allow_changes', 'model', 'data', 'world', 'search',
          'dialogue', 'reward', 'reward_options', 'outcome', 'rollout', 'mesh')


def get_config(text: str = '') -> ml_collections.ConfigDict:
  base = common.as_evaluated(common.get_config(text))
  config = ml_collections.ConfigDict()
  config.job = 'searchrl.jobs.demonstrate:run'
  for name in _PARTS:
    config[name] = base[name]
  for name in ('evaluate', 'mix', 'weights'):
    del config.data[name]  # they choose questions of evaluation and of training
  config.demonstrations = dict(
      # Author of the turns: a script that follows chains, or a served model.
      source=field('chains', one_of=('chains', 'teacher')),
      count=field(0, zero='as many as there are'),  # demonstrations to write
      hops=(),  # hop counts of the questions; (): all
      # Demonstrations of each hop count, at most.
      most_per_hops=field(0, zero='no limit'),
      most=field(1, at_least=1),  # demonstrations of a question, at most
      least_reward=1.0,  # a lower reward is left out
      # Questions per round; a kill loses one round.
      questions_a_round=field(200, at_least=1),
      # Share of the questions whose first query is a poor one.
      retry_share=field(0.0, at_least=0, at_most=1),
      train_poor_queries=False,  # True: a poor first turn is trained on, too
  )
  config.teacher = dict(  # a model behind OpenAI's chat API
      url='',  # such as http://127.0.0.1:8001/v1/chat/completions
      model='',  # its name on the server
      token_env='',  # environment variable with a bearer token; '': none
      samples=field(4, at_least=1),  # samples per question
      temperature=field(0.7, at_least=0),
      # Most tokens of a turn, as the teacher's tokenizer counts them.
      max_tokens=field(512, at_least=1),
      connections=field(16, at_least=1),  # simultaneous requests
      deadline_secs=field(300.0, above=0),  # seconds for a turn, with all tries
      try_secs=field(120.0, above=0),  # seconds for one try
      tries=field(4, at_least=1),  # tries of a request
  )
  return config
