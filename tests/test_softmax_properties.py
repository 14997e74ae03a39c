"""What holds for every softmax, on examples that hypothesis draws: sums, shifts, permutations, and float64."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, REGIMES, assert_contract, dtype_id, softmax_by

import fused_softmax as fs

pytest.importorskip("hypothesis")
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.interpreted

every_regime = pytest.mark.parametrize("regime", REGIMES)
finite = st.floats(-60000.0, 60000.0, width=32, allow_subnormal=False)
rows = st.lists(finite, min_size=1, max_size=70).map(lambda row: torch.tensor([row]))


def drawn(n_rows: int, n_cols: int, scale: float, seed: int) -> torch.Tensor:
    return torch.randn(n_rows, n_cols, generator=torch.Generator().manual_seed(seed)) * scale


tensors = st.builds(
    drawn,
    st.integers(1, 4),
    st.integers(1, 300),
    st.sampled_from([0.01, 1.0, 10.0, 1000.0]),
    st.integers(0, 2**31),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@every_regime
@given(x=st.one_of(rows, tensors))
@example(x=torch.tensor([[1000.0, 999.0, 998.0]]))
@example(x=torch.tensor([[60000.0, -60000.0, 59999.0]]))
def test_against_float64(regime, dtype, x):
    x = x.to(dtype)
    assert_contract(softmax_by(regime, x), x)


@every_regime
@given(x=st.one_of(rows, tensors))
def test_sums_to_one(regime, x):
    y = softmax_by(regime, x)
    assert ((y >= 0) & (y <= 1)).all()
    torch.testing.assert_close(y.double().sum(-1), torch.ones(x.shape[0]).double(), atol=2e-6, rtol=0)


@every_regime
@given(x=tensors, shift=st.integers(-4096, 4096))
def test_shift_invariance(regime, x, shift):
    """softmax(x + c) = softmax(x), bit for bit where x + c is exact: the row's max goes before anything else."""
    x = (x.clamp(-500, 500) * 64).round() / 64
    assert torch.equal(softmax_by(regime, x + shift), softmax_by(regime, x))


@every_regime
@given(x=tensors, seed=st.integers(0, 2**31))
def test_permutation(regime, x, seed):
    """A permutation of the columns permutes the result; the order of the sum shows as a few ulps.

    An exponential may be the product of two, whose relative error grows with the distance from the row's maximum.
    """
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
    got, want = softmax_by(regime, x[:, order].contiguous()), softmax_by(regime, x)[:, order]
    below = (x.amax(1, keepdim=True) - x)[:, order]
    ulps = torch.finfo(torch.float32).eps * want * (8 + 4 * below)
    assert ((got - want).abs() <= ulps + torch.finfo(torch.float32).tiny).all()


@given(x=rows, holes=st.sets(st.integers(0, 69), max_size=30))
def test_minus_infinity_is_absence(x, holes):
    """Columns of -inf give exact zeros and leave the rest as if they were not there."""
    keep = torch.tensor([i not in holes for i in range(x.shape[1])])
    masked = x.masked_fill(~keep, -torch.inf)
    y = fs.softmax(masked)
    if not keep.any():
        assert y.isnan().all()
        return
    assert (y[:, ~keep] == 0).all()
    assert_contract(y[:, keep].contiguous(), x[:, keep].contiguous())


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_shape_any_dim(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.randn(shape)
    got = fs.softmax(x, dim)
    assert got.is_contiguous()
    assert_contract(got, x, dim)
