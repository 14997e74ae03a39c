"""The shipped kernels, interpreted: every regime forced on every width, row count, dtype, edge case and layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import (
    DTYPES,
    REGIMES,
    ROWS,
    SENTINEL,
    WIDTHS,
    assert_contract,
    dtype_id,
    edge_rows,
    guarded,
    logits,
    outside,
    regimes_for,
    softmax_by,
)

import fused_softmax as fs

pytestmark = pytest.mark.interpreted

every_regime = pytest.mark.parametrize("regime", REGIMES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


@pytest.mark.sampled(3)
@every_dtype
@pytest.mark.parametrize(("regime", "n_cols"), regimes_for(*WIDTHS))
def test_widths(regime, dtype, n_cols):
    for n_rows in ROWS:
        x = logits(n_rows, n_cols, dtype=dtype)
        before = x.clone()
        assert_contract(softmax_by(regime, x), x)
        assert torch.equal(x, before), "the input was written"


@every_dtype
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_the_plans_own_choice(dtype, n_cols):
    x = logits(3, n_cols, dtype=dtype)
    assert fs.plan_for(x).regime != "torch"
    assert_contract(fs.softmax(x), x)


# 1003 columns start unaligned in most rows; 12,288 (24,576 in 16 bits) are three whole steps of the stream regime, so
# that a chunk of -inf is a step of -inf
@every_dtype
@pytest.mark.parametrize(("regime", "n_cols"), regimes_for(5, 1003, 12288))
def test_edge_table(regime, dtype, n_cols):
    n_cols = 2 * n_cols if n_cols == 12288 and dtype.itemsize == 2 else n_cols
    rows = edge_rows(n_cols, dtype)
    x = torch.stack(list(rows.values()))
    got = softmax_by(regime, x)
    own = torch.softmax(x, -1)
    for i, name in enumerate(rows):
        assert torch.equal(got[i].isnan(), own[i].isnan()), name
        # exact zeros, not merely small numbers
        assert torch.equal(got[i][x[i] == -torch.inf] == 0, own[i][x[i] == -torch.inf] == 0), name
    assert_contract(got, x)


@every_dtype
@pytest.mark.parametrize("n_cols", [5, 3001])
def test_edge_table_over_the_first_dim(dtype, n_cols):
    """Columns that are not neighbours in memory go another way through the package; the table is the same."""
    x = torch.stack(list(edge_rows(n_cols, dtype).values())).t().contiguous()
    assert_contract(fs.softmax(x, 0), x, 0)


@every_regime
def test_worked_examples(regime):
    x = torch.tensor([[1000.0, 999.0, 998.0], [2.0, 1.0, 0.1]])
    want = torch.tensor([[0.665, 0.245, 0.090], [0.659, 0.242, 0.099]])
    torch.testing.assert_close(softmax_by(regime, x), want, atol=5e-4, rtol=0)


@pytest.mark.parametrize("regime", [r for r in REGIMES if r != "warp"])
def test_real_logits(regime):
    """The excerpt that ships with the package: near-flat logits of a whole vocabulary, and sharp attention scores."""
    safetensors = pytest.importorskip("safetensors.torch")
    file = Path(fs.__file__).parent / "lab" / "data" / "minilm_excerpt.safetensors"
    assert file.stat().st_size <= 1_000_000
    tensors = safetensors.load_file(file)
    x = tensors["logits"][:3]
    assert x.shape == (3, 30522) and x.dtype == torch.float16
    assert_contract(softmax_by(regime, x), x)
    # head 2 is the sharp one
    scores = tensors["attention_scores"][2].contiguous()
    assert scores.max() > 33
    assert_contract(softmax_by(regime, scores), scores)


@every_dtype
@every_regime
@pytest.mark.parametrize("lead", [1, 8])
@pytest.mark.parametrize("n_cols", [1, 7, 1001, 1024])
def test_nothing_is_read_or_written_outside(regime, dtype, n_cols, lead):
    """Rows inside a field: a read outside shows as a NaN or an infinity, a write outside as a lost sentinel."""
    n_rows = 3
    around = torch.full((n_rows, lead + n_cols + 9), torch.nan, dtype=dtype)
    around[1] = torch.inf
    x = around[:, lead : lead + n_cols]
    x.copy_(logits(n_rows, n_cols, dtype=dtype))
    y, field = guarded(n_rows, n_cols, dtype, lead)
    softmax_by(regime, x, y)
    assert_contract(y, x)
    assert (outside(field, n_cols, lead) == SENTINEL).all()


@every_dtype
def test_layouts(dtype):
    """Any dim and any strides give torch's values in a contiguous tensor."""
    x = logits(4, 5, 6, 7, dtype=dtype)
    for dim in (0, 1, 2, 3, -1, -2, -3, -4):
        got = fs.softmax(x, dim)
        assert got.is_contiguous()
        assert_contract(got, x, dim)
    flat = logits(40, 66, dtype=dtype)
    layouts = {
        "transposed": flat.t(),
        "columns sliced": flat[:, 1:-2],
        "columns stepped": flat[:, ::3],
        "rows stepped": flat[::7],
        "rows sliced": flat[3:9],
        "reversed": flat.flip(1),
        "expanded rows": flat[:1].expand(5, 66),
        "expanded columns": flat[:, :1].expand(40, 9),
        "overlapping": flat.flatten().as_strided((6, 50), (3, 1)),
        "permuted": logits(3, 4, 50, dtype=dtype).permute(1, 2, 0),
        "permuted, rows whole": logits(3, 4, 50, dtype=dtype).permute(1, 0, 2),
        "every second of five dims": logits(4, 2, 6, 2, 66, dtype=dtype)[::2, :, ::2, :, ::2],
        "channels last": logits(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last),
    }
    for name, view in layouts.items():
        before = view.clone()
        for dim in {0, 1, -1}:
            got = fs.softmax(view, dim)
            assert got.is_contiguous(), name
            assert_contract(got, view, dim)
        assert torch.equal(view, before), name


@every_dtype
def test_out_may_be_a_view(dtype):
    """out= with strides of its own: only the view is written."""
    for n_cols in (5, 1003):
        x = logits(6, n_cols, dtype=dtype)
        for lead in (1, 8):
            out, field = guarded(6, n_cols, dtype, lead)
            assert fs.softmax(x, -1, out=out) is out
            assert_contract(out, x)
            assert (outside(field, n_cols, lead) == SENTINEL).all()
        field = torch.full((n_cols, 13), SENTINEL, dtype=dtype)
        out = field[:, 0:12:2].t()
        fs.softmax(x, -1, out=out)
        assert_contract(out, x)
        assert (field[:, 1::2] == SENTINEL).all() and (field[:, 12] == SENTINEL).all()
        in_place = x.clone()
        assert_contract(fs.softmax(in_place, -1, out=in_place), x)


@every_dtype
@pytest.mark.parametrize("offset", range(0, 9))
def test_unaligned_rows(dtype, offset):
    """A row may start at any element: odd widths and sliced storage leave 16-byte boundaries behind."""
    n_rows, n_cols = 3, 1003
    x = logits(1, offset + n_rows * n_cols, dtype=dtype)[0, offset:].view(n_rows, n_cols)
    assert_contract(fs.softmax(x), x)


@every_dtype
def test_rows_out_of_phase(dtype):
    """Input and output rows at different distances from a 16-byte boundary."""
    for n_cols in (5, 603):
        for x_lead, y_lead in ((0, 1), (1, 0), (1, 3)):
            x = logits(3, x_lead + n_cols, dtype=dtype)[:, x_lead:]
            y, field = guarded(3, n_cols, dtype, y_lead)
            for regime in REGIMES:
                assert_contract(softmax_by(regime, x, y), x)
                assert (outside(field, n_cols, y_lead) == SENTINEL).all()


def test_the_tile_regime_says_what_it_cannot_hold():
    with pytest.raises(ValueError, match="warp"):
        softmax_by("warp", logits(2, 8191))


@every_regime
def test_the_same_bits_every_time(regime):
    x = logits(3, 1023)
    first = softmax_by(regime, x)
    assert all(torch.equal(softmax_by(regime, x), first) for _ in range(3))
