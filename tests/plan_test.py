# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""plan: bytes by hand and by compilers; 7B and 3B on the chips they fit."""

import dataclasses
import functools
import importlib.util
import json
import math
import re
import types
from unittest import mock

import jax
import pytest

from configs import evaluate
from configs import grpo
from configs import rejection
from configs import sft
from searchrl.experiment import memory_plan
from searchrl.jobs import plan
from searchrl.models import attention
from searchrl.models import shipped_shapes
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.inference import engine as engine_lib
from searchrl.rl import algorithms
from searchrl.runtime import devices
from searchrl.runtime import mesh as meshes
from searchrl.runtime.devices import GIB
from searchrl.search import engines
from searchrl.search.index import open_index
from searchrl.training import learner as learners
from searchrl.training import optimizer
from searchrl.training import update_memory

DEVICES = 8

QWEN_3B = transformer.TransformerConfig(
    vocab_size=151_936, hidden_size=2048, num_hidden_layers=36,
    num_attention_heads=16, num_key_value_heads=2, head_dim=128,
    intermediate_size=11_008, rope_theta=1e6)
QWEN_7B = transformer.TransformerConfig(
    vocab_size=152_064, hidden_size=3584, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, head_dim=128,
    intermediate_size=18_944, rope_theta=1e6, tie_word_embeddings=False)


def config(tmp_path=None, shape=None, **changes):
  """GRPO with a KL term, for a model of which there is but a config.json."""
  result = grpo.get_config()
  result.algorithm.kl_coef = 0.1
  result.plan.compile = False
  result.update(changes)
  if shape:
    fields = vars(shape) | {'architectures': [shape.architecture]}
    (tmp_path / 'config.json').write_text(json.dumps(fields))
    result.model.path = str(tmp_path)
  return result


def test_a_plan_by_hand(tmp_path):
  """64 H200 hold 7B: everything that stays, counted on paper."""
  found = memory_plan.make(config(
      tmp_path, QWEN_7B, plan=dict(devices='h200-64'),
      mesh=dict(data=1, fsdp=64), rollout=dict(
          max_num_seqs=512, max_length=4096, dtype='bfloat16', tensor=4),
      model=dict(dtype='bfloat16'),
      learner=dict(dtype='bfloat16', remat='nothing')))
  # Of 64 devices; biases, a few in 10,000, are held whole by each.
  each = pytest.approx(7_615_616_512 / 64, rel=1e-2)
  assert found.parameters == 7_615_616_512 and not found.update.compiled
  holds = dict(found.holds)
  assert holds.pop('policy: trained parameters, float32') / 4 == each
  assert holds.pop('policy: moments') / 8 == each
  assert holds.pop('reference policy, bfloat16') / 2 == each
  # 8 hosts of 8: 64 slots a host, 32 a copy of the weights on 4 devices.
  cached = 32 * 4096 * 28 * 2 * 4 * 128 * 2 / 4
  assert holds.pop('KV cache: 64 slots x 4096 tokens a process') == (
      pytest.approx(cached, rel=1e-4))
  sync = 1.5 * 2 * 152_064 * 3584 * 2 / 4  # bytes of embedding and head
  assert (found.engine.besides - sync) / 2 * 4 / 64 == each
  assert not holds and found.available == 141 * GIB and found.fits
  gradients, layer_inputs = 4 * 7_615_616_512 / 64, 28 * 4096 * 3584 * 2
  assert gradients + layer_inputs < found.update.bytes < 8 * GIB
  # Two float32 vectors and a number per head; 16 documents and padding a row.
  assert found.update.workspace == 4096 * 17 * 28 * (2 * 128 + 1) * 4


def test_a_model_that_writes_documents_takes_its_weights_and_its_cache():
  """A published simulator beside the policy, whose shape is shipped."""
  made = config(plan=dict(devices='h200-1'))
  before = memory_plan.make(made)
  made.search.engine = 'searchrl.papers.zerosearch.simulated:make'
  made.search.options = dict(
      writer='model', simulator='wiki_3b', dtype='bfloat16', slots=64,
      max_prompt_tokens=424, max_tokens=600)
  found = memory_plan.make(made)
  added = {name: size for name, size in found.holds.items()
           if name not in before.holds}
  assert list(added) == ['search engine: weights, bfloat16',
                         'search engine: 64 slots x 1024 tokens']
  weights, cache = added.values()
  assert weights == 2 * 3_085_938_688
  assert cache == pytest.approx(64 * 1024 * 36 * 2 * 2 * 128 * 2, rel=1e-3)
  assert found.peak - before.peak == weights + cache
  made.plan.devices = 'h200-8'  # a copy and 8 slots on each
  assert memory_plan.make(made).holds[
      'search engine: 8 slots x 1024 tokens'] == cache / 8
  made.plan.devices, made.rollout.max_num_seqs = 'h200-16', 80
  with pytest.raises(ValueError, match='search.options.path .* this run has 2'):
    memory_plan.make(made)


def test_the_fastest_way_to_split_rollouts_is_named(tmp_path):
  """A token's bytes on paper: weights, full slots, and two sums a layer."""
  usual = dict(plan=dict(devices='v6e-8'), rollout=dict(
      max_num_seqs=512, max_length=4096, dtype='bfloat16', tensor=2),
               model=dict(dtype='bfloat16'), learner=dict(dtype='bfloat16', remat='nothing'),
      mesh=dict(data=1, fsdp=8))
  found = memory_plan.make(config(tmp_path, QWEN_7B, **usual))
  assert [x.tensor for x in found.engines] == [1, 2, 4]  # 4 heads; 8 devices
  once = 2 * (7_615_616_512 - 152_064 * 3584)  # an embedding is looked up
  cached = 512 / 8 * 4096 * 28 * 2 * 4 * 128 * 2  # of each device
  kind = devices.KINDS['v6e']
  for engine in found.engines:
    rows, ways = 512 / 8 * engine.tensor, engine.tensor
    assert engine.read == pytest.approx(once / ways + cached, rel=1e-3)
    assert engine.sent == pytest.approx(
        2 * (ways - 1) / ways * rows * 3584 * 2 * (2 * 28 + 1))
    assert engine.secs(kind) == pytest.approx(
        engine.read / 1640e9 + engine.sent / 448e9)
  assert found.fastest is None and 'None of them fits.' in plan.describe(found)
  usual['rollout'].update(max_num_seqs=256, cache_tokens=256 * 1664)
  assert memory_plan.make(config(tmp_path, QWEN_7B, **usual)).fastest is None
  usual['plan']['devices'] = 'v5p-8'
  found = memory_plan.make(config(tmp_path, QWEN_7B, **usual))
  assert found.fastest.tensor == 4 and found.fits
  assert ('rollout.tensor=4 is the fastest that fits; the config has 2.'
          in plan.describe(found))


def test_what_does_not_fit_names_what_would_help(tmp_path):
  found = memory_plan.make(config(
      tmp_path, QWEN_7B, plan=dict(devices='a100-40gb-1')))
  text = plan.describe(found)
  assert not found.fits
  assert '7.62 billion parameters on 1 x a100-40gb, mesh data=1' in text
  assert 'It does not fit: ' in text and 'learner.remat' in text
  assert 'estimated, not compiled' in text


@pytest.mark.parametrize('message, size', [
    ('RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required '
     'for HLO temporaries (20.91G) exceeds available HBM (15.75G).', 20.91),
    ('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5.39GiB', None)])
def test_a_program_that_the_compiler_refuses_needs_what_it_says(message, size):
  def compile_():
    raise jax.errors.JaxRuntimeError(message)

  step = types.SimpleNamespace(update=types.SimpleNamespace(
      lower=lambda *_: types.SimpleNamespace(compile=compile_)),
                               offload_optimizer=False)
  learner = types.SimpleNamespace(
      train_step=step, abstract_update=lambda rows: ((),) * 6)
  if size:
    assert update_memory.compiled(learner, 8) == size * 2**30
  else:
    with pytest.raises(jax.errors.JaxRuntimeError, match='5.39GiB'):
      update_memory.compiled(learner, 8)


def test_moments_of_the_hosts_take_no_room_of_devices(tmp_path):
  usual = dict(plan=dict(devices='h100-8'), mesh=dict(data=1, fsdp=8))
  here, there = (
      memory_plan.make(config(tmp_path, QWEN_3B, **usual, **changes))
      for changes in ({}, dict(learner=dict(offload_optimizer=True))))
  moments = here.holds['policy: moments']
  assert here.update.on_host == 0
  assert there.update.on_host == moments
  # Two moments of four bytes on eight devices; norms are on each of them.
  assert moments == pytest.approx(2 * 4 / 8 * here.parameters, rel=1e-3)
  assert sum(here.holds.values()) - sum(there.holds.values()) == moments
  assert f'{moments / 2**30:.2f} GiB for each device' in plan.describe(
      there)


def test_half_a_moment_and_adapters_take_less(tmp_path):
  usual = dict(plan=dict(devices='h100-8'), mesh=dict(data=1, fsdp=8))
  whole, half, lora = (
      memory_plan.make(config(tmp_path, QWEN_3B, **usual, **changes)).holds
      for changes in ({}, dict(optimizer=dict(mu_dtype='bfloat16')),
                      dict(model=dict(lora=dict(rank=8)))))
  each = pytest.approx(3_085_938_688 / 8, rel=1e-2)
  assert (whole['policy: moments'] - half['policy: moments']) / 2 == each
  ins, outs = 2048, 11_008  # q, o: D D; k, v: D 256; gate, up; down
  rank = 8 * (2 * (ins + ins) + 2 * (ins + 256) + 3 * (ins + outs))
  trained = lora['policy: trained parameters, float32']
  assert 36 * rank * 4 / 8 < trained < 36 * rank * 4  # one side of each split
  assert lora['policy: moments'] == pytest.approx(2 * trained, rel=1e-3)
  assert lora['reference policy, float32'] / 4 == each


def test_the_laptop_is_planned_with_its_own_compiler():
  found = memory_plan.make(config(
      mesh=dict(data=1, fsdp=8), plan=dict(compile=True)))
  assert found.update.compiled and found.fits
  assert found.devices == '8 x cpu, here'
  assert 10_000 < found.update.bytes < GIB
  table = plan.describe(found)
  assert '968,' not in table and 'compiled' in table
  assert 'tokens/s' not in table  # of a CPU no rate is published


def test_a_host_without_accelerators_also_holds_itself():
  found = memory_plan.make(config(
      mesh=dict(data=8), plan=dict(compile=False)))
  held = dict(found.holds)
  own = held.pop('Python, JAX, programs')
  assert own * 8 == pytest.approx(0.9 * GIB)  # the devices of one process
  assert found.peak == pytest.approx(
      own + sum(held.values()) + max(
          found.engine.besides, found.update.bytes - found.engine.cache))
  elsewhere = memory_plan.make(config(
      mesh=dict(data=8), plan=dict(devices='v5e-8', compile=False)))
  assert 'Python, JAX, programs' not in elsewhere.holds


def test_an_engine_holds_the_kernels_that_it_rounds(tmp_path):
  def besides(rounds, devices=''):
    found = memory_plan.make(config(
        tmp_path, QWEN_3B, mesh=dict(fsdp=8), rollout=dict(tensor=1),
        model=dict(matmul_dtype=rounds),
        plan=dict(devices=devices, compile=False)))
    return found.engine.besides

  kernels = sum(2 * math.prod(x.shape) for x in jax.tree.leaves(
      transformer.abstract(QWEN_3B)))  # the head is tied to the embedding
  found = besides('bfloat16') - besides('')
  assert found == pytest.approx(kernels, rel=1e-3)
  assert besides('auto', 'h200-8') == besides('', 'h200-8')


def test_an_engine_of_many_slots_on_cpus_holds_transposed_kernels(
    tmp_path, monkeypatch):
  def besides(slots, devices):
    monkeypatch.setattr(meshes, 'all_devices', lambda: jax.devices()[:devices])
    return memory_plan.make(config(
        tmp_path, QWEN_3B, mesh=dict(fsdp=devices),
        rollout=dict(max_num_seqs=slots, tensor=1, dtype='float32'),
        plan=dict(devices='', compile=False))).engine.besides

  layers = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(
      transformer.abstract(QWEN_3B)['layers']))
  few = engine_lib.FEW_SLOTS
  assert besides(few + 1, 1) - besides(few, 1) == pytest.approx(
      layers, rel=1e-3)
  # Of several copies of the weights, each has its kernels as they are.
  assert besides(2 * few + 2, 2) - besides(2 * few, 2) < layers / 100


def test_a_plan_has_room_for_the_merged_model_at_the_end(tmp_path):
  """Float32 kernels need more than rollouts in bfloat16."""
  def besides(**lora):
    return memory_plan.make(config(
        tmp_path, QWEN_7B, plan=dict(devices='h200-8'),
        mesh=dict(data=2, fsdp=4), rollout=dict(tensor=4, dtype='bfloat16'),
        model=dict(dtype='float32', lora=lora))).engine.besides

  merged = 3 * 28 * 3584 * 18944 * 4 / 4  # bytes of the three kernels, split
  assert besides(rank=16, targets=('gate', 'up', 'down')) == merged
  assert besides(rank=0) < merged
  assert besides(rank=16, targets=('q', 'k')) == besides(rank=0)


def test_an_update_on_cpus_has_the_room_of_the_cache():
  def peak(**changes):
    made = memory_plan.make(config(
        mesh=dict(data=8), plan=dict(compile=False), **changes))
    return dataclasses.replace(
        made, update=made.update._replace(bytes=100 * GIB)), made.engine

  (freed, engine), (beside, _) = peak(), peak(train=dict(max_staleness=1))
  assert freed.peak == pytest.approx(
      sum(freed.holds.values()) + 100 * GIB - engine.cache)
  assert f'-{engine.cache / GIB:.2f}' in plan.describe(freed)
  assert beside.peak == pytest.approx(sum(beside.holds.values()) + 100 * GIB)
  assert 'the KV cache is freed' not in plan.describe(beside)


def test_a_plan_prints_and_writes_nothing(tmp_path, capsys):
  plan.run(config(plan=dict(devices='v5e-8'), mesh=dict(data=8)),
           str(tmp_path / 'run'))
  assert 'mesh data=8 x fsdp=1 x tensor=1' in capsys.readouterr().out
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name, message', [
    ('tiny_encoder', 'has neither a learner nor a rollout'),
    ('serve_search', 'has neither a learner nor a rollout'),
    ('demonstrations', r'config\.plan must be there .* Give a recipe')])
def test_a_plan_without_a_language_model_is_refused(name, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    plan.run(importlib.import_module(f'configs.{name}').get_config(),
             str(tmp_path))


def test_a_plan_of_fine_tuning_has_no_rollouts(tmp_path):
  """Float32 parameters and moments on each of 8 data-parallel GPUs."""
  made = sft.get_config()
  made.model.path = config(tmp_path, QWEN_7B).model.path
  made.plan.update(devices='h200-8', compile=False)
  made.learner.update(pack_length=4096, dtype='bfloat16', remat='nothing')
  found = memory_plan.make(made)
  once = 4 * 7_615_616_512
  assert found.holds == {
      'policy: trained parameters, float32': once,
      'policy: moments': pytest.approx(2 * once)}
  assert found.peak == pytest.approx(
      3 * once + found.update.bytes + found.update.workspace)
  assert found.update.bytes > 2 * once and not found.fits
  text = plan.describe(found)
  assert 'rollout' not in text.partition('It does not fit')[0]
  made.mesh.update(data=1, fsdp=8)
  split = memory_plan.make(made)
  assert split.fits
  assert split.holds['policy: moments'] == pytest.approx(once / 4, rel=1e-2)


def test_each_phase_of_rejection_has_a_plan(capsys, tmp_path):
  """The tuning has no rollouts, and the sampling has no update."""
  made = rejection.get_config('qwen2.5-7b')
  made.plan.update(devices='h200-8', compile=False)
  made.data.train = __file__
  plan.run(made, str(tmp_path))
  _, sampling, tuning = re.split('The (?:sampling|tuning):',
                                 capsys.readouterr().out)
  assert 'policy, bfloat16' in sampling and 'KV cache' in sampling
  assert 'update' not in sampling and 'moments' not in sampling
  assert 'moments' in tuning and 'KV cache' not in tuning
  assert 'fsdp=8' in tuning and 'It fits' in tuning


def test_rows_of_an_index_are_on_the_devices_of_a_process(tmp_path):
  """A process of 8 devices shares rows of 2 bytes and a scale each, if any."""
  index, count, dim = tmp_path / 'index', 21_000_000, 768
  made = config(plan=dict(devices='v5e-8'), mesh=dict(data=1, fsdp=8))
  made.search.update(engine='dense', options=dict(index=str(index)))
  label = f'search engine: rows of {index}'
  assert memory_plan.make(made).holds[
      f'{label}, which is not here and not counted'] == 0
  index.mkdir()
  store = mock.Mock(count=count, dim=dim)
  with mock.patch.object(open_index.vector_store, 'open_', lambda _: store):
    held = lambda **options: memory_plan.make(config(
        plan=dict(devices='v5e-8'), search=dict(options=(
            dict(index=str(index), backend='auto') | options),
                    engine='dense'))).holds
    rows = count * dim * 2
    assert held()[f'{label}, bfloat16'] == pytest.approx(rows / 8)
    assert f'{label}, bfloat16' not in held(memory_share=.2)  # of 128 GiB
    assert f'{label}, bfloat16' not in held(backend='scann')
    assert held(backend='exact', memory_share=.2, storage='float32')[
        f'{label}, float32'] == pytest.approx(2 * rows / 8)


@pytest.mark.parametrize('on', ['v5e-8', 'v6e-8', 'h100-8', 'h200-8'])
@pytest.mark.parametrize('size', ['3b', '14b'])
def test_remat_follows_the_memory(on, size, capsys):
  """The fastest that fits, with a tenth of the update to spare; else the least.

  A mini-batch has 640 trajectories, so that a device may have two rows.
  """
  made = grpo.get_config(f'qwen2.5-{size}')
  made.plan.update(devices=on, compile=False)
  assert made.learner.remat == 'auto'
  found = memory_plan.chosen(made)
  made.rollout.update(tensor=found.rollout.tensor,
                      max_num_seqs=found.rollout.max_num_seqs)
  found = found.learner
  assert (f"learner.remat='{found.remat}', learner.microbatch_rows="
          f'{found.microbatch_rows}.' in capsys.readouterr().err)
  fitting = []
  for remat in ('', 'dots', 'nothing'):
    for rows in (16, 8):
      made.learner.update(remat=remat, microbatch_rows=rows)
      one = memory_plan.make(made)
      if one.peak + one.update.bytes / 10 <= .92 * one.available:
        fitting.append((remat, rows))
  assert (found.remat, found.microbatch_rows) == [*fitting, ('nothing', 8)][0]
  assert bool(fitting) == (on.startswith('h') or size == '3b')


@pytest.mark.slow
@pytest.mark.parametrize('size, on', [
    ('3b', 'v5e-8'), ('3b', 'h200-8'), ('14b', 'h100-8'), ('14b', 'v6e-8')])
def test_slots_follow_the_memory(size, on, capsys):
  """256 a copy, or half as many until they fit beside the least update.

  There are at least 16, where it does not fit.
  """
  made = grpo.get_config(f'qwen2.5-{size}')
  made.plan.update(devices=on, compile=False)
  rollout = memory_plan.chosen(made).rollout
  found, copies = rollout.max_num_seqs, 8 // rollout.tensor
  assert f'rollout.max_num_seqs={found}, learner.r' in capsys.readouterr().err
  made.learner.update(remat='nothing', microbatch_rows=8)
  fits = {}
  for each in (256, 128, 64, 32, 16):
    made.rollout.update(tensor=rollout.tensor, max_num_seqs=copies * each)
    plan_ = memory_plan.make(made)
    fits[copies * each] = plan_.peak + plan_.update.bytes / 10 <= (
        .92 * plan_.available)
  assert found == max([n for n in fits if fits[n]], default=16 * copies)
  assert (found == 2048) == (on == 'h200-8')
  made.rollout.max_num_seqs = 48
  assert memory_plan.chosen(made).rollout.max_num_seqs == 48  # given


def test_an_evaluation_without_an_engine_is_planned_with_bm25(tmp_path, capsys):
  plan.run(evaluate.get_config('smoke'), str(tmp_path))
  assert 'It fits' in capsys.readouterr().out


def test_a_plan_of_an_evaluation_holds_what_sampling_needs_alone(capsys):
  made = evaluate.get_config('methods/qwen2.5-7b-instruct')
  made.plan.update(devices='v5e-8', compile=False)
  plan.run(made, '')
  text = capsys.readouterr().out
  for name in ('moments', 'update', 'reference'):
    assert name not in text
  # Each of the 8 copies has 64 slots. The policy is split into 8.
  assert 'KV cache: 512 slots x 4096 tokens' in text
  made_ = memory_plan.make(memory_plan.resolved(made))
  assert sum(made_.holds.values()) == pytest.approx(
      2 * 7.62e9 / 8 + 64 * 4096 * 28 * 2 * 4 * 128 * 2, rel=.01)
  assert 'These help: more rollout.tensor, fewer rollout.max_num_seqs' in text


@pytest.mark.slow
@pytest.mark.parametrize('size, on, expected', [
    ('7b', 'v5e-64', 2), ('7b', 'h100-8', 1), ('14b', 'v5e-8', 1)])
def test_rollouts_are_split_where_whole_weights_do_not_fit(
    size, on, expected, capsys):
  """The smallest split with 16 slots a copy; 1 where none fits."""
  made = grpo.get_config(f'qwen2.5-{size}')
  made.plan.update(devices=on, compile=False)
  devices = int(on.rpartition('-')[2])
  found = memory_plan.chosen(made).rollout
  said = capsys.readouterr().err
  assert found.tensor == expected
  assert (f'rollout.tensor={expected}, ' in said) == (expected > 1)
  made.learner.update(remat='nothing', microbatch_rows=devices)
  fitting = []
  for tensor in (1, 2, 4):
    made.rollout.update(tensor=tensor, max_num_seqs=16 * devices // tensor)
    plan_ = memory_plan.make(made)
    if plan_.peak + plan_.update.bytes / 10 <= .92 * plan_.available:
      fitting.append(tensor)
  assert expected == min(fitting, default=1)
  made.rollout.tensor = 1
  assert memory_plan.chosen(made).rollout.tensor == 1  # given


@pytest.mark.slow
def test_a_step_with_few_conversations_or_a_slow_engine_takes_few_slots():
  made = grpo.get_config('qwen2.5-3b')
  made.plan.update(devices='h200-8', compile=False)
  slots = lambda: memory_plan.chosen(made).rollout.max_num_seqs
  assert slots() == 256 * 8
  made.rollout.tensor = 2
  assert slots() == 256 * 4
  made.rollout.update(questions_per_step=20, group_size=5, tensor=1)
  assert slots() == 13 * 8  # the least multiple of 8 above 100
  made.rollout.budgets.when_full = 'drop'  # a conversation has rows, and a slot
  assert memory_plan.rows_of(made) == 400 and slots() == 13 * 8
  made.rollout.budgets.when_full = 'stop'
  made.rollout.update(questions_per_step=512)
  made.search.engine = 'remote'
  with mock.patch.object(engines.Spec, 'deadline_secs',
                         lambda self, queries: queries / 10):
    assert slots() == 512  # within 60 seconds; 1,024 are not


def test_rows_that_are_given_stay_and_few_documents_have_one_row_each():
  made = grpo.get_config('qwen2.5-3b')
  made.plan.update(devices='h200-8', compile=False)
  made.learner.microbatch_rows = 24
  assert memory_plan.chosen(made).learner.microbatch_rows == 24
  made.learner.update(microbatch_rows=0, minibatches=8)  # of 320 documents
  assert memory_plan.chosen(made).learner.microbatch_rows == 8


def test_rollouts_in_a_thread_hold_their_weights_during_updates(tmp_path):
  usual = dict(plan=dict(devices='h200-1'), rollout=dict(dtype='bfloat16'))
  beside, ahead = (
      memory_plan.make(config(
          tmp_path, QWEN_3B, **usual, train=dict(max_staleness=n)))
      for n in (0, 1))
  weights = 2 * 3_085_938_688
  assert ahead.holds['frozen weights of rollouts, bfloat16'] == 2 * weights
  assert beside.engine.besides - ahead.engine.besides == weights


def test_devices_that_only_sample_hold_what_the_others_do_not(tmp_path):
  """Four that train and four that sample: together what each of four holds."""
  train = dict(max_staleness=1)
  four, apart = (memory_plan.make(config(
      tmp_path, QWEN_3B, plan=dict(devices=where, compile=False),
      rollout=dict(dtype='bfloat16', max_num_seqs=64), mesh=dict(fsdp=4),
      train=train | dict(rollout_devices=count)))
                 for where, count in (('h200-4', 0), ('h200-8', 4)))
  assert apart.holds | apart.sampling == four.holds
  assert not apart.holds.keys() & apart.sampling.keys()
  assert apart.engine == four.engine and apart.update == four.update
  assert apart.mesh == four.mesh == dict(data=1, fsdp=4, tensor=1)
  assert apart.training_peak == pytest.approx(
      sum(apart.holds.values()) + apart.update.bytes)
  sampling = sum(apart.sampling.values()) + apart.engine.besides
  assert apart.peak == max(sampling, apart.training_peak) < four.peak
  text = plan.describe(apart)
  assert 'on 8 x h200, of which 4 sample' in text
  for name, size in (('trains', apart.training_peak), ('samples', sampling)):
    table = text[text.index(f'a device that {name} holds'):]
    line = re.search(r'at most, together +([\d.]+)', table)
    assert line and line[1] == f'{size / devices.GIB:.2f}'
  assert text.count('It fits') == 2


def test_two_processes_whose_devices_only_sample_have_two_of_everything(
    tmp_path):
  """Each has half of the slots; its devices hold what those of one do."""
  one, two = (memory_plan.make(config(
      tmp_path, QWEN_3B, plan=dict(devices=where, compile=False),
      rollout=dict(dtype='bfloat16', max_num_seqs=slots),
      mesh=dict(data=data, fsdp=4),
      train=dict(max_staleness=1, rollout_devices=4)))
              for where, slots, data in (
                  ('h200-8', 64, 1), ('h200-16', 128, 2)))
  assert two.mesh == dict(data=2, fsdp=4, tensor=1)
  assert [*two.sampling.values()] == [*one.sampling.values()]
  assert two.engine == dataclasses.replace(one.engine, slots=128)
  assert 'on 16 x h200, of which 8 sample' in plan.describe(two)
  made = grpo.get_config('qwen2.5-3b')
  made.train.update(max_staleness=1, rollout_devices=4)
  slots = []
  for where in ('h200-8', 'h200-16'):
    made.plan.update(devices=where, compile=False)
    slots.append(memory_plan.chosen(made).rollout.max_num_seqs)
  assert slots == [1024, 2048]  # 256 for each copy


def test_a_plan_refuses_devices_that_cannot_train(tmp_path):
  with pytest.raises(ValueError, match='train.rollout_devices must leave'):
    memory_plan.make(config(
        tmp_path, QWEN_3B, plan=dict(devices='h200-16'),
        train=dict(max_staleness=1, rollout_devices=8)))


@pytest.mark.parametrize('text', ['v5e', 'v9-8', 'v5e-0', 'h200-x', '8-v5e'])
def test_unknown_devices_are_refused(text):
  with pytest.raises(ValueError, match='plan.devices must be KIND-COUNT'):
    devices.parse(text)


@pytest.mark.parametrize('text, name, count', [
    ('v5e-64', 'v5e', 64), ('a100-40gb-8', 'a100-40gb', 8),
    ('b200-1', 'b200', 1)
])
def test_devices_by_name(text, name, count):
  kind, number = devices.parse(text)
  assert (kind.name, number) == (name, count)


@pytest.mark.parametrize('text', ['v5e-3', 'h100-12'])
def test_there_are_no_slices_and_hosts_of_these_sizes(text):
  assert devices.to_compile_for(*devices.parse(text)) is None


def test_without_the_packages_nothing_compiles_for_other_devices(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  for text in ('v5e-8', 'h100-8'):
    assert devices.to_compile_for(*devices.parse(text)) is None


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec('jax_cuda12_plugin'),
    reason="no compiler of GPUs: pip install 'searchrl[compile]'")
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.parametrize('text, hosts, gib', [
    ('a100-40gb-8', 1, 40), ('a100-4', 1, 80), ('h100-1', 1, 80),
    ('h200-64', 8, 141), ('b200-8', 1, 180)])
def test_a_product_compiles_for_gpus_that_are_not_there(text, hosts, gib):
  """Rows are split over all devices, and their sum is one all-reduce."""
  kind, count = devices.parse(text)
  found = devices.to_compile_for(kind, count)
  assert [x.process_index for x in found] == sorted(
      [*range(hosts)] * (count // hosts))
  mesh = jax.sharding.Mesh(found, 'x')
  describe = lambda *axes: jax.ShapeDtypeStruct(
      (1024, 1024), 'bfloat16', sharding=jax.sharding.NamedSharding(
          mesh, jax.sharding.PartitionSpec(*axes)))
  program = jax.jit(lambda a, b: (a @ b).sum(0)).lower(
      describe('x'), describe()).compile()
  assert program.memory_analysis().argument_size_in_bytes == (
      2 * 1024**2 * (1 + 1 / count))
  assert ('all-reduce' in program.as_text()) == (count > 1)
  size = re.search(r'device_memory_size: (\d+)', (
      devices._TARGETS / f'{kind.name}.txtpb').read_text())
  assert int(size[1]) / GIB == pytest.approx(gib, rel=.02)


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec('libtpu'),
    reason="no libtpu: pip install 'jax[tpu]' to compile for TPUs")
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.parametrize('shape, chips, limit', [
    (QWEN_3B, 8, 0.85), (QWEN_7B, 64, 0.70)], ids=['3b', '7b'])
def test_a_policy_step_fits_its_chips(shape, chips, limit):
  """State, and the compiler's bytes of an update of 4,096-token rows."""
  mesh = meshes.make(data=1, fsdp=chips, devices=devices.to_compile_for(
      devices.KINDS['v5e'], chips))
  learner = learners.make(
      shape, algorithms.grpo(kl_coef=1e-3),
      optimizer.adamw(learning_rate=1e-6), mesh, rows=512, length=4096,
      microbatch_rows=chips, remat='nothing', dtype='bfloat16',
      attend=functools.partial(
          attention.causal, implementation='splash',
          sharding=meshes.sharding(mesh, ('batch', None, 'heads', None))))
  state = meshes.bytes_of(learner.train_step.abstract_state())
  parameters = sum(
      math.prod(x.shape) for x in jax.tree.leaves(transformer.abstract(shape)))
  assert state == pytest.approx(12 * parameters / chips, rel=0.01)
  update = update_memory.compiled(learner, 512)
  assert state + update <= limit * 16 * GIB
  assert 0.9 < update_memory.estimated(
      learner, 'splash', 512, on_tpu=True) / update < 1.1


def test_replayed_experts_are_counted():
  """The bytes are those of the update's argument."""
  figures = {}
  for replays in (False, True):
    made = grpo.get_config('qwen3-30b-a3b')
    made.plan.update(devices='h200-8', compile=False)
    made.mesh.update(expert=8, fsdp=1)
    made.rollout.questions_per_step = 64
    made.learner.router_replay = replays
    figures[replays] = memory_plan.make(made).update.bytes
  mesh = meshes.abstract(8, data=1, expert=8)
  learner, _ = memory_plan.learner_of(
      made, weights.read_config(shipped_shapes.locate(made.model.path)), mesh,
      devices.KINDS['h200'])
  rows = learner.abstract_update(memory_plan.rows_of(made))[3]
  assert figures[True] - figures[False] == meshes.bytes_of(rows.routing) > 1e7


REMAT, LONG = 'learner.remat', 'rollout.max_length'
OFFLOAD = 'learner.offload_optimizer'
SEQUENCE, EXPERT, FSDP = 'mesh.sequence', 'mesh.expert', 'mesh.fsdp'
# (recipe, devices, changes): most GiB per device of an update by the compiler.
COMPILED = {
    ('grpo:qwen2.5-3b', 'h200-8', ()): 4.41,
    ('grpo:qwen2.5-3b', 'h200-8', ((REMAT, 'dots'),)): 11.7,
    ('grpo:qwen2.5-3b', 'h200-8', ((REMAT, ''),)): 17.8,
    ('ppo:qwen2.5-3b', 'h200-8', ()): 6.25,
    ('ppo:qwen2.5-7b', 'h200-8', ()): 14.0,
    ('ppo:qwen2.5-7b', 'h200-8', ((OFFLOAD, True),)): 9.7,
    ('ppo:qwen2.5-3b', 'v6e-8', ()): 9.15,
    ('ppo:qwen2.5-7b', 'v6e-8', ((OFFLOAD, True),)): 16.9,
    ('grpo:qwen2.5-7b', 'h200-8', ()): 9.79,
    ('grpo:qwen2.5-14b', 'h200-8', ()): 18.7,
    ('grpo:qwen2.5-14b', 'h200-8', ((LONG, 32_768),)): 37.1,
    ('grpo:qwen2.5-14b', 'h200-8', ((LONG, 32_768), (SEQUENCE, 4))): 22.2,
    ('grpo:qwen2.5-14b', 'h200-8', ((LONG, 32_768), (SEQUENCE, 8))): 22.4,
    ('grpo:qwen2.5-32b', 'h200-8', ()): 39.5,
    ('grpo:qwen2.5-3b', 'v6e-8', ()): 7.12,
    ('grpo:qwen3-30b-a3b', 'h200-8', ((EXPERT, 8), (FSDP, 1))): 40.1,
    ('grpo:qwen3-30b-a3b', 'v5e-128', ((EXPERT, 8), (FSDP, 16))): 10.2,
}


@pytest.mark.long
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ('jax_cuda12_plugin', 'libtpu'))),
    reason="no compilers: pip install 'searchrl[compile]'")
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.parametrize('recipe, on, changes', COMPILED)
def test_an_estimate_is_close_to_the_compilers_figure(recipe, on, changes):
  name, _, text = recipe.partition(':')
  made = importlib.import_module(f'configs.{name}').get_config(text)
  made.plan.devices, made.learner.remat = on, 'nothing'
  with made.unlocked():
    made.update_from_flattened_dict(dict(changes))
  figure = memory_plan.make(made).update.bytes / GIB
  assert figure <= 1.01 * COMPILED[recipe, on, changes]
  made.plan.compile = False
  estimate = memory_plan.make(made).update.bytes / GIB
  assert estimate == pytest.approx(figure, rel=.1)


@pytest.mark.parametrize('text', ['', 'qwen2.5-7b'])
def test_a_plan_takes_another_engine_as_a_run_does(text, capsys):
  made = grpo.get_config(text)
  made.search.engine = 'bm25'  # without an encoder, the default's option
  made.plan.compile = False
  made.plan.devices = 'h200-8'
  made.rollout.max_num_seqs = 80
  plan.run(made, '')
  assert 'billion parameters on 8 x h200' in capsys.readouterr().out
