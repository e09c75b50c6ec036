# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config in, a server of its policy out, until it is told to stop."""

import functools
import pathlib
import signal
import sys
import threading

import numpy as np

from searchrl.agent import chat
from searchrl.experiment import policy
from searchrl.models.inference import engine as engines
from searchrl.models.inference import stops
from searchrl.rollouts import generation
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.search.remote import wire
from searchrl.serving import model_server
from searchrl.serving import openai_api


def run(config, workdir: str) -> None:
  """Serves the policy of a run or a model folder; Ctrl-C or SIGTERM ends it.

  Raises:
    ValueError, FileNotFoundError: the config cannot be served.
  """
  del workdir  # nothing is written
  if processes.count() > 1:
    raise ValueError('a model is served by one process, but there are '
                     f'{processes.count()}. Start it alone.')
  options = _options(config)
  if config.ask.run:
    policy.check_run(config.ask.run, model=config.model.path,
                     dialogue=config.dialogue)
  generator, tokenizer = generate(config)
  try:
    server = model_server.Server(
        generator, tokenizer, config.rollout.length, options)
  except OSError as error:
    generator.close(1.0)
    raise ValueError(
        f'serve.host and serve.port must be free, but {options.host}, port '
        f'{options.port}, cannot be had: {error.strerror}. Choose another '
        'port, or end what listens there.') from error
  _run_until_told(server)


def generate(config) -> tuple[generation.Generator, object]:
  """What continues prompts, compiled and running; and the tokenizer."""
  if config.serve.steps < 1:
    raise ValueError(
        f'serve.steps must be at least 1, but is {config.serve.steps}.')
  sampler, params = policy.of_run(config, config.ask.run, most=1)
  tokenizer, length = sampler.tokenizer, config.rollout.length
  eos_ids = (*tokenizer.eos_ids, *turn_ends(tokenizer))
  copies = sampler.sync.mesh.size // config.rollout.tensor
  if config.rollout.slots % copies:
    raise ValueError(
        f'rollout.slots must be a multiple of the {copies} copies of the '
        f'weights, but is {config.rollout.slots}.')
  engine = engines.Engine(
      sampler.shape, slots=config.rollout.slots, length=length,
      stop_table=never(sampler.shape.vocab_size), eos_ids=eos_ids,
      seed=config.seed, steps=config.serve.steps, dtype=config.rollout.dtype,
      shardings=functools.partial(meshes.shardings, sampler.sync.mesh))
  engine.load(sampler.sync(params).weights, None)
  engine.compile()
  return generation.Generator(
      engine, token_bytes=tokenizer.token_bytes, eos_ids=eos_ids,
      waiting=config.serve.waiting), tokenizer


def never(vocab_size: int) -> stops.StopTable:
  """Stops at nothing: each request has stop strings of its own."""
  return stops.StopTable(np.zeros((1, vocab_size), np.uint8),
                         np.zeros((1, vocab_size), bool))


def turn_ends(tokenizer) -> tuple[int, ...]:
  """What ends an assistant's turn in the chat template, if there is one."""
  talk = [{'role': 'user', 'content': 'QuestionStandsHere'},
          {'role': 'assistant', 'content': 'AnswerStandsHere'}]
  try:
    end = chat.turn_end(tokenizer, tokenizer.render, talk)
  except ValueError:  # no template, or one for other talks
    return ()
  return chat.end_ids(tokenizer, end)


def _options(config) -> model_server.Options:
  """config.serve, checked."""
  fields = dict(config.serve)
  del fields['steps']
  fields['limits'] = openai_api.Limits(**fields['limits'])
  variable = fields.pop('token_env')
  if variable:
    fields['token'] = wire.secret(variable, 'serve.token_env')
  path = config.ask.run or config.model.path or 'tiny_base'
  fields['name'] = fields['name'] or pathlib.PurePath(path).name
  return model_server.Options(**fields)


def _run_until_told(server: model_server.Server) -> None:
  """Serves until SIGINT or SIGTERM, or until the engine fails."""
  told = threading.Event()
  previous = {number: signal.signal(number, lambda *_: told.set())
              for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    server.start()
    _say(f'Serving {server.options.name} at {server.address}/v1; Ctrl-C ends '
         'it.')
    host = server.options.host
    if not server.options.token and not (
        host in ('localhost', '::1') or host.startswith('127.')):
      _say(f'Warning: whoever reaches {host} may ask. Name a variable in '
           'serve.token_env that holds a token.')
    while not told.wait(0.5) and server.generator.is_open:
      pass
    _say('Stopping; what was asked is answered first.')
    server.stop()
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
  if server.generator.error:
    raise server.generator.error


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
