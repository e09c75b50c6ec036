# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the text of a compiled program: what it moves, copies and sends.

  module = hlo.parse(compiled.as_text())
  hlo.touched(module, unknown=16)  # bytes by memory, loops with their trips

  python benchmarks/compiled/hlo.py TEXT 16  # the ops that move the most, of a file

XLA's own `cost_analysis` counts the body of a loop once, and what a custom call
says of itself. Here a body counts as often as it runs, where the text tells it,
and as often as the caller says otherwise; custom calls count nothing and are
listed, for the caller to add. Sizes are those of the arrays, without the
padding of their layouts.

A program is scheduled: each op of a computation that is run reads its operands
from a memory and writes its results to one, a fusion as one op. Memory 0 is the
device's own; a TPU's compiler moves arrays to others on its chip (1 is its
vector memory), whose traffic costs no bandwidth of the first.
"""

from collections.abc import Collection, Iterator
import dataclasses
import functools
import math
import pathlib
import re
import sys
from typing import Any, NamedTuple

import numpy as np

_FREE = frozenset((
    'tuple', 'get-tuple-element', 'bitcast', 'parameter', 'constant', 'while',
    'async', 'call', 'conditional', 'custom-call', 'after-all',
    'add-dependency',
    'opt-barrier', 'optimization-barrier', 'domain', 'partition-id',
    'replica-id'))
_VIEWS = ('bitcast', 'copy', 'reshape', 'transpose', 'convert')
_COPIES = ('copy', 'reshape', 'transpose', 'convert')  # outside fusions
_SLICES = ('dynamic-slice', 'gather', 'slice')  # read a part of operand 0
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}  # operand: what is put
_WHOLE = ('dot', 'convolution', 'sort', 'fft', 'custom-call')  # read all
_COLLECTIVES = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all',
                'collective-permute')
_NO_WORK = frozenset((  # custom calls that stand for nothing
    'AllocateBuffer', 'AssumeGatherIndicesInBound', 'AsyncCollectiveDone',
    'AsyncCollectiveStart', 'ConcatBitcast', 'GatherScatterIndicesBitpacked',
    'PrepareAsyncCallDone', 'PrepareAsyncCallStart', 'Sharding',
    'SPMDFullToShardShape', 'SPMDShardToFullShape'))


class Array(NamedTuple):
  """One array of a result."""

  dtype: str
  dims: tuple[int, ...]
  layout: str = ''  # without the memory
  memory: int = 0

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def itemsize(self) -> float:
    """Bytes of an element; less than one for 4 bits."""
    digits = re.search(r'\d+', self.dtype)
    return int(digits[0]) / 8 if digits else float(self.dtype == 'pred')

  @property
  def bytes(self) -> float:
    return self.elements * self.itemsize

  def __str__(self):
    return f'{self.dtype}[{",".join(map(str, self.dims))}]'


@dataclasses.dataclass(frozen=True)
class Op:
  """One instruction."""

  name: str
  opcode: str
  result: Any  # an Array, or a tuple of results
  operands: tuple[str, ...]  # names, in the same computation
  argument: str  # the text between the parentheses
  attributes: str  # the text behind them
  is_root: bool = False

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    return tuple(_flat(self.result))

  @property
  def elements(self) -> int:
    return sum(array.elements for array in self.arrays)

  @property
  def op_name(self) -> str:
    """The place in the Python program that the op comes from."""
    return self.attribute(r'op_name="([^"]*)"')

  def attribute(self, pattern: str) -> str:
    found = re.search(pattern, self.attributes)
    return found[1] if found else ''

  def called(self, key: str) -> str:
    """The computation that an attribute names."""
    return self.attribute(rf'\b{key}=%([\w.-]+)')


Computation = dict[str, Op]  # by name, in the order of the text


class Module(NamedTuple):
  """A program."""

  computations: dict[str, Computation]
  entry: str
  devices: int


@dataclasses.dataclass(frozen=True)
class Loop:
  """A loop that an op stands in."""

  op: Op  # the `while`
  body: str
  trips: float
  is_known: bool  # from the text, else from the caller


@dataclasses.dataclass(frozen=True)
class Visit:
  """An op that is run, and the loops around it, the outermost first."""

  op: Op
  computation: Computation
  loops: tuple[Loop, ...]
  in_background: bool  # in a computation that was started to run beside

  @property
  def times(self) -> float:
    return math.prod(loop.trips for loop in self.loops)

  def operands(self) -> list[Op]:
    return [self.computation[name] for name in self.op.operands]


@dataclasses.dataclass(frozen=True)
class Copy:
  """An array that is copied."""

  array: Array
  loops: tuple[Loop, ...]
  is_move: bool  # from one memory to another, in the same layout
  op_name: str


@dataclasses.dataclass(frozen=True)
class Collective:
  """An exchange between devices."""

  kind: str
  arrays: tuple[Array, ...]  # its results
  group: int  # devices that take part in one exchange
  sent: float  # bytes that a device sends each time; see `_sent`
  loops: tuple[Loop, ...]
  times: float
  is_async: bool
  op_name: str


@dataclasses.dataclass(frozen=True)
class CustomCall:
  """A call of something that the compiler does not look into."""

  target: str
  name: str  # of a Pallas kernel's op: that of the kernel, and a number
  operands: tuple[Array, ...]
  results: tuple[Array, ...]
  loops: tuple[Loop, ...]
  times: float
  op_name: str


def parse(text: str) -> Module:
  """The program of a text.

  Raises:
    ValueError: there is no ENTRY.
  """
  computations, entry, lines = {}, '', None
  for line in re.sub(r'/\*index=\d+\*/', '', text).splitlines():
    header = re.match(r'(ENTRY )?%([\w.-]+) \(.*\{$', line)
    if header:
      lines = computations.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif re.match(r'\}(?!\})', line):
      lines = None
    elif lines is not None and re.match(r'\s+(ROOT )?%', line):
      lines.append(line)
    elif lines:  # an attribute may have several lines
      lines[-1] += line
  if not entry:
    raise ValueError('the text of a program must have an ENTRY computation.')
  count = lambda name: int((re.search(rf'\b{name}=(\d+)', text) or [0, 1])[1])
  return Module(
      {name: {op.name: op for op in map(_op, lines)}
       for name, lines in computations.items()},
      entry, count('num_partitions') * count('replica_count'))


def _op(line: str) -> Op:
  start = re.match(r'\s+(ROOT )?%([\w.-]+) = ', line)
  result, end = _result(line, start.end())
  opcode = re.compile(r' ([\w-]+)\(').match(line, end)
  close = _closing(line, opcode.end() - 1)
  argument = line[opcode.end():close]
  operands = () if opcode[1] == 'constant' else tuple(
      re.findall(r'%([\w.-]+)', argument))
  return Op(start[2], opcode[1], result, operands, argument, line[close + 1:],
            bool(start[1]))


_ARRAY = re.compile(r'(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?')


def _result(line: str, at: int) -> tuple[Any, int]:
  """The result written at a place, and the place behind it."""
  if line[at] != '(':
    found = _ARRAY.match(line, at)
    layout, memory = found[3] or '', re.search(r'S\((\d+)\)', found[3] or '')
    dims = tuple(int(n.lstrip('<=')) for n in found[2].split(',') if n)
    return Array(found[1], dims, re.sub(r'S\(\d+\)', '', layout),
                 int(memory[1]) if memory else 0), found.end()
  parts, at = [], at + 1
  while line[at] != ')':
    if line[at] in ', ':
      at += 1
    else:
      part, at = _result(line, at)
      parts.append(part)
  return tuple(parts), at + 1


def _flat(result: Any) -> Iterator[Array]:
  if isinstance(result, Array):
    yield result
  else:
    for part in result:
      yield from _flat(part)


def _closing(line: str, at: int) -> int:
  """The place of the parenthesis that closes the one at a place."""
  depth = 0
  for at in range(at, len(line)):
    depth += (line[at] == '(') - (line[at] == ')')
    if not depth:
      return at
  raise ValueError(f'a parenthesis is not closed: {line[:99]}')


def walk(module: Module, unknown: float = 1) -> Iterator[Visit]:
  """Yields all ops that are run, without those inside of fusions.

  Each branch of a conditional counts as if it were taken.

  Args:
    module: Program.
    unknown: Number of trips of loops whose text does not tell it. Such loops
      inside of such a loop count once.
  """
  def inside(name, loops, in_background):
    computation = module.computations[name]
    for op in computation.values():
      visit = Visit(op, computation, loops, in_background)
      yield visit
      if op.opcode == 'while':
        trips = _trips(module, visit)
        is_inner = any(not loop.is_known for loop in loops)
        loop = Loop(op, op.called('body'), trips if trips is not None else
                    1 if is_inner else unknown, trips is not None)
        for part in ('condition', 'body'):
          yield from inside(op.called(part), (*loops, loop), in_background)
      elif op.opcode in ('call', 'call-start', 'async-start'):
        yield from inside(op.called('to_apply') or op.called('calls'), loops,
                          in_background or op.opcode != 'call')
      elif op.opcode == 'conditional':
        for branch in _branches(op):
          yield from inside(branch, loops, in_background)

  yield from inside(module.entry, (), False)


def loops(module: Module, unknown: float = 1) -> list[tuple[Loop, ...]]:
  """Every loop that is run, with those around it: the outermost first."""
  return list(dict.fromkeys(v.loops for v in walk(module, unknown) if v.loops))


def _branches(op: Op) -> list[str]:
  several = op.attribute(r'branch_computations=\{([^}]*)\}')
  return re.findall(r'%([\w.-]+)', several) or [
      op.called('true_computation'), op.called('false_computation')]


def _trips(module: Module, visit: Visit) -> int | None:
  """How often a `while` runs: by the compiler, or by its condition.

  An index that has to be less than a number starts at what the loop is given,
  or 0 if that is not known, and grows by what the body adds, or 1. Of several
  conditions the tightest counts: the loop may end earlier.
  """
  op = visit.op
  known = op.attribute(r'"known_trip_count":\{"n":"(\d+)"')
  if known:
    return int(known)
  condition, root = _opened(module, op.called('condition'))
  body, out = _opened(module, op.called('body'))
  given = visit.computation[op.operands[0]]
  given = given.operands if given.opcode == 'tuple' else ()
  found, left = [], [root]
  while left:
    at = condition[left.pop()]
    if at.opcode == 'and':
      left += at.operands
    elif at.opcode == 'compare' and re.search('direction=[LG]T', at.attributes):
      index, limit = (condition[_origin(condition, x)] for x in (
          at.operands if 'direction=LT' in at.attributes
          else reversed(at.operands)))
      start, step, end = 0, 1, _number(limit)
      if end is None and _is_carried(limit) and given:
        place = _index(limit)
        if _added(body, body[out].operands[place], place) == 0:
          end = _number(visit.computation[given[place]])
      if _is_carried(index):
        place = _index(index)
        step = _added(body, body[out].operands[place], place) or 1
        start = given and _number(visit.computation[given[place]]) or 0
      if end is not None:
        found.append(max(0, -(-(end - start) // step)))
  return min(found, default=None)


def _number(op: Op) -> int | None:
  """The value of a whole constant."""
  whole = op.opcode == 'constant' and re.fullmatch(r'-?\d+', op.argument)
  return int(op.argument) if whole else None


def _is_carried(op: Op) -> bool:
  return op.opcode == 'get-tuple-element'  # of the only parameter


def _added(body: Computation, name: str, place: int) -> int | None:
  """Returns the number that a loop's body adds to a carried value, or None."""
  total, at = 0, body[_origin(body, name)]
  while at.opcode == 'add':
    terms = [body[_origin(body, x)] for x in at.operands]
    numbers = [_number(x) for x in terms]
    if None not in numbers or numbers == [None, None]:
      return None
    total += next(x for x in numbers if x is not None)
    at = next(x for x, number in zip(terms, numbers) if number is None)
  return total if _is_carried(at) and _index(at) == place else None


def _opened(module: Module, name: str, arguments: tuple[str, ...] = (),
            prefix: str = '') -> tuple[Computation, str]:
  """A computation with the fusions in it opened, and the name of its root."""
  ops, same, root = {}, {}, ''
  for op in module.computations[name].values():
    own = prefix + op.name
    operands = tuple(same.get(prefix + x, prefix + x) for x in op.operands)
    if op.opcode == 'parameter' and arguments:
      same[own] = arguments[int(op.argument)]
    elif op.opcode == 'fusion':
      inner, same[own] = _opened(
          module, op.called('calls'), operands, f'{own}/')
      ops |= inner
    elif op.opcode == 'get-tuple-element' and (
        operands[0] in ops and ops[operands[0]].opcode == 'tuple'):
      same[own] = ops[operands[0]].operands[_index(op)]
    else:
      ops[own] = dataclasses.replace(op, name=own, operands=operands)
    root = own if op.is_root else root
  return ops, same.get(root, root)


def _fused(module: Module, visit: Visit) -> Computation:
  """The ops inside of a fusion; of another op none."""
  if visit.op.opcode != 'fusion':
    return {}
  inner, _ = _opened(module, visit.op.called('calls'))
  return inner


def _index(op: Op) -> int:
  return int(op.attribute(r'\bindex=(\d+)'))


def touched(module: Module, unknown: float = 1) -> dict[int, float]:
  """Bytes read and written, by memory; see `traffic`."""
  total = {}
  for visit, moved in traffic(module, unknown):
    for memory, count in moved.items():
      total[memory] = total.get(memory, 0) + visit.times * count
  return total


def traffic(module: Module, unknown: float = 1
           ) -> Iterator[tuple[Visit, dict[int, float]]]:
  """Yields each op that moves bytes, with the bytes of each memory in one run.

  An op reads its operands and writes its results. But it reads only the slices
  of arrays that it slices or gathers from, and writes only the updates of
  arrays that it updates in place; a scatter also reads the former values. The
  same holds for what happens inside of a fusion.

  Args:
    module: Program.
    unknown: Number of trips of loops whose text does not tell it.
  """
  for visit in walk(module, unknown):
    opcode = visit.op.opcode
    if opcode.removesuffix('-start') in _FREE or (
        opcode.endswith(('-done', '-update'))):
      continue
    moved = {}
    for array, count in _moved(module, visit):
      moved[array.memory] = moved.get(array.memory, 0) + count
    yield visit, moved


def _moved(module: Module, visit: Visit) -> list[tuple[Array, float]]:
  """(array, bytes) of what an op reads and writes."""
  ops, parameters, outputs = _inside(module, visit)
  wanted, in_place, moved = dict.fromkeys(ops, 0), set(), []
  for name, arrays in outputs:
    update = _updated(ops, name)
    if update:
      size = ops[ops[update].operands[_UPDATES[ops[update].opcode]]].elements
      in_place.add(update)
      wanted[update] = size
      reads = 1 + (ops[update].opcode == 'scatter')
      moved += [(array, reads * size * array.itemsize) for array in arrays]
    elif ops[name].opcode != 'parameter':  # which is passed on
      wanted[name] = ops[name].elements
      moved += [(array, array.bytes) for array in arrays]
  _want_operands(ops, wanted, in_place)
  for parameter in parameters:
    share = min(1, wanted[parameter.name] / max(parameter.elements, 1))
    moved += [(array, share * array.bytes) for array in parameter.arrays]
  return moved


def _inside(module: Module, visit: Visit) -> tuple[
    Computation, list[Op], list[tuple[str, tuple[Array, ...]]]]:
  """Returns an op's computation, its parameters, and the arrays that it writes.

  A collective that others are computed beside runs through several fusions, as
  a chain: the first one starts it, and there it counts.
  """
  op = _plain(visit.op)
  parameters = [
      dataclasses.replace(source, name=f'operand {i}', opcode='parameter',
                          operands=(), argument=str(i))
      for i, source in enumerate(visit.operands())]
  names = tuple(x.name for x in parameters)
  ops = {x.name: x for x in parameters}
  if op.opcode != 'fusion':
    ops[op.name] = dataclasses.replace(op, operands=names)
    return ops, parameters, [(op.name, op.arrays)]
  inner, root = _opened(module, op.called('calls'), names, 'fused/')
  chained = [x for x in inner.values() if _is_chained(x)]
  if chained and _starts(inner):
    return ops | inner, parameters, [
        (x.name, tuple(y for y in op.arrays if str(y) in map(str, x.arrays)))
        for x in chained]
  ops |= inner | {x.name: dataclasses.replace(
      x, opcode='parameter', operands=()) for x in chained}
  if _target(ops[root]) == 'AsyncCollectiveDone':
    return ops, parameters, []
  if ops[root].opcode != 'tuple':
    return ops, parameters, [(root, op.arrays)]
  return ops, parameters, [
      (name, (array,)) for name, array in zip(ops[root].operands, op.arrays)]


def _is_chained(op: Op) -> bool:
  return op.opcode in _COLLECTIVES and 'chain_id=' in op.attributes


def _starts(ops: Computation) -> bool:
  return any(_target(x) == 'AsyncCollectiveStart' for x in ops.values())


def _target(op: Op) -> str:
  return op.attribute(r'custom_call_target="([^"]*)"')


def _plain(op: Op) -> Op:
  """The op that a pair of -start and -done stands for."""
  kind = op.opcode.removesuffix('-start')
  if kind == op.opcode:
    return op
  result = op.result
  if kind != 'all-reduce':  # its result alone is no pair of old and new
    result = result[0 if kind == 'copy' else 1]
  return dataclasses.replace(op, opcode=kind, result=result)


def _updated(ops: Computation, name: str) -> str:
  """The update in place that makes an output, or ''."""
  same = lambda name: _origin(ops, name, ('bitcast',))
  update = same(name)
  if ops[update].opcode not in _UPDATES:
    return ''
  updated = ops[same(ops[update].operands[0])]
  return update if updated.opcode == 'parameter' or (
      _target(updated) == 'AllocateBuffer') else ''


def _origin(ops: Computation, name: str, views: Collection[str] = _VIEWS
           ) -> str:
  """Returns the name of the op whose array an op views."""
  while ops[name].opcode in views:
    name = ops[name].operands[0]
  return name


def _want_operands(ops: Computation, wanted: dict[str, float],
                   in_place: set[str]) -> None:
  """Adds to `wanted` the elements of each op that later ones want."""
  for name in reversed(ops):
    op = ops[name]
    share = min(wanted[name], op.elements)
    for i, operand in enumerate(op.operands if share else ()):
      size = ops[operand].elements
      if i == 0 and name in in_place:
        continue
      if i == 0 and op.opcode in _SLICES:
        size = share
      elif op.opcode not in _WHOLE:  # elementwise, a broadcast, or a reduction
        size = min(size, share) if size <= op.elements else (
            size * share / op.elements)
      wanted[operand] += size


def copies(module: Module, elements: Collection[int]) -> list[Copy]:
  """Copies of arrays of so many elements, by an op or a fusion of their own."""
  result = []
  for visit in walk(module):
    op = _plain(visit.op)
    if op.opcode == 'fusion':
      ops, _ = _opened(module, op.called('calls'))
      if any(x.opcode not in (*_VIEWS, 'parameter', 'tuple')
             for x in ops.values()):
        continue
    elif op.opcode not in _COPIES:
      continue
    sources = [array for x in visit.operands() for array in x.arrays]
    result += [
        Copy(array, visit.loops, any(_is_move(x, array) for x in sources),
             op.op_name)
        for array in op.arrays if array.elements in elements]
  return result


def _is_move(source: Array, target: Array) -> bool:
  return source.memory != target.memory and (
      source._replace(memory=0) == target._replace(memory=0))


def collectives(module: Module, unknown: float = 1) -> list[Collective]:
  """Every exchange between devices, also those inside of fusions."""
  result = []
  for visit in walk(module, unknown):
    inner = _fused(module, visit)
    for op in inner.values() or [visit.op]:
      plain = _plain(op) if op.opcode.startswith(_COLLECTIVES) else op
      if plain.opcode not in _COLLECTIVES or (
          _is_chained(op) and not _starts(inner)):
        continue
      kind, group = plain.opcode, _group(plain, module.devices)
      sources = inner or visit.computation
      read = sum(x.bytes for name in op.operands for x in sources[name].arrays)
      if kind == 'all-reduce' and any(
          x.opcode == 'dynamic-slice' and x.operands[0] == op.name
          for x in inner.values()):
        kind = 'reduce-scatter'  # as a TPU's compiler writes it
      written = sum(x.bytes for x in plain.arrays)
      result.append(Collective(
          kind, plain.arrays, group, _sent(kind, group, read, written),
          visit.loops, visit.times,
          visit.in_background or plain is not op or _is_chained(op),
          plain.op_name))
  return result


def _sent(kind: str, group: int, read: float, written: float) -> float:
  """Bytes that a device sends around a ring of so many.

  all-gather and reduce-scatter: (n - 1) / n of the whole array; all-reduce: as
  one after the other; all-to-all: all but the own part; a permute sends once.
  """
  if kind == 'collective-permute':
    return read
  others = (group - 1) / max(group, 1)
  return others * {'all-gather': written, 'reduce-scatter': read,
                   'all-reduce': 2 * read, 'all-to-all': read}[kind]


def _group(op: Op, devices: int) -> int:
  """Devices of one exchange: {{0,1},{2,3}}, [2,4]<=[8], or axes of a mesh."""
  pairs = op.attribute(r'source_target_pairs=\{(\{.*?\})\}')
  if pairs:
    return _cycle(re.findall(r'\{(\d+),(\d+)\}', pairs))
  axes = re.search(r"replica_groups=mesh\[([^]]*)\].*?\{([^}]*)\}",
                   op.attributes)
  if axes:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
    return math.prod(int(sizes[x]) for x in re.findall(r"'(\w+)'", axes[2]))
  tiles = op.attribute(r'replica_groups=\[([\d,]+)\]<=')
  if tiles:
    return int(tiles.split(',')[-1])
  first = op.attribute(r'replica_groups=\{\{([\d,]*)\}')
  return len(first.split(',')) if first else devices


def _cycle(pairs: list[tuple[str, str]]) -> int:
  """How many devices a permutation passes through, from the first on."""
  step, at = dict(pairs), pairs[0][0]
  seen = {at}
  while step.get(at) not in (*seen, None):
    at = step[at]
    seen.add(at)
  return len(seen)


def custom_calls(module: Module, unknown: float = 1) -> list[CustomCall]:
  """Calls that do work; also those inside of fusions, without their arrays."""
  result = []
  for visit in walk(module, unknown):
    inner = _fused(module, visit)
    for op in inner.values() or [visit.op]:
      target = _target(op)
      if op.opcode.startswith('custom-call') and (
          not op.opcode.endswith('-done') and target not in _NO_WORK):
        sources = inner or visit.computation
        result.append(CustomCall(
            target, op.name,
            tuple(x for name in op.operands for x in sources[name].arrays),
            _plain(op).arrays, visit.loops, visit.times, op.op_name))
  return result


def flops(module: Module, unknown: float = 1) -> float:
  """Returns the FLOPs of matrix products: two per multiply and add."""
  total = 0.0
  for visit in walk(module, unknown):
    ops = visit.computation
    inside = [visit.op]
    if visit.op.opcode == 'fusion':
      ops, _ = _opened(module, visit.op.called('calls'))
      inside = ops.values()
    for op in inside:
      if op.opcode in ('dot', 'convolution'):
        left, right = (ops[name].arrays[0].dims for name in op.operands)
        products = (_of_dot(op, left) if op.opcode == 'dot' else
                    _of_convolution(op, left, right))
        total += 2 * visit.times * products
  return total


def _of_dot(op: Op, left: tuple[int, ...]) -> int:
  """Multiplications of a dot."""
  summed = op.attribute(r'lhs_contracting_dims=\{([\d,]*)\}')
  return op.elements * math.prod(
      left[int(i)] for i in summed.split(',') if i)


def _of_convolution(op: Op, left: tuple[int, ...], right: tuple[int, ...]
                   ) -> int:
  """Multiplications of a convolution, but of those with padding.

  A TPU's compiler makes one of every product; the batch of a product of
  batches is then a spatial dimension, with holes.
  """
  lhs, rhs, out = re.split(
      '_|->', op.attribute(r'dim_labels=(\w+->\w+)'))
  size = lambda dims, labels, label: dims[labels.index(label)]
  result = op.arrays[0].dims
  count = (size(result, out, 'b') * size(result, out, 'f')
           * size(right, rhs, 'i'))
  window = dict(re.findall(r'(\w+)=([\w.-]+)',
                           op.attribute(r'window=\{([^}]*)\}')))
  spatial = sorted(set(out) - set('bf'))
  for i, label in enumerate(spatial):
    of = lambda key, default, i=i: (
        window[key].split('x')[i] if key in window else default)
    dilate, step = int(of('lhs_dilate', 1)), int(of('rhs_dilate', 1))
    at = (np.arange(size(result, out, label))[:, None] * int(of('stride', 1))
          + np.arange(size(right, rhs, label)) * step
          - int(str(of('pad', '0_0')).split('_')[0]))
    last = (size(left, lhs, label) - 1) * dilate
    count *= int(((at >= 0) & (at <= last) & (at % dilate == 0)).sum())
  return count


def heaviest(module: Module, unknown: float = 1
            ) -> list[tuple[float, float, str]]:
  """(bytes, times, what) of the main memory's traffic, alike ops as one."""
  sums = {}
  for visit, moved in traffic(module, unknown):
    op = visit.op
    what = (f'{op.opcode} -> {op.arrays[0]}, in {len(visit.loops)} loops, '
            f'{op.op_name}')
    count, times = sums.get(what, (0, 0))
    sums[what] = (count + visit.times * moved.get(0, 0), times + visit.times)
  return sorted(((*sums[what], what) for what in sums), reverse=True)


def main() -> None:
  path, *unknown = sys.argv[1:]
  module = parse(pathlib.Path(path).read_text(encoding='utf-8'))
  print('| MB | times | what |\n|---|---|---|')
  for count, times, what in heaviest(module, *map(float, unknown))[:30]:
    print(f'| {count / 1e6:.1f} | {times:.4g} | {what} |')


if __name__ == '__main__':
  main()
