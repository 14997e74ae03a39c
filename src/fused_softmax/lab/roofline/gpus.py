"""The numbers of each GPU that bound a kernel. `explain` says which of them were measured.

Sources: the vendors' datasheets (bandwidth, clock, L2) and the hardware table of planning/types.py. The bandwidths of a
copy, of a read and of an addition are measured on an H200 (benchmarks/results/h200). For the other GPUs they are the
datasheet's bandwidth times the fraction that the H200 reaches. The latencies are estimates: published microbenchmarks
give 500 to 900 ns for a load from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from fused_softmax.planning.types import MULTIPROCESSORS

# of an H200: the median over the cases of benchmarks/results/h200/softmax.json, and its datasheet's bandwidth
COPY_GBPS, COPY_OF = 4207.0, 4800.0
# a pass that only reads, and an addition of two tensors: the same record's header
READ_GBPS, ADD_GBPS = 4217.5, 4407.3


@dataclass(frozen=True)
class Gpu:
    """One GPU. gbps: bandwidth of a copy, read and written bytes together, in 10^9 bytes a second."""

    name: str
    target: str  # of the hardware table: registers, warps and shared memory of a multiprocessor
    multiprocessors: int
    datasheet_gbps: float
    gbps: float
    measured: bool  # whether gbps was measured
    ghz: float  # boost clock
    l2_bytes: int
    latency_ns: float = 700.0  # of a load from memory, under load
    launch_us: float = 2.2  # of a kernel that does nothing, on the device
    lanes: int = 128  # float32 operations that a multiprocessor starts in a cycle
    special: int = 16  # exponentials that it starts in a cycle
    read_over_copy: float = READ_GBPS / COPY_GBPS
    add_over_copy: float = ADD_GBPS / COPY_GBPS

    def rate(self, passes: str) -> float:
        """The bandwidth of a plain pass: a "copy", a "read" or an "add", in 10^9 bytes a second."""
        return self.gbps * {"copy": 1.0, "read": self.read_over_copy, "add": self.add_over_copy}[passes]

    @property
    def gflops(self) -> float:
        """float32 operations, 10^9 a second; a multiply-add counts as two."""
        return 2 * self.lanes * self.multiprocessors * self.ghz

    @property
    def ridge(self) -> float:
        """Operations for each byte from which on arithmetic binds."""
        return self.gflops / self.gbps

    @property
    def bytes_in_flight(self) -> float:
        """Bytes that must be on their way at a time to reach the bandwidth (Little's law): bandwidth times latency."""
        return self.gbps * self.latency_ns


def _gpu(
    name: str, target: str, gbps: float, ghz: float, l2_mb: float, count: int | None = None, measured: bool = False
) -> Gpu:
    reached = COPY_GBPS if measured else gbps * COPY_GBPS / COPY_OF
    count = count or MULTIPROCESSORS[target].count
    return Gpu(name, target, count, gbps, reached, measured, ghz, int(l2_mb * 2**20))


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "h200": _gpu("H200", "sm_90", 4800, 1.98, 60, measured=True),  # the L2 as PyTorch reports it
        "h100": _gpu("H100 SXM", "sm_90", 3350, 1.98, 50),
        "a100": replace(_gpu("A100 80GB SXM", "sm_80", 2039, 1.41, 40), lanes=64),
        "l40s": _gpu("L40S", "sm_89", 864, 2.52, 96),
        "rtx4090": _gpu("RTX 4090", "sm_89", 1008, 2.52, 72, count=128),
        "rtx5090": _gpu("RTX 5090", "sm_120", 1792, 2.41, 96),
        "b200": _gpu("B200", "sm_100", 8000, 1.965, 126),
        "mi300x": _gpu("MI300X", "gfx942", 5300, 2.1, 256),
    }
)


def this_gpu() -> Gpu:
    """The GPU of this machine, its bandwidths measured; RuntimeError where there is none, or none with kernels."""
    import torch

    from fused_softmax.lab.bench import ceilings
    from fused_softmax.launch.device import Device, describe

    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU here")
    device = describe(torch.device("cuda", torch.cuda.current_device()))
    if not isinstance(device, Device):
        raise RuntimeError(str(device))
    if device.name not in MULTIPROCESSORS:
        raise RuntimeError(f"{device.name} is not in the hardware table: {', '.join(MULTIPROCESSORS)}")
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    like = next(gpu for gpu in GPUS.values() if gpu.target == device.name)
    rates = ceilings.measured(torch.device("cuda", torch.cuda.current_device()))
    gbps = rates["copy"]
    return replace(
        like, name=found.name, target=device.name, multiprocessors=found.multi_processor_count, datasheet_gbps=gbps,
        gbps=gbps, measured=True, l2_bytes=found.L2_cache_size, read_over_copy=rates["read"] / gbps,
        add_over_copy=rates["add"] / gbps,
    )  # fmt: skip
