"""softmax and its kin over a dimension that is not the last: launches over planes, (outer, n_cols, inner).

A recipe is what a plan launches, without tensors: a few steps, each a kernel with its numbers, and the workspace that
they share. It is made once for each layout. `outer` travels with each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..planning.spatial import bundled_plan, plan_spatial, staggered, tiles_plan
from ..planning.types import SECTOR_BYTES, Device, Plan, SpatialProblem, bundles_of, period_of, power_of_two, tiles_of
from . import compile as compiling
from .availability import KernelUnavailable
from .cache import Cache
from .compile import Launch, early_start, launch_options
from .context import is_batch_invariant
from .device import device_of
from .folding import alignment_of
from .kernel_loading import kernel_of
from .layout import DTYPE_NAMES, divisor, empty, expect_countable
from .torch_private import current_device, current_stream

if TYPE_CHECKING:
    from ..planning.held_planes import Held

# the kernels of softmax and its gradient, by module, and those of columns that are read in parts, by name
RESIDENT = {
    module: tuple(kernel_of(module, name) for name in (module, f"{module}_backward"))
    for module in (
        "softmax_spatial",
        "softmax_spatial_skewed",
        "softmax_spatial_gathered",
        "softmax_spatial_periodic",
    )  # fmt: skip
}
PARTS = {
    name: kernel_of("softmax_spatial_parts", name)
    for name in (
        "softmax_spatial_reduce",
        "softmax_spatial_merge",
        "softmax_spatial_finish",
        "softmax_spatial_backward_reduce",
        "softmax_spatial_backward_merge",
        "softmax_spatial_backward_finish",
        "logsumexp_spatial_backward",
    )
}
BUNDLED = {  # by `backward`
    backward: tuple(kernel_of("softmax_spatial_bundled", f"{name}_{step}") for step in ("reduce", "finish"))
    for backward, name in ((False, "softmax_spatial_bundled"), (True, "softmax_spatial_bundled_backward"))
}


def problem_of(
    *tensors: Tensor, backward: bool = False, log: bool = False, batch_invariant: bool = False
) -> SpatialProblem:
    """The SpatialProblem of tensors (outer, n_cols, inner) with contiguous inner; the last is the output.

    KernelUnavailable for columns that the kernels cannot count.
    """
    _, n_cols, inner = tensors[0].shape
    expect_countable(n_cols)
    widest = max(tensors, key=Tensor.element_size)
    to, vec = tensors[-1], 16 // widest.element_size()
    whole_sectors = all(n * to.element_size() % 32 == 0 for n in (inner, to.stride(0), to.stride(1)))
    for t in tensors:
        vec = min(vec, *(alignment_of(n, vec) for n in (inner, t.stride(0), t.stride(1))))
        if t.data_ptr() % 16:
            vec = 1
    in_phase = _in_phase(tensors, inner)
    lies = (to.dtype, 0, (n_cols * inner, inner))
    packed = all((t.dtype, t.data_ptr() % 16, t.stride()[:2]) == lies for t in tensors)
    return SpatialProblem(
        n_cols, inner, DTYPE_NAMES[widest.dtype], vec, backward, log, batch_invariant, whole_sectors, in_phase, packed
    )


def _in_phase(tensors: tuple[Tensor, ...], inner: int) -> bool:
    """Whether tiles that overlap may hold the tensors: runs have the same phases, and the output has memory of its own.

    What one program writes another one may read. The widest unit is a sector of 32 bytes.
    """
    first, to = tensors[0], tensors[-1]
    phases = {(t.data_ptr() % 16, t.dtype, *(n * t.element_size() % 32 for n in t.stride()[:2])) for t in tensors}
    apart = all(t.data_ptr() != to.data_ptr() or t.is_meta for t in tensors[:-1])
    return len(phases) == 1 and first.data_ptr() % 16 == 0 and apart and all(t.stride(1) >= inner for t in tensors)


class Step(NamedTuple):
    """One kernel of a recipe. tensors: indices into the tensors of the call and, after them, the workspaces."""

    kernel: Any
    meta: Mapping[str, Any]
    tensors: tuple[int, ...]
    scalars: tuple[int | None, ...]  # None stands for `outer`
    programs: int  # for each index of `outer`, or for each group of them
    outers: int = 1  # indices of `outer` in a group
    most: int | None = None  # programs of a kernel that loops over its work

    def grid(self, outer: int) -> int:
        programs = -(-outer // self.outers) * self.programs
        return programs if self.most is None else min(programs, self.most)

    def numbers(self, outer: int) -> tuple[int, ...]:
        return tuple(outer if n is None else n for n in self.scalars)


class Recipe(NamedTuple):
    """The steps of a plan. workspaces: float32 elements of each, for each index of `outer`.

    apart: the output must have memory of its own, because tiles overlap.
    """

    steps: tuple[Step, ...]
    workspaces: tuple[int, ...] = ()
    apart: bool = False


def _strides(tensors: Sequence[Tensor], vec: int) -> tuple[int, ...]:
    return tuple(stride // vec for t in tensors for stride in t.stride()[:2])


def _near(strides: tuple[int, ...]) -> bool:
    """Whether the strides between columns, of `_strides`, have 32 bits."""
    return max(strides[1::2]) < 1 << 32


def _meta(kernel: Any, plan: Plan, device: Device, **flags: Any) -> dict[str, Any]:
    pdl = device.supports_pdl
    known = dict(
        OUTERS=plan.outers, CTAS=plan.ctas, COLS=plan.vectors_per_chunk, INNER=plan.rows, VEC=plan.vec,
        CHUNKS=plan.chunks, UNPREDICATED=plan.unpredicated_chunks, RECOMPUTE=plan.recompute,
        SMEM_STAGED=plan.smem_staged, UNIT=plan.skewed, OVERLAP=plan.overlap, THREADS=plan.num_warps * device.warp_size,
        INVARIANT=plan.invariant, PTX=device.ptx, EARLY=pdl, TRIGGER=pdl, WAITS=False,
        STAGGER=plan.stagger, FITTING=plan.fitting,
        PIECE=plan.piece, LANES=plan.vectors_per_chunk, DYNAMIC=plan.dynamic_bytes,
    )  # fmt: skip
    known |= flags
    meta = {name: known[name] for name in kernel.declaration.constexprs}
    return meta | launch_options(kernel, plan, device) | early_start(meta)


MERGE_WARPS = 4
# parts, times the columns of a bundle, that one launch merges: beyond, a launch merges the parts for each position of a
# bundle first. H200, 13 random shapes each, mean speed with up to 1,024 over that with two launches: bfloat16 softmax
# 1.03, a gradient 1.02, float32 1.01; worst 0.996
MOST_IN_ONE_MERGE = 1024


def merge_tile(parts: int) -> tuple[int, int]:
    """(parts, positions) of a merge's tile. Tiles are read one after the other, so many parts take taller ones."""
    step = min(256, max(32, power_of_two(parts)))
    return step, 1024 // step


def merge_step(kernel: Any, device: Device, tensors: tuple[int, ...], inner: int, parts: int, **flags: Any) -> Step:
    """The launch that merges parts, (outer, parts, inner)."""
    pdl = device.supports_pdl
    step, positions = merge_tile(parts)
    known = dict(COLS=step, INNER=positions, WAITS=pdl, EARLY=pdl, TRIGGER=pdl) | flags
    meta = {name: known[name] for name in kernel.declaration.constexprs}
    meta |= dict(num_warps=MERGE_WARPS * 32 // device.warp_size) | device.options() | early_start(meta)
    n_blocks = -(-inner // positions)
    return Step(kernel, meta, tensors, (inner, n_blocks, parts), n_blocks)


def _sizes(t: Tensor, plan: Plan) -> tuple[int, int, int]:
    """(n_cols, inner in units of the plan's vectors, blocks of positions)."""
    _, n_cols, inner = t.shape
    # a skewed tile counts positions one by one
    units = inner if plan.skewed else inner // plan.vec
    return n_cols, units, tiles_of(inner, plan.rows, plan.overlap, plan.skewed)


def resident_step(
    kernel: Any, tensors: tuple[Tensor, ...], n_tensors: int, plan: Plan, device: Device, **flags: Any
) -> Step:
    """The one launch over tensors (outer, n_cols, inner) that stay on chip, and over vectors, n_tensors in all."""
    sizes = _sizes(tensors[0], plan)
    strides = _strides(tensors, 1 if plan.skewed else plan.vec)
    scalars: tuple[int | None, ...] = (None, *sizes, *strides)
    meta = _meta(kernel, plan, device, NEAR=_near(strides), **flags)
    return Step(kernel, meta, tuple(range(n_tensors)), scalars, sizes[2], plan.outers)


def _gathered_step(
    kernel: Any, tensors: tuple[Tensor, ...], n_tensors: int, plan: Plan, device: Device, **flags: Any
) -> Step:
    """The one launch over planes that are moved as pieces of memory."""
    _, n_cols, inner = tensors[0].shape
    scalars = (None, n_cols, *divisor(inner), plan.outers)
    return Step(kernel, _meta(kernel, plan, device, **flags), tuple(range(n_tensors)), scalars, 1, plan.outers)


def _periodic_step(
    kernel: Any, tensors: tuple[Tensor, ...], n_tensors: int, plan: Plan, device: Device, **flags: Any
) -> Step:
    """The one launch over planes that are read as runs of vectors."""
    _, n_cols, inner = tensors[0].shape
    scalars = (n_cols, *divisor(inner), plan.periodic)
    return Step(kernel, _meta(kernel, plan, device, **flags), tuple(range(n_tensors)), scalars, 1, plan.outers)


def parts_step(
    kernel: Any, read: tuple[Tensor, ...], tensors: tuple[int, ...], plan: Plan, device: Device, **flags: Any
) -> Step:
    """The launch whose programs each reduce one part of the columns."""
    sizes = _sizes(read[0], plan)
    parts = -(-sizes[0] // plan.part_cols)
    scalars = (*sizes, parts, *_strides(read, plan.vec))
    return Step(kernel, _meta(kernel, plan, device, **flags), tensors, scalars, sizes[2] * parts, plan.outers)


def with_outer(step: Step) -> Step:
    """The step of a kernel that takes the size of `outer` in front of its other numbers."""
    return step._replace(scalars=(None, *step.scalars))


def sizes_and_steps(
    kernel: Any, tensors: tuple[Tensor, ...], plan: Plan, device: Device, **flags: Any
) -> tuple[tuple[int, ...], int, dict[str, Any]]:
    """(numbers, programs, constexprs) of a launch whose programs each write CHUNKS x COLS columns."""
    last = plan.finish
    sizes = _sizes(tensors[0], last)
    n_steps = -(-sizes[0] // (last.chunks * last.vectors_per_chunk))
    scalars = (*sizes, n_steps, *_strides(tensors, last.vec))
    return scalars, sizes[2] * n_steps, _meta(kernel, last, device, **flags)


def with_crop(step: Step, plan: Plan, crop: tuple[int, int] | None) -> Step:
    """The step of a kernel that takes (width, from a row to the next) of a cropped x behind its strides."""
    width, apart = crop or (plan.vec, 0)
    return step._replace(scalars=(*step.scalars, width // plan.vec, apart // plan.vec))


def problem_of_crop(problem: SpatialProblem, crop: tuple[int, int]) -> SpatialProblem:
    """The problem of positions that are rows of so many, so far apart. No tile of it is skewed or overlaps."""
    vec = min(alignment_of(n, problem.vec) for n in crop)
    return replace(problem, vec=vec, in_phase=False, packed=False)


def softmax_step(
    tensors: tuple[Tensor, ...], plan: Plan, log: bool, device: Device, crop: tuple[int, int] | None = None
) -> Step:
    """The one launch over (x, y) in tiles of positions. crop: (width, from a row to the next) of a cropped x."""
    kernel = RESIDENT["softmax_spatial"][False]()
    return with_crop(resident_step(kernel, tensors, 2, plan, device, LOG=log, CROPPED=crop is not None), plan, crop)


def softmax_recipe(tensors: tuple[Tensor, ...], plan: Plan, log: bool, backward: bool, device: Device) -> Recipe:
    """What softmax or log_softmax over (x, y), or the gradient over (y, dy, dx), launches as `plan` says."""
    n = len(tensors)
    inner = tensors[0].shape[2]
    if plan.regime != "spatial_two_pass":
        kind = "_gathered" if plan.gathered else "_skewed" if plan.skewed else "_periodic" if plan.periodic else ""
        kernel = RESIDENT[f"softmax_spatial{kind}"][backward]()
        if not (kind or backward):
            return Recipe((softmax_step(tensors, plan, log, device),), apart=plan.overlap > 0)
        make_step = _gathered_step if plan.gathered else _periodic_step if plan.periodic else resident_step
        return Recipe((make_step(kernel, tensors, n, plan, device, LOG=log),), apart=plan.overlap > 0)
    if plan.bundle:
        return _bundled_recipe(tensors, plan, log, backward, device)
    kind = "softmax_spatial_backward" if backward else "softmax_spatial"
    reduce, merge, finish = (PARTS[f"{kind}_{step}"]() for step in ("reduce", "merge", "finish"))
    parts = -(-tensors[0].shape[1] // plan.part_cols)
    # what a part, and a softmax, is reduced to: (maximum, sum), or the one sum of a gradient
    values = (n,) if backward else (n, n + 1)
    merged = values if parts == 1 else tuple(v + len(values) for v in values)
    read, given = tensors[:-1], tuple(range(n))
    flags = dict(LOG=log, LSE=False, ONE_PART=parts == 1)
    first = parts_step(reduce, read, (*given[:-1], *values), plan, device, **flags)
    steps = [first if backward else with_outer(first)]
    if parts > 1:
        steps.append(merge_step(merge, device, (*values, *merged), inner, parts, LSE=False))
    scalars, programs, meta = sizes_and_steps(finish, tensors, plan, device, LOG=log, WAITS=device.supports_pdl)
    steps.append(Step(finish, meta, (*given, *merged), scalars, programs))
    of_parts, of_one = (parts * inner,) * len(values), (inner,) * len(values)
    return Recipe(tuple(steps), of_one if parts == 1 else of_parts + of_one)


def _bundled_recipe(tensors: tuple[Tensor, ...], plan: Plan, log: bool, backward: bool, device: Device) -> Recipe:
    """What softmax launches over columns that are read in bundles.

    The parts are merged for each position of the plane; many are merged for each position of a bundle first.
    """
    n, (_, n_cols, inner), itemsize = len(tensors), tensors[0].shape, tensors[0].element_size()
    period = period_of(inner, itemsize)
    n_bundles, width = bundles_of(n_cols, period, plan.bundle), plan.bundle * inner
    plane, ends = n_cols * inner, (n_cols - n_bundles * plan.bundle) * inner
    blocks, part_bundles = -(-width // plan.rows), plan.part_cols // plan.bundle
    parts = -(-n_bundles // part_bundles)
    reduce, finish = (load() for load in BUNDLED[backward])
    merge = PARTS["softmax_spatial_backward_merge" if backward else "softmax_spatial_merge"]()
    # (maximum, sum), or the one sum of a gradient: of a part, of all parts and of a plane
    count, several = 1 if backward else 2, parts > 1 and parts * plan.bundle > MOST_IN_ONE_MERGE
    of_part, of_parts, of_plane = (tuple(range(n + i * count, n + (i + 1) * count)) for i in (0, several, 1 + several))
    given, flags = tuple(range(n)), dict(LOG=log, UNIT=SECTOR_BYTES // itemsize, WAITS=device.supports_pdl)
    meta, read = _meta(reduce, plan, device, **flags), (*given[:-1], *of_part)
    sizes = (n_bundles, width, blocks, parts, plane, inner, period, ends)
    first = Step(reduce, meta, read, sizes, blocks * parts)
    merges = [merge_step(merge, device, (*of_part, *of_parts), width, parts, LSE=False)] if several else []
    # the parts of a bundle follow one another as its columns do
    n_merged = plan.bundle * (1 if several else parts)
    merges.append(merge_step(merge, device, (*of_parts, *of_plane), inner, n_merged, LSE=False))
    last = plan.finish
    blocks, steps = -(-width // last.rows), -(-n_bundles // (last.chunks * last.vectors_per_chunk))
    numbers = (n_bundles, width, blocks, steps, plane, period, ends, *divisor(inner))
    writes = Step(finish, _meta(finish, last, device, **flags), (*given, *of_plane), numbers, blocks * steps)
    workspaces = (parts * width,) * count + (width,) * (count * several) + (inner,) * count
    return Recipe((first, *merges, writes), workspaces)


def recipe_launches(
    recipe: Recipe, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...] = (), outer: int | None = None
) -> list[Launch]:
    """A recipe's launches as records, over these tensors and a new workspace; `numbers` go last."""
    outer = tensors[0].shape[0] if outer is None else outer
    real = dict(dtype=torch.float32, device=tensors[0].device)
    held = (*tensors, *(torch.empty(outer * size, **real) for size in recipe.workspaces))  # type: ignore[call-overload]
    return [
        Launch(s.kernel, (s.grid(outer),), (*(held[i] for i in s.tensors), *s.numbers(outer), *numbers), s.meta)
        for s in recipe.steps
    ]


Run = Callable[..., None]  # run(tensors, numbers=(), outer=None): the op's own numbers go last


def of_layout(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What a recipe over these tensors depends on, as a key: all except the size of `outer`."""
    first, to = tensors[0], tensors[-1].data_ptr()
    lies = tuple([(t.dtype, t.shape[1:], t.stride(), t.data_ptr() % 16 == 0, t.data_ptr() == to) for t in tensors])
    return (first.get_device(), lies)


def prepare(recipe: Recipe, tensors: tuple[Tensor, ...]) -> Run:
    """run(tensors): launches a recipe over tensors that lie as these, of any `outer`.

    `outer` is the first tensor's first size, where it is not given. KernelUnavailable, with nothing written, where a
    kernel does not compile.
    """
    if not tensors[0].is_cuda:
        return _interpreted(recipe)
    index = tensors[0].get_device()
    pointers = _pointers(recipe, tensors)
    with compiling.lock, torch.cuda.device(index):
        bound = [
            compiling.bind(compiling.compile_kernel(s.kernel, tuple(pointers[i] for i in s.tensors), s.meta, index))
            for s in recipe.steps
        ]
    calls = tuple(zip(recipe.steps, bound, strict=True))
    workspaces = recipe.workspaces

    def run(tensors: tuple[Tensor, ...], numbers: tuple[Any, ...] = (), outer: int | None = None) -> None:
        if current_device() != index:
            with torch.cuda.device(index):
                return run(tensors, numbers, outer)
        outer = tensors[0].shape[0] if outer is None else outer
        addresses = [t.data_ptr() for t in tensors]
        held = [empty((outer * size,), (1,), torch.float32, tensors[0]) for size in workspaces]
        addresses += [t.data_ptr() for t in held]
        stream = current_stream(index)
        for step, (call, prefix, trailing) in calls:
            at = [addresses[i] for i in step.tensors]
            call(step.grid(outer), 1, 1, stream, *prefix, *at, *step.numbers(outer), *numbers, *trailing)

    if len(calls) == 1 and not workspaces:  # one launch, whatever memory the tensors have
        run.steps = calls  # type: ignore[attr-defined]
    if recipe.apart:
        run.apart = True  # type: ignore[attr-defined]
    return run


def cached_run(cache: Cache, key: object, on: Tensor, make: Callable[[], Run]) -> Run:
    """What `make` prepares: once for a key on a GPU, each time where kernels are interpreted."""
    if not on.is_cuda:
        return make()
    run: Run | None = cache.get(key)
    return cache.store(key, make()) if run is None else run


def _interpreted(recipe: Recipe) -> Run:
    def run(tensors: tuple[Tensor, ...], numbers: tuple[Any, ...] = (), outer: int | None = None) -> None:
        for launch in recipe_launches(recipe, tensors, numbers, outer):
            launch()

    return run


def _pointers(recipe: Recipe, tensors: tuple[Tensor, ...]) -> compiling.Pointers:
    return compiling.pointers_to(tensors) + ((torch.float32, 16),) * len(recipe.workspaces)


# --- softmax, log_softmax and their gradients ------------------------------------------------------------------------

_softmaxes = Cache()


def tiles_of_positions(problem: SpatialProblem, device: Device) -> Plan:
    """The plan of a softmax, or of its gradient, in tiles of positions that are not `lean_tiles`."""
    from ..planning.overlapping_tiles import overlapping_config  # loaded when it is first needed

    config = overlapping_config(problem, device)
    if config is None:
        return plan_spatial(problem, device)
    return staggered(tiles_plan(problem, device, config), problem, device)


def softmax_plan(planes: tuple[Tensor, ...], log: bool, backward: bool, invariant: bool, device: Device) -> Plan:
    """The plan over (x, y), or over (y, dy, dx) of a gradient: of tiles of positions or of planes."""
    from ..planning.bundled_columns import faster_as_bundled  # loaded when it is first needed, as those below
    from ..planning.register_planes import best_way, faster_as_held
    from ..planning.short_planes import faster_as_short

    problem = problem_of(*planes, backward=backward, log=log, batch_invariant=invariant)
    way = best_way(problem, device)
    plan = tiles_or_pieces(problem, device, way)
    held = faster_as_held(problem, way, plan)
    short = faster_as_short(problem, device, plan, way, held)
    plan = (held or plan) if short is None else tiles_plan(problem, device, short)
    bundle = faster_as_bundled(problem, plan)
    return plan if bundle is None else bundled_plan(problem, device, bundle)


def tiles_or_pieces(problem: SpatialProblem, device: Device, way: Held | None) -> Plan:
    """The plan of tiles or of pieces, before others are considered. way: how registers could hold planes."""
    from ..planning.lean_tiles import LONG, lean_config
    from ..planning.planes import are_slower_than_parts, faster_as_planes
    from ..planning.skewed_tiles import faster_as_skewed

    lean = lean_config(problem, device)
    tiles = tiles_of_positions(problem, device) if lean is None else tiles_plan(problem, device, lean)
    if lean is not None and problem.inner >= LONG:
        return tiles
    plan = faster_as_planes(problem, device, tiles) or tiles
    if plan is tiles and are_slower_than_parts(problem, device, tiles):
        plan = plan_spatial(problem, device, "spatial_two_pass")
    skewed = faster_as_skewed(problem, device, plan, way)
    return plan if skewed is None else staggered(tiles_plan(problem, device, skewed), problem, device)


def prepare_softmax(planes: tuple[Tensor, ...], log: bool, backward: bool, invariant: bool) -> Run:
    """run(tensors) over (x, y), or over (y, dy, dx) of a gradient: planned the first time, then cached."""

    def make() -> Run:
        device = device_of(planes[0])
        plan = softmax_plan(planes, log, backward, invariant, device)
        return prepare(softmax_recipe(planes, plan, log, backward, device), planes)

    return cached_run(_softmaxes, (of_layout(planes), log, backward, invariant), planes[0], make)


def planned_softmax(planes: tuple[Tensor, ...], log: bool, backward: bool, on: Tensor) -> Plan | str:
    """The plan of planes, which may be meta tensors, on `on`'s device; or why a kernel did not compile."""
    device, index = device_of(on), on.get_device()
    plan = softmax_plan(planes, log, backward, is_batch_invariant(), device)
    try:
        recipe = softmax_recipe(planes, plan, log, backward, device)
    except KernelUnavailable as error:
        return str(error)
    pointers = _pointers(recipe, planes)
    for step in recipe.steps if on.is_cuda else ():
        failed = compiling.compile_failure(step.kernel, tuple(pointers[i] for i in step.tensors), step.meta, index)
        if failed:
            return failed
    return plan
