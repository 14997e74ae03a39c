"""Each row of torch.softmax's behaviour, side by side with torch: same result, same dtype, same exception type."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_contract, dtype_id

import fused_softmax as fs

pytestmark = pytest.mark.interpreted

INF, NAN = float("inf"), float("nan")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def same_exception(*args: object, **kwargs: object) -> pytest.ExceptionInfo:
    with pytest.raises(Exception) as theirs:
        torch.softmax(*args, **kwargs)
    with pytest.raises(theirs.type) as ours:
        fs.softmax(*args, **kwargs)
    assert ours.type is theirs.type
    return ours


@every_dtype
def test_infinities_and_nan_stay_in_their_row(dtype):
    x = torch.tensor([[1, 2, 3], [-INF] * 3, [1, INF, 2], [1, NAN, 2], [-INF, 0, 1], [3, 2, 1]], dtype=dtype)
    y = fs.softmax(x)
    assert_contract(y, x)
    assert y[1:4].isnan().all()
    assert y[[0, 4, 5]].isfinite().all()
    assert y[4, 0] == 0


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,), (0, 0), (2, 0, 3), (4, 0, 0)])
@every_dtype
def test_empty_shapes_are_kept(dtype, shape):
    x = torch.empty(shape, dtype=dtype)
    for dim in range(-len(shape), len(shape)):
        assert_contract(fs.softmax(x, dim), x, dim)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("value", [7.0, -INF, INF, NAN])
@every_dtype
def test_zero_dim(dtype, value, dim):
    x = torch.tensor(value, dtype=dtype)
    assert_contract(fs.softmax(x, dim), x, dim)


@every_dtype
def test_one_column(dtype):
    x = torch.tensor([[5.0], [-3.0], [INF], [-INF], [NAN]], dtype=dtype)
    y = fs.softmax(x)
    assert_contract(y, x)
    assert y[:2].eq(1).all()
    assert y[2:].isnan().all()


@pytest.mark.parametrize("dim", [2, -3, 100])
def test_dim_out_of_range(dim):
    raised = same_exception(torch.zeros(2, 3), dim)
    assert raised.type is IndexError
    assert "[-2, 1]" in str(raised.value)


@pytest.mark.parametrize("dim", [1, -2])
def test_dim_out_of_range_of_a_scalar(dim):
    raised = same_exception(torch.tensor(1.0), dim)
    assert raised.type is IndexError
    assert "[-1, 0]" in str(raised.value)


def test_dim_out_of_range_comes_first_on_empty_tensors_too():
    same_exception(torch.zeros(0, 3), 2)


@pytest.mark.parametrize("dim", [0.0, 1.5, True, None, "0", (0,), [0]], ids=repr)
def test_dim_of_another_type(dim):
    assert same_exception(torch.zeros(2, 3), dim).type is TypeError


@pytest.mark.parametrize("input", [None, 3.0, [1.0, 2.0]], ids=repr)
def test_input_that_is_no_tensor(input):
    assert same_exception(input, 0).type is TypeError


@pytest.mark.parametrize("dtype", ["float32", 1.0, int], ids=repr)
def test_dtype_of_another_type(dtype):
    same_exception(torch.zeros(2, 3), -1, dtype=dtype)


def test_pythons_float_is_float64():
    x = torch.randn(2, 3)
    assert_contract(fs.softmax(x, -1, dtype=float), x, -1, torch.float64)


NO_SOFTMAX = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", NO_SOFTMAX, ids=dtype_id)
def test_dtypes_without_softmax(dtype):
    assert same_exception(torch.zeros(2, 3).to(dtype), -1).type is NotImplementedError
    assert same_exception(torch.zeros(2, 3), -1, dtype=dtype).type is NotImplementedError


@pytest.mark.parametrize("wanted", [*DTYPES, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool], ids=dtype_id)
def test_integers_are_cast_first(dtype, wanted):
    x = torch.tensor([[0, 1, 5], [3, 0, 0]]).to(dtype)
    assert_contract(fs.softmax(x, -1, dtype=wanted), x, -1, wanted)


@pytest.mark.parametrize("wanted", [*DTYPES, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("n_cols", [3, 1025])
def test_dtype_argument(n_cols, dtype, wanted):
    x = (torch.randn(3, n_cols) * 4).to(dtype)
    assert_contract(fs.softmax(x, -1, dtype=wanted), x, -1, wanted)


def test_the_input_is_cast_not_the_result():
    x = torch.tensor([[70000.0, 1.0], [2.0, 1.0]])
    y = fs.softmax(x, -1, dtype=torch.float16)
    assert y.dtype == torch.float16
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


def test_float64_is_double_precision():
    x = torch.randn(5, 777, dtype=torch.float64) * 10
    assert torch.equal(fs.softmax(x), torch.softmax(x, -1))
    assert fs.plan_for(x).regime == "torch"
    assert "float64" in fs.plan_for(x).why


def test_huge_values():
    x = torch.tensor([1e30, 1e30, -1e30])
    assert fs.softmax(x, 0).tolist() == [0.5, 0.5, 0.0]


def test_out_of_another_dtype():
    x = torch.zeros(2, 3)
    for out, dtype in ((torch.float64, None), (torch.float16, None), (torch.float32, torch.float16)):
        assert same_exception(x, -1, dtype=dtype, out=torch.empty(2, 3, dtype=out)).type is RuntimeError


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@every_dtype
def test_out_is_returned_and_resized(dtype):
    x = torch.randn(2, 3).to(dtype)
    for shape in ((2, 3), (0,), (7,)):
        out = torch.empty(shape, dtype=dtype)
        assert fs.softmax(x, -1, out=out) is out
        assert_contract(out, x)


@pytest.mark.parametrize("n_cols", [5, 1025])
@every_dtype
def test_gradients_reach_the_input(dtype, n_cols):
    """A drop-in never cuts the graph, whichever code computes the backward."""
    x = torch.randn(3, n_cols).to(dtype).requires_grad_()
    own = x.detach().clone().requires_grad_()
    dy = torch.randn(3, n_cols).to(dtype)
    y = fs.softmax(x)
    assert y.requires_grad
    y.backward(dy)
    torch.softmax(own, -1).backward(dy)
    assert x.grad.dtype == dtype
    # the two forwards may differ by an ulp each, and so may the gradients
    torch.testing.assert_close(x.grad, own.grad, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_no_graph_where_none_is_asked_for():
    x = torch.randn(2, 3, requires_grad=True)
    with torch.no_grad():
        assert not fs.softmax(x).requires_grad
    with torch.inference_mode():
        y = fs.softmax(x)
    assert y.is_inference()
    assert_contract(y, x.detach())
    assert not fs.softmax(torch.randn(2, 3)).requires_grad


def test_sample_inputs_of_torchs_own_operator_database():
    """What torch tests its own softmax on: every sample, as positional and keyword arguments."""
    from torch.testing._internal.common_methods_invocations import op_db

    ran = 0
    for op in op_db:
        if op.name != "softmax":
            continue
        for dtype in DTYPES:
            for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
                kwargs = {k: v for k, v in sample.kwargs.items() if k in ("dim", "dtype")}
                got = fs.softmax(sample.input, *sample.args, **kwargs)
                dim = sample.args[0] if sample.args else kwargs["dim"]
                assert_contract(got, sample.input, dim, kwargs.get("dtype"))
                ran += 1
    assert ran >= 20


def test_functional_and_keyword_calls_agree():
    x = torch.randn(4, 6)
    want = F.softmax(x, dim=0)
    for got in (fs.softmax(x, 0), fs.softmax(x, dim=0), fs.softmax(input=x, dim=0, dtype=None)):
        torch.testing.assert_close(got, want)
