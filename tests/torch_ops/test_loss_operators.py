"""The losses under torch.compile: one operator forward and one backward, in one graph for every width, and exact."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from params import few
from torch.fx.experimental import symbolic_shapes
from torch.library import opcheck

import fused_softmax as fs
from fused_softmax import integrations
from fused_softmax.lab import reference
from fused_softmax.launch.context import is_batch_invariant
from fused_softmax.launch.options import weight_facts_of
from fused_softmax.losses import cross_entropy_over
from fused_softmax.torch_ops import cross_entropy, decompositions, masked_softmax, token_logprobs

pytestmark = pytest.mark.interpreted

ops = torch.ops.fused_softmax
NAN = float("nan")
# inductor builds C++ for what is around the operators
BACKENDS = ("aot_eager", "inductor") if shutil.which(os.environ.get("CXX", "g++")) else ("aot_eager",)
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # the interpreter truncates bfloat16
# fields after the target: weight, weight_facts, ignore_index, reduction, smoothing, softcap, z_loss, denominator
FIELDS = {
    "mean": (None, None, -100, "mean", 0.0, None, 0.0, None),
    "sum, weights": (True, None, 3, "sum", 0.0, None, 0.0, None),
    "none, all": (True, True, -100, "none", 0.1, 4.0, 0.1, None),
    "mean over, smoothing": (None, None, -100, "mean", 0.2, None, 0.0, True),
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def rows(n_rows: int = 4, n_cols: int = 7, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = (torch.randn(n_rows, n_cols) * 3).to(dtype).requires_grad_()
    target = torch.randint(0, n_cols, (n_rows,))
    target[1:2] = -100
    return x, target


def fields(name: str, n_cols: int = 7) -> tuple:
    weight, weight_facts, *rest, denominator = FIELDS[name]
    weight = torch.rand(n_cols) + 0.1 if weight else None
    return (
        weight,
        weight_facts_of(weight, 0.1) if weight_facts else None,
        *rest,
        torch.tensor([5.0]) if denominator else None,
    )


# --- every operator by PyTorch's own examination ----------------------------------------------------------------------


# float64 takes formulas and the others kernels
examined = pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(t, marks=pytest.mark.extended) for t in (torch.float16, torch.float64))],
    ids=str,
)


def check(op: Any, arguments: tuple) -> None:
    opcheck(op.default, arguments, rtol=1e-2, atol=1e-2)  # half results are rounded on every route


@examined
@pytest.mark.parametrize("name", FIELDS)
def test_opcheck_of_cross_entropy(name, dtype):
    x, target = rows(dtype=dtype)
    target = target.clamp(0) if "weights" in name else target
    given = (x, target, *fields(name))
    check(ops.cross_entropy, given)
    with torch.no_grad():
        loss, moments = ops.cross_entropy(*given)
    check(ops.cross_entropy_backward, (torch.rand_like(loss), moments, x.detach(), *given[1:]))


@examined
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_opcheck_of_token_logprobs(by_row, entropy, dtype):
    x, ids = rows(dtype=dtype)[0], torch.randint(0, 7, (4, 3))
    scale = (torch.rand(4) + 0.5 if by_row else None, 0.7)
    check(ops.token_logprobs, (x, ids, *scale, entropy))
    with torch.no_grad():
        picked, entropies, lse, moments = ops.token_logprobs(x, ids, *scale, entropy)
    of_entropy = torch.rand_like(entropies) if entropy else None
    for upstream in ((torch.rand_like(picked), of_entropy, None), (None, None, torch.rand_like(lse))):
        check(ops.token_logprobs_backward, (*upstream, moments, entropies, x.detach(), ids, *scale))


@examined
def test_opcheck_of_masked_softmax(dtype):
    x = torch.randn(2, 3, 7, dtype=dtype, requires_grad=True)
    added = torch.randn(3, 7, requires_grad=True)
    for mask in (None, torch.rand(2, 1, 7) > 0.3, added):
        check(ops.masked_softmax, (x, mask, 0.5, mask is None, True))
    y = ops.masked_softmax(x, None, 0.5, True, False).detach()
    for mask in (None, torch.rand(2, 1, 7) > 0.3):
        check(ops.masked_softmax_backward, (y, torch.randn_like(y), mask, 0.5, True))


@pytest.mark.parametrize("name", FIELDS)
def test_the_formulas_inside_by_finite_differences(name):
    """float64 takes them, below autograd and, for gradients of gradients, above it."""
    x, target = rows(3, 5, torch.float64)
    target = target.clamp(0) if "weights" in name else target
    given = fields(name, 5)
    loss = lambda t: ops.cross_entropy(t, target, *given)[0]  # noqa: E731
    assert torch.autograd.gradcheck(loss, x)
    assert torch.autograd.gradgradcheck(loss, x)


def test_the_other_formulas_inside_by_finite_differences():
    x, ids = rows(3, 5, torch.float64)[0], torch.tensor([[1, 1], [0, 4], [2, 3]])
    for scales in (None, torch.rand(3, dtype=torch.float64) + 0.5):
        assert torch.autograd.gradcheck(lambda t, s=scales: ops.token_logprobs(t, ids, s, 0.7, True), x)
        assert torch.autograd.gradgradcheck(lambda t, s=scales: ops.token_logprobs(t, ids, s, 0.7, True), x)
    assert torch.autograd.gradcheck(lambda t: ops.masked_softmax(t, None, 0.5, True, False), x)
    assert torch.autograd.gradgradcheck(lambda t: ops.masked_softmax(t, None, 0.5, True, False), x)
    added = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 5, dtype=torch.float64)
    (got,) = torch.autograd.grad(ops.masked_softmax(x, added, 0.5, False, False), added, g)
    (want,) = torch.autograd.grad(torch.softmax(x * 0.5 + added, -1), added, g)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)  # nothing in between is float32


# --- torch.compile against eager mode and float64 ---------------------------------------------------------------------


def outputs(result: Any) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def with_gradients(function: Callable[..., Any], *given: Any) -> list[torch.Tensor]:
    """What function returns, and the gradients of all that needs one, for upstream gradients other than 1."""
    given = tuple(
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in given
    )
    leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    found = outputs(function(*given))
    upstream = [torch.linspace(-0.5, 1.5, y.numel() + 1)[1:].view(y.shape).to(y) for y in found]
    return [y.detach() for y in found] + list(torch.autograd.grad(found, leaves, upstream))


Judge = Callable[..., None]


# inductor's graphs take seconds each, and have the operators of aot_eager's: other tests below run some by default
@pytest.fixture(params=[BACKENDS[0], *(pytest.param(b, marks=pytest.mark.extended) for b in BACKENDS[1:])])
def judge(request: pytest.FixtureRequest) -> Judge:
    """judge(function, *given, exact=None): function compiled in one graph is what it is in eager mode, and near `exact`
    of float64 logits."""

    def judged(function: Callable[..., Any], *given: Any, exact: Callable[..., Any] | None = None) -> None:
        eager = with_gradients(function, *given)
        torch._dynamo.reset()
        compiled = with_gradients(torch.compile(function, backend=request.param, fullgraph=True), *given)
        for got, want in zip(compiled, eager, strict=True):
            assert got.dtype is want.dtype and got.shape == want.shape
            tolerance = TOLERANCE[got.dtype]
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 5, equal_nan=True)
        if exact is not None:
            x, *rest = given
            wanted = with_gradients(exact, x.detach().double().requires_grad_(), *rest)
            for got, want in zip(compiled, wanted, strict=True):
                tolerance = TOLERANCE[got.dtype]
                torch.testing.assert_close(got.double(), want, rtol=4 * tolerance, atol=tolerance)

    return judged


OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "weight": dict(weight=True),
    "weight, smoothing, summed": dict(weight=True, label_smoothing=0.2, reduction="sum"),
    "softcap, z_loss": dict(softcap=5.0, z_loss=1e-2),
    "all, each row": dict(weight=True, label_smoothing=0.1, softcap=4.0, z_loss=0.1, reduction="none"),
    "ignored, in place": dict(ignore_index=2, inplace_backward=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_cross_entropy(options, judge):
    x, target = rows(5, 33, torch.bfloat16 if "softcap" in options else torch.float32)
    target = target.clamp(0) if "ignore_index" in options else target
    options = {**options, "weight": torch.rand(33) + 0.1} if "weight" in options else options
    for_exact = {k: v for k, v in options.items() if k != "inplace_backward"}
    judge(
        lambda x, t: fs.cross_entropy(x, t, **options), x, target,
        exact=lambda x, t: reference.cross_entropy(x, t, **for_exact),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(7,), (2, 7, 3), (2, 7, 3, 2)], ids=str)
def test_shapes_of_cross_entropy(shape, judge):
    target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else ())
    x = torch.randn(shape, requires_grad=True)
    judge(lambda x, t: fs.cross_entropy(x, t, reduction="none"), x, target)
    turned = torch.randn(shape[::-1]).permute(*range(len(shape))[::-1]).requires_grad_()
    judge(lambda x, t: fs.cross_entropy(x * 2, t), turned, target)


def test_rows_of_a_padded_vocabulary_and_modules(judge):
    x, target = rows(5, 40)
    judge(lambda x, t: fs.cross_entropy(x[:, :33], t), x, target.clamp(max=32))
    judge(fs.nn.CrossEntropyLoss(torch.rand(40), softcap=3.0), x, target)


def test_a_mean_over_another_count_and_the_trainers_loss(judge):
    x, target = rows(6, 20)
    judge(lambda x, t, n: cross_entropy_over(n, x, t), x, target, torch.tensor(5))
    labels = target.view(2, 3)
    judge(
        lambda x, t: tuple(integrations.causal_lm_loss({"logits": x}, t, n) for n in (None, 4, torch.tensor(4))),
        x.detach().view(2, 3, 20).requires_grad_(),
        labels,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("temperature", [0.7, torch.tensor([0.5, 2.0, 1.3, 0.9])], ids=["0.7", "per row"])
def test_token_logprobs(temperature, dtype, judge):
    def exact(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = temperature.double().unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
        log_p = torch.log_softmax(x / t, -1)
        return log_p.gather(-1, ids), -(log_p.exp() * log_p).sum(-1), torch.logsumexp(x / t, -1)

    def ours(x: torch.Tensor, ids: torch.Tensor) -> Any:
        return fs.token_logprobs(x, ids, temperature=temperature, return_entropy=True, return_logsumexp=True)

    judge(ours, rows(4, 33, dtype)[0], torch.randint(0, 33, (4, 3)), exact=exact)


def test_shapes_of_token_logprobs(judge):
    x = torch.randn(2, 3, 11, requires_grad=True)
    ids = torch.randint(0, 11, (2, 3))
    judge(
        lambda x, ids: (
            fs.token_logprobs(x, ids),
            fs.token_logprobs(x, ids, return_logsumexp=True).logsumexp,
            integrations.selective_log_softmax(x, ids),
        ),
        x,
        ids,
    )
    judge(
        lambda x, ids: fs.token_logprobs(x[:, :-1], ids, return_entropy=True), x, torch.randint(0, 11, (2, 2, 4)).int()
    )
    judge(fs.token_logprobs, torch.randn(11, requires_grad=True), torch.tensor(4))
    hot = torch.tensor([0.5, 2.0, 1.0], requires_grad=True)
    judge(lambda x, ids, t: fs.token_logprobs(x, ids, temperature=t), x, ids, hot)


@pytest.mark.parametrize(
    ("causal", "dtype"),
    [
        (False, torch.float32),
        (True, torch.bfloat16),
        pytest.param(True, torch.float32, marks=pytest.mark.extended),
        pytest.param(False, torch.bfloat16, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_masked_softmax(causal, dtype, judge):
    x = torch.randn(2, 3, 4, 9).to(dtype).requires_grad_()
    transposed = (torch.rand(2, 1, 9, 4) > 0.3).transpose(2, 3)
    transposed[0, :, 1] = False  # nothing is left of these rows
    for mask, fully_masked in (
        (None, "zero"),
        (torch.rand(2, 1, 1, 9) > 0.3, "zero"),
        (transposed, "zero"),
        (transposed, "nan"),
        (torch.randn(1, 4, 9).to(dtype), "zero"),
    ):
        judge(lambda x, m, f=fully_masked: fs.masked_softmax(x, m, scale=0.5, causal=causal, fully_masked=f), x, mask)
    judge(lambda x: fs.masked_softmax(x.transpose(0, 2), causal=causal), x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mask_shape", "scale"),
    [
        *(((2, 3, 4, 8), s) for s in (1.0, 0.25)),
        *(((1, 1, 4, 8), s) for s in (1.0, 0.25)),
        ((8,), 0.25),
        ((4, 1), 0.25),
    ],
    ids=str,
)
def test_the_gradient_of_an_additive_mask(mask_shape, scale, judge):
    x, mask = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(mask_shape, requires_grad=True)
    judge(lambda x, m: fs.masked_softmax(x, m, scale=scale), x, mask)
    judge(lambda x, m: fs.masked_softmax(x, m, scale=scale), x.detach(), mask)


# --- what is in the graph ---------------------------------------------------------------------------------------------


def names(graph: torch.fx.GraphModule) -> list[str]:
    return [node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


LOSSES = {
    "cross_entropy": lambda x: fs.cross_entropy(x, torch.tensor([1, 2, 3])),
    "token_logprobs": lambda x: fs.token_logprobs(x, torch.tensor([1, 2, 3]), return_entropy=True).logprobs,
    "masked_softmax": lambda x: fs.masked_softmax(x, causal=True),
}
each = pytest.mark.parametrize("name", LOSSES)


@each
def test_the_graph_has_our_operators_and_nothing_of_the_logits_size_beside(name):
    backend = torch._dynamo.testing.AotEagerAndRecordGraphs()
    x = torch.randn(3, 129, requires_grad=True)
    torch.compile(LOSSES[name], backend=backend, fullgraph=True)(x).sum().backward()
    (forward,), (backward,) = backend.fw_graphs, backend.bw_graphs
    assert names(forward).count(f"fused_softmax::{name}") == 1
    assert names(backward).count(f"fused_softmax::{name}_backward") == 1
    ours = {f"fused_softmax::{name}", f"fused_softmax::{name}_backward"}
    for graph in (forward, backward):
        for node in graph.graph.nodes:
            made = node.meta.get("val")
            if isinstance(node.target, torch._ops.OpOverload) and isinstance(made, torch.Tensor):
                assert made.numel() < x.numel() or node.target.is_view or node.target.name() in ours, node


@pytest.mark.sampled(2)
@each
def test_float64_and_transforms_stay_formulas(name):
    backend = torch._dynamo.testing.AotEagerAndRecordGraphs()
    double = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    torch.compile(LOSSES[name], backend=backend, fullgraph=True)(double).sum().backward()
    x = torch.randn(3, 9)
    of_row = {
        "cross_entropy": lambda x: fs.cross_entropy(x, torch.tensor(2)),
        "token_logprobs": lambda x: fs.token_logprobs(x, torch.tensor(2)),
        "masked_softmax": lambda x: fs.masked_softmax(x)[2],
    }[name]
    per_row = torch.compile(torch.func.vmap(torch.func.grad(of_row)), backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(per_row, torch.stack([torch.func.grad(of_row)(row) for row in x]))
    tangent = torch.randn_like(x)
    jvp = lambda x, t: torch.func.jvp(LOSSES[name], (x,), (t,))[1]  # noqa: E731
    torch.testing.assert_close(torch.compile(jvp, backend=backend, fullgraph=True)(x, tangent), jvp(x, tangent))
    assert len(backend.fw_graphs) == 3 and backend.bw_graphs
    for graph in (*backend.fw_graphs, *backend.bw_graphs):
        assert not any(op.startswith("fused_softmax") for op in names(graph))


@each
def test_without_gradients(name):
    backend = torch._dynamo.testing.AotEagerAndRecordGraphs()
    x = torch.randn(3, 9, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(LOSSES[name], backend=backend, fullgraph=True)(x), LOSSES[name](x))
    assert not backend.bw_graphs and f"fused_softmax::{name}" in names(backend.fw_graphs[0])


@each
def test_subclasses_stay_formulas(name):
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(3, 9)
    backend = torch._dynamo.testing.EagerAndRecordGraphs()
    y = torch.compile(LOSSES[name], backend=backend)(x.as_subclass(Tagged))
    torch.testing.assert_close(y.as_subclass(torch.Tensor), LOSSES[name](x))
    assert backend.graphs and not any("fused_softmax" in str(graph.graph) for graph in backend.graphs)


@each
@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_one_operator(name, strict):
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LOSSES[name](x)

    x = torch.randn(3, 9)
    exported = torch.export.export(Module(), (x,), strict=strict)
    assert f"fused_softmax::{name}" in names(exported.graph_module)
    torch.testing.assert_close(exported.module()(x), LOSSES[name](x))


def test_autocast_is_eagers():
    for name, loss in LOSSES.items():
        x = torch.randn(3, 9).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            got, want = torch.compile(loss, backend="aot_eager", fullgraph=True)(x), loss(x)
        assert got.dtype is want.dtype, name
        torch.testing.assert_close(got, want)


def test_batch_invariance_reaches_the_kernels(monkeypatch):
    seen = []
    forward = cross_entropy.rows.cross_entropy_forward
    monkeypatch.setattr(
        cross_entropy.rows,
        "cross_entropy_forward",
        lambda x, op, **given: (seen.append(is_batch_invariant()), forward(x, op, **given))[1],
    )
    compiled = torch.compile(LOSSES["cross_entropy"], backend="aot_eager", fullgraph=True)
    compiled(torch.randn(3, 9))
    with fs.batch_invariant():
        compiled(torch.randn(3, 9))
    assert seen == [False, True]


@pytest.mark.extended
def test_on_a_cpu_without_the_interpreter_inductor_fuses_the_formulas():
    code = """
        import torch, torch._dynamo.testing, fused_softmax as fs
        backend = torch._dynamo.testing.AotEagerAndRecordGraphs()
        def losses(x, t):
            return fs.cross_entropy(x, t) + fs.token_logprobs(x, t).sum() + fs.masked_softmax(x)[0, 0]
        x, t = torch.randn(3, 9, requires_grad=True), torch.tensor([1, 2, 3])
        loss = torch.compile(losses, backend=backend, fullgraph=True)(x, t)
        loss.backward()
        torch.testing.assert_close(loss, losses(x, t))
        for graph in (*backend.fw_graphs, *backend.bw_graphs):
            assert "fused_softmax" not in str(graph.graph), graph.graph
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("marked", [pytest.param(True, marks=pytest.mark.extended), False])
@pytest.mark.parametrize("backend", few(["aot_eager"], BACKENDS))
@each
def test_one_graph_serves_every_width(name, backend, marked):
    """Without mark_dynamic, torch compiles the first size by itself and the second for all."""
    loss = {
        "cross_entropy": lambda x, t: fs.cross_entropy(x, t, label_smoothing=0.1),
        "token_logprobs": lambda x, t: fs.token_logprobs(x, t, temperature=0.7, return_entropy=True)[:2],
        "masked_softmax": lambda x, t: fs.masked_softmax(x, t[:, None] > 4, causal=True, fully_masked="zero"),
    }[name]
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for n_rows, n_cols in ((3, 17), (4, 33), (5, 1000), (2, 64), (7, 4097)):
        x, target = torch.randn(n_rows, n_cols, requires_grad=True), torch.randint(0, n_cols, (n_rows,))
        if marked:
            for t, dim in ((x, 0), (x, 1), (target, 0)):
                torch._dynamo.mark_dynamic(t, dim)
        got = outputs(compiled(x, target))
        dx = torch.autograd.grad(got, x, [torch.ones_like(y) for y in got])
        want = outputs(loss(x, target))
        own = torch.autograd.grad(want, x, [torch.ones_like(y) for y in want])
        torch.testing.assert_close((*got, *dx), (*want, *own), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == (1 if marked else 2)


def test_a_temperature_that_changes_is_a_tensor():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, t, hot: fs.token_logprobs(x, t, temperature=hot), backend=counter, fullgraph=True
    )
    x, ids = rows()[0], torch.tensor([1, 2, 3, 4])
    for hot in (0.5, 1.0, 1.7):
        torch.testing.assert_close(compiled(x, ids, torch.tensor(hot)), fs.token_logprobs(x, ids, temperature=hot))
    assert counter.frame_count == 1


def test_numbers_of_rows_that_only_the_run_knows():
    def kept(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rows = t != -100
        return fs.cross_entropy(x[rows], t[rows]) + fs.token_logprobs(x[rows], t[rows]).sum()

    x, target = rows(5, 9)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(kept, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, target), kept(x, target))
        (dx,) = torch.autograd.grad(compiled(x, target), x)
        torch.testing.assert_close(dx, torch.autograd.grad(kept(x, target), x)[0], rtol=1e-4, atol=1e-6)
        assert compiled(x, torch.full_like(target, -100)).isnan()


@pytest.mark.sampled(2)
@pytest.mark.skipif(not hasattr(symbolic_shapes, "guard_or_true"), reason="before torch 2.8 no size is left to the run")
@pytest.mark.parametrize(
    "name", ["cross_entropy", "token_logprobs", "masked", "linear_cross_entropy", "linear_logprobs"]
)
def test_sizes_that_the_run_alone_can_compare(name):
    """Rows and targets are selected by masks of their own: torch's own losses, too, leave the comparison to the run."""
    weight, of_mask = torch.randn(6, 9), torch.rand(5, 9) > 0.2
    run = {
        "cross_entropy": fs.cross_entropy,
        "token_logprobs": lambda x, t: fs.token_logprobs(x, t, temperature=t * 0.1 + 1, return_entropy=True).entropy,
        "masked": lambda x, t: fs.masked_softmax(x, of_mask[t % 5]),
        "linear_cross_entropy": lambda x, t: fs.linear_cross_entropy(x, weight, t, reduction="none"),
        "linear_logprobs": lambda x, t: fs.linear_token_logprobs(x, weight, t),
    }[name]

    def selected(x: torch.Tensor, t: torch.Tensor, of_x: torch.Tensor, of_t: torch.Tensor) -> torch.Tensor:
        return run(x[of_x], t[of_t])

    x, t = torch.randn(5, 9, requires_grad=True), torch.randint(0, 6, (5,))
    given = x, t, torch.tensor([True, False, True, True, False]), torch.tensor([False, True, True, False, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(selected, backend="aot_eager", fullgraph=True)
        got, want = compiled(*given), selected(*given)
        torch.testing.assert_close(got, want)
        if want.requires_grad:
            (dx,), (dx_eager,) = (torch.autograd.grad(loss.square().sum(), x) for loss in (got, want))
            torch.testing.assert_close(dx, dx_eager, rtol=1e-4, atol=1e-6)
        with pytest.raises(RuntimeError, match="assertion failed"):
            compiled(*given[:-1], torch.ones(5, dtype=torch.bool))


def test_shapes_that_the_trace_knows_are_compared_there():
    x, t = torch.randn(4, 6), torch.tensor([1, 2, 3])
    for loss in (fs.token_logprobs, fs.cross_entropy, lambda x, t: fs.linear_cross_entropy(x, x, t)):
        with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError)):  # this one is torch's own
            torch.compile(loss, backend="aot_eager")(x, t)
    compiled = torch.compile(fs.masked_softmax, backend="aot_eager", fullgraph=True, dynamic=True)
    for mask in (torch.rand(4, 1) > 0.2, torch.ones(6, dtype=torch.bool), torch.rand(4, 6) > 0.2):
        torch.testing.assert_close(compiled(x, mask), fs.masked_softmax(x, mask), equal_nan=True)


def test_nothing_counts():
    for n_rows in (0, 4):
        for reduction, want in (("mean", NAN), ("sum", 0.0), ("none", torch.zeros(n_rows))):
            loss = torch.compile(fs.cross_entropy, backend="aot_eager", fullgraph=True)
            x = torch.randn(n_rows, 5, requires_grad=True)
            got = loss(x, torch.full((n_rows,), -100), reduction=reduction)
            torch.testing.assert_close(got, torch.as_tensor(want), equal_nan=True)
            got.sum().backward()
            assert x.grad.shape == x.shape and not x.grad.any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 5)], ids=str)
def test_empty_logits(shape, judge):
    ids = torch.zeros(shape[:-1], dtype=torch.int64)[..., None][..., : shape[-1]]
    x = torch.randn(shape, requires_grad=True)
    judge(lambda x, ids: fs.token_logprobs(x, ids, return_entropy=True), x, ids)
    judge(lambda x: fs.masked_softmax(x, fully_masked="zero"), x)
    double = torch.empty(0, 5, dtype=torch.float64)
    loss, moments = ops.cross_entropy(double, ids.new_empty(0), *fields("mean", 5))
    assert loss.isnan() and moments.shape == (0, 2)


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [5, -1, 1 << 40])
def test_a_target_outside_is_an_index_error_and_nothing_is_read(bad, backend):
    x = torch.randn(2, 5, requires_grad=True)
    for reduction in ("mean", "none"):
        loss = torch.compile(lambda x, t, r=reduction: fs.cross_entropy(x, t, reduction=r), backend=backend)
        loss(x, torch.tensor([1, 2]))
        with pytest.raises(IndexError, match="out of bounds"):
            loss(x, torch.tensor([1, bad]))
    logprobs = torch.compile(fs.token_logprobs, backend=backend, fullgraph=True)
    with pytest.raises(IndexError, match="out of bounds"):
        logprobs(x, torch.tensor([1, bad]))
    x = x.detach()
    given = (torch.tensor([1, bad]), *fields("mean", 5))
    moments = torch.stack([torch.logsumexp(x, 1), torch.ones(2)], 1)  # exp(x - lse)/1
    dx = ops.cross_entropy_backward(torch.tensor(1.0), moments, x, *given)
    assert dx[0].any() and not dx[1].any()


def test_an_operator_refuses_what_its_kernel_would_read_outside_of():
    """An exported graph, say, guards the shapes of what it is called with, but not the device."""
    x, ids, plain = torch.randn(2, 5), torch.tensor([1, 2]), fields("mean", 5)
    # the kernels themselves: a meta tensor, which stands for another device here, would choose the fake ones
    for given, message in (
        ((ids.to("meta"), *plain), "same device.*target is on meta"),
        ((ids[:1], *plain), r"target must have shape \(2,\)"),
        ((ids, torch.rand(4), *plain[1:]), r"weight must have shape \(5,\)"),
        ((ids, torch.rand(5), None, -100, "mean", 0.1, None, 0.0, None), "need weight_facts, two numbers of"),
        ((ids, torch.rand(5), torch.rand(1), -100, "mean", 0.1, None, 0.0, None), r"must have shape \(2,\)"),
        ((ids, *plain[:-1], torch.tensor([2.0], device="meta")), "same device.*denominator is on meta"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cross_entropy._cross_entropy_kernel(x, *given)
    for given, message in (
        ((ids[:, None].to("meta"), None), "same device.*ids is on meta"),
        ((ids[:1, None], None), r"ids must have shape \(2, 1\)"),
        ((ids[:, None], torch.ones(1)), r"scales must have shape \(2,\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            token_logprobs._token_logprobs_kernel(x, *given, 1.0, False)
    moments = torch.ones(2, 1), torch.ones(2), torch.ones(2, 2, device="meta")
    for of_rows, message in zip(
        moments, [r"moments must have shape \(2, 2\)"] * 2 + ["moments is on meta"], strict=True
    ):
        with pytest.raises(RuntimeError, match=message):
            cross_entropy._cross_entropy_backward_kernel(torch.ones(()), of_rows, x, ids, *plain)
        with pytest.raises(RuntimeError, match=message):
            rest = (torch.ones(2), of_rows, torch.ones(0), x, ids[:, None], None, 1.0)
            token_logprobs._token_logprobs_backward_kernel(None, None, *rest)
    with pytest.raises(RuntimeError, match=r"entropies must have shape \(2,\)"):
        rest = (torch.ones(2), None, torch.ones(2, 2), torch.ones(0), x, ids[:, None], None, 1.0)
        token_logprobs._token_logprobs_backward_kernel(None, *rest)
    with pytest.raises(RuntimeError, match="same device.*mask is on meta"):
        masked_softmax._backward_kernel(x, x, torch.ones(2, 5, device="meta"), 1.0, False)
    with pytest.raises(RuntimeError, match="same device.*mask is on meta"):
        masked_softmax._forward_kernel(x, torch.ones(2, 5, device="meta"), 1.0, False, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [("target", "target must have shape (4,)"), ("bias", "bias must have shape (6,)")]
    + [("class_weight", "class_weight must have shape (6,)"), ("denominator", "denominator must have shape (1,)")]
    + [("g", "g must have shape (4,)"), ("moments", "moments must have shape (4, 2)")],
)
def test_the_linear_operator_refuses_other_shapes(name, message):
    dtype = torch.float32
    given = dict(
        g=torch.ones(4), moments=torch.ones(4, 2), x=torch.randn(4, 3), weight=torch.randn(6, 3), bias=torch.zeros(6),
        target=torch.tensor([1, 2, 0, 5]), class_weight=torch.ones(6), weight_facts=None, denominator=torch.ones(1),
    )  # fmt: skip
    given[name] = given[name][:0]
    rest = (-100, "none", 0.0, None, 0.0, dtype, dtype, "float32", None, [True, True, True])
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.linear_cross_entropy_backward(*given.values(), *rest)
    if name not in ("g", "moments"):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            ops.linear_cross_entropy(*list(given.values())[2:], *rest)


@pytest.mark.parametrize("name", ["g_picked", "g_entropy", "g_lse", "moments", "entropies", "bias", "ids", "scales"])
def test_the_linear_log_probabilities_operator_refuses_other_shapes(name):
    given = dict(
        g_picked=torch.ones(4, 1), g_entropy=torch.ones(4), g_lse=torch.ones(4), moments=torch.ones(4, 2),
        entropies=torch.ones(4), x=torch.randn(4, 3), weight=torch.randn(6, 3), bias=torch.zeros(6),
        ids=torch.tensor([[1], [2], [0], [5]]), scales=torch.ones(4),
    )  # fmt: skip
    given[name] = given[name][:2]
    rest = (1.0, True, torch.float32, None, [True, True, True])
    with pytest.raises(RuntimeError, match=f"{name} must have shape"):
        ops.linear_token_logprobs_backward(*given.values(), *rest)
    if name in ("bias", "ids", "scales"):
        with pytest.raises(RuntimeError, match=f"{name} must have shape"):
            ops.linear_token_logprobs(*list(given.values())[5:], *rest)


def test_gradients_refuse_other_shapes():
    x, ids, plain = torch.randn(4, 6), torch.tensor([1, 2, 0, 5]), fields("mean", 6)
    y, lse, two, none = x.softmax(1), x.logsumexp(1), torch.ones(2), (None, None)
    moments, entropies = torch.ones(4, 2), torch.ones(4)
    for call, message in (
        (lambda: ops.softmax_backward(x[:2], y, -1, x.dtype), "dy must have shape (4, 6), not (2, 6)"),
        (lambda: ops.log_softmax_backward(x[:, :2], y.log(), 0, x.dtype), "dy must have shape (4, 6), not (4, 2)"),
        (lambda: ops.masked_softmax_backward(y, x[:2], None, 1.0, False), "dy must have shape (4, 6), not (2, 6)"),
        (lambda: ops.logsumexp_backward(two, x, lse, [1]), "g must have shape (4,), not (2,)"),
        (lambda: ops.logsumexp_backward(lse, x, two, [-1]), "lse must have shape (4,), not (2,)"),
        (lambda: ops.logsumexp_backward(lse, x, lse, [1], True), "g must have shape (4, 1), not (4,)"),
        (lambda: ops.cross_entropy_backward(two, moments, x, ids, *plain), "g must have shape (), not (2,)"),
        (
            lambda: ops.cross_entropy_backward(torch.ones(()), moments, x, ids[:2], *plain),
            "target must have shape (4,), not (2,)",
        ),
        (
            lambda: ops.token_logprobs_backward(x[:, :2], *none, moments, entropies, x, ids[:, None], None, 1.0),
            "g_picked must have shape (4, 1), not (4, 2)",
        ),
        (
            lambda: ops.token_logprobs_backward(None, None, two, moments, entropies, x, ids[:, None], None, 1.0),
            "g_lse must have shape (4,), not (2,)",
        ),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            call()


def test_gradients_of_gradients_are_the_formulas_or_an_error():
    x, target = rows(3, 6)
    given = fields("none, all", 6)
    exact = x.detach().double().requires_grad_()
    seconds = []
    for t in (x, exact):
        loss, _ = ops.cross_entropy(t, target, *given)
        (dx,) = torch.autograd.grad(loss.sum(), t, create_graph=True)
        seconds.append(torch.autograd.grad(dx.square().sum(), t)[0])
    torch.testing.assert_close(seconds[0].double(), seconds[1], rtol=1e-3, atol=1e-5)
    assert not ops.cross_entropy(x, target, *given)[1].requires_grad  # no result to differentiate
    y = ops.masked_softmax(x, None, 1.0, False, False)
    for op, arguments in (
        (ops.cross_entropy_backward, (torch.ones(3), torch.ones(3, 2), x, target, *given)),
        (ops.masked_softmax_backward, (y, torch.ones_like(y), None, 1.0, False)),
    ):
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            op(*arguments).sum().backward()


def test_the_gradient_written_out_is_autograds():
    x, target = rows(4, 6, torch.float64)
    given = fields("none, all", 6)
    op = cross_entropy.CrossEntropy(target, *given)
    g = torch.rand(4, dtype=torch.float64)
    (want,) = torch.autograd.grad(decompositions.cross_entropy_of_rows(x, op), x, g)
    torch.testing.assert_close(decompositions.cross_entropy_gradient(g, x, op), want)
    torch.testing.assert_close(
        F.cross_entropy(x, target, reduction="none"), fs.cross_entropy(x, target, reduction="none")
    )
