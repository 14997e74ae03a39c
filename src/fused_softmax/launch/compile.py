"""Kernels -> compiled kernels: a launch as data, and how a kernel is compiled and bound for calls.

Kernels are compiled from their declaration, not by value: no width ever becomes part of a kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..planning.types import Device, Plan, looser_cap
from . import availability
from .cache import Cache
from .torch_private import current_device, current_stream

lock = threading.RLock()  # held while a kernel is planned, compiled and cached
_interpreter = threading.RLock()
_TRITON_TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_TRITON_TYPES |= {torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8"}
COUNT = "int"  # the declared type of a count: 32 bits where its value fits
# bytes that a thread may spill at a cap. H200, Triton 3.6, masked softmax: at a cap that spilled 8 to 32 bytes 3 to 12%
# less time than with a looser one that spilled none (5 kernels); with 64 bytes 1% less, with 120 to 440 bytes 4 to 11%
# more (4 kernels). Triton 3.9, planes in registers: with 40 to 48 bytes 17 to 31% less with 6e7 elements (5 kernels)
MOST_SPILLED = 48
_OPTIONS = (
    "num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "debug", "sanitize_overflow", "launch_pdl",
)  # fmt: skip


def launch_options(kernel: Any, plan: Plan, device: Device) -> dict[str, Any]:
    """The launch's own meta-parameters for a kernel that runs a plan."""
    declared = kernel.declaration
    options: dict[str, Any] = {"num_warps": plan.num_warps}
    if device.kind == "cuda":
        if declared.on_cluster:
            options["num_ctas"] = plan.ctas
        if plan.max_registers is not None:
            options["maxnreg"] = device.registers_within(plan.max_registers, plan.num_warps)
    return options | assert_options(kernel, device) | device.options(declared.num_stages)


def early_start(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The launch option that lets a kernel start before the previous one has ended: programmatic dependent launch.

    meta: the kernel's own constexprs. It waits before its first access to memory (EARLY), or before it reads what the
    previous kernel writes (WAITS).
    """
    return {"launch_pdl": True} if meta.get("EARLY", False) or meta.get("WAITS", False) else {}


def assert_options(kernel: Any, device: Device) -> dict[str, Any]:
    """What compiles the assertions of a kernel that has any."""
    asserts = kernel.declaration.asserts and device.kind != "interpreter"
    return dict(debug=True, sanitize_overflow=False) if asserts else {}


class Launch(NamedTuple):
    """One kernel launch as data, so that it can be run, or cross-compiled where there is no GPU.

    `args` are the kernel's positional run-time arguments in its order; `meta` holds its constexprs by name and the
    launch's own meta-parameters (num_warps, num_stages, num_ctas, ...). `alignments`: the bytes that a call on a GPU
    lets the kernel know to divide each pointer; None where Triton takes them from the addresses.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: Mapping[str, Any]
    alignments: tuple[int, ...] | None = None

    def __call__(self) -> None:
        on = next((a.device for a in self.args if isinstance(a, torch.Tensor) and a.is_cuda), None)
        # interpreted, a launch patches Triton's own modules: one at a time
        with torch.cuda.device(on) if on is not None else _interpreter:
            meta = self.meta if on is None else self._compile(on.index)
            self.kernel[self.grid](*self.args, **meta)

    def _compile(self, index: int) -> Mapping[str, Any]:
        """Compiles and loads the kernel without a launch, so that a failure is told from an error of the launch.

        The meta-parameters of the kernel that was kept.
        """
        key = self._key(index)
        availability.raise_if_failed(key)
        if key in _ready:
            return _ready.get(key)  # type: ignore[return-value]

        def build(meta: Mapping[str, Any]) -> Any:
            compiled = self.kernel.warmup(*self.args, grid=self.grid, **meta)
            tell_launcher(compiled, self.kernel, meta)
            compiled._init_handles()
            return compiled

        try:
            _, meta = built_without_spills(build, self.kernel, self.meta, _spilled)
        except Exception as error:
            raise availability.failed(key, _name(self.kernel), error) from error
        _ready.store(key, meta)
        return meta

    def failure(self, index: int) -> str | None:
        """Why this kernel failed to compile for device `index` in this process, or None where it did not."""
        return availability.failure(self._key(index))

    def _key(self, index: int) -> tuple[Any, ...]:
        return (self.kernel, index, tuple(self.meta.items()), tuple(_specialized(a) for a in self.args))


_ready = Cache()  # the meta-parameters of what `Launch._compile` has compiled


def _specialized(argument: Any) -> Any:
    """What Triton may compile a kernel again for, as an argument changes."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument)


def _name(kernel: Any) -> str:
    return getattr(kernel, "__name__", None) or str(kernel)


# of each pointer argument: its dtype, and the bytes, a power of two, that divide its address
Pointers = tuple[tuple[torch.dtype, int], ...]
_compiled = Cache()


def pointers_to(tensors: Iterable[torch.Tensor]) -> Pointers:
    """The pointers of a kernel that is compiled for the addresses of these tensors: a multiple of 16 bytes, or any."""
    return tuple((t.dtype, 1 if t.data_ptr() % 16 else 16) for t in tensors)


def compile_kernel(
    kernel: Any, pointers: Pointers, meta: Mapping[str, Any], index: int, counts: tuple[int, ...] = ()
) -> Any:
    """The CompiledKernel of a kernel on device `index`: built once for each set of compile-time numbers, loaded once.

    meta: constexprs by name, and launch options. counts: the values of the arguments that are declared as a Count or a
    Stride, in order. KernelUnavailable where it does not compile or load; it is not tried again.
    """
    key = _compile_key(kernel, pointers, meta, index, counts)
    compiled = _compiled.get(key)
    if compiled is None:
        availability.raise_if_failed(key)
        began = time.perf_counter()

        def build(meta: Mapping[str, Any]) -> Any:
            compiled = _built(kernel, pointers, meta, counts)
            tell_launcher(compiled, kernel, meta)
            compiled._init_handles()  # loads it on the current device
            return compiled

        try:
            compiled, _ = built_without_spills(build, kernel, meta, _spilled)
        except Exception as error:
            raise availability.failed(key, _name(kernel), error) from error
        _compiled.store(key, compiled)
        availability.note_kernel(_name(kernel), meta, index, time.perf_counter() - began)
    return compiled


def built_without_spills(
    build: Callable[[Mapping[str, Any]], Any], kernel: Any, meta: Mapping[str, Any], spilled: Callable[[Any], int]
) -> tuple[Any, Mapping[str, Any]]:
    """(build(meta), meta), with a looser cap on registers where ptxas spills more than MOST_SPILLED with the given one.

    A cap was measured with one Triton on one GPU. Another ptxas, or options that take more numbers, may need registers
    that the cap does not give. A lesson's kernel keeps its cap, because it shows what a cap does. spilled: bytes.
    """
    built = build(meta)
    cap = meta.get("maxnreg") if getattr(kernel, "declaration", None) is not None else None
    while cap is not None and spilled(built) > MOST_SPILLED:
        cap = looser_cap(cap, meta["num_warps"])
        if cap is not None:
            meta = {**meta, "maxnreg": cap}
            built = build(meta)
    return built, meta


def _spilled(compiled: Any) -> int:
    return 4 * int(compiled.n_spills)


def compile_failure(
    kernel: Any, pointers: Pointers, meta: Mapping[str, Any], index: int, counts: tuple[int, ...] = ()
) -> str | None:
    """Why such a kernel failed to compile in this process, or None where it did not."""
    return availability.failure(_compile_key(kernel, pointers, meta, index, counts))


def _compile_key(
    kernel: Any, pointers: Pointers, meta: Mapping[str, Any], index: int, counts: tuple[int, ...]
) -> tuple[Any, ...]:
    return (kernel, pointers, tuple(meta.items()), index, tuple(_specialized(n) for n in counts))


def _built(kernel: Any, pointers: Pointers, meta: Mapping[str, Any], counts: tuple[int, ...]) -> Any:
    import triton
    from triton.compiler import ASTSource

    options = {name: meta[name] for name in _OPTIONS if name in meta}
    constexprs = {name: value for name, value in meta.items() if name not in options}
    of_pointer, of_count = iter(pointers), iter(counts)
    signature, attrs = {}, {}
    for position, (name, argument) in enumerate(kernel.declaration.arguments.items()):
        divisor = 1
        if argument.type is None:
            dtype, divisor = next(of_pointer)
            signature[name] = _TRITON_TYPES[dtype]
        elif argument.type == COUNT:
            count = next(of_count)
            signature[name] = "i32" if -(2**31) <= count < 2**31 else "i64"
            divisor = 16 if argument.specialized and count % 16 == 0 else 1
            if argument.specialized and count == 1:
                signature[name] = "constexpr"
                constexprs[name] = 1
        else:
            signature[name] = argument.type
        if divisor > 1:
            attrs[(position,)] = [["tt.divisibility", divisor]]
    signature |= dict.fromkeys(kernel.declaration.constexprs, "constexpr")
    target = triton.runtime.driver.active.get_current_target()  # builds its own helper on first use
    return triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=options)


def tell_launcher(compiled: Any, kernel: Any, meta: Mapping[str, Any]) -> None:
    """Gives Triton's launcher the numbers that Triton does not know, before the kernel is loaded."""
    make_clusters(compiled, kernel, meta)
    add_shared_memory(compiled, meta)


def make_clusters(compiled: Any, kernel: Any, meta: Mapping[str, Any]) -> None:
    """Where each CTA is a program of its own, lets Triton's launcher make clusters of CTAS of them.

    The launcher reads the size of a cluster from these numbers, and launches so many CTAs for each program of a grid. A
    Triton that keeps other numbers there gets an error, because CTAs that are alone would wait for the others forever.
    """
    declared = getattr(kernel, "declaration", None)  # a lesson's kernel has none
    if declared is not None and declared.cta_programs and meta["CTAS"] > 1:
        num_warps, ctas, shared = compiled.packed_metadata
        if (num_warps, ctas) not in ((meta["num_warps"], 1), (meta["num_warps"], meta["CTAS"])):
            raise RuntimeError(f"the launcher of this Triton takes other numbers: {compiled.packed_metadata}")
        compiled.packed_metadata = (num_warps, meta["CTAS"], shared)


def add_shared_memory(compiled: Any, meta: Mapping[str, Any]) -> None:
    """Where a kernel asks for DYNAMIC bytes of shared memory, lets Triton's launcher add them to what PTX declares.

    PTX alone declares 48 KB at most. The kernel must not have shared memory of Triton's, whose place this is.
    """
    n_bytes = meta.get("DYNAMIC", 0)
    if n_bytes:
        num_warps, ctas, shared = compiled.packed_metadata
        if {shared, compiled.metadata.shared} - {0, n_bytes}:  # Triton may hand out one kernel twice
            raise RuntimeError(f"the kernel has {shared} bytes of shared memory of Triton's")
        compiled.metadata = compiled.metadata._replace(shared=n_bytes)
        compiled.packed_metadata = (num_warps, ctas, n_bytes)


class Binding(NamedTuple):
    """A compiled kernel's launcher: call(grid, 1, 1, stream, *prefix, *run-time arguments, *trailing)."""

    call: Callable[..., Any]
    prefix: tuple[Any, ...]
    trailing: tuple[None, ...]  # Triton skips the constexprs' places


def bind(compiled: Any) -> Binding:
    """The launcher of a compiled kernel with as little in between as this Triton allows.

    A Triton that is newer than those tested may call its launcher otherwise: then Triton's own public call is used.
    """
    trailing = (None,) * len(compiled.src.fn.declaration.constexprs)
    if availability.triton_is_untested():
        return Binding(_public_call, (compiled,), trailing)
    function, packed, launcher = compiled.function, compiled.packed_metadata, compiled.run
    direct = getattr(launcher, "launch", None)
    if direct is not None and not hasattr(launcher, "arg_annotations") and launcher.global_scratch_size == 0:
        # triton 3.6: the C function behind the launcher, 0.7 us a call less
        cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
        prefix = (function, cooperative, dependent, None, None, packed, None, None, None)
        return Binding(direct, prefix, trailing)
    return Binding(launcher, (function, packed, None, None, None), trailing)


def _public_call(gx: int, gy: int, gz: int, stream: int, compiled: Any, *args: Any) -> None:
    compiled[(gx, gy, gz)](*args, stream=stream)


# --- a launch over tensors of one shape -------------------------------------------------------------------------------

Shaped = Callable[[torch.Tensor, torch.Tensor], None]


def prepare_launch(make: Callable[[torch.Tensor, torch.Tensor], Launch], x: torch.Tensor, y: torch.Tensor) -> Shaped:
    """run(x, y) of the launch make(x, y), over tensors of these shapes, strides and alignments.

    On a GPU, run.one has the parts of a call.
    """
    made = make(x, y)
    if not x.is_cuda:
        return lambda x, y: make(x, y)()
    index, numbers = x.get_device(), made.args[2:]
    with lock, torch.cuda.device(index):
        compiled = compile_kernel(made.kernel, pointers_to((x, y)), made.meta, index, _counts(made))
    call, prefix, trailing = bind(compiled)
    (grid,) = made.grid

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        if current_device() != index:
            with torch.cuda.device(index):
                return run(x, y)
        call(grid, 1, 1, current_stream(index), *prefix, x.data_ptr(), y.data_ptr(), *numbers, *trailing)

    run.one = (index, call, grid, prefix, (*numbers, *trailing))  # type: ignore[attr-defined]
    return run


def launch_failure(made: Launch, x: torch.Tensor, y: torch.Tensor) -> str | None:
    """Why the kernel of a launch over x and y did not compile in this process; None where it did, or was not tried."""
    index = x.get_device()
    failed = compile_failure(made.kernel, pointers_to((x, y)), made.meta, index, _counts(made))
    return failed or made.failure(index)


def _counts(made: Launch) -> tuple[int, ...]:
    declared = made.kernel.declaration.arguments.values()
    return tuple([a for a, of in zip(made.args, declared, strict=True) if of.type == COUNT])
