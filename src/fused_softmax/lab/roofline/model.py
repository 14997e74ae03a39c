"""From bytes and instructions to the least time: what binds a kernel on a described GPU. Pure Python.

Four times bound a call from below. The bytes over the bandwidth of a plain pass with the same pattern. The instructions
over the rate at which multiprocessors start them, and the exponentials over the rate of the unit for them. Little's
law: bytes in flight over the latency. And the time of a launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fused_softmax.lab.roofline.gpus import Gpu
from fused_softmax.lab.traffic import Traffic

# float32 operations for each element by the formula: compare, subtract, scale, exponential, add, multiply
SOFTMAX_OPERATIONS = 6
# part of the L2 that data which is read again may take: the rest holds what is written, and other programs' lines
L2_KEEPS = 0.5
# part of the L2 whose lines a kernel has written and not yet sent to memory when it ends: 0.25 to 0.44 on an H200
L2_UNSENT = 0.35


@dataclass(frozen=True)
class DramBytes:
    """Bytes between L2 and memory. `kept` of the requested reads come from the L2, because a read before left them.

    `unsent` of the written bytes are still in the L2 when the call's kernels end: later calls send them.
    """

    read: int
    written: int
    kept: int = 0
    unsent: int = 0

    @property
    def all(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Floor:
    """The least times of a call in microseconds by what binds, and the largest of them."""

    microseconds: Mapping[str, float]

    @property
    def binds(self) -> str:
        return max(self.microseconds, key=lambda name: self.microseconds[name])

    @property
    def least(self) -> float:
        return self.microseconds[self.binds]


@dataclass(frozen=True)
class InFlight:
    """Little's law for one kernel: bytes on their way at a time, and bytes that the bandwidth needs."""

    programs: int  # resident on a multiprocessor
    limiter: str
    bytes_each: int  # that a program has requested before it waits
    bytes: float
    needed: float
    by: Mapping[str, int] = field(default_factory=dict)

    @property
    def enough(self) -> bool:
        return self.bytes >= self.needed


def dram_bytes(asked: Traffic, cells: int, itemsize: int, rows_in_flight: int, row_bytes: int, gpu: Gpu) -> DramBytes:
    """Bytes from and to memory of a kernel that reads `asked.reads` elements, each of `cells` at least once.

    A row that is read again comes from the L2 if all rows that are in flight fit the part of it that keeps them.
    """
    again = max(0, asked.reads - cells) * itemsize
    kept = again if rows_in_flight * row_bytes <= L2_KEEPS * gpu.l2_bytes else 0
    return DramBytes(asked.reads * itemsize - kept, asked.writes * itemsize, kept)


def unsent_bytes(written: Sequence[int], gpu: Gpu) -> int:
    """Bytes in the L2 at the end of kernels that write so many bytes each, the L2 emptied after each of them."""
    return sum(min(each, int(L2_UNSENT * gpu.l2_bytes)) for each in written)


def floor(
    moved: int,
    elements: int,
    gpu: Gpu,
    *,
    instructions: float | None = None,
    exponentials: float = 1.0,
    in_flight: InFlight | None = None,
    passes: str = "copy",
    launches: int = 1,
) -> Floor:
    """The least times of a call that moves so many bytes; `instructions` and `exponentials` are for each element.

    passes: the plain pass with the call's pattern, whose bandwidth is meant. launches: kernels that follow each
    other; only the largest moves much.
    """
    cycles_us = 1e-3 / gpu.ghz
    found = {"bandwidth": moved / gpu.rate(passes) / 1e3, "launch": gpu.launch_us}
    if in_flight is not None and in_flight.bytes:
        found["latency"] = gpu.latency_ns / 1e3  # of one load
        if not in_flight.enough:
            found["latency"] = max(found["latency"], found["bandwidth"] * in_flight.needed / in_flight.bytes)
    special = exponentials * elements / (gpu.special * gpu.multiprocessors) * cycles_us
    started = (instructions or SOFTMAX_OPERATIONS) * elements / (gpu.lanes * gpu.multiprocessors) * cycles_us
    found["arithmetic"] = max(special, started)
    return Floor({name: us + (launches - 1) * gpu.launch_us for name, us in found.items()})


def intensity(operations: float, moved: int) -> float:
    """Operations for each byte."""
    return operations / max(moved, 1)
