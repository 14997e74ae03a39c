"""The resources of a compiled launch, and how many of its programs fit on a multiprocessor; no GPU is needed.

cross_compile(launch, "sm_90") specializes the launch's arguments with Triton's own binder (16-byte alignment,
divisibility, ones that become constants), compiles for that target and reads the result: registers and spills from the
binary, shared memory from its metadata, the widths of its global loads and stores from its assembly. occupancy() is
then arithmetic: programs = min(registers, shared memory, warps, slots). Limits: Triton (3.6 and later) must not
interpret in this process (TRITON_INTERPRET unset), and a kernel may ask for more shared memory than there is: fits().
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fused_softmax.planning.types import MULTIPROCESSORS, Multiprocessor

if TYPE_CHECKING:
    from fused_softmax.launch.compile import Launch


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses. Registers are per thread, spilled_bytes per thread, shared_bytes per CTA."""

    name: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    num_ctas: int
    num_stages: int
    loads: tuple[tuple[int, int], ...]  # (bytes one thread moves in one instruction, instructions), widest first
    stores: tuple[tuple[int, int], ...]
    async_copies: int  # global-to-shared copies among the loads (cp.async), as num_stages > 1 makes them
    cluster_barriers: int = 0  # in the program text: how often the CTAs of a cluster wait for each other
    products_exchanged: int = 0  # sums over lanes of plain products: ptxas may fuse a lane's own product with the sum

    @property
    def widest_load_bytes(self) -> int:
        return self.loads[0][0] if self.loads else 0

    @property
    def widest_store_bytes(self) -> int:
        return self.stores[0][0] if self.stores else 0

    def fits(self, shared_limit: int | None = None) -> bool:
        """Whether the launch can run: its shared memory is within `shared_limit` bytes (None: the target's limit)."""
        limit = MULTIPROCESSORS[self.target].shared_per_program if shared_limit is None else shared_limit
        return self.shared_bytes <= limit


@dataclass(frozen=True)
class Occupancy:
    """Programs resident on one multiprocessor, and the resource that allows no more."""

    programs: int
    limiter: str
    by: Mapping[str, int]  # resource -> programs it would allow


def occupancy(used: Resources, on: Multiprocessor) -> Occupancy:
    """How many programs of `used` one multiprocessor holds at a time: the least that any of its resources allows.

    Registers are given to a warp in units of `on.register_unit`, and a program's warps are spread over four schedulers,
    so the warps that registers allow are rounded down to a multiple of four (CUDA occupancy calculator). For a kernel
    with num_ctas > 1 a program is one CTA; a cluster needs num_ctas of them at once. 0 programs: it cannot launch.
    """
    per_warp = _round_up(max(used.registers, 1) * on.warp_size, on.register_unit)
    shared = _round_up(used.shared_bytes, 128) + on.shared_reserved
    by = {
        "registers": on.registers // per_warp // 4 * 4 // used.num_warps,
        "shared memory": on.shared // shared if shared else on.programs,
        "warps": on.warps // used.num_warps,
        "slots": on.programs,
    }
    if used.shared_bytes > on.shared_per_program:
        by["shared memory"] = 0
    limiter = min(by, key=lambda name: by[name])
    return Occupancy(by[limiter], limiter, MappingProxyType(by))


def cross_compile(launch: Launch, target: str) -> Resources:
    """Compile `launch` for `target` and say what it uses; errors as compile_for's."""
    return resources(compile_for(launch, target))


def compile_for(launch: Launch, target: str) -> Any:
    """The triton CompiledKernel of `launch` for `target` ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", ...).

    As on a GPU, a cap on registers with which ptxas spills is dropped (`launch.compile.built_without_spills`).

    Tensors among its arguments stand for device pointers of their dtype, aligned as `launch.alignments` says, or to 16
    bytes when their data_ptr is. They are not read, so CPU and meta tensors will do. Raises RuntimeError in a process
    where Triton interprets kernels, ValueError for a target of another form; what Triton or ptxas raise passes through.
    """
    import triton
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from fused_softmax.launch.compile import built_without_spills, tell_launcher

    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise RuntimeError(
            f"cross_compile needs a kernel made by triton.jit, not a {type(kernel).__name__}: start a process with "
            "TRITON_INTERPRET unset (it is read when a kernel is decorated)"
        )
    gpu = _gpu_target(target)
    backend = make_backend(gpu)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)

    def build(given: Mapping[str, Any]) -> Any:
        meta = {"debug": False, "instrumentation_mode": "", **given}
        bound, specialization, _ = binder(*launch.args, **meta)
        options, signature, constexprs, attrs = kernel._pack_args(backend, meta, bound, specialization, None)
        if launch.alignments is not None:
            attrs = _aligned(kernel, attrs, launch.alignments)
        source = ASTSource(kernel, signature, constexprs, attrs)
        return triton.compile(source, target=gpu, options=options.__dict__)

    compiled, meta = built_without_spills(build, kernel, launch.meta, _spilled_bytes)
    tell_launcher(compiled, kernel, meta)
    return compiled


def _aligned(kernel: Any, attrs: Mapping[Any, Any], alignments: Sequence[int]) -> dict[Any, Any]:
    """The attributes of the kernel's arguments, with what a call knows of its pointers in place of their addresses."""
    arguments = enumerate(kernel.declaration.arguments.values())
    of_pointer = dict(zip([(i,) for i, a in arguments if a.type is None], alignments, strict=True))
    others = {at: known for at, known in attrs.items() if at not in of_pointer}
    return others | {at: [["tt.divisibility", known]] for at, known in of_pointer.items() if known > 1}


def resources(compiled: Any) -> Resources:
    """What `compiled` uses: a triton CompiledKernel, from cross_compile or from kernel.warmup(...) on a real GPU."""
    meta, asm = compiled.metadata, compiled.asm
    if meta.target.backend == "cuda":
        registers, stack, static_shared = _cubin_usage(asm["cubin"])
        # from sm_90 on cuobjdump counts the system's 1,024 bytes in, where any shared memory is used
        if meta.target.arch >= 90:
            static_shared = max(0, static_shared - 1024)
        loads, stores, copies = _ptx_widths(asm["ptx"])
        # what follows an exit is not reached; ptxas leaves it out
        cluster_barriers = len(re.findall(r"\bbarrier\.cluster\.arrive\b", re.split(r"\n\s*exit;", asm["ptx"])[0]))
        target, products = f"sm_{meta.target.arch}", _products_exchanged(asm["ptx"])
    else:
        registers, stack, static_shared = _amdgcn_usage(asm["amdgcn"])
        loads, stores, copies = _amdgcn_widths(asm["amdgcn"])
        cluster_barriers = products = 0
        target = str(meta.target.arch)
    return Resources(
        name=meta.name,
        target=target,
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=meta.shared + static_shared,
        num_warps=meta.num_warps,
        num_ctas=compiled.packed_metadata[1] if meta.target.backend == "cuda" else 1,
        num_stages=meta.num_stages,
        loads=loads,
        stores=stores,
        async_copies=copies,
        cluster_barriers=cluster_barriers,
        products_exchanged=products,
    )


def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if match := re.fullmatch(r"sm_?(\d+)a?", target):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx\w+", target):
        return GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    raise ValueError(f"target {target!r} is neither sm_<capability> nor gfx<architecture>")


def _spilled_bytes(compiled: Any) -> int:
    return _cubin_usage(compiled.asm["cubin"])[1] if "cubin" in compiled.asm else 0


def _cubin_usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack bytes and static shared bytes. A Triton kernel has a stack only where ptxas spilled."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump named no resources: {said!r}")
    return int(found[1]), int(found[2]), int(found[3])


# ld.global.L1::evict_first.v4.b32, st.global.v2.b64, ld.global.nc.b16; .v8 is sm_100's 32-byte access
_PTX_ACCESS = re.compile(r"\b(ld|st)\.(?:\w+(?:::\w+)?\.)*?global\.(?:[\w:]+\.)*?(?:v(\d)\.)?[bfus](\d+)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")


def _ptx_widths(ptx: str) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], int]:
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for access, vector, bits in _PTX_ACCESS.findall(ptx):
        (loads if access == "ld" else stores)[int(vector or 1) * int(bits) // 8] += 1
    stores.update(16 for _ in re.finditer(r"\bcp\.async\.bulk\.global\.shared", ptx))  # counted as one store
    copies = [int(size, 0) for size in _PTX_COPY.findall(ptx)]
    loads.update(copies)
    return _widest_first(loads), _widest_first(stores), len(copies)


_PTX_PRODUCT = re.compile(r"\bmul(?:\.rn)?(?:\.ftz)?\.f32\s+(%\w+),")
_PTX_EXCHANGE = re.compile(r"\bshfl\.sync\.bfly\.b32\s+(%\w+)(?:\|%\w+)?,\s*(%\w+),")
_PTX_FUSED = re.compile(r"\bfma\.rn(?:\.ftz)?\.f32\s+%\w+,\s*%\w+,\s*%\w+,\s*(%\w+);")
_PTX_SUM = re.compile(r"\badd(?:\.rn)?(?:\.ftz)?\.f32\s+%\w+,\s*(%\w+),\s*(%\w+);")


def _products_exchanged(ptx: str) -> int:
    """Products that a lane exchanges with another and adds to the other's, fused already or by ptxas."""
    products = set(_PTX_PRODUCT.findall(ptx))
    exchanged = {other: own for other, own in _PTX_EXCHANGE.findall(ptx) if own in products}
    sums = [(a, b) for a, b in _PTX_SUM.findall(ptx) if exchanged.get(a) == b or exchanged.get(b) == a]
    return len(sums) + sum(other in exchanged for other in _PTX_FUSED.findall(ptx))


def _amdgcn_usage(text: str) -> tuple[int, int, int]:
    """Vector registers, scratch bytes a lane; LDS is all in the metadata already."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)
    if registers is None or scratch is None:
        raise RuntimeError("the AMD assembly carries no kernel metadata")
    return int(registers[1]), int(scratch[1]), 0


_AMD_BYTES = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "byte": 1, "short": 2,
              "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}  # fmt: skip
_AMD_ACCESS = re.compile(
    r"\b(?:global|buffer)_(load|store)_(?:lds_)?([us]?byte|[us]?short|dword(?:x[234])?)(?:_d16(?:_hi)?)?\b"
)


def _amdgcn_widths(text: str) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], int]:
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for access, width in _AMD_ACCESS.findall(text):
        (loads if access == "load" else stores)[_AMD_BYTES[width]] += 1
    return _widest_first(loads), _widest_first(stores), 0


def _widest_first(counts: Counter[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(counts.items(), reverse=True))


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
