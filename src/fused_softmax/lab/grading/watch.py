"""Watching an interpreted kernel: elements read and written, and each access outside of its tensors.

Triton's interpreter makes each load and store of a kernel through one function. Here they are counted. An access to an
address of no tensor of the launch is noted and not made, so that a wrong kernel cannot damage this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
from torch import Tensor

MOST_EVENTS = 5


@dataclass(frozen=True)
class Access:
    """One load or store of one program: the tensor, and the range of its elements, by their order in memory."""

    program: int
    kind: str  # "read" or "write"
    tensor: str
    first: int
    last: int
    elements: int


@dataclass
class Watched:
    """The accesses of all launches of one call."""

    reads: int = 0
    writes: int = 0
    launches: int = 0
    outside: list[str] = field(default_factory=list)  # in words, the first few
    reads_outside: int = 0
    writes_outside: int = 0
    rewritten: int = 0  # stores to an element that was written before in the same launch
    sectors: int = 0  # of 32 bytes: distinct ones of each load and store, added up
    needed: int = 0  # bytes of those loads and stores
    log: list[Access] | None = None  # each access, where that is asked for


@dataclass
class _Memory:
    """The tensors of a running launch: sorted addresses of their elements, and names."""

    addresses: Any
    names: list[tuple[int, int, str, Tensor]]
    written: set[int] = field(default_factory=set)

    def access(self, kind: str, where: Any, program: int) -> Access:
        """An access to these addresses, which lie in one tensor."""
        low, high = int(where.min()), int(where.max())
        begin, _, name, tensor = max((n for n in self.names if n[0] <= low), key=lambda n: n[0], default=self.names[0])
        size = tensor.element_size()
        return Access(program, kind, name, (low - begin) // size, (high - begin) // size, int(where.size))

    def describe(self, address: int) -> str:
        """Where an address lies, next to the nearest tensor."""
        near = min(
            self.names, key=lambda n: 0 if n[0] <= address < n[1] else min(abs(address - n[0]), abs(address - n[1]))
        )
        begin, end, name, tensor = near
        size = tensor.element_size()
        shape = " x ".join(map(str, tensor.shape))
        if address >= end:
            return f"{(address - end) // size + 1} elements past the end of {name} ({shape})"
        if address < begin:
            return f"{(begin - address + size - 1) // size} elements before the start of {name} ({shape})"
        return f"between the rows of {name} ({shape}), which is a slice of a wider tensor"


def _elements(tensor: Tensor) -> Any:
    offsets = numpy.zeros(1, dtype=numpy.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + numpy.arange(size, dtype=numpy.int64) * stride).ravel()
    return tensor.data_ptr() + offsets * tensor.element_size()


class _Watch:
    def __init__(self) -> None:
        self.seen = Watched()
        self.memory: _Memory | None = None

    def enter(self, kernel: Any, args: Any, kwargs: Any) -> None:
        names = list(inspect.signature(kernel).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name: t for name, t in given.items() if isinstance(t, Tensor) and t.numel()}
        found = [_elements(t) for t in tensors.values()]
        addresses = numpy.unique(numpy.concatenate(found)) if found else numpy.zeros(0, dtype=numpy.int64)
        named = [
            (int(e.min()), int(e.max()) + t.element_size(), name, t)
            for e, (name, t) in zip(found, tensors.items(), strict=True)
        ]
        self.memory = _Memory(addresses, named)
        self.seen.launches += 1

    def access(self, kind: str, ptrs: Any, mask: Any, builder: Any) -> Any:
        """Count an access; returns the mask of what may be done."""
        seen, memory = self.seen, self.memory
        active = numpy.broadcast_to(mask.data, ptrs.data.shape)
        where = ptrs.data[active].astype(numpy.int64).ravel()
        if memory is None or not where.size:
            return active
        inside = numpy.isin(where, memory.addresses)
        missed = int((~inside).sum())
        if kind == "read":
            seen.reads += where.size
            seen.reads_outside += missed
        else:
            seen.writes += where.size
            seen.writes_outside += missed
            fresh = set(where.tolist())
            seen.rewritten += len(fresh & memory.written)
            memory.written |= fresh
        if seen.log is not None:
            seen.log.append(memory.access(kind, where, builder.grid_idx[0]))
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        seen.sectors += len(numpy.unique(where // 32))
        seen.needed += where.size * size
        if missed and len(seen.outside) < MOST_EVENTS:
            program = builder.grid_idx[0]
            first = memory.describe(int(where[~inside][0]))
            seen.outside.append(
                f"program {program} {kind}s {missed} of {where.size} elements outside, the first {first}"
            )
        if not missed:
            return active
        allowed = active.copy()
        allowed[active] = inside
        return allowed


@contextmanager
def watching(log: bool = False) -> Iterator[Watched]:
    """Watch the launches of this block, in a process that interprets kernels; with `log`, keep each access."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    watch = _Watch()
    watch.seen.log = [] if log else None
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    initialize = GridExecutor._init_args_hst

    def counting_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        allowed = watch.access("read", ptrs, mask, self)
        return load(self, ptrs, TensorHandle(allowed, mask.dtype), other, *rest)

    def counting_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        allowed = watch.access("write", ptrs, mask, self)
        return store(self, ptrs, value, TensorHandle(allowed, mask.dtype), *rest)

    def entering(self: Any, args: Any, kwargs: Any) -> Any:
        found = initialize(self, args, kwargs)
        watch.enter(self.fn, found[0], found[1])
        return found

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counting_load, counting_store
    GridExecutor._init_args_hst = entering
    try:
        yield watch.seen
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        GridExecutor._init_args_hst = initialize
