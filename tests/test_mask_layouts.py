"""masked_softmax with masks that lie anywhere: out of phase with their rows, and shared by several batches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fused_softmax as fs
from fused_softmax.launch import masked_softmax as masked_rows
from fused_softmax.launch import masks
from fused_softmax.launch.device import device_of
from fused_softmax.launch.launcher import RowOp
from fused_softmax.launch.layout import rows_of
from fused_softmax.planning.types import Plan

pytestmark = pytest.mark.interpreted

INF = float("inf")
# elements between the mask of one query and that of the next: unaligned rows, aligned ones, rows of several chunks, and
# narrow ones that move as one piece, in accesses of 1, 4 and 2 elements where they have 16 bits
WIDTHS = [133, 104, 523, 101, 52, 50]


def placed(mask: torch.Tensor, first: int) -> torch.Tensor:
    """The mask, `first` elements from a multiple of 64 bytes, with NaN or True around it."""
    around = torch.full((mask.numel() + first + 64,), True if mask.dtype is torch.bool else float("nan")).to(mask.dtype)
    around[first : first + mask.numel()] = mask.flatten()
    return around[first : first + mask.numel()].view(mask.shape)


def exact(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    z = x.double().masked_fill(~mask, -INF) if mask.dtype is torch.bool else x.double() + mask.double()
    return torch.softmax(z, -1)


def plan_of(mask: torch.Tensor, x: torch.Tensor) -> Plan:
    rows = rows_of(x, x.shape[-1])
    return masked_rows.FORWARD[masks.kind_of(mask)].plan((rows, rows), device_of(x), False)


def columns_of(mask: torch.Tensor, x: torch.Tensor) -> int:
    """How the kernel reads the mask: 3 in vectors that are shifted."""
    _, flags, _ = masks.describe_mask(mask, x, plan_of(mask, x), rows_of(x, x.shape[-1]), forward=True)
    return dict(flags)["MASK_COLS"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_masks_out_of_phase_with_their_rows(n_cols, dtype, mask_dtype):
    x = torch.randn(2, 3, n_cols).to(dtype)
    values = torch.randn(3, n_cols)
    for first in (1, 4, 6, 7):
        mask = placed(values > -1.0 if mask_dtype is torch.bool else values.to(mask_dtype), first)
        narrow = n_cols == 50 or (n_cols in (52, 101) and dtype is torch.bfloat16)
        assert plan_of(mask, x).gathered == narrow
        assert narrow or columns_of(mask, x) == 3 or (n_cols in (52, 104) and first == 4)
        y = fs.masked_softmax(x, mask)
        tolerance = 1e-6 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(y.double(), exact(x, mask), rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masks_out_of_phase_with_rows_on_a_cluster(dtype, mask_dtype):
    """Rows of 16 bits read masks of 16 bits and less in vectors, those of float32 boolean masks."""
    x, values = torch.randn(2, 3, 27003).to(dtype), torch.randn(3, 27003)
    mask = placed(values > -1.0 if mask_dtype is torch.bool else values.to(mask_dtype), 3)
    by_elements = mask_dtype is torch.float32 or (dtype is torch.float32 and mask_dtype is torch.bfloat16)
    assert columns_of(mask, x) == (1 if by_elements else 3)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(fs.masked_softmax(x, mask).double(), exact(x, mask), rtol=tolerance, atol=1e-6)


def test_a_long_row_of_float32_reads_its_mask_by_elements():
    x, mask = torch.randn(2, 1, 9001), torch.randn(1, 9001)
    assert columns_of(mask, x) == 1 and columns_of(mask.bfloat16(), x) == columns_of(mask > 0, x) == 3
    torch.testing.assert_close(fs.masked_softmax(x, mask).double(), exact(x, mask), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("n_cols", "threads"), [(133, 8), (133, 16), (133, 32), (104, 8)])
@pytest.mark.parametrize("kind", ["causal", "additive", "both"])
def test_any_number_of_threads_holds_a_row(kind, n_cols, threads, monkeypatch):
    """Head, tail and the vector that a row sees in part are up to four vectors, in one tile or in several."""
    causal, masked = kind != "additive", kind != "causal"

    def with_threads(op):
        def planner(problem, device):
            chosen = op.planner(problem, device)
            chunks = -(-chosen.chunks * chosen.vectors_per_chunk // threads)
            shape = dict(vectors_per_chunk=threads, chunks=chunks, unpredicated_chunks=0, rows=4)
            assert not chosen.gathered
            return replace(chosen, **shape, output_gathered=False)

        return RowOp(planner, op.kernel, backward=op.backward, alignment=op.alignment)

    of_mask = 2 if masked else 0
    for ops, key in ((masked_rows.FORWARD, of_mask), (masked_rows.BACKWARD, 0), (masked_rows.CAUSAL_BACKWARD, 0)):
        monkeypatch.setitem(ops, key, with_threads(ops[key]))
    monkeypatch.setattr(masked_rows, "CAUSAL", with_threads(masked_rows.CAUSAL))
    x, dy = torch.randn(2, 2, 13, n_cols).bfloat16()
    mask = placed(torch.randn(13, n_cols).bfloat16(), 3) if masked else torch.zeros(13, n_cols)
    seen = torch.ones(13, n_cols, dtype=torch.bool).tril(0 if causal else n_cols)
    y = fs.masked_softmax(x, mask if masked else None, causal=causal)
    torch.testing.assert_close(y.double(), exact(x.double() + mask.double(), seen), rtol=1e-2, atol=1e-4)
    dx = masked_rows.masked_backward(y, dy, None, 1.0, causal)
    want = y.double() * (dy.double() - (y.double() * dy.double()).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), want.masked_fill(~seen, 0.0), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("width", [160, 2000])
@pytest.mark.parametrize("first", [0, 3])
def test_bits_do_not_depend_on_the_rows_around(width, first):
    """The first row, the last row and a row alone read the same columns of their mask by the same threads."""
    x = torch.randn(5, width + 3)[:, :width]
    mask = placed(torch.randn(5, width), first)
    y = fs.masked_softmax(x, mask)
    for row in range(5):
        assert torch.equal(y[row : row + 1], fs.masked_softmax(x[row : row + 1], mask[row : row + 1]))


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(
    "mask_shape", [(7, 40), (1, 3, 7, 40), (2, 1, 7, 40), (2, 3, 7, 40), (2, 1, 1, 40), (2, 3, 7, 1)], ids=str
)
def test_batches_that_share_a_mask(mask_shape, causal, monkeypatch):
    """Blocks of two queries of each batch, and a last one of one query."""
    monkeypatch.setattr(masks, "GROUP_BYTES", 2 * 40 * 4)
    x, mask = torch.randn(2, 3, 7, 40), torch.randn(mask_shape)
    want = mask.expand(x.shape)
    if causal:
        want = want.masked_fill(torch.ones(7, 40, dtype=torch.bool).triu(1), -INF)
    torch.testing.assert_close(fs.masked_softmax(x, mask, causal=causal).double(), exact(x, want), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(
    "mask_shape", [(50, 39), (1, 3, 50, 39), (4, 1, 50, 39), (4, 3, 50, 39), (4, 1, 1, 39), (1, 3, 50, 1)], ids=str
)
def test_pieces_whose_batches_share_a_mask(mask_shape, causal, monkeypatch):
    """19 pieces of 32 rows: blocks of three of each part, and a last one of fewer."""
    monkeypatch.setattr(masks, "GROUP_BYTES", 3 * 32 * 39 * 4)
    x, mask = torch.randn(4, 3, 50, 39), torch.randn(mask_shape)
    rows = rows_of(x, 39)
    found = masked_rows.forward_of(x, (rows, rows), mask, causal, False, device_of(x), False)
    plan = found.op.plan((rows, rows), device_of(x), False)
    assert plan.gathered and plan.rows == 32
    n_part, n_shared = found.numbers[-11], found.numbers[-1]
    assert (n_part, n_shared) == {1: (4, 4), 50: (1, 12)}.get(mask_shape[0], (0, 1))
    want = mask.expand(x.shape)
    if causal:
        want = want.masked_fill(torch.ones(50, 39, dtype=torch.bool).triu(1), -INF)
    torch.testing.assert_close(fs.masked_softmax(x, mask, causal=causal).double(), exact(x, want), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("n_pieces", "n_shared", "n_group"), [(19, 4, 3), (19, 4, 1), (96, 8, 5), (7, 7, 3), (5, 9, 2)]
)
def test_every_piece_has_one_place_and_parts_start_together(n_pieces, n_shared, n_group):
    n_part, n_block, _, _, group, _, _, last, _, _, shared = masks.piece_order(n_pieces, n_shared, n_group)
    assert n_part == n_pieces // n_shared and shared == n_shared and n_block == group * n_shared
    found = []
    for place in range(n_pieces):
        block, rest = divmod(place, n_block)
        part, at = divmod(rest, last if n_part - block * group <= last else group)
        found.append(part * n_part + block * group + at if place < n_part * n_shared else place)
    assert sorted(found) == list(range(n_pieces))
    # what the parts read of their mask is never further apart than two blocks
    where = {piece: place for place, piece in enumerate(found)}
    for i in range(n_part):
        places = [where[part * n_part + i] for part in range(n_shared)]
        assert max(places) - min(places) < 2 * n_block


def test_the_order_of_rows_follows_what_batches_share():
    x = torch.empty(4, 3, 7, 40)
    plan = masked_rows.FORWARD[True].plan((x.view(84, 40),) * 2, device_of(x), False)
    for shape, (rows, n_shared, span_stride, shared_stride) in {
        (7, 40): (1, 12, 12, 1), (1, 3, 7, 40): (1, 4, 1, 3), (4, 1, 7, 40): (1, 3, 3, 1), (4, 3, 7, 40): (0, 1, 1, 1),
        (4, 1, 1, 40): (1, 3, 3, 1), (40,): (0, 1, 1, 1), (4, 3, 1, 40): (1, 1, 1, 1),
    }.items():  # fmt: skip
        _, flags, numbers = masks.describe_mask(torch.empty(shape), x, plan, x, forward=True)
        found = (dict(flags)["MASK_ROWS"], numbers[1] // 7, numbers[4], numbers[8])
        assert found == (rows, n_shared, span_stride, shared_stride), shape


@pytest.mark.parametrize(
    ("n_queries", "n_batch", "n_shared", "inner"), [(7, 6, 3, True), (5, 6, 2, False), (8, 4, 4, True)]
)
def test_every_row_has_one_place_and_a_block_shares_its_mask(n_queries, n_batch, n_shared, inner):
    numbers = masks.row_schedule(n_queries, n_batch, n_shared, 2, inner=inner)
    (
        queries, n_span, *of_span, span_stride, n_block, block_multiplier, block_power, shared_stride,
        n_group, group_multiplier, group_power, n_last, last_multiplier, last_power,
    ) = numbers  # fmt: skip
    assert queries == n_queries

    def divmod_by(n: int, d: int, multiplier: int, power: int) -> tuple[int, int]:
        assert multiplier < 2**32
        quotient = (2 * n * multiplier >> 32) >> power
        assert (quotient, n - quotient * d) == divmod(n, d)
        return divmod(n, d)

    seen = []
    for place in range(n_queries * n_batch):
        span, rest = divmod_by(place, n_span, *of_span)
        block, rest = divmod_by(rest, n_block, block_multiplier, block_power)
        last = n_queries - block * n_group <= n_last
        shared, query = divmod_by(
            rest, *((n_last, last_multiplier, last_power) if last else (n_group, group_multiplier, group_power))
        )
        seen.append((span * span_stride + shared * shared_stride, block * n_group + query))
    assert sorted(seen) == list(itertools.product(range(n_batch), range(n_queries)))
    kept = {(batch // n_shared if inner else batch % (n_batch // n_shared), query) for batch, query in seen[:n_block]}
    assert len(kept) == n_group


@pytest.mark.parametrize("d", [1, 2, 3, 5, 641, 65537, 2**30 + 1, 2**31 - 1])
def test_a_division_is_exact_below_2_to_the_31(d):
    _, multiplier, power = masks.row_order(d)
    assert multiplier < 2**32
    for n in (0, 1, d - 1, d, 2**30, (2**31 - 1) // d * d - 1, (2**31 - 1) // d * d, 2**31 - 2, 2**31 - 1):
        assert (2 * n * multiplier >> 32) >> power == n // d
