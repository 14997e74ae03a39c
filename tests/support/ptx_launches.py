"""Runs all clusters of a compiled launch on `ptx_machine`, over tensors on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from ptx_machine import Machine, Race, parse

from fused_softmax.launch.compile import Launch

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OWN_PARAMETERS = 2  # that Triton appends


def run_launch(
    launch: Launch, ptx: str, dynamic_bytes: int, ctas: int
) -> tuple[list[Race], list[tuple[torch.Tensor, np.ndarray]]]:
    """The races of all clusters, and how often each byte of each tensor was written, in the order of the arguments."""
    tensors = {id(arg): arg for arg in launch.args if isinstance(arg, torch.Tensor)}
    memories = {
        of: ((1 + i << 32) + t.data_ptr() % 16, t.view(BITS[t.element_size()]).numpy().reshape(-1).view(np.uint8))
        for i, (of, t) in enumerate(tensors.items())
    }

    def parameter(arg: object) -> int:
        if isinstance(arg, torch.Tensor):
            return memories[id(arg)][0]
        return int(np.float32(arg).view(np.uint32)) if isinstance(arg, float) else arg

    program, clusters = parse(ptx, dynamic_bytes), launch.grid[0]
    args = [parameter(arg) for arg in launch.args]
    assert len(program.parameters) == len(args) + OWN_PARAMETERS, "an argument became a constant"
    races: list[Race] = []
    written = [np.zeros(len(memory), np.int64) for _, memory in memories.values()]
    for cluster in range(clusters):
        ran = Machine(program, ctas, cluster, clusters, [*args, 0, 0], list(memories.values())).run()
        races += ran.races
        for total, of in zip(written, ran.n_written, strict=True):
            total += of
    return races, list(zip(tensors.values(), written, strict=True))
