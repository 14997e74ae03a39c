"""What only the compiler decides: which warp holds a row segment, and which arguments become constants.

The interpreter has neither layouts nor specialized arguments, so a kernel that it runs may still be wrong on a GPU, or
not compile.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from launches import cross_compiled, masked_gradient_launch
from params import few

from fused_softmax.lab import cross_compile as compiled
from fused_softmax.launch import cross_entropy, loss_kernels, masked_softmax, masks, row_statistics
from fused_softmax.launch.compile import Launch
from fused_softmax.launch.launcher import flat_launch, row_launch
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.launch.views import strided_launch
from fused_softmax.planning.losses import plan_statistics
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES, Plan

pytestmark = pytest.mark.compiled

SM_90 = DEVICES["sm_90"]


def ttgir_of(launch: Launch) -> str:
    """The kernel's IR after layouts are chosen."""
    with captured() as kernels:
        compiled.cross_compile(launch, "sm_90")
    return kernels[0].asm["ttgir"]


@contextmanager
def captured() -> Iterator[list]:
    kernels: list = []
    read = compiled.resources

    def remember(kernel):
        kernels.append(kernel)
        return read(kernel)

    compiled.resources = remember
    try:
        yield kernels
    finally:
        compiled.resources = read


def holds_lines(layout: str, parts: int) -> bool:
    """Whether all lanes of a warp hold one line (first dimension), and each of a CTA's `parts` lines has its own warp.

    Where `parts` is 1, all warps of a CTA hold its line.
    """
    of = dict(re.findall(r"(\w+) = (\[.*?\](?=[,}] ?\w|}))", layout))
    if "ttg.linear" in layout:
        bases = {name: ast.literal_eval(of[name]) for name in ("register", "lane", "warp")}
        lines = {name: 2 ** sum(base[0] != 0 for base in bases[name]) for name in bases}
        warps = 2 ** len(bases["warp"])
    else:
        lines = {
            "register": ast.literal_eval(of["sizePerThread"])[0],
            "lane": ast.literal_eval(of["threadsPerWarp"])[0],
        }
        lines["warp"] = ast.literal_eval(of["warpsPerCTA"])[0]
        warps = math.prod(ast.literal_eval(of["warpsPerCTA"]))
    return lines == {"register": 1, "lane": 1, "warp": parts} and (parts == 1 or warps == parts)


def merged_layouts(ttgir: str) -> list[str]:
    """The layouts of the tiles whose lines the cluster merges, or sums up."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.M))
    found = []
    for line in ttgir.splitlines():
        if "elementwise_inline_asm" in line and "cluster_slots" in line:
            operands = line.rsplit("} ", 1)[1]
            found += [layouts[name] for name in re.findall(r"parent = (#(?!ttg)\w+)", operands)]
    return found


def masked_launch(n_cols: int, dtype: torch.dtype, mask: int, cols: int, causal: bool) -> tuple[Launch, Plan]:
    x = torch.empty(4, n_cols, dtype=dtype)
    of_mask = torch.empty(2, n_cols, dtype=dtype if mask == 2 else torch.uint8)
    op = masked_softmax.FORWARD[True]
    chosen = op.planner(problem_of(x, x), SM_90)
    assert chosen.ctas > 1
    flags = (
        ("MASK", mask),
        ("MASK_COLS", cols),
        ("MASK_VEC", 1),
        ("MASK_ROWS", 2),
        ("CAUSAL", causal),
        ("ZERO", False),
    )
    numbers = (
        *masks.row_schedule(2, 2, 2),
        1,
        2,
        0,
        0,
        0,
        n_cols,
        cols,
        0,
        0.5,
    )
    launch = row_launch(op, (x, x), (of_mask,), numbers, flags, chosen, SM_90)
    return launch, chosen


@pytest.mark.parametrize(("n_cols", "causal"), [(27003, False), (32768, True)])
@pytest.mark.parametrize("cols", [0, 1])
@pytest.mark.parametrize(("mask", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_masked_lines_are_warps(n_cols, causal, cols, mask, dtype):
    launch, chosen = masked_launch(n_cols, dtype, mask, cols, causal)
    layouts = merged_layouts(ttgir_of(launch))
    assert layouts and all(holds_lines(layout, chosen.warps_per_row) for layout in layouts), layouts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", [1, 2], ids=["boolean", "additive"])
def test_a_mask_out_of_phase_with_a_cluster_is_read_in_vectors(mask, dtype):
    """Next to its vectors and those that follow them, only elements outside of whole vectors are read one by one."""
    launch, chosen = masked_launch(27003, dtype, mask, 3, False)
    with captured() as kernels:
        used = compiled.cross_compile(launch, "sm_90")
    assert used.spilled_bytes == 0
    # of the vectors and of two elements
    assert sum(n for _, n in used.loads) == 3 * chosen.chunks + 2
    narrowest = min(16, chosen.vec * (1 if mask == 1 else dtype.itemsize))
    assert sum(n for width, n in used.loads if width >= narrowest) >= 3 * chosen.chunks
    layouts = merged_layouts(kernels[0].asm["ttgir"])
    assert layouts and all(holds_lines(layout, chosen.warps_per_row) for layout in layouts), layouts


@pytest.mark.parametrize(("n_cols", "causal"), [(27003, False), (32768, True)])
@pytest.mark.parametrize(
    "mask", [None, torch.ones(2, 1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)], ids=["", "query", "column"]
)
def test_the_lines_of_masked_gradients_are_warps(n_cols, causal, mask):
    x = torch.empty(4, n_cols)
    if mask is not None and mask.dim() == 1:
        mask = mask.repeat(n_cols)
    launch, chosen = masked_gradient_launch(x, mask, causal, SM_90)
    assert chosen.ctas > 1
    layouts = merged_layouts(ttgir_of(launch))
    assert layouts and all(holds_lines(layout, chosen.warps_per_row) for layout in layouts), layouts


@pytest.mark.parametrize("n_cols", [50257, 128256])
@pytest.mark.parametrize("picks", [1, 4])
def test_the_lines_of_statistics_are_warps(n_cols, picks):
    x, number, ids = torch.empty(3, n_cols), torch.zeros(6), torch.zeros(3, picks, dtype=torch.int64)
    flags = (("PICKS", picks), ("ENTROPY", True), ("RANK", False), ("SCALE", 2), ("KEEP_MOMENTS", True))
    chosen = plan_statistics(problem_of(x), SM_90)
    vectors = (number, number, number, ids, number, number)
    launch = row_launch(row_statistics.FORWARD, (x,), vectors, (picks, 1.0), flags, chosen, SM_90)
    layouts = merged_layouts(ttgir_of(launch))
    assert bool(layouts) == (chosen.ctas > 1)
    assert all(holds_lines(layout, chosen.warps_per_row) for layout in layouts), layouts


# weights together with smoothing have no kernel that writes the gradient in the forward
LOSSES = [
    ("with gradient", False, 0.0),
    ("with gradient", True, 0.0),
    ("with gradient", False, 0.1),
    ("forward", False, 0.0),
    ("forward", True, 0.1),
]


@pytest.mark.parametrize("n_cols", few([50257], [50257, 128256]))
@pytest.mark.parametrize(("name", "weighted", "smoothing"), LOSSES)
def test_the_lines_of_a_loss_are_warps(n_cols, name, weighted, smoothing):
    x = torch.empty(3, n_cols, dtype=torch.bfloat16)
    target, number = torch.zeros(3, dtype=torch.int64), torch.zeros(6)
    of_weight, facts = (number, number[:2]) if weighted else (None, None)
    op = cross_entropy.CrossEntropy(target, of_weight, facts, -100, "mean", smoothing, 30.0, 0.0)
    numbers = (op.ignore_index, *op.numbers)
    if name == "with gradient":
        numbers = loss_kernels.with_gradient_numbers(op)
        tensors, vectors = (x, x), (target, number, number, number, number, number)
        flags = loss_kernels.with_gradient_flags(op.kind, inplace=True)
        row_op = cross_entropy.WITH_GRADIENT[op.kind.arithmetic]
        chosen = row_op.planner(problem_of(x, x), SM_90)
        assert chosen.ctas > 1
    else:
        tensors, vectors, flags = (x,), (target, number, number, number, number), op.kind.flags
        row_op = cross_entropy.FORWARD[op.kind.arithmetic]
        chosen = row_op.planner(problem_of(x), SM_90)
    launch = row_launch(row_op, tensors, vectors, numbers, flags, chosen, SM_90)
    layouts = merged_layouts(ttgir_of(launch))
    assert bool(layouts) == (chosen.ctas > 1)
    assert all(holds_lines(layout, chosen.warps_per_row) for layout in layouts), layouts


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["count_targets", "reduce_losses"])
def test_the_lines_of_a_sum_over_rows_are_warps(name, weighted):
    """A sum over many rows is a cluster's: with weights, which Triton 3.6 lays out otherwise, it is one CTA's."""
    n_rows = 4096
    target, number = torch.zeros(n_rows, dtype=torch.int64), torch.zeros(n_rows)
    losses = name == "reduce_losses"
    kernel = loss_kernels.reduce_kernel if losses else loss_kernels.count_kernel
    flags = loss_kernels.sum_flags(losses, losses, weighted, n_rows > loss_kernels.ONE_CTA_ROWS, SM_90)
    flags = (*flags, ("KEEPS_COUNT", True), ("HAS_COUNT", False)) if losses else flags
    tensors = (number, target, number, number, number) if losses else (target, number, number)
    launch = flat_launch(kernel, tensors, (n_rows, n_rows, 1000, -100), flags, 8, SM_90)
    layouts = merged_layouts(ttgir_of(launch))
    assert bool(layouts) == (dict(flags)["CTAS"] > 1) == (not weighted)
    assert all(holds_lines(layout, dict(flags)["WARPS_PER_ROW"]) for layout in layouts), layouts


@pytest.mark.parametrize("n_cols", [50257, 131072])
def test_the_lines_of_softmax_are_warps(n_cols):
    x = torch.empty(3, n_cols)
    chosen = plan(problem_of(x, x), SM_90)
    launch = softmax_launch((x, torch.empty_like(x)), chosen, device=SM_90)
    layouts = merged_layouts(ttgir_of(launch))
    assert layouts and all(holds_lines(layout, chosen.warps_per_row) for layout in layouts), layouts


# --- the strided kernel is launched through the JIT, which turns a stride of 1 into a constant ------------------------

# x and y of one call: each stride is 1, a multiple of 16, or another number
STRIDED = {
    "steps of columns": lambda n: (torch.empty(4, 2 * n)[:, ::2], torch.empty(4, n), 1),
    "transposed": lambda n: (torch.empty(n, 48).t(), torch.empty(48, n), 1),
    "transposed, odd strides": lambda n: (torch.empty(n, 37).t(), torch.empty(37, n), 1),
    "out is transposed": lambda n: (torch.empty(48, n), torch.empty(n, 48).t(), 1),
    "steps of columns, aligned rows": lambda n: (
        torch.empty(4, 2 * n + 16)[:, : n * 2 : 2],
        torch.empty(4, n + 8)[:, :n],
        1,
    ),
    "another dim": lambda n: (torch.empty(n, 48), torch.empty(n, 48), 0),
    "another dim, odd strides": lambda n: (torch.empty(n, 37), torch.empty(n, 37), 0),
    "three dims of rows": lambda n: (torch.empty(3, 5, n, 7).transpose(1, 3), torch.empty(3, 7, n, 5), 2),
    "expanded": lambda n: (torch.empty(n, 1).expand(n, 48), torch.empty(n, 48), 0),
}


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("n_cols", [9, 3000], ids=["one step", "several steps"])
@pytest.mark.parametrize("layout", STRIDED)
def test_every_stride_compiles(layout, n_cols, log):
    x, y, dim = STRIDED[layout](n_cols)
    launch = strided_launch(x, y, dim, log, DEVICES["sm_90"])
    assert launch.meta["ONE_STEP"] == (n_cols == 9)
    used = compiled.cross_compile(launch, "sm_90")
    assert used.fits() and used.loads and used.stores


def test_the_strides_reach_each_specialization():
    """Of the strides along columns and rows, some are 1, some multiples of 16 and some neither."""
    seen: dict[str, set[str]] = {}
    for make in STRIDED.values():
        launch = strided_launch(*make(3000), False, DEVICES["sm_90"])
        named = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        for name in ("x_row", "x_col", "y_row", "y_col"):
            n = named[name]
            seen.setdefault(name, set()).add("1" if n == 1 else "16" if n % 16 == 0 else "other")
    assert all(kinds == {"1", "16", "other"} for kinds in seen.values()), seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_strided_accesses_are_vectors(dtype):
    """Where neighbors start on 16 bytes and their number is a multiple of 16, a mask does not take the vectors away."""
    x, y = torch.empty(4800, 1840, dtype=dtype, device="meta").t(), torch.empty(1840, 4800, dtype=dtype, device="meta")
    launch = strided_launch(x, y, 1, False, SM_90)
    used = compiled.cross_compile(launch, "sm_90")
    assert not launch.meta["ONE_STEP"] and used.spilled_bytes == 0
    assert used.widest_load_bytes == used.widest_store_bytes == 16 and set(used.loads) == {(16, used.loads[0][1])}, used
    # crops: neighbors are written where they are read
    x = torch.empty(2, 48, 30, 184, dtype=dtype, device="meta")[..., :176]
    y = torch.empty(x.shape, dtype=dtype, device="meta")
    used = compiled.cross_compile(strided_launch(x, y, 1, False, SM_90), "sm_90")
    assert used.widest_store_bytes == 16, used


def test_a_strided_rows_order_does_not_follow_from_the_number_of_rows():
    """Layouts decide which thread adds which columns, and full tiles of any number of rows have the same."""

    def layouts(n_rows: int) -> list[str]:
        x = torch.empty(1840, 4800, device="meta").t()[:n_rows]
        code = cross_compiled(strided_launch(x, torch.empty(x.shape, device="meta"), 1, False, SM_90), "sm_90")[1]
        return [line for line in code["ttgir"].splitlines() if line.startswith("#") and "loc" not in line]

    assert layouts(4800) == layouts(64) == layouts(65) == layouts(4111)


def rows_at(n_cols: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Rows whose first element is the offset-th of an allocation."""
    return torch.empty(4 * n_cols + offset, dtype=dtype)[offset:].view(4, n_cols)


@pytest.mark.parametrize(
    ("n_cols", "dtype", "offset"),
    [(2, torch.float16, 2), pytest.param(4, torch.float32, 2, marks=pytest.mark.extended)]
    + [pytest.param(n, torch.bfloat16, 4, marks=pytest.mark.extended) for n in (4, 12, 20)],
)
def test_lanes_that_share_a_vector_add_rounded_products(n_cols, dtype, offset):
    """At an address that is no multiple of 16 bytes, each element of a vector may have a lane of its own.

    racecheck reported lanes whose entropies of one row differed, and the gradient differed from call to call.
    """
    x, number, ids = rows_at(n_cols, dtype, offset), torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64)
    chosen = row_statistics.FORWARD.plan((x,), SM_90, False)
    assert chosen.vec > 1 and chosen.vec * x.element_size() < 16
    flags = (("PICKS", 1), ("ENTROPY", True), ("RANK", False), ("SCALE", 0), ("KEEP_MOMENTS", True))
    vectors = (number, number, number, ids, number, number)
    entropy = row_launch(row_statistics.FORWARD, (x,), vectors, (1, 1.0), flags, chosen, SM_90)
    rows = (x, x, x)
    chosen = plan(problem_of(*rows, backward=True), SM_90)
    gradient = softmax_launch(rows, chosen, backward=True, device=SM_90)
    masked, _ = masked_gradient_launch(x, None, True, SM_90)
    for launch in (entropy, gradient, masked):
        assert compiled.cross_compile(launch, "sm_90").products_exchanged == 0, launch.kernel


@pytest.mark.parametrize(
    ("n_cols", "dtype", "mask_dtype"), [(294, torch.float32, torch.bool), (588, torch.bfloat16, torch.bfloat16)]
)
def test_a_masks_address_does_not_decide_the_order_of_sums(n_cols, dtype, mask_dtype):
    """Rows at an odd address are read one by one. A mask that was read in vectors decided which thread adds what."""
    x, y = rows_at(n_cols, dtype, 1), rows_at(n_cols, dtype, 0)
    op = masked_softmax.FORWARD[masks.kind_of(torch.empty(0, dtype=mask_dtype))]
    chosen = op.plan((x, y), SM_90, True)
    found = []
    for offset in (0, 4):
        mask = rows_at(n_cols, mask_dtype, offset).view(2, 2, n_cols)
        read, of_mask, numbers = masks.describe_mask(mask, x.view(2, 2, n_cols), chosen, y, forward=True)
        assert read.data_ptr() % 16 == offset * mask.element_size()
        flags = (*of_mask, ("CAUSAL", False), ("ZERO", False))
        launch = row_launch(op, (x, y), (read,), (*numbers, 0.5), flags, chosen, SM_90)
        ttgir = compiled.compile_for(launch, "sm_90").asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.M))
        reduced = re.findall(r"^ *\}\) : \(tensor<.*?(#blocked\d*|#linear\d*)", ttgir, re.M)
        found.append([layouts[name] for name in reduced])
    assert found[0] and found[0] == found[1]
