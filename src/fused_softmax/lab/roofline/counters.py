"""Nsight Compute: which counters are asked for, how its answer is read, and what its failures mean."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# our name -> the profiler's
COUNTERS: Mapping[str, str] = {
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "nanoseconds": "gpu__time_duration.sum",
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "l2_busy": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "issued": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "load_sectors": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "store_sectors": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "thread_instructions": "smsp__thread_inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "waves": "launch__waves_per_multiprocessor",
}
# why a warp does not go on -> in words
STALLS: Mapping[str, str] = {
    "long_scoreboard": "waits for data from memory or L2",
    "short_scoreboard": "waits for shared memory or an exponential",
    "barrier": "waits for the other warps of its program",
    "membar": "waits for a memory fence",
    "wait": "waits for its own last instruction, a fixed time",
    "math_pipe_throttle": "the arithmetic unit is busy",
    "mio_throttle": "the queue of shared memory and exponentials is full",
    "lg_throttle": "the queue of loads and stores is full",
    "drain": "waits for its stores at its end",
    "no_instruction": "waits for the instruction cache",
    "branch_resolve": "waits for a branch",
    "dispatch_stall": "the dispatcher is busy",
    "imc_miss": "waits for a constant",
    "sleeping": "sleeps",
    "not_selected": "is ready, and another warp was chosen",
    "selected": "issues an instruction",
}
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {**COUNTERS, **{f"stall_{name}": _STALL.format(name) for name in STALLS}}
NEEDED = ("read", "written", "nanoseconds")


class NoProfiler(Exception):
    """Nsight Compute cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Kernel:
    """One profiled launch: its name and its counters by our names."""

    name: str
    values: Mapping[str, float]


def find_ncu() -> str:
    """The path of ncu; NoProfiler where there is none."""
    found = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if found is None:
        raise NoProfiler("ncu is not on the PATH: install NVIDIA Nsight Compute, which is part of the CUDA toolkit")
    return found


def arguments(metrics: Sequence[str]) -> list[str]:
    """ncu's arguments: counters of the launches between cudaProfilerStart and cudaProfilerStop, as CSV.

    The clocks stay as they are. The caches are emptied before each launch.
    """
    fixed = ["--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off"]
    return [*fixed, "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]


def unknown_metrics(said: str) -> set[str]:
    """The counters that this ncu, or this GPU, does not have."""
    return set(re.findall(r"(?:[Ff]ailed to find metric|[Uu]nknown metric|[Ii]nvalid metric)\W+([a-z][\w.]+\w)", said))


def refusal(said: str) -> str | None:
    """Why ncu counted nothing, in words, or None."""
    if "ERR_NVGPUCTRPERM" in said:
        return (
            "this user may not read the GPU's counters: run as root, or let the administrator load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "LibraryNotLoaded" in said or "Failed to initialize the profiler" in said:
        return "the profiler cannot reach the driver's counters: a sandbox or a container hides them"
    if "No kernels were profiled" in said:
        return "no kernel was profiled"
    found = re.search(r"==ERROR== (.*)", said)
    return found[1].strip() if found else None


def read_csv(said: str) -> list[Kernel]:
    """The kernels of ncu's CSV, in the order of their launches; lines of other programs are skipped."""
    lines = said.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if begin is None:
        return []
    table = [line for line in lines[begin:] if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(table))))
    ours = {metric: name for name, metric in METRICS.items()}
    kernels = []
    for row in rows:
        if not (row.get("ID") or "").isdigit():  # the line of units
            continue
        values = {ours[key]: _number(text) for key, text in row.items() if key in ours and text not in ("", None)}
        kernels.append(Kernel(row["Kernel Name"], {name: v for name, v in values.items() if v is not None}))
    return kernels


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
