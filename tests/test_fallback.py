"""Where kernels cannot run: PyTorch's own results and gradients, one warning, a reason in plan_for, no second attempt.

A kernel that "does not compile" here fails where a real one does: when it is asked for, before anything is launched.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

import fused_softmax as fs
from fused_softmax.lab.bench import cases as bench
from fused_softmax.lab.bench.session import Session
from fused_softmax.lab.bench.systems import systems_for
from fused_softmax.lab.fuzz import draw as fuzz
from fused_softmax.lab.fuzz.judge import evaluate
from fused_softmax.lab.record import header
from fused_softmax.launch import availability, device, layout, prepared_calls
from fused_softmax.launch import compile as launch
from fused_softmax.launch import softmax as launch_softmax
from fused_softmax.torch_ops import route

# kernel -> its module
OF_SOFTMAX = {
    "softmax_resident": "softmax_resident",
    "softmax_two_pass": "softmax_two_pass",
    "softmax_backward_resident": "softmax_resident",
    "softmax_backward_two_pass": "softmax_two_pass",
    "softmax_gathered": "softmax_gathered",
    "softmax_backward_gathered": "softmax_gathered",
    "softmax_strided": "softmax_strided",
    "softmax_transposed": "softmax_transposed",
    "softmax_channels_last": "softmax_channels_last",
    "transposed_copy": "strided_copies",
    "stepped_copy": "strided_copies",
    "softmax_spatial": "softmax_spatial",
    "softmax_spatial_backward": "softmax_spatial",
    "softmax_spatial_skewed": "softmax_spatial_skewed",
    "softmax_spatial_skewed_backward": "softmax_spatial_skewed",
    "softmax_spatial_gathered": "softmax_spatial_gathered",
    "softmax_spatial_gathered_backward": "softmax_spatial_gathered",
    "softmax_spatial_periodic": "softmax_spatial_periodic",
    "softmax_spatial_periodic_backward": "softmax_spatial_periodic",
    "softmax_spatial_reduce": "softmax_spatial_parts",
    "softmax_spatial_merge": "softmax_spatial_parts",
    "softmax_spatial_finish": "softmax_spatial_parts",
    "softmax_spatial_backward_reduce": "softmax_spatial_parts",
    "softmax_spatial_backward_merge": "softmax_spatial_parts",
    "softmax_spatial_backward_finish": "softmax_spatial_parts",
    "logsumexp_spatial_backward": "softmax_spatial_parts",
    "softmax_spatial_bundled_reduce": "softmax_spatial_bundled",
    "softmax_spatial_bundled_finish": "softmax_spatial_bundled",
    "softmax_spatial_bundled_backward_reduce": "softmax_spatial_bundled",
    "softmax_spatial_bundled_backward_finish": "softmax_spatial_bundled",
}
OF_LOSSES = {
    "row_statistics": "row_statistics",
    "row_statistics_backward": "row_statistics",
    **dict.fromkeys(("row_statistics_gathered", "row_statistics_backward_gathered"), "row_statistics_gathered"),
    **dict.fromkeys(("row_statistics_parts", "merge_row_statistics"), "row_statistics_parts"),
    "cross_entropy_forward": "cross_entropy",
    "count_targets": "cross_entropy",
    "reduce_losses": "cross_entropy",
    "cross_entropy_resident": "cross_entropy_resident",
    "cross_entropy_gathered": "cross_entropy_gathered",
    "cross_entropy_forward_gathered": "cross_entropy_gathered",
    "cross_entropy_backward_gathered": "cross_entropy_gathered",
    "cross_entropy_backward": "cross_entropy_backward",
    "scale_unless_one": "cross_entropy_backward",
    "cross_entropy_spatial": "cross_entropy_spatial",
    "cross_entropy_spatial_shared": "cross_entropy_spatial_shared",
    "cross_entropy_spatial_reduce": "cross_entropy_spatial_parts",
    "cross_entropy_spatial_merge": "cross_entropy_spatial_parts",
    "cross_entropy_spatial_finish": "cross_entropy_spatial_parts",
    "prepare_spatial_targets": "spatial_targets",
    "add_partials": "spatial_targets",
}
MODULES = {
    **OF_SOFTMAX,
    **OF_LOSSES,
    "masked_softmax_resident": "masked_softmax_resident",
    "masked_softmax_gathered": "masked_softmax_gathered",
    "masked_softmax_two_pass": "masked_softmax_two_pass",
    "masked_softmax_backward": "masked_softmax_backward",
    "masked_softmax_backward_gathered": "masked_softmax_gathered",
}
KERNELS = tuple(MODULES)
# of rows that are spread over ranks: tests/parallel breaks these
OF_RANKS = {
    **dict.fromkeys(("pack_shard", "merge_loss", "merge_statistics", "loss_factors"), "vocab_shards"),
    **dict.fromkeys(("shard_gradient_sums", "shard_gradient", "log_softmax_shard"), "softmax_shards"),
}
FORWARD = tuple(name for name in KERNELS if "backward" not in name)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    """Warnings and failures of one test are unknown to the next."""
    monkeypatch.setattr(availability, "_warned", set())
    monkeypatch.setattr(availability, "_failures", {})
    monkeypatch.setattr(prepared_calls, "_calls", {})


@contextlib.contextmanager
def broken(*names: str):
    """Has the named kernels fail to compile, and checks that each is tried once. Yields the names that were tried."""
    tried: list[str] = []

    class Broken(types.ModuleType):
        def __getattribute__(self, name: str):
            if name in names:
                tried.append(name)
                raise ValueError(f"no lowering in {name}")
            return super().__getattribute__(name)

    modules = {importlib.import_module(f"fused_softmax.kernels.{MODULES[name]}") for name in names}
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as given:
        for module in modules:
            patched.setattr(module, "__class__", Broken)
        warnings.simplefilter("always")
        yield tried
    assert len(set(tried)) == len(tried), "a kernel that failed was tried again"
    said = [str(w.message) for w in given if "fused_softmax" in str(w.message)]
    assert len(said) == len(tried), said
    for text in said:
        assert f"torch {torch.__version__}" in text and "Triton" in text and "no lowering" in text


def both(function, own, *tensors: torch.Tensor, rtol=2e-5, atol=1e-6):
    """function's result and gradients against own's, of the same tensors, twice."""
    for _ in range(2):
        ours = [t.clone().requires_grad_() for t in tensors]
        theirs = [t.double().requires_grad_() for t in tensors]
        got, want = function(*ours), own(*theirs)
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)
        g = torch.randn_like(want)
        got.backward(g.to(got.dtype))
        want.backward(g)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=rtol, atol=atol)


BROKEN = [KERNELS, FORWARD, tuple(name for name in KERNELS if "backward" in name)]
BROKEN_IDS = ["all", "forward", "backward"]
WIDTHS = pytest.mark.parametrize("n_cols", [40, 600])  # logits that are moved as one piece, and others
interpreted = pytest.mark.interpreted


@interpreted
@pytest.mark.parametrize("names", BROKEN, ids=BROKEN_IDS)
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("ours, own", [(fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)])
def test_softmax(names, dim, ours, own):
    x = torch.randn(5, 37)
    with broken(*names) as tried:
        both(lambda t: ours(t, dim), lambda t: own(t, dim), x)
        half = ours(x.half(), dim, dtype=torch.float32)
        assert torch.equal(ours(x, dim, out=torch.empty(5, 37)), ours(x, dim))
    assert tried
    torch.testing.assert_close(half, own(x.half(), dim, dtype=torch.float32))


@interpreted
@pytest.mark.parametrize("names", BROKEN, ids=BROKEN_IDS)
@WIDTHS
def test_logsumexp(names, n_cols):
    with broken(*names) as tried:
        both(lambda t: fs.logsumexp(t, -1), lambda t: torch.logsumexp(t, -1), torch.randn(5, n_cols))
    assert tried


@interpreted
@pytest.mark.parametrize("names", BROKEN, ids=BROKEN_IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_masked_softmax(names, causal):
    mask = torch.rand(8, 40) > 0.3
    mask[:, 0] = True
    hidden = ~mask | (torch.ones(8, 40, dtype=torch.bool).triu(1) if causal else torch.zeros(8, 40, dtype=torch.bool))
    with broken(*names) as tried:
        both(
            lambda t: fs.masked_softmax(t, mask, scale=0.5, causal=causal),
            lambda t: torch.softmax((t * 0.5).masked_fill(hidden, -float("inf")), -1),
            torch.randn(3, 8, 40),
        )
    assert tried


@pytest.mark.sampled(3)
@interpreted
@pytest.mark.parametrize("names", [*BROKEN, *((name,) for name in OF_LOSSES)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@WIDTHS
def test_cross_entropy(names, reduction, weighted, n_cols):
    options = {"weight": torch.rand(n_cols) + 0.5, "label_smoothing": 0.1} if weighted else {}
    target = torch.randint(0, n_cols, (6,))
    target[2] = -100
    double = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with broken(*names):
        both(
            lambda t: fs.cross_entropy(t, target, reduction=reduction, **options),
            lambda t: F.cross_entropy(t, target, reduction=reduction, **double),
            torch.randn(6, n_cols),
        )


@interpreted
@pytest.mark.parametrize("names", [*BROKEN, ("scale_unless_one",), ("reduce_losses",), ("count_targets",)])
@WIDTHS
def test_cross_entropy_in_place(names, n_cols):
    """The logits are overwritten, if at all, after everything that can fail to compile and needs them."""
    x, target = torch.randn(6, n_cols), torch.randint(0, n_cols, (6,))
    with broken(*names):
        both(
            lambda t: fs.cross_entropy(t * 1.0, target, inplace_backward=True, z_loss=0.01),
            lambda t: F.cross_entropy(t, target) + 0.01 * torch.logsumexp(t, 1).pow(2).mean(),
            x,
        )


@interpreted
@pytest.mark.parametrize("names", BROKEN, ids=BROKEN_IDS)
@pytest.mark.parametrize("temperature", [0.7, torch.tensor([0.5, 2.0, 1.3])], ids=["number", "per row"])
@pytest.mark.parametrize("n_ids", [1, 2])  # one id for each row of few columns has a kernel of its own
def test_token_logprobs(names, temperature, n_ids):
    ids = torch.randint(0, 40, (3, n_ids))

    def own(x):
        z = torch.log_softmax(
            x / (temperature.unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature), -1
        )
        return z.gather(-1, ids).sum() + 2.0 * (z.exp() * z).sum()

    def ours(x):
        found = fs.token_logprobs(x, ids, temperature=temperature, return_entropy=True)
        return found.logprobs.sum() - 2.0 * found.entropy.sum()

    with broken(*names) as tried:
        both(ours, own, torch.randn(3, 40))
    assert tried


@interpreted
@pytest.mark.parametrize("name", ["row_statistics_parts", "merge_row_statistics"])
def test_logsumexp_of_wide_rows(name):
    x = torch.randn(2, 9001).half()
    with broken(name) as tried:
        torch.testing.assert_close(fs.logsumexp(x, -1), torch.logsumexp(x, -1))
    assert name in tried


@interpreted
@pytest.mark.parametrize("names", BROKEN, ids=BROKEN_IDS)
def test_patch(names):
    """The kernel that was there before runs; it is not asked for through the dispatcher, which would ask us again."""
    with broken(*names) as tried, fs.patch():
        both(lambda t: torch.softmax(t, -1), lambda t: torch.softmax(t, -1), torch.randn(5, 37))
        both(lambda t: F.log_softmax(t, 0), lambda t: F.log_softmax(t, 0), torch.randn(5, 37))
        both(lambda t: fs.softmax(t, -1), lambda t: torch.softmax(t, -1), torch.randn(5, 37))
        hidden = torch.full((2, 3), -float("inf"))
        assert torch.equal(torch._safe_softmax(hidden, -1), torch.zeros(2, 3))
        out = torch.empty(2, 4)
        torch.ops.aten._softmax.out(torch.zeros(2, 4), -1, False, out=out)
        assert torch.equal(out, torch.full((2, 4), 0.25))
    assert tried


@interpreted
@pytest.mark.parametrize("names", BROKEN, ids=BROKEN_IDS)
def test_operators_in_a_graph(names):
    """The operators that torch.compile puts into its graphs fall back inside."""
    with broken(*names) as tried:
        function = torch.compile(lambda t: fs.softmax(t, -1) * 2.0, backend="aot_eager")
        both(function, lambda t: torch.softmax(t, -1) * 2.0, torch.randn(5, 37))
    assert tried


PLANNED = {
    "softmax_gathered": lambda x: fs.plan_for(x),
    "softmax_resident": lambda x: fs.plan_for(x[:, :32]),
    "softmax_backward_gathered": lambda x: fs.plan_for(x.half(), op="log_softmax", backward=True),
    "softmax_backward_resident": lambda x: fs.plan_for(x, op="log_softmax", backward=True),
    "softmax_strided": lambda x: fs.plan_for(x.t(), 1),
    "softmax_transposed": lambda x: fs.plan_for(x.repeat(4, 1).t(), 1),
    "softmax_channels_last": lambda x: fs.plan_for(x[None].repeat(1, 4, 1).transpose(1, 2), 1),
    "softmax_spatial": lambda x: fs.plan_for(x.repeat(1, 16), 0),
    "softmax_spatial_gathered": lambda x: fs.plan_for(x, 0),
    "softmax_spatial_gathered_backward": lambda x: fs.plan_for(x.half(), 0, op="log_softmax", backward=True),
    "softmax_spatial_periodic": lambda x: fs.plan_for(x.repeat(600, 1), 0),
    "softmax_spatial_periodic_backward": lambda x: fs.plan_for(
        x.half().repeat(600, 1), 0, op="log_softmax", backward=True
    ),
    "row_statistics": lambda x: fs.plan_for(x.repeat(1, 16), op="logsumexp"),
    "row_statistics_backward": lambda x: fs.plan_for(x.repeat(1, 16), op="token_logprobs", backward=True),
    "row_statistics_gathered": lambda x: fs.plan_for(x, op="logsumexp"),
    "row_statistics_backward_gathered": lambda x: fs.plan_for(x, op="token_logprobs", backward=True),
    "masked_softmax_gathered": lambda x: fs.plan_for(x, op="masked_softmax", mask=x > 0),
    "masked_softmax_backward_gathered": lambda x: fs.plan_for(
        x.bfloat16(), op="masked_softmax", mask=x > 0, backward=True
    ),
    "masked_softmax_resident": lambda x: fs.plan_for(x.repeat(1, 4), op="masked_softmax", mask=x.repeat(1, 4) > 0),
    "masked_softmax_backward": lambda x: fs.plan_for(x, op="masked_softmax", backward=True),
    "cross_entropy_forward": lambda x: fs.plan_for(x.repeat(1, 16), op="cross_entropy"),
    "cross_entropy_resident": lambda x: fs.plan_for(x.repeat(1, 16), op="cross_entropy", backward=True),
    "cross_entropy_gathered": lambda x: fs.plan_for(x, op="cross_entropy", backward=True),
    "cross_entropy_forward_gathered": lambda x: fs.plan_for(x, op="cross_entropy"),
}


@interpreted
@pytest.mark.parametrize("name", PLANNED)
def test_plan_for_says_so(name):
    x = torch.randn(5, 37)
    assert fs.plan_for(x).regime != "torch"
    assert isinstance(PLANNED[name](x), fs.Plan)
    with broken(name) as tried:
        if name == "softmax_gathered":
            fs.softmax(x)
        for _ in range(2):
            found = PLANNED[name](x)
            assert isinstance(found, fs.Fallback) and found.reason == "unsupported"
            assert f"torch {torch.__version__}" in found.why and name in found.why
    assert tried == [name]


@interpreted
def test_a_call_that_is_copied_first_fails_while_it_is_prepared():
    """Not when it runs: nothing catches it there."""
    x = torch.randn(2, 3000, 40).transpose(1, 2)
    assert "after a copy" in fs.plan_for(x, -1).why
    with broken("softmax_resident"), pytest.raises(availability.KernelUnavailable):
        launch_softmax.prepare_softmax(x, torch.empty(x.shape), 2, False)


def test_every_kernel_is_broken_here():
    """The list above has every kernel that the package launches."""
    package = importlib.import_module("fused_softmax.kernels")
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg:
            members = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
            found |= {
                name: module.name
                for name, value in members.items()
                if hasattr(value, "declaration") and value.fn.__module__.endswith(f".{module.name}")
            }
    assert found == MODULES | OF_RANKS


@interpreted
def test_errors_of_users_stay():
    with broken(*KERNELS):
        with pytest.raises(IndexError):
            fs.softmax(torch.randn(2, 3), 2)
        with pytest.raises(IndexError):
            fs.cross_entropy(torch.randn(2, 3), torch.tensor([0, 3]))
        with pytest.raises(NotImplementedError):
            fs.softmax(torch.ones(2, 3, dtype=torch.int64))


# --- compile_kernel ---------------------------------------------------------------------------------------------------


class some_kernel:
    """Stands for a kernel that `_built` is asked for."""


def test_a_failure_is_remembered(monkeypatch, caplog):
    calls = []

    def built(*_):
        calls.append(1)
        raise ValueError("cannot lower this\n")

    monkeypatch.setattr(launch, "_built", built)
    with pytest.warns(UserWarning, match="some_kernel does not compile with torch .* Triton .*cannot lower this"):
        with caplog.at_level(logging.WARNING, "fused_softmax"), pytest.raises(availability.KernelUnavailable):
            launch.compile_kernel(some_kernel, (), {"num_warps": 4}, 0)
    assert "some_kernel" in caplog.text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(availability.KernelUnavailable, match="cannot lower this"):
            launch.compile_kernel(some_kernel, (), {"num_warps": 4}, 0)
    assert len(calls) == 1


def test_a_failure_is_raised_where_calls_are_timed_or_judged(monkeypatch):
    """A call that PyTorch's own kernel answers would pass the check, and its time would be recorded as ours."""

    def fails(key):
        raise availability.failed(key, "some_kernel", AttributeError("no lowering"))

    monkeypatch.setattr(availability, "raise_if_failed", fails)
    with pytest.warns(UserWarning, match="no lowering"):
        fs.softmax(torch.randn(3, 8), -1)
    cpu = torch.device("cpu")
    timed = Session(header(cpu, interpreted=True), systems_for("softmax", ["fused_softmax"]), cpu, timed=False)
    (record,) = timed.run([bench.Case("softmax", "float32", 3, 8)])
    assert record.status == "error" and "no lowering" in record.note
    judged = evaluate(fuzz.Case("softmax", "function", "float32", (3, 8), (1,), options={"dim": 1}), "cpu")
    assert any("no lowering" in problem for problem in judged.found())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        RuntimeError("CUDA error: out of memory"),
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
    ],
    ids=lambda error: str(error)[:30],
)
def test_an_error_of_the_device_is_raised(monkeypatch, error):
    def built(*_):
        raise error

    monkeypatch.setattr(launch, "_built", built)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(type(error)) as raised:
                launch.compile_kernel(some_kernel, (), {"num_warps": 4}, 0)
            assert raised.value is error


def test_a_binary_that_the_driver_does_not_take(monkeypatch):
    error = RuntimeError("Triton Error [CUDA]: no kernel image is available for execution on the device")
    monkeypatch.setattr(launch, "_built", lambda *_: (_ for _ in ()).throw(error))
    with pytest.warns(UserWarning, match="no kernel image"), pytest.raises(availability.KernelUnavailable):
        launch.compile_kernel(some_kernel, (), {"num_warps": 4}, 0)


def test_a_cache_folder_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(launch, "_built", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied", "/cache")))
    with pytest.warns(UserWarning, match="TRITON_CACHE_DIR"), pytest.raises(availability.KernelUnavailable):
        launch.compile_kernel(some_kernel, (), {"num_warps": 4}, 0)


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "torch_version, triton_version, usable",
    [
        ("2.4.1+cu121", "3.0.0", False),
        ("2.9.1", "3.5.1", False),
        ("2.10.0", "3.5.1", False),
        ("2.8.0", "3.6.0", False),
        ("2.10.0", "3.6.0", True),
        ("2.13.0+cpu", "3.7.1", True),
        ("2.16.0.dev20261201", "3.10.0+git12", True),
        ("3.0.0", "4.0.0", True),
    ],
)
def test_floors(monkeypatch, torch_version, triton_version, usable):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(availability, "triton_version", lambda: triton_version)
    error = device.triton_error.__wrapped__()
    assert (error is None) == usable
    if error is not None:
        assert torch_version in error and triton_version in error and "2.10" in error and "3.6" in error


def test_below_the_floor_one_warning(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    for cached in (device.triton_error, device.describe):
        cached.cache_clear()
    x = torch.randn(3, 5)
    try:
        with pytest.warns(UserWarning) as given:
            for _ in range(2):
                assert torch.equal(fs.softmax(x), torch.softmax(x, -1))
                with fs.patch():
                    assert torch.equal(F.softmax(x, 0), torch.softmax(x, 0))
            assert "torch 2.4.1" in fs.plan_for(x).why
            assert "torch 2.4.1" in fs.plan_for(x.double()).why or "float64" in fs.plan_for(x.double()).why
        assert len(given) == 1
    finally:
        for cached in (device.triton_error, device.describe):
            cached.cache_clear()


def test_a_newer_triton_is_tried_through_its_public_call(monkeypatch):
    monkeypatch.setattr(availability, "triton_version", lambda: "99.0.0")
    calls = []

    class Compiled:
        class src:
            fn = types.SimpleNamespace(declaration=types.SimpleNamespace(constexprs=("ROWS",)))

        def __getitem__(self, grid):
            return lambda *args, stream: calls.append((grid, args, stream))

    call, prefix, trailing = launch.bind(Compiled())
    call(7, 1, 1, 11, *prefix, 1024, 5, 40, *trailing)
    assert calls == [((7, 1, 1), (1024, 5, 40, None), 11)]


def test_a_torch_without_a_private_symbol(monkeypatch):
    """A symbol that is gone is named, and the package stays importable without it."""
    from fused_softmax.launch import torch_private

    monkeypatch.setattr(torch_private, "missing", [])
    assert torch_private._required("_C._no_such_symbol", torch_private._nothing)() is None
    error = device.triton_error.__wrapped__()
    assert error is not None and "torch._C._no_such_symbol" in error


@pytest.mark.interpreted
def test_rows_that_the_kernels_cannot_count_are_torchs(monkeypatch):
    """By every way in, and for every op; here rows of more than 100 columns."""
    for module in (layout, prepared_calls, route):
        monkeypatch.setattr(module, "MAX_COLS", 100)
    x, image = torch.randn(4, 120, requires_grad=True), torch.randn(2, 120, 6, requires_grad=True)
    target, of_image = torch.randint(0, 120, (4,)), torch.randint(0, 120, (2, 6))
    operators = torch.ops.fused_softmax
    calls = {
        "softmax": (lambda: fs.softmax(x, -1), lambda: torch.softmax(x, -1)),
        "image": (lambda: fs.log_softmax(image, 1), lambda: torch.log_softmax(image, 1)),
        "operator": (lambda: operators.softmax(x, -1), lambda: torch.softmax(x, -1)),
        "logsumexp": (lambda: operators.logsumexp(x, [-1]), lambda: torch.logsumexp(x, -1)),
        "masked": (lambda: fs.masked_softmax(x, x.detach() > 0), lambda: torch.softmax(x.where(x > 0, -torch.inf), -1)),
        "loss": (lambda: fs.cross_entropy(x, target), lambda: F.cross_entropy(x, target)),
        "image's loss": (lambda: fs.cross_entropy(image, of_image), lambda: F.cross_entropy(image, of_image)),
        "logprobs": (
            lambda: fs.token_logprobs(x, target), lambda: torch.log_softmax(x, -1).gather(1, target[:, None])[:, 0]
        ),
    }  # fmt: skip
    with fs.patch():
        patched = torch.softmax(x, -1), torch.autograd.grad(torch.softmax(image, 1).square().sum(), image)[0]
    calls["patched"] = (lambda: patched[0], lambda: torch.softmax(x, -1))
    wanted = torch.autograd.grad(torch.softmax(image, 1).square().sum(), image)[0]
    torch.testing.assert_close(patched[1], wanted)
    for name, (ours, torchs) in calls.items():
        torch.testing.assert_close(ours(), torchs(), msg=lambda said, name=name: f"{name}: {said}")
        of = image if "image" in name else x
        gradients = [torch.autograd.grad(call().square().sum(), of)[0] for call in (ours, torchs)]
        torch.testing.assert_close(*gradients, msg=lambda said, name=name: f"{name}: {said}")
    for op in ("softmax", "logsumexp", "masked_softmax", "cross_entropy", "token_logprobs"):
        assert fs.plan_for(x.detach(), op=op).reason == "unsupported", op


def test_functions_that_a_program_puts_in_torchs_place_do_not_call_themselves(monkeypatch):
    """The originals are bound at import: what our kernels do not take still goes to them."""
    x, target = torch.randn(3, 5), torch.tensor([1, 2, 0])
    inputs = (x, target), (x.double(), target), (x, x.softmax(-1))
    calls = [lambda: torch.softmax(x.double(), -1), lambda: torch.log_softmax(x.double(), -1)]
    calls += [lambda: torch.logsumexp(x.double(), -1), lambda: torch.softmax(x, -1)]
    calls += [lambda given=given: torch.nn.CrossEntropyLoss()(*given) for given in inputs]
    wanted = [call() for call in calls]
    monkeypatch.setattr(F, "cross_entropy", fs.cross_entropy)
    for name in ("softmax", "log_softmax", "logsumexp"):
        monkeypatch.setattr(torch, name, getattr(fs, name))
    for call, want in zip(calls, wanted, strict=True):
        torch.testing.assert_close(call(), want)
