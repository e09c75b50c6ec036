# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The values that each paper trained with: one function per setting.

  python -m searchrl.main --config=configs/grpo.py:study/qwen2.5-7b

A setting applies to every model. It fixes the values that a paper or its
published scripts fix: batch, group, learning rates, warm-up, steps, KL,
lengths, turns, engine, dialogue and reward. All other values are ours. The
algorithm stays the recipe's. docs/settings.md compares the settings, and
tests/sentences.py has the sentence behind each number.

Result: not yet measured for any setting.
"""

from collections.abc import Callable
import difflib

import ml_collections

from configs import models
from configs.models import Model

_EM = 'searchrl.agent.rewards:em'
# Exact index of intfloat/e5-base-v2's vectors, made by configs/build_index.py.
_INDEX = 'runs/e5'
# The laptop run with larger updates: learning rate and updates per batch.
# Recipes that allow one update per batch keep that. The values were fixed
# before anything was measured.
STRESS = {'stress_1': (2e-4, 2), 'stress_2': (4e-4, 4), 'stress_3': (6e-4, 4)}
_WITHOUT_MODEL = ('laptop', 'smoke', *STRESS)  # sizes that name no model

Config = ml_collections.ConfigDict


def apply(config: Config, size: str, default: str) -> bool:
  """Gives a config the values of a setting, if its size names a model.

  configs/common.py applies Search-R1's setting first. A recipe calls this
  function at its end with the setting that it prefers. The algorithm, a
  group_size of 1 and a single update per batch belong to the recipe. A setting
  reads them, so that they must be set before.

  Args:
    config: Config of a recipe, with the laptop's values.
    size: Name of the size: 'laptop', 'smoke', one of STRESS, a model, or
      SETTING/MODEL.
    default: Name of the setting for a size that is only a model.

  Returns:
    True if the size names a model.

  Raises:
    ValueError: There is no such size.
  """
  if size in _WITHOUT_MODEL:
    return False
  setting, model = parse(size, default)
  SETTINGS[setting](config, models.MODELS[model])
  return True


def is_laptop(size: str) -> bool:
  """Returns whether a size is a laptop run, with larger updates or without."""
  return size == 'laptop' or size in STRESS


def parse(size: str, default: str) -> tuple[str, str]:
  """Returns the setting and the model of a size that names a model."""
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
  """Sets Search-R1, arXiv:2503.09516, on NQ and HotpotQA; scripts v0.2.

  Differs: a batch has at most 4 updates. The script makes 10 updates per batch
  with GRPO, and the last of them are far off policy. Each passage has its own
  budget in the 500 tokens of an observation. There is no entropy bonus and no
  top_p.
  """
  _of_any_paper(config, model)
  config.data.question_mark = True
  config.search.engine = 'dense'
  config.search.options = dict(index=_INDEX)
  config.dialogue = _tags(model)
  config.reward = config.outcome = _EM
  config.reward_options = {}
  config.rollout.budgets.update(
      max_turns=5,  # 4 turns with a search, and 1 for the answer
      max_new_tokens=500, max_prompt_tokens=2048, passage_tokens=166, top_k=3)
  config.optimizer.learning_rate = 2e-7 if model.billions >= 32 else 1e-6
  config.train.update(num_steps=1005, checkpoint_every=100, keep_checkpoints=2)
  _batch(config, questions=512, group=5, minibatches=4)
  _warm_up(config, 0.285)
  _kl(config, 1e-3)


def search_r1_nq(config: Config, model: Model) -> None:
  """Sets Search-R1's quick start: data.train is NQ, two turns have a search."""
  search_r1(config, model)
  config.rollout.budgets.max_turns = 3


def study(config: Config, model: Model) -> None:
  """Sets the Empirical Study, arXiv:2505.15117: Search-R1 and a format reward.

  Every checkpoint is kept, because the paper reports the last one before a
  collapse.
  """
  search_r1(config, model)
  config.reward = 'searchrl.agent.rewards:format_em'
  config.reward_options = dict(
      lambda_f=0.4 if model.hub_id.startswith('Qwen/Qwen2.5-7B') else 0.2)
  higher = _trains_by(config, 'ppo') and model.billions < 14
  config.optimizer.learning_rate = 1e-6 if higher else 5e-7
  # The warm-up stays that of 1005 steps.
  config.train.update(num_steps=600, keep_checkpoints=6)


def zerosearch(config: Config, model: Model) -> None:
  """Sets ZeroSearch, arXiv:2505.04588: a language model writes the documents.

  First serve one of the paper's simulators at the url, or another one with its
  own prompts. Noise rises from 0 to 0.5 as in its README, because the paper
  gives no range. Evaluation uses E5; the paper uses Google. Two turns have a
  search, as in the paper's runs; its README says five.
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
      deadline_secs=240.0, try_secs=120.0,  # with the time in a server's queue
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
  """Sets Dr. Zero's solver, arXiv:2601.07055, Table 6, on questions with golds.

  The paper's questions are its proposer's. A turn may use all tokens of the
  response, which passages share. There is one update per batch, so that
  training is strictly on-policy.
  """
  search_r1(config, model)
  config.data.question_mark = False
  config.dialogue = _tools(model, 'dr_zero')
  config.rollout.max_length = 3072
  config.rollout.budgets.update(
      max_turns=5,  # turns; a search in the fifth is not carried out
      max_new_tokens=2560, max_prompt_tokens=512, passage_tokens=170)
  for optimizer in (config.optimizer, config.critic.optimizer):
    optimizer.max_grad_norm = 0.1
  config.optimizer.learning_rate = 1e-6
  config.train.update(num_steps=50, checkpoint_every=25)
  _batch(config, questions=256, group=5, minibatches=1)
  _warm_up(config, 0.03)
  _kl(config, 0.0)


def drzero_proposer(config: Config, model: Model) -> None:
  """Sets Dr. Zero's proposer, Table 5: one sample per prompt, longer limits.

  data.train has the documents that configs/drzero.py draws. The prompt is ours.
  """
  drzero_solver(config, model)
  config.solver = dict(  # frozen solver that answers for the reward
      path=model.hub_id, run='', dialogue=config.dialogue,
      budgets=config.rollout.budgets.to_dict(), temperature=1.0)
  config.data.golds = False
  config.dialogue = ('searchrl.papers.dr_zero.dialogues:' + (
      'with_tool' if model.tools else 'in_chat' if model.chat else 'in_tags'))
  config.reward = 'searchrl.papers.dr_zero.proposals:judge'
  config.reward_options = dict(
      attempts=5, format_weight=0.5, difficulty='difficulty')
  config.rollout.max_length = 4096
  config.rollout.budgets.max_prompt_tokens = 1536


def dspo(config: Config, model: Model) -> None:
  """Sets DSPO, arXiv:2510.09255: BM25, tools and subEM on NQ and HotpotQA.

  The paper gives no learning rate, batch or steps. They are from the example of
  verl that it starts from: one pass over the 169,615 questions.
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
  """Sets the values that the papers share, and slots, dtypes and mesh."""
  config.model.update(path=model.hub_id, dtype='bfloat16')
  config.data.update(per_hop=(), common=0.0, mix=())  # no generated questions
  config.rollout.update(max_num_seqs=256, max_length=4096, dtype='bfloat16',
                        temperature=1.0, top_p=1.0)
  for optimizer, rate in ((config.optimizer, 1e-6),
                          (config.critic.optimizer, 1e-5)):
    optimizer.update(learning_rate=rate, b2=0.999, weight_decay=0.01,
                     max_grad_norm=1.0)
  config.critic.warmup_updates = 0
  config.learner.update(remat='nothing', dtype='bfloat16')
  config.mesh.update(data=1, fsdp=-1)
  config.train.max_rollouts = 0
  config.evaluate.update(every=0, limit=0, num_sets_during=0)
  config.evaluate.search.engine, config.evaluate.search.options = '', {}
  config.evaluate.worlds.kinds = ()


def _tags(model: Model, name: str = 'search_r1') -> str:
  return f'searchrl.agent.{"chat" if model.chat else "dialogue"}:{name}'


def _tools(model: Model, name: str) -> str:
  """Returns a tool dialogue, or one with tags if the template has no tools."""
  return f'searchrl.agent.tools:{name}' if model.tools else _tags(model)


def _trains_by(config: Config, algorithm: str) -> bool:
  return config.algorithm.name.endswith(f':{algorithm}')


def _batch(config: Config, *, questions: int, group: int, minibatches: int,
           single: int = 1) -> None:
  """Sets the questions of a step, their samples, and the step's updates.

  Args:
    config: Config of a recipe. A recipe with one sample per question gets
      `single` samples and at most 2 updates. A recipe that allows one update
      per batch keeps that.
    questions: Number of questions per step.
    group: Number of samples per question.
    minibatches: Number of updates per step.
    single: Number of samples per question in recipes without a group.
  """
  alone = config.rollout.group_size == 1
  config.rollout.update(
      questions_per_step=questions, group_size=single if alone else group)
  if config.learner.minibatches > 1:
    config.learner.minibatches = min(minibatches, 2) if alone else minibatches


def _warm_up(config: Config, share: float) -> None:
  """Sets the warm-ups in updates, from shares of the steps.

  The critic's share is 0.015.
  """
  steps, updates = config.train.num_steps, config.learner.minibatches
  for optimizer, part in ((config.optimizer, share),
                          (config.critic.optimizer, 0.015)):
    optimizer.warmup_steps = int(round(part * steps, 6)) * updates


def _kl(config: Config, coefficient: float) -> None:
  """Sets the KL of PPO (in the reward) and GRPO (in the loss), no others."""
  ours = _trains_by(config, 'ppo') or _trains_by(config, 'grpo')
  if ours and 'kl_coef' in config.algorithm:
    config.algorithm.kl_coef = coefficient
