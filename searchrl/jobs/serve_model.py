# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a policy with OpenAI's API, until it is stopped."""

from collections.abc import Mapping
import pathlib
from typing import Any

from searchrl.experiment import config_checks
from searchrl.experiment import policy
from searchrl.experiment import run_defaults
from searchrl.rollouts import generation
from searchrl.runtime import processes
from searchrl.serving import asgi
from searchrl.serving import model_server
from searchrl.serving import openai_api


def run(config, workdir: str) -> None:
  """Serves the policy of a run or model directory until Ctrl-C or SIGTERM.

  Raises:
    ValueError, FileNotFoundError: The config cannot be served.
  """
  del workdir  # nothing is written
  config_checks.check(config)
  if processes.count() > 1:
    raise ValueError('a model is served by one process, but there are '
                     f'{processes.count()}. Start it alone.')
  options = make_options(config.serve, config.ask.run, config.model.path)
  config = run_defaults.complete(config, config.ask.run, 'ask.run')
  length, budgets = config.rollout.max_length, config.rollout.budgets
  if budgets.max_prompt_tokens + budgets.max_new_tokens > length:
    # Requests have limits of their own, so these budgets refuse no length.
    budgets.update(max_prompt_tokens=length - 1, max_new_tokens=1)
  sampler, params = policy.of_run(config, config.ask.run, limit=1)
  generator = generation.build(
      sampler.shape, sampler.tokenizer, sampler.sync(params).weights,
      sampler.sync.mesh, slots=config.rollout.max_num_seqs,
      length=length, tensor=config.rollout.tensor,
      seed=config.seed, steps=config.serve.steps, dtype=config.rollout.dtype,
      attention=sampler.engine.attention, waiting=options.waiting)
  try:
    server = model_server.Server(
        generator, sampler.tokenizer, length, options)
    asgi.serve(server, f'{options.name} at {server.address}/v1', options.http,
               is_open=lambda: generator.is_open)
  finally:
    generator.close(1.0)
  if generator.error:
    raise generator.error


def make_options(serve: Mapping[str, Any], run: str, path: str
                 ) -> model_server.Options:
  """Returns the checked options of config.serve.

  Args:
    serve: Fields of config.serve.
    run: Directory of a run. '': none.
    path: Path of the model, used if there is no run.
  """
  http, rest = asgi.take_options(serve)
  del rest['steps']
  limits = openai_api.Limits(**rest.pop('limits'))
  name = rest.pop('name') or pathlib.PurePath(run or path or 'tiny_base').name
  return model_server.Options(name, http, limits=limits, **rest)
