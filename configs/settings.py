# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What each paper trained with: one setting a function, for every model.

  python -m searchrl.main --config=configs/grpo.py:study/qwen2.5-7b

A setting fixes what a paper or its published scripts fix: batch, group,
learning rates, warm-up, steps, KL, lengths, turns, engine, dialogue and reward.
What they do not say is ours. The algorithm stays the recipe's. docs/settings.md
compares the settings, tests/sentences.py has the sentence behind each number.

Result: of no setting measured yet.
"""

from collections.abc import Callable
import difflib

import ml_collections

from configs import models
from configs.models import Model

_EM = 'searchrl.agent.rewards:em'
_INDEX = 'runs/e5'  # of intfloat/e5-base-v2, by configs/build_index.py: exact
# The laptop run with larger updates: learning rate, and updates a batch (but
# recipes that are good for one keep to it). Fixed before anything was measured.
STRESS = {'stress_1': (2e-4, 2), 'stress_2': (4e-4, 4), 'stress_3': (6e-4, 4)}
_WITHOUT_MODEL = ('laptop', 'smoke', *STRESS)  # the other sizes

Config = ml_collections.ConfigDict


def apply(config: Config, size: str, default: str) -> bool:
  """Gives a config the values of a setting, if its size names a model.

  configs/common.py applies Search-R1's; a recipe, at its end, what is wanted.
  The recipe's algorithm, a group_size of 1, and a single update a batch are its
  own: a setting reads them, so they have to be there before.

  Args:
    config: of a recipe, as for a laptop.
    size: 'laptop', 'smoke', one of STRESS, a model, or SETTING/MODEL.
    default: the setting of a model alone.

  Returns:
    Whether the size names a model.

  Raises:
    ValueError: there is no such size.
  """
  if size in _WITHOUT_MODEL:
    return False
  setting, model = parse(size, default)
  SETTINGS[setting](config, models.MODELS[model])
  return True


def is_laptop(size: str) -> bool:
  """Whether a size is that of a laptop run, with larger updates or not."""
  return size == 'laptop' or size in STRESS


def parse(size: str, default: str) -> tuple[str, str]:
  """The setting and the model of a size that names a model."""
  setting, slash, model = size.rpartition('/')
  setting = setting if slash else default
  if setting in SETTINGS and model in models.MODELS:
    return setting, model
  near = _nearest(model, [*models.MODELS])
  if size in SETTINGS:
    why, near = 'a setting alone', [f'{size}/qwen2.5-7b-instruct']
  elif not slash:
    why, near = 'none of them', _nearest(
        model, [*_WITHOUT_MODEL, *models.MODELS])
  elif setting in SETTINGS:
    why, near = f'no model {model!r}', [f'{setting}/{name}' for name in near]
  else:
    why, near = f'no setting {setting!r}', [
        f'{name}/{near[0]}' for name in _nearest(setting, [*SETTINGS])]
  raise ValueError(
      f"size must be {', '.join(map(repr, _WITHOUT_MODEL))}, a model, or "
      f'SETTING/MODEL, but is {size!r}, {why}. The nearest: '
      f'{", ".join(near)}; docs/settings.md lists all. Write for instance '
      '--config=configs/dspo.py:smoke.')


def _nearest(name: str, known: list[str]) -> list[str]:
  return difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.0)


def search_r1(config: Config, model: Model) -> None:
  """Search-R1, arXiv:2503.09516, on NQ and HotpotQA; scripts v0.2.

  Differs: at most 4 updates a batch, where the script makes 10 of a batch of
  GRPO, the last of them far off policy; passages have budgets of their own in
  the 500 tokens of an observation; no entropy bonus, no top_p.
  """
  _of_any_paper(config, model)
  config.data.question_mark = True
  config.search.engine = 'dense'
  config.search.options = dict(index=_INDEX)
  config.dialogue = _tags(model)
  config.reward = config.outcome = _EM
  config.reward_options = {}
  config.rollout.budgets.update(
      max_turns=5,  # 4 with a search, and the answer's
      max_turn_tokens=500, max_prompt_tokens=2048, passage_tokens=166, top_k=3)
  config.optimizer.learning_rate = 2e-7 if model.billions >= 32 else 1e-6
  config.train.update(num_steps=1005, checkpoint_every=100, keep_checkpoints=2)
  _batch(config, questions=512, group=5, minibatches=4)
  _warm_up(config, 0.285)
  _kl(config, 1e-3)


def search_r1_nq(config: Config, model: Model) -> None:
  """Search-R1's quick start: data.train is NQ, and two turns have a search."""
  search_r1(config, model)
  config.rollout.budgets.max_turns = 3


def study(config: Config, model: Model) -> None:
  """The Empirical Study, arXiv:2505.15117: Search-R1 with a format reward.

  Keeps every checkpoint: the paper reports the last before a collapse.
  """
  search_r1(config, model)
  config.reward = 'searchrl.agent.rewards:format_em'
  config.reward_options = dict(
      lambda_f=0.4 if model.hub_id.startswith('Qwen/Qwen2.5-7B') else 0.2)
  higher = _trains_by(config, 'ppo') and model.billions < 14
  config.optimizer.learning_rate = 1e-6 if higher else 5e-7
  config.train.update(num_steps=600, keep_checkpoints=6)  # warm-up as of 1005


def zerosearch(config: Config, model: Model) -> None:
  """ZeroSearch, arXiv:2505.04588: a language model writes the documents.

  Serve one of the paper's simulators at the url first, or another with prompts
  of its own. Noise rises from 0 to 0.5 as in its README, for the paper names no
  range. Evaluation is through E5; the paper's is through Google. Two turns have
  a search, as in the paper's runs; its README says five.
  """
  search_r1(config, model)
  config.evaluate.search.update(engine='dense')
  config.evaluate.search.options = dict(index=_INDEX)
  config.dialogue = _tags(model, 'zerosearch')
  config.search.engine = 'simulated'
  config.search.options = dict(
      writer='served', simulator='google_3b',
      urls=('http://127.0.0.1:6001/v1/chat/completions',),
      max_tokens=600, temperature=0.8, connections=256,
      deadline_secs=240.0, try_secs=120.0,  # a server's queue included
      malformed='nothing',
      curriculum=dict(start=0.0, end=0.5, base=4.0, steps=0),
  )
  config.rollout.search_timeout_secs = 300.0
  config.reward = config.outcome = 'searchrl.agent.rewards:f1'
  config.rollout.budgets.update(max_turns=3, passage_tokens=409, top_k=5)
  config.optimizer.learning_rate = 1e-6
  config.train.update(num_steps=200, checkpoint_every=50)
  _batch(config, questions=64, group=5, minibatches=2, single=5)
  _warm_up(config, 0.285 if _trains_by(config, 'ppo') else 0.95)


def drzero_solver(config: Config, model: Model) -> None:
  """Dr. Zero's solver, arXiv:2601.07055, Table 6, on questions with golds.

  The paper's questions are its proposer's. A turn may have all tokens of the
  response, which passages share. One update a batch: strictly on policy.
  """
  search_r1(config, model)
  config.data.question_mark = False
  config.dialogue = _tools(model, 'dr_zero')
  config.rollout.length = 3072
  config.rollout.budgets.update(
      max_turns=5,  # a call in the fifth is not carried out
      max_turn_tokens=2560, max_prompt_tokens=512, passage_tokens=170)
  for optimizer in (config.optimizer, config.critic.optimizer):
    optimizer.max_grad_norm = 0.1
  config.optimizer.learning_rate = 1e-6
  config.train.update(num_steps=50, checkpoint_every=25)
  _batch(config, questions=256, group=5, minibatches=1)
  _warm_up(config, 0.03)
  _kl(config, 0.0)


def drzero_proposer(config: Config, model: Model) -> None:
  """Dr. Zero's proposer, Table 5: one sample a prompt, more room for both.

  data.train has the seeds that configs/drzero.py draws. The prompt is ours.
  """
  drzero_solver(config, model)
  config.solver = dict(  # who plays for the reward
      path=model.hub_id, run='', dialogue=config.dialogue,
      budgets=config.rollout.budgets.to_dict(), temperature=1.0)
  config.data.golds = False
  config.dialogue = _tools(model, 'dr_zero_proposer', 'proposer')
  config.reward = 'searchrl.agent.proposals:judge'
  config.reward_options = dict(
      attempts=5, format_weight=0.5, difficulty='difficulty')
  config.rollout.length = 4096
  config.rollout.budgets.max_prompt_tokens = 1536


def dspo(config: Config, model: Model) -> None:
  """DSPO, arXiv:2510.09255: BM25, tools and subEM on NQ and HotpotQA.

  The paper gives no learning rate, batch or steps. They are those of the
  example of verl that it starts from: one pass over the 169,615 questions.
  """
  search_r1(config, model)
  config.data.question_mark = False
  config.search.engine = 'bm25'
  config.search.options = {}
  config.dialogue = _tools(model, 'dspo')
  config.reward = config.outcome = 'searchrl.agent.rewards:subem'
  config.optimizer.learning_rate = 1e-6
  config.train.num_steps = 331
  _warm_up(config, 0.285)


SETTINGS: dict[str, Callable[[Config, Model], None]] = {
    function.__name__: function for function in (
        search_r1, search_r1_nq, study, zerosearch, drzero_solver,
        drzero_proposer, dspo)}


def _of_any_paper(config: Config, model: Model) -> None:
  """What the papers share, and what memory asks for: slots, types, mesh."""
  config.model.update(path=model.hub_id, dtype='bfloat16')
  config.data.update(per_hop=(), common=0.0, mix=())  # nothing is generated
  config.rollout.update(slots=256, length=4096, dtype='bfloat16',
                        temperature=1.0, top_p=1.0)
  for optimizer, rate in ((config.optimizer, 1e-6),
                          (config.critic.optimizer, 1e-5)):
    optimizer.update(learning_rate=rate, b2=0.999, weight_decay=0.01,
                     max_grad_norm=1.0)
  config.critic.warmup_updates = 0
  config.learner.update(remat='nothing', dtype='bfloat16')
  config.mesh.update(data=1, fsdp=-1)
  config.train.max_rollouts = 0
  config.evaluate.update(every=0, limit=0, during=0)
  config.evaluate.search.engine, config.evaluate.search.options = '', {}
  config.evaluate.worlds.kinds = ()


def _tags(model: Model, name: str = 'search_r1') -> str:
  return f'searchrl.agent.{"chat" if model.chat else "dialogue"}:{name}'


def _tools(model: Model, name: str, tags: str = 'search_r1') -> str:
  """Tags where the chat template cannot frame the answers of a tool."""
  return f'searchrl.agent.tools:{name}' if model.tools else _tags(model, tags)


def _trains_by(config: Config, algorithm: str) -> bool:
  return config.algorithm.name.endswith(f':{algorithm}')


def _batch(config: Config, *, questions: int, group: int, minibatches: int,
           single: int = 1) -> None:
  """The questions of a step, their samples, and its updates.

  Args:
    config: of a recipe: one with one sample a question keeps that, and half of
      the updates; one that is good for one update keeps that.
    questions: a step.
    group: samples a question.
    minibatches: updates a step.
    single: samples a question of recipes without a group.
  """
  alone = config.rollout.group_size == 1
  config.rollout.update(
      questions=questions, group_size=single if alone else group)
  if config.learner.minibatches > 1:
    config.learner.minibatches = min(minibatches, 2) if alone else minibatches


def _warm_up(config: Config, share: float) -> None:
  """A share of the steps, of the critic a much smaller one, in updates."""
  steps, updates = config.train.num_steps, config.learner.minibatches
  for optimizer, part in ((config.optimizer, share),
                          (config.critic.optimizer, 0.015)):
    optimizer.warmup_steps = int(round(part * steps, 6)) * updates


def _kl(config: Config, coefficient: float) -> None:
  """Of PPO, in the reward, and of GRPO, in the loss; others keep their own."""
  ours = _trains_by(config, 'ppo') or _trains_by(config, 'grpo')
  if ours and 'kl_coef' in config.algorithm:
    config.algorithm.kl_coef = coefficient
