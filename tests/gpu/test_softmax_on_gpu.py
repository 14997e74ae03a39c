"""The compiled kernels on a device: rounding, every regime, streams, devices, repeats and batch invariance.

Run on a GPU with: make gpu, or pytest -m gpu. Outputs are poisoned with NaN by conftest before every kernel.
"""

from __future__ import annotations

import pytest
import torch
from cases import (
    DTYPES,
    SENTINEL,
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
from fused_softmax.launch.device import describe

pytestmark = pytest.mark.gpu

# widths that each regime is made for, with odd ones and real vocabularies among them
WIDTHS_OF = {
    "warp": (1, 2, 5, 33, 257, 1000, 1023, 1024),
    "block": (1, 33, 1000, 1024, 4097, 8192, 16384, 32000, 32768),
    "cluster": (1000, 4097, 8192, 32768, 50257, 128256, 151936, 200019, 262144),
    "two_pass": (1, 33, 1000, 8191, 50257, 131072, 524289, 2**22),
}
REGIME_WIDTHS = [(regime, n_cols) for regime, widths in WIDTHS_OF.items() for n_cols in widths]
BIG = [("warp", 1024), ("block", 32768), ("cluster", 128256), ("two_pass", 131072)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
every_regime = pytest.mark.parametrize("regime", WIDTHS_OF)


@pytest.fixture(autouse=True)
def clusters(request: pytest.FixtureRequest) -> None:
    """GPUs without thread-block clusters have no cluster regime."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("regime") == "cluster" and describe(torch.device("cuda", 0)).max_cluster == 1:
        pytest.skip("this GPU has no clusters")


def rows_for(n_cols: int) -> tuple[int, ...]:
    return (1, 3, 133) if n_cols <= 131072 else (1, 3)


@every_dtype
@pytest.mark.parametrize(("regime", "n_cols"), REGIME_WIDTHS)
def test_every_regime(regime, n_cols, dtype):
    for n_rows in rows_for(n_cols):
        x = logits(n_rows, n_cols, dtype=dtype, device="cuda")
        assert_contract(softmax_by(regime, x), x)


@every_dtype
@pytest.mark.parametrize(("regime", "n_cols"), regimes_for(5, 1000, 9001))
def test_edge_table(regime, n_cols, dtype):
    x = torch.stack(list(edge_rows(n_cols, dtype, device="cuda").values()))
    assert_contract(softmax_by(regime, x), x)


@every_dtype
@pytest.mark.parametrize("n_cols", [1, 33, 1000, 4097, 50257, 128256, 151936, 262144, 524288])
def test_the_plans_own_choice(n_cols, dtype):
    planned = fs.plan_for(torch.empty(3, n_cols, dtype=dtype, device="cuda"))
    assert planned.regime != "torch", planned.why
    for offset in (0, 1, 3):
        x = logits(1, offset + 7 * n_cols, dtype=dtype, device="cuda")[0, offset:].view(7, n_cols)
        assert_contract(fs.softmax(x), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@every_regime
def test_sixteen_bit_results_are_the_rounded_float64_results(regime, dtype):
    """Share of elements that are not the nearest 16-bit number to the float64 result, beside torch's own share."""
    x = torch.randn(4096, 1024, device="cuda").to(dtype)
    want = torch.softmax(x.double(), -1)

    def misrounded(y: torch.Tensor) -> torch.Tensor:
        # results are positive, so the neighbours are one bit pattern up and one down
        bits = y.view(torch.int16)
        error = (y.double() - want).abs()
        up = ((bits + 1).view(dtype).double() - want).abs()
        down = ((bits - 1).clamp(min=0).view(dtype).double() - want).abs()
        return (error > up) | (error > down)

    ours, own = misrounded(softmax_by(regime, x)), misrounded(torch.softmax(x, -1))
    assert ours.sum() <= 2 * own.sum() + x.numel() // 100_000


@every_dtype
@every_regime
@pytest.mark.parametrize("lead", [1, 8])
@pytest.mark.parametrize("n_cols", [1, 7, 1001, 1024])
def test_nothing_is_written_outside(regime, dtype, n_cols, lead):
    around = torch.full((5, lead + n_cols + 9), torch.nan, dtype=dtype, device="cuda")
    x = around[:, lead : lead + n_cols]
    x.copy_(logits(5, n_cols, dtype=dtype, device="cuda"))
    y, field = guarded(5, n_cols, dtype, lead, device="cuda")
    softmax_by(regime, x, y)
    assert_contract(y, x)
    assert (outside(field, n_cols, lead) == SENTINEL).all()


@every_dtype
@pytest.mark.parametrize(("regime", "n_cols"), BIG)
def test_a_hundred_runs_give_the_same_bits(regime, n_cols, dtype):
    x = logits(133, n_cols, dtype=dtype, device="cuda")
    first = softmax_by(regime, x)
    for _ in range(100):
        assert torch.equal(softmax_by(regime, x), first)


@every_dtype
@pytest.mark.parametrize(("regime", "n_cols"), [*BIG, (None, 50257)])
def test_a_rows_bits_do_not_depend_on_the_batch(regime, n_cols, dtype):
    def run(x: torch.Tensor) -> torch.Tensor:
        return fs.softmax(x) if regime is None else softmax_by(regime, x)

    x = logits(257, n_cols, dtype=dtype, device="cuda")
    whole = run(x)
    for n_rows in (1, 2, 16, 256):
        assert torch.equal(run(x[:n_rows].clone()), whole[:n_rows])
    # an aligned row's place does not matter either
    if (n_cols * x.element_size()) % 16 == 0:
        assert torch.equal(run(x[100:103].clone()), whole[100:103])


def test_runs_on_the_current_stream():
    """Work queued on a side stream before the call is seen by it: nothing synchronises, nothing runs elsewhere."""
    side = torch.cuda.Stream()
    stale, fresh = (logits(512, 4096, device="cuda") for _ in range(2))
    x = stale.clone()
    fs.softmax(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(fresh)
        y = fs.softmax(x)
    side.synchronize()
    assert_contract(y, fresh)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_dtype
def test_runs_on_the_tensors_device(dtype):
    assert torch.cuda.current_device() == 0
    for n_cols in (1000, 50257):
        x = logits(9, n_cols, dtype=dtype, device="cuda:1")
        y = fs.softmax(x)
        assert y.device == x.device
        assert_contract(y, x)
    assert torch.cuda.current_device() == 0


def test_a_cuda_graph_replays_it():
    x = logits(64, 8192, dtype=torch.bfloat16, device="cuda")
    fs.softmax(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fs.softmax(x)
    x.copy_(logits(64, 8192, dtype=torch.bfloat16, device="cuda"))
    graph.replay()
    assert_contract(y, x)


def test_autocast_promotes_to_float32():
    x = logits(3, 1000, dtype=torch.bfloat16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        own, got = torch.softmax(x, -1), fs.softmax(x)
    assert got.dtype == own.dtype == torch.float32
    assert_contract(got, x, dtype=torch.float32)


def test_more_than_two_to_the_31_elements():
    n_rows, n_cols = 65537, 32769
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")
    x = torch.randn(n_rows, n_cols, dtype=torch.float16, device="cuda")
    assert x.numel() > 2**31
    y = fs.softmax(x)
    for rows in (slice(0, 2), slice(n_rows // 2, n_rows // 2 + 2), slice(-2, None)):
        assert_contract(y[rows], x[rows])
    # every row was written, and sums to one
    sums = torch.cat([part.float().sum(-1) for part in y.split(4096)])
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=5e-3, rtol=0)


@pytest.mark.parametrize("ours, theirs", [(fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)])
def test_zero_dim(ours, theirs):
    x = torch.tensor(2.0, device="cuda", requires_grad=True)
    for dim in (0, -1):
        assert torch.equal(ours(x, dim), theirs(x, dim))
        assert torch.autograd.grad(ours(x, dim), x)[0] == 0.0


@pytest.mark.parametrize("n_cols", [3000, 12557, 21719])
def test_columns_that_are_not_neighbours_are_added_up_exactly(n_cols):
    x = torch.randint(0, 3, (n_cols, 5), device="cuda").float()
    y = fs.softmax(x.t(), -1).double()
    exact = torch.softmax(x.t().double(), -1)
    assert ((y - exact).abs() / exact).max() < 6e-7
