# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""hlo: bytes, copies, loops and exchanges by hand and by XLA's own analysis."""

import functools

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import pytest

import hlo

OPTIMIZATION_LEVEL = 3  # how many ops a text has depends on it
X = jax.ShapeDtypeStruct((64, 256), jnp.float32)
X_BYTES = 64 * 256 * 4


def compiled(function, *args, **options):
  return jax.jit(function, **options).lower(*args).compile()


def read(function, *args, **options) -> hlo.Module:
  return hlo.parse(compiled(function, *args, **options).as_text())


def shape(*dims, spec=None, dtype=jnp.float32):
  sharding = None if spec is None else NamedSharding(mesh(), P(*spec))
  return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


@functools.cache
def mesh():
  return jax.make_mesh((8,), ('d',), axis_types=(AxisType.Auto,))


def on_each(function, spec, out):
  """A function of what each of 8 devices holds."""
  return jax.shard_map(function, mesh=mesh(), in_specs=P(*spec),
                       out_specs=P(*out))


def entry(*lines, others='', header='') -> hlo.Module:
  """A program by hand; its operands are parameters p0, p1, ... of f32[8,128]."""
  lines = '\n'.join(f'  {line}' for line in lines)
  return hlo.parse(f'''HloModule by_hand, is_scheduled=true{header}
{others}
ENTRY %main (p0: f32[8,128], p1: f32[8,128]) -> f32[8,128] {{
  %p0 = f32[8,128]{{1,0:T(8,128)}} parameter(0)
  %p1 = f32[8,128]{{1,0:T(8,128)S(1)}} parameter(1)
{lines}
}}
''')


@pytest.mark.parametrize('function, args, options', [
    (lambda x, w: jax.nn.relu(x @ w), (X, shape(256, 512)), {}),
    (jax.nn.softmax, (X,), {}),
    (lambda x: x.T + 0, (X,), {}),
    (lambda x, i: jax.lax.dynamic_slice(x, (i, 0), (4, 256)) + 1, (X, 3), {}),
    (lambda x, u: jax.lax.dynamic_update_slice(x, u, (3, 0)),
     (X, shape(2, 256)), dict(donate_argnums=0)),
    (lambda x: x * 2, (shape(64, 256, spec=('d',)),),
     dict(out_shardings=NamedSharding(mesh(), P()))),
    (on_each(lambda x: jax.lax.psum(x, 'd'), ('d',), ()), (X,), {}),
    (on_each(lambda x: jax.lax.psum_scatter(x, 'd', tiled=True), (None, 'd'),
             ('d',)), (X,), {}),
], ids=['product', 'softmax', 'transposed', 'slice', 'update', 'gathered',
        'summed', 'scattered'])
def test_bytes_without_loops_are_those_of_xla(function, args, options):
  program = compiled(function, *args, **options)
  found = hlo.touched(hlo.parse(program.as_text()))
  assert found == {0: pytest.approx(
      program.cost_analysis()['bytes accessed'], rel=2e-3)}


def test_a_body_counts_with_its_trips():
  """XLA counts it once; here each of 5 layers reads its own weights."""
  def layers(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  found, = (hlo.touched(read(layers, X, shape(5, 256, 256))).values())
  weight = 256 * 256 * 4
  # A layer: its weights read, written, read; x read and written twice. Around
  # the loop: x copied, so that the argument stays.
  assert found == pytest.approx(5 * (3 * weight + 4 * X_BYTES) + 2 * X_BYTES,
                                rel=1e-3)
  assert hlo.flops(read(layers, X, shape(5, 256, 256))) == (
      5 * 2 * 64 * 256 * 256)


def test_loops_stand_in_loops_with_trips_of_the_text_or_of_the_caller():
  def sine(x, count):
    add = lambda _, x: jnp.sin(x)
    return jax.lax.scan(lambda x, _: (jax.lax.fori_loop(0, count, add, x), None),
                        x, length=3)[0]

  module = read(sine, X, 7)
  outer, inner = hlo.loops(module, unknown=4)
  assert [(x.trips, x.is_known) for x in outer] == [(3, True)]
  assert [(x.trips, x.is_known) for x in inner] == [(3, True), (4, False)]
  body = module.computations[outer[0].body]
  calls = [module.computations[op.called('to_apply')]
           for op in body.values() if op.opcode == 'call']  # by newer jax
  assert inner[0] == outer[0] and any(
      inner[1].op.name in ops for ops in (body, *calls))
  few, many = (sum(hlo.touched(module, n).values()) for n in (4, 14))
  assert many - few == pytest.approx(3 * 10 * 2 * X_BYTES, rel=1e-3)


def test_the_least_of_several_conditions_is_the_most_that_a_loop_runs():
  def run(x):
    return jax.lax.while_loop(
        lambda c: (c[0] < 16) & (c[1].sum() > 0) & (20 > c[0]),
        lambda c: (c[0] + 1, c[1] - 1), (0, x))[1]

  (loop,), = hlo.loops(read(run, X))
  assert (loop.trips, loop.is_known) == (16, True)


COUNTED = '''
%less (x: s32[], y: s32[]) -> pred[] {
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %c = pred[] compare(%y, %x), direction=GT
}

%test (s: (s32[], s32[], f32[8,128])) -> pred[] {
  %s = (s32[], s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %w = pred[] fusion(%i, %n), kind=kLoop, calls=%less
}

%step (t: (s32[], s32[], f32[8,128])) -> (s32[], s32[], f32[8,128]) {
  %t = (s32[], s32[], f32[8,128]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %m = s32[] get-tuple-element(%t), index=1
  %z = f32[8,128]{1,0} get-tuple-element(%t), index=2
  %one = s32[] constant(1)
  %k = s32[] add(%j, %one)
  %l = s32[] copy(%k)
  %o = s32[] add(%one, %l)
  %r = f32[8,128]{1,0} negate(%z)
  ROOT %u = (s32[], s32[], f32[8,128]{1,0}) tuple(%o, %m, %r)
}
'''


@pytest.mark.parametrize('start, limit, trips, is_known', [
    ('constant(2)', 'constant(9)', 4, True),  # 2, 4, 6, 8
    ('constant(2)', 'constant(2)', 0, True),
    ('constant(2)', 'bitcast(%p0)', 5, False),
    ('bitcast(%p0)', 'constant(9)', 5, True)])  # from 0: 0, 2, 4, 6, 8
def test_an_index_counts_from_its_start_in_its_steps(
    start, limit, trips, is_known):
  """The loop is unrolled twice, and its limit is carried along."""
  (loop,), = hlo.loops(entry(
      f'%start = s32[] {start}', f'%limit = s32[] {limit}',
      '%t.1 = (s32[], s32[], f32[8,128]{1,0}) tuple(%start, %limit, %p0)',
      'ROOT %loop = (s32[], s32[], f32[8,128]{1,0}) while(%t.1), '
      'condition=%test, body=%step', others=COUNTED), unknown=5)
  assert (loop.trips, loop.is_known) == (trips, is_known)


def test_an_update_in_a_loop_touches_the_update():
  """Arrays that are sliced or gathered are read in slices, too."""
  def written(cache, new):
    def put(i, cache):
      row = jax.lax.dynamic_index_in_dim(cache, 2 * i, keepdims=False)
      return cache.at[i].set(jnp.cos(row) + new)
    return jax.lax.fori_loop(0, 10, put, cache)

  module = read(written, shape(1000, 256), shape(256), donate_argnums=0)
  assert not hlo.copies(module, {1000 * 256})
  # Slice, sum and update may be one op or three, with a row between them.
  assert 10 * 3 * 1024 <= hlo.touched(module)[0] <= 10 * 7 * 1024

  taken = hlo.touched(read(lambda x, i: x[i] * 2, X, shape(7, dtype=jnp.int32)))
  assert taken == {0: 2 * 7 * 1024 + 7 * 4}
  put = hlo.touched(read(lambda x, i, u: x.at[i].add(u), X, shape(
      7, dtype=jnp.int32), shape(7, 256), donate_argnums=0))
  # Reads rows and updates, writes rows; indices are few.
  assert put[0] == pytest.approx(3 * 7 * 1024, rel=.02)


def test_bytes_of_each_memory_by_hand():
  """A prefetch reads one memory and fills the other; free ops move nothing."""
  tile = 8 * 128 * 4
  found = hlo.touched(entry(
      '%start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, '
      'u32[]{:S(2)}) copy-start(%p0)',
      '%done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%start)',
      '%view = f32[1024]{0:T(1024)S(1)} bitcast(%done)',
      '%sum = f32[8,128]{1,0:T(8,128)} add(%done, %p1)',
      '%slices = ((f32[8,128]{1,0}), f32[2,128]{1,0:S(1)}, s32[]{:S(2)}) '
      'slice-start(%sum), slice={[0:2], [0:128]}',
      '%slice = f32[2,128]{1,0:S(1)} slice-done(%slices)',
      '%narrow = bf16[2,128]{1,0} convert(%slice)',
      'ROOT %pair = (f32[8,128]{1,0}, bf16[2,128]{1,0}) tuple(%sum, %narrow)'))
  assert found == {
      0: tile + tile + tile / 4 + tile / 8,  # prefetch, sum, slice, narrow
      1: tile + 2 * tile + tile / 4 + tile / 4}


FUSED = '''
%body (a: f32[8,128], b: s32[], c: f32[1,128]) -> (f32[8,128], f32[8,128]) {
  %a = f32[8,128]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %zero = s32[] constant(0)
  %c = f32[1,128]{1,0} parameter(2)
  %twice = f32[1,128]{1,0} add(%c, %c)
  %put = f32[8,128]{1,0} dynamic-update-slice(%a, %twice, %b, %zero)
  %same = f32[8,128]{1,0} bitcast(%put)
  %inner = f32[8,128]{1,0} fusion(%c), kind=kLoop, calls=%spread
  ROOT %both = (f32[8,128]{1,0}, f32[8,128]{1,0}) tuple(%same, %inner)
}

%spread (d: f32[1,128]) -> f32[8,128] {
  %d = f32[1,128]{1,0} parameter(0)
  %flat = f32[128]{0} bitcast(%d)
  ROOT %wide = f32[8,128]{1,0} broadcast(%flat), dimensions={1}
}
'''


def test_a_fusion_counts_what_happens_inside():
  """An update in place by a row, and a row that becomes a matrix."""
  row = 128 * 4
  found = hlo.touched(entry(
      '%at = s32[] constant(3)',
      '%row = f32[1,128]{1,0} constant({...})',
      'ROOT %f = (f32[8,128]{1,0}, f32[8,128]{1,0}) fusion(%p0, %at, %row), '
      'kind=kLoop, calls=%body', others=FUSED))
  assert found == {0: row + 8 * row + 4 + row}  # put, spread, and read: 3, row


def test_the_first_update_of_a_new_buffer_writes_the_update_alone():
  new = FUSED.replace('parameter(0)\n  %b', (
      'custom-call(), custom_call_target="AllocateBuffer"\n  %b')).replace(
          'body (a: f32[8,128], b', 'body (b').replace(
              '%b = s32[] parameter(1)', '%b = s32[] parameter(0)').replace(
                  '%c = f32[1,128]{1,0} parameter(2)',
                  '%c = f32[1,128]{1,0} parameter(1)')
  row = 128 * 4
  found = hlo.touched(entry(
      '%at = s32[] constant(3)',
      '%row = f32[1,128]{1,0} constant({...})',
      'ROOT %f = (f32[8,128]{1,0}, f32[8,128]{1,0}) fusion(%at, %row), '
      'kind=kLoop, calls=%body', others=new))
  assert found == {0: row + 8 * row + 4 + row}


def test_an_update_that_is_turned_afterwards_writes_the_whole():
  turned = FUSED.replace('%same = f32[8,128]{1,0} bitcast(%put)',
                         '%same = f32[8,128]{0,1} copy(%put)')
  row = 128 * 4
  found = hlo.touched(entry(
      '%at = s32[] constant(3)',
      '%row = f32[1,128]{1,0} constant({...})',
      'ROOT %f = (f32[8,128]{0,1}, f32[8,128]{1,0}) fusion(%p0, %at, %row), '
      'kind=kLoop, calls=%body', others=turned))
  assert found == {0: 8 * row + 8 * row + 8 * row + 4 + row}  # and reads it


SLICED = '''
%corner (a: f32[8,128]) -> f32[2,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %several = (f32[8,128]{1,0}, f32[1,128]{1,0}) fusion(%a), kind=kLoop, calls=%both
  %whole = f32[8,128]{1,0} get-tuple-element(%several), index=0
  %part = f32[1,128]{1,0} get-tuple-element(%several), index=1
  ROOT %tall = f32[2,128]{1,0} concatenate(%part, %part), dimensions={0}
}

%both (b: f32[8,128]) -> (f32[8,128], f32[1,128]) {
  %b = f32[8,128]{1,0} parameter(0)
  %n = f32[8,128]{1,0} negate(%b)
  %s = f32[1,128]{1,0} slice(%n), slice={[0:1], [0:128]}
  ROOT %t = (f32[8,128]{1,0}, f32[1,128]{1,0}) tuple(%n, %s)
}
'''


def test_only_what_is_wanted_of_a_parameter_is_read():
  """A row of its negation, although all of that has a name."""
  found = hlo.touched(entry(
      'ROOT %f = f32[2,128] fusion(%p0), kind=kLoop, calls=%corner',
      others=SLICED))
  assert found == {0: 128 * 4 + 2 * 128 * 4}  # read once, though put twice


def test_a_sum_of_rows_reads_the_rows_that_are_wanted():
  others = '''
%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}

%rows (a: f32[8,128]) -> f32[2] {
  %a = f32[8,128]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %all = f32[8]{0} reduce(%a, %zero), dimensions={1}, to_apply=%add
  ROOT %two = f32[2]{0} slice(%all), slice={[0:2]}
}
'''
  module = entry('ROOT %f = f32[2]{0} fusion(%p0), kind=kInput, calls=%rows',
                 others=others)
  assert hlo.touched(module) == {0: 2 * 128 * 4 + 2 * 4}
  (count, times, what), = hlo.heaviest(module)
  assert (count, times) == (2 * 128 * 4 + 2 * 4, 1)
  assert what.startswith('fusion -> f32[2], in 0 loops')


def test_each_branch_counts():
  found = hlo.touched(read(
      lambda x, p: jax.lax.cond(p, jnp.sin, lambda x: jnp.cos(x).T.reshape(
          x.shape), x), X, True), 1)
  assert found[0] >= 2 * 2 * X_BYTES


COPIED = '''
%only (a: f32[8,128]) -> f32[128,8] {
  %a = f32[8,128]{1,0} parameter(0)
  %b = f32[8,128]{0,1} copy(%a)
  ROOT %c = f32[128,8]{1,0} bitcast(%b)
}

%more (e: f32[8,128]) -> f32[128,8] {
  %e = f32[8,128]{1,0} parameter(0)
  %f = f32[8,128]{1,0} negate(%e)
  ROOT %g = f32[128,8]{0,1} bitcast(%f)
}

%step (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s = (s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %turned = f32[8,128]{0,1:S(1)} copy(%x), metadata={op_name="jit(f)/copied"}
  %small = f32[8]{0} copy(%x)
  %back = f32[8,128]{1,0} copy(%turned)
  ROOT %t = (s32[], f32[8,128]{1,0}) tuple(%next, %back)
}

%test (s.1: (s32[], f32[8,128])) -> pred[] {
  %s.1 = (s32[], f32[8,128]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}
'''


def test_copies_of_a_cache_are_found_in_loops_and_around():
  found = hlo.copies(entry(
      '%zero = s32[] constant(0)',
      '%moving = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, '
      'u32[]{:S(2)}) copy-start(%p0)',
      '%moved = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%moving)',
      '%again = f32[8,128]{1,0:T(8,128)} copy(%p0)',
      '%across = f32[128,8]{0,1} transpose(%p0), dimensions={1,0}',
      '%turned.1 = f32[128,8]{1,0} fusion(%p0), kind=kLoop, calls=%only',
      '%other = f32[128,8]{0,1} fusion(%p0), kind=kLoop, calls=%more',
      '%t.1 = (s32[], f32[8,128]{1,0}) tuple(%zero, %moved)',
      'ROOT %w = (s32[], f32[8,128]{1,0}) while(%t.1), condition=%test, '
      'body=%step', others=COPIED), {8 * 128})
  assert [(len(x.loops), x.is_move, x.op_name) for x in found] == [
      (0, True, ''), *[(0, False, '')] * 3, (1, False, 'jit(f)/copied'),
      (1, False, '')]
  assert found[4].loops[0].trips == 6


def test_a_real_loop_that_turns_its_cache_copies_it():
  def turned(cache):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x.T.reshape(x.shape)),
                             cache)

  assert any(x.loops for x in hlo.copies(read(turned, X), {64 * 256}))


@pytest.mark.parametrize('function, spec, out, kind, sent', [
    (lambda x: jax.lax.all_gather(x, 'd', tiled=True), ('d',), (None,),
     'all-gather', 7 * X_BYTES / 8),
    (lambda x: jax.lax.psum_scatter(x, 'd', tiled=True), (None, 'd'), ('d',),
     'reduce-scatter', 7 * X_BYTES / 8 / 8),
    (lambda x: jax.lax.psum(x, 'd'), (None, 'd'), (), 'all-reduce',
     2 * 7 * X_BYTES / 8 / 8),
    (lambda x: jax.lax.all_to_all(x, 'd', 1, 0, tiled=True), ('d',),
     (None, 'd'), 'all-to-all', 7 * X_BYTES / 8 / 8),
    (lambda x: jax.lax.ppermute(x, 'd', [(i, (i + 1) % 8) for i in range(8)]),
     ('d',), ('d',), 'collective-permute', X_BYTES / 8),
])
def test_what_devices_send_each_other(function, spec, out, kind, sent):
  module = read(jax.shard_map(function, mesh=mesh(), in_specs=P(*spec),
                              out_specs=P(*out), check_vma=False), X)
  found, = hlo.collectives(module)
  assert (found.kind, found.group, found.sent) == (kind, 8, sent)
  assert found.times == 1 and not found.is_async and not found.loops


def test_weights_split_over_devices_are_gathered_in_the_loop_over_layers():
  """The sharding alone asks for it; the loop tells how often."""
  def layers(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  module = read(layers, shape(64, 256, spec=('d',)),
                shape(5, 256, 256, spec=(None, 'd')))
  found = [x for x in hlo.collectives(module) if x.kind == 'all-gather']
  assert sum(x.times * x.sent for x in found) == 5 * 7 / 8 * 256 * 256 * 4
  assert all(len(x.loops) == 1 and x.group == 8 for x in found)
  assert any(x.op_name.startswith('jit(layers)/while/body/') and (
      x.op_name.endswith(('/dot_general', 'dynamic_index_in_dim)/squeeze')))
             for x in found)  # jax 0.10 and 0.12: the product, or its operand


ADD = '''
%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%l, %r)
}
'''
SCATTERED = ADD + '''
%all-reduce-scatter (in: f32[8,128]) -> f32[1,128] {
  %in = f32[8,128]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %r.1 = f32[8,128]{1,0} all-reduce(%in), replica_groups={}, to_apply=%add
  ROOT %part = f32[1,128]{1,0} dynamic-slice(%r.1, %zero, %zero), dynamic_slice_sizes={1,128}
}
'''
TILE = 8 * 128 * 4


@pytest.mark.parametrize('line, others, wanted', [
    ('%g = (f32[8,128], f32[32,128]) all-gather-start(%p0), '
     'replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}', '',
     ('all-gather', 4, 3 * TILE, True)),
    ('%g = f32[32,128] all-gather(%p0), replica_groups=[2,4]<=[4,2]T(1,0), '
     'dimensions={0}', '', ('all-gather', 4, 3 * TILE, False)),
    ("%g = f32[16,128] all-gather(%p0), replica_groups=mesh['axis_0'=1,"
     "'axis_1'=4,'axis_2'=2], device_ids=([4,2]T(1,0)) {'axis_0','axis_2'}, "
     'dimensions={0}', '', ('all-gather', 2, TILE, False)),
    ('%g = f32[8,128] all-reduce-start(%p0), replica_groups={}, '
     'to_apply=%add', ADD, ('all-reduce', 8, 2 * 7 / 8 * TILE, True)),
    ('%g = (f32[8,128], f32[8,128]) all-reduce(%p0, %p1), '
     'replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add', ADD,
     ('all-reduce', 2, 2 * TILE, False)),
    ('%g = (f32[8,128], f32[8,128], u32[]{:S(2)}, u32[]{:S(2)}) '
     'collective-permute-start(%p0), source_target_pairs={{0,1},{1,0},{2,3}}',
     '', ('collective-permute', 2, TILE, True)),
    ('%g = ((f32[8,128]), f32[1,128], u32[]) reduce-scatter-start(%p0), '
     'replica_groups={}, to_apply=%add', ADD,
     ('reduce-scatter', 8, 7 / 8 * TILE, True)),
    ('%g = f32[1,128] fusion(%p0), kind=kCustom, calls=%all-reduce-scatter',
     SCATTERED, ('reduce-scatter', 8, 7 / 8 * TILE, False)),
], ids=['pair', 'tiles', 'axes', 'all', 'two', 'permute', 'wrapped', 'fused'])
def test_forms_of_exchanges_by_hand(line, others, wanted):
  found, = hlo.collectives(entry(
      line, 'ROOT %end = f32[8,128]{1,0} negate(%p0)', others=others,
      header=', num_partitions=8'))
  assert (found.kind, found.group, found.sent, found.is_async) == wanted


CHAINED = '''
%first (a: f32[8,128]) -> (f32[8,128], f32[64,128], u32[]) {
  %a = f32[8,128]{1,0} parameter(0)
  %g.1 = f32[64,128]{1,0} all-gather(%a), replica_groups={}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c.1 = (f32[8,128]{1,0}, f32[64,128]{1,0:S(1)}, u32[]) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%beside (b: f32[8,128], c: f32[64,128], d: f32[8,128]) -> (f32[8,128], f32[8,128], f32[64,128]) {
  %b = f32[8,128]{1,0} parameter(0)
  %c = f32[64,128]{1,0} parameter(1)
  %d = f32[8,128]{1,0} parameter(2)
  %g.2 = f32[64,128]{1,0} all-gather(%b), replica_groups={}, dimensions={0}, frontend_attributes={chain_id="0"}
  %e = f32[8,128]{1,0} negate(%d)
  ROOT %t = (f32[8,128]{1,0}, f32[8,128]{1,0}, f32[64,128]{1,0}) tuple(%e, %b, %g.2)
}

%last (i: f32[8,128], j: f32[64,128]) -> f32[64,128] {
  %i = f32[8,128]{1,0} parameter(0)
  %j = f32[64,128]{1,0} parameter(1)
  %g.3 = f32[64,128]{1,0} all-gather(%i), replica_groups={}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %c.3 = f32[64,128]{1,0} custom-call(%i, %j, %g.3), custom_call_target="AsyncCollectiveDone"
}
'''


def test_a_gathering_that_fusions_run_beside_is_one():
  module = entry(
      '%s = (f32[8,128]{1,0}, f32[64,128]{1,0:S(1)}, u32[]) fusion(%p0), '
      'kind=kCustom, calls=%first',
      '%s0 = f32[8,128]{1,0} get-tuple-element(%s), index=0',
      '%s1 = f32[64,128]{1,0:S(1)} get-tuple-element(%s), index=1',
      '%m = (f32[8,128]{1,0}, f32[8,128]{1,0}, f32[64,128]{1,0:S(1)}) '
      'fusion(%s0, %s1, %p1), kind=kOutput, calls=%beside',
      '%m0 = f32[8,128]{1,0} get-tuple-element(%m), index=0',
      '%m1 = f32[8,128]{1,0} get-tuple-element(%m), index=1',
      '%m2 = f32[64,128]{1,0:S(1)} get-tuple-element(%m), index=2',
      '%e = f32[64,128]{1,0:S(1)} fusion(%m1, %m2), kind=kCustom, calls=%last',
      'ROOT %r = f32[8,128]{1,0} negate(%m0)', others=CHAINED,
      header=', num_partitions=8')
  found, = hlo.collectives(module)
  assert found.is_async and found.sent == 7 * TILE
  # Gathered from one memory into the other; negated from there, and once more.
  assert hlo.touched(module) == {0: TILE + TILE + 2 * TILE, 1: 8 * TILE + TILE}
  assert not hlo.custom_calls(module)


def test_what_runs_beside_on_another_unit_counts_and_is_marked():
  others = '''
%aside (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  ROOT %r = f32[8,128]{1,0} all-reduce(%a), replica_groups={}, to_apply=%add
}, execution_thread="sparsecore"
''' + ADD
  module = entry(
      '%s = ((f32[8,128]), f32[8,128], u32[]) call-start(%p0), '
      'async_execution_thread="sparsecore", to_apply=%aside',
      'ROOT %d = f32[8,128]{1,0} call-done(%s)', others=others,
      header=', num_partitions=8')
  found, = hlo.collectives(module)
  assert found.is_async and hlo.touched(module) == {0: 2 * TILE}


def test_custom_calls_are_listed_and_count_nothing():
  others = '''
%around (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %hint = f32[8,128]{1,0} custom-call(%a), custom_call_target="AssumeGatherIndicesInBound"
  ROOT %k = f32[8,128]{1,0} custom-call(%hint), custom_call_target="Inner"
}
'''
  module = entry(
      '%kernel.1 = (f32[8,128]{1,0}, f32[1]{0}) custom-call(%p0, %p1), '
      'custom_call_target="tpu_custom_call", frontend_attributes={metadata={',
      '"block": 512', '}}, metadata={op_name="jit(f)/kernel"}',
      '%f = f32[8,128]{1,0} fusion(%p1), kind=kLoop, calls=%around',
      'ROOT %r = f32[8,128]{1,0} negate(%p0)', others=others)
  first, second = hlo.custom_calls(module)
  assert (first.target, first.name, first.op_name) == (
      'tpu_custom_call', 'kernel.1', 'jit(f)/kernel')
  assert [str(x) for x in (*first.operands, *first.results)] == [
      'f32[8,128]', 'f32[8,128]', 'f32[8,128]', 'f32[1]']
  assert first.operands[1].memory == 1 and second.target == 'Inner'
  # Of the fusion only its own result is known.
  assert hlo.touched(module) == {0: TILE + 2 * TILE, 1: TILE}


@pytest.mark.parametrize('function, shapes', [
    (lambda a, b: jnp.einsum('bij,bkj->bik', a, b), ((3, 9, 5), (3, 7, 5))),
    (lambda a, b: jax.lax.conv_general_dilated(
        a, b, (2, 2), ((1, 2), (0, 1)), lhs_dilation=(1, 2)),
     ((2, 3, 9, 9), (4, 3, 3, 3))),
    (lambda a, b: jax.lax.conv_general_dilated(
        a, b, (1, 3), ((0, 0), (2, 2)), rhs_dilation=(2, 1),
        feature_group_count=2), ((2, 6, 9, 8), (4, 3, 3, 3))),
], ids=['batches', 'holes', 'groups'])
def test_products_count_as_xla_counts_them(function, shapes):
  program = compiled(function, *(shape(*dims) for dims in shapes))
  found = hlo.flops(hlo.parse(program.as_text()))
  assert found == program.cost_analysis()['flops'] > 0


def test_products_of_batches_as_a_tpu_writes_them():
  """22 rows of 2 heads, 8 queries, 128 keys of width 128; as one convolution."""
  module = entry(
      '%q = bf16[22,2,8,128]{3,2,1,0} constant({...})',
      '%k = bf16[22,2,128,128]{3,2,1,0} constant({...})',
      'ROOT %c = f32[22,2,128,8]{2,3,1,0} convolution(%k, %q), window={size='
      '22x2 stride=21x1 lhs_dilate=22x2}, dim_labels=01bf_01oi->01bf')
  assert hlo.flops(module) == 2 * 22 * 2 * 8 * 128 * 128


def test_a_text_without_an_entry_is_refused():
  with pytest.raises(ValueError, match='must have an ENTRY'):
    hlo.parse('HloModule nothing\n')
