# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Names of config fields in verl, TRL and Search-R1, and our names for them."""

from collections.abc import Sequence
import re

_THEIRS = {  # our fields, with a remark where the meaning differs: their names
    'rollout.group_size': 'num_generations rollout.n n_agent',
    'rollout.questions_per_step': 'train_batch_size gen_batch_size',
    'learner.minibatches, the number of them in a step,': (
        'ppo_mini_batch_size steps_per_generation'),
    'learner.microbatch_rows, the rows of each micro-batch,': (
        'ppo_micro_batch_size_per_gpu per_device_train_batch_size '
        'ppo_micro_batch_size gradient_accumulation_steps'),
    'learner.pack_length, the tokens of a packed row,': (
        'ppo_max_token_len_per_gpu'),
    'learner.remat': 'enable_gradient_checkpointing gradient_checkpointing',
    'learner.dtype and rollout.dtype': 'bf16',
    'algorithm.name': 'adv_estimator importance_sampling_level',
    'algorithm.mask_observations': 'state_masking',
    'algorithm.kl_coef': 'kl_loss_coef kl_ctrl.kl_coef beta',
    'algorithm.kl_estimator': 'kl_loss_type kl_penalty',
    'algorithm.clip_low and algorithm.clip_high': 'clip_ratio epsilon',
    'algorithm.clip_low': 'clip_ratio_low',
    'algorithm.clip_high': 'clip_ratio_high epsilon_high',
    'algorithm.dual_clip': 'clip_ratio_c',
    'algorithm.value_clip': 'cliprange_value',
    'algorithm.discount': 'gamma',
    'algorithm.gae_lambda': 'lam',
    'algorithm.entropy_coef': 'entropy_coeff',
    'algorithm.aggregation': 'loss_agg_mode loss_type',
    'algorithm.normalize_std': 'norm_adv_by_std_in_grpo scale_rewards',
    'learner.offload_optimizer': 'optimizer_offload',
    'optimizer.learning_rate': 'lr',
    'critic.optimizer.learning_rate': 'critic.optim.lr',
    'critic.warmup_updates': 'critic_warmup',
    'importance_correction.method': (
        'rollout_is vllm_importance_sampling_correction'),
    'optimizer.b1': 'adam_beta1',
    'optimizer.b2': 'adam_beta2',
    'optimizer.eps': 'adam_epsilon',
    'optimizer.max_grad_norm': 'grad_clip',
    'optimizer.schedule': 'lr_scheduler_type warmup_style',
    'optimizer.warmup_steps, a number of updates,': 'lr_warmup_steps',
    'rollout.budgets.max_prompt_tokens': 'max_prompt_length',
    'rollout.budgets.max_new_tokens, for each turn, and rollout.max_length': (
        'max_response_length max_completion_length'),
    'rollout.budgets.passage_tokens, for each passage,': 'max_obs_length',
    'rollout.budgets.max_turns': (
        'max_assistant_turns max_tool_calling_iterations'),
    'rollout.budgets.top_k': 'topk',
    'rollout.max_length': 'max_model_len',
    'rollout.tensor': 'tensor_model_parallel_size',
    'rollout.max_rounds': 'max_num_gen_batches',
    'rollout.mask_truncated': 'mask_truncated_completions',
    'rollout.cache_tokens, a number of tokens,': 'gpu_memory_utilization',
    'mesh.sequence': 'ulysses_sequence_parallel_size',
    'mesh.data and mesh.fsdp': 'nnodes',
    'search.engine and search.options': 'retriever.url',
    'search.engine, and tools for others,': 'tool_config_path',
    'model.path': 'model_name_or_path',
    'model.lora.rank': 'lora_rank lora_r',
    'model.lora.alpha': 'lora_alpha',
    'reward, a module:function,': (
        'custom_reward_function.path custom_reward_function.name reward_funcs'),
    'data.train': 'train_files',
    'data.evaluate': 'val_files',
    'train.num_steps, a number of steps,': (
        'total_epochs num_train_epochs total_training_steps max_steps'),
    'train.checkpoint_every': 'save_freq save_steps',
    'train.keep_checkpoints': 'save_total_limit',
    'train.loggers': 'report_to logger',
    'evaluate.every': 'test_freq eval_steps',
    'evaluate.initial': 'val_before_train',
}
OURS = {name: fields for fields, names in _THEIRS.items()
        for name in names.split()}


def answer(name: str, fields: Sequence[str]) -> str:
  """Returns a sentence that translates another library's field name into ours.

  It is '' if the name is unknown, or if the config lacks the field and its
  group. If the config has the group but not the field, the sentence says so.

  Args:
    name: Name in another library, with or without its groups.
    fields: Dotted names of all fields of our config. Each may have more groups
      before it.
  """
  theirs = known(name)
  named = OURS.get(theirs, '')
  ours = re.findall(r'\w+(?:\.\w+)+', named) or (
      [named.partition(',')[0]] if named else [])  # a field without a group
  listed = ''.join(f'.{field}\n' for field in fields)
  groups = [field.partition('.')[0] for field in ours]
  has_all = all(f'.{field}\n' in listed for field in ours)
  if not ours or not (has_all or all(
      f'.{group}.' in listed for group in groups)):
    return ''
  lacks = '' if has_all else ', but this config does not have it'
  return f'{theirs} is called {named} here{lacks}.'


def known(name: str) -> str:
  """Returns the key of OURS with which a name ends; '' if there is none."""
  return max((key for key in OURS if f'.{name}'.endswith(f'.{key}')),
             key=len, default='')
