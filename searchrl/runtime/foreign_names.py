# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Names that verl, TRL and Search-R1 give to config fields, and ours."""

from collections.abc import Sequence
import re

# The answers may name several fields, each with its group.
OURS = {
    # Sizes of a batch.
    'num_generations': 'rollout.group_size',
    'rollout.n': 'rollout.group_size',
    'n_agent': 'rollout.group_size',
    'train_batch_size': 'rollout.questions_per_step',
    'gen_batch_size': 'rollout.questions_per_step',
    'ppo_mini_batch_size': 'learner.minibatches, the number of them in a step,',
    'steps_per_generation': 'learner.minibatches',
    'ppo_micro_batch_size_per_gpu': 'learner.microbatch_rows',
    'per_device_train_batch_size': 'learner.microbatch_rows',
    'gradient_accumulation_steps': (
        'learner.microbatch_rows, the rows of each micro-batch,'),
    # The algorithm.
    'adv_estimator': 'algorithm.name',
    'kl_loss_coef': 'algorithm.kl_coef',
    'beta': 'algorithm.kl_coef',
    'kl_loss_type': 'algorithm.kl_estimator',
    'kl_penalty': 'algorithm.kl_estimator',
    'clip_ratio': 'algorithm.clip_low and algorithm.clip_high',
    'epsilon': 'algorithm.clip_low and algorithm.clip_high',
    'clip_ratio_low': 'algorithm.clip_low',
    'clip_ratio_high': 'algorithm.clip_high',
    'epsilon_high': 'algorithm.clip_high',
    'clip_ratio_c': 'algorithm.dual_clip',
    'cliprange_value': 'algorithm.value_clip',
    'gamma': 'algorithm.discount',
    'lam': 'algorithm.gae_lambda',
    'entropy_coeff': 'algorithm.entropy_coef',
    'loss_agg_mode': 'algorithm.aggregation',
    'loss_type': 'algorithm.aggregation',
    'norm_adv_by_std_in_grpo': 'algorithm.normalize_std',
    'scale_rewards': 'algorithm.normalize_std',
    # The optimizer.
    'lr': 'optimizer.learning_rate',
    'adam_beta1': 'optimizer.b1',
    'adam_beta2': 'optimizer.b2',
    'adam_epsilon': 'optimizer.eps',
    'grad_clip': 'optimizer.max_grad_norm',
    'lr_scheduler_type': 'optimizer.schedule',
    'lr_warmup_steps': 'optimizer.warmup_steps, a number of updates,',
    # Rollouts.
    'max_prompt_length': 'rollout.budgets.max_prompt_tokens',
    'max_response_length': (
        'rollout.budgets.max_new_tokens, for each turn, and rollout.max_length'),
    'max_completion_length': (
        'rollout.budgets.max_new_tokens, for each turn, and rollout.max_length'),
    'max_obs_length': 'rollout.budgets.passage_tokens, for each passage,',
    'max_assistant_turns': 'rollout.budgets.max_turns',
    'topk': 'rollout.budgets.top_k',
    'max_model_len': 'rollout.max_length',
    'tensor_model_parallel_size': 'rollout.tensor',
    # The run.
    'model_name_or_path': 'model.path',
    'lora_rank': 'model.lora.rank',
    'lora_alpha': 'model.lora.alpha',
    'train_files': 'data.train',
    'val_files': 'data.evaluate',
    'total_epochs': 'train.num_steps, a number of steps,',
    'num_train_epochs': 'train.num_steps, a number of steps,',
    'total_training_steps': 'train.num_steps',
    'max_steps': 'train.num_steps',
    'save_freq': 'train.checkpoint_every',
    'save_steps': 'train.checkpoint_every',
    'save_total_limit': 'train.keep_checkpoints',
    'test_freq': 'evaluate.every',
    'eval_steps': 'evaluate.every',
    'val_before_train': 'evaluate.initial',
}


def answer(name: str, fields: Sequence[str]) -> str:
  """Returns a sentence with our name of a field; '' if none is known.

  Args:
    name: Name as a user of another library gives it, with its groups or
      without.
    fields: Dotted names of the fields of a config, which may be in groups.
  """
  theirs = next((key for key in sorted(OURS, key=len, reverse=True)
                 if f'.{name}'.endswith(f'.{key}')), '')
  ours = re.findall(r'\w+(?:\.\w+)+', OURS.get(theirs, ''))
  if not ours or not all(any(
      f'.{field}'.endswith(f'.{target}') for field in fields)
                         for target in ours):
    return ''
  return f'{theirs} is called {OURS[theirs]} here.'
