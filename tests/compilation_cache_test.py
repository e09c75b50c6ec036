# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled programs, in one process and in two."""

import types

import jax
from jax._src import compilation_cache as jax_cache
import pytest

from searchrl.runtime import compilation_cache
from searchrl.runtime import processes
import loopback

CODE = '''
import jax
from searchrl.runtime import compilation_cache, processes

compilation_cache.start()
processes.initialize()
compilation_cache.start()  # again: each program is written once
counts = {'hits': 0, 'misses': 0}

def count(event, **_):
  for name in counts:
    counts[name] += event == f'/jax/compilation_cache/cache_{name}'

jax.monitoring.register_event_listener(count)
mesh = jax.make_mesh((2,), 'x')
split = jax.sharding.NamedSharding(mesh, jax.P('x'))
own = jax.jit(lambda x: x + 1)(float(processes.index()))
ones = jax.jit(lambda: jax.numpy.ones(2), out_shardings=split)()
total = jax.jit(lambda x: x.sum(), out_shardings=jax.sharding.NamedSharding(
    mesh, jax.P()))(ones)
out('found', [float(own), float(total), counts])
'''


def test_each_process_finds_its_programs_in_the_next_run(tmp_path):
  env = {'JAX_COMPILATION_CACHE_DIR': str(tmp_path)}
  runs = [loopback.outputs(2, CODE, devices=1, env=env)['found']
          for _ in range(2)]
  for number, ends in enumerate(runs):
    assert [end[:2] for end in ends] == [[1, 2], [2, 2]]
    for *_, counts in ends:
      assert (counts['hits'] if number else counts['misses']) >= 3
      assert not (counts['misses'] if number else counts['hits'])


@pytest.mark.parametrize('index, platform, callbacks, is_written', [
    (1, 'cpu', (), True), (0, 'cpu', (), False), (1, 'gpu', (), False),
    (1, 'tpu', (), False), (1, 'cpu', ('a callback',), False)])
def test_only_what_no_other_process_writes_is_written(
    monkeypatch, index, platform, callbacks, is_written):
  written = []
  monkeypatch.setattr(processes, 'index', lambda: index)
  monkeypatch.setattr(jax_cache, 'put_executable_and_time',
                      lambda *arguments: written.append(arguments))
  compiled = compilation_cache._and_written(lambda *_: 'program')(
      types.SimpleNamespace(platform=platform), 'module', 'devices', 'options',
      callbacks, 'name', 'key')
  assert compiled == 'program'
  assert [arguments[:3] for arguments in written] == [
      ('key', 'name', 'program')] * is_written


@pytest.mark.parametrize('error', [
    OSError(28, 'No space left on device'), jax.errors.JaxRuntimeError('no')])
def test_a_program_that_cannot_be_written_is_a_warning(
    monkeypatch, error):
  def put(*_):
    raise error

  monkeypatch.setattr(processes, 'index', lambda: 1)
  monkeypatch.setattr(jax_cache, 'put_executable_and_time', put)
  said = []
  monkeypatch.setattr(compilation_cache.log, 'say', said.append)
  backend = types.SimpleNamespace(platform='cpu')
  assert compilation_cache._and_written(lambda *_: 'program')(
      backend, 'module', 'devices', 'options', (), 'decode', 'key') == 'program'
  assert said == [
      f'Warning: decode cannot be written to the compilation cache: {error}']
