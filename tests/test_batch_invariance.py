"""A row's bits: the same alone, among 3 and among 17, and, for rows on 16 bytes or on request, at any place among them.

A row alone is `x[i:i+1]`, which keeps the stride of the tensor that it was taken from; so it is planned as that
tensor's rows are. A row that starts unaligned is cut at other columns when it starts elsewhere, and its sum is then
added in another order: that is what `batch_invariant()` rules out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch
from cases import REGIMES, dtype_id, logits, softmax_by

import fused_softmax as fs
from fused_softmax.launch import masked_softmax, masks
from fused_softmax.launch.context import is_batch_invariant
from fused_softmax.launch.device import describe
from fused_softmax.launch.layout import gradient_buffer, problem_of, rows_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning.softmax import plan

pytestmark = pytest.mark.interpreted

every_regime = pytest.mark.parametrize("regime", REGIMES)
# float16 is planned as bfloat16 is (test_plan.py)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
# several chunks, and several steps of a walk; multiples of 8
COLUMNS = {"warp": 504, "block": 5504, "cluster": 4104, "two_pass": 8200}
# (columns beside COLUMNS, columns before a row, columns after it)
LAYOUTS = {
    "aligned": (0, 0, 0),
    "unaligned": (1, 0, 0),
    "sliced": (0, 1, 2),
    "sliced, odd": (3, 2, 8),
    "sliced, aligned": (0, 8, 16),
}
aligned_layouts = pytest.mark.parametrize("layout", ["aligned", "sliced, aligned"])
odd_layouts = pytest.mark.parametrize("layout", ["unaligned", "sliced, odd"])


def rows(regime: str, layout: str, dtype: torch.dtype, n_rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of logits in this layout, and an output that lies as they do."""
    more, before, after = LAYOUTS[layout]
    n_cols = COLUMNS[regime] + more
    field = logits(n_rows, before + n_cols + after, dtype=dtype)
    own = slice(before, before + n_cols)
    return field[:, own], torch.empty_like(field)[:, own]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "dtype"), [*((name, torch.bfloat16) for name in LAYOUTS), ("sliced, odd", torch.float32)], ids=str
)
@every_regime
def test_a_row_in_its_place_does_not_know_how_many_there_are(regime, layout, dtype):
    x, y = rows(regime, layout, dtype, n_rows=17)
    whole = softmax_by(regime, x, y).clone()
    assert whole.isfinite().all()
    for n_rows in (1, 3):
        assert torch.equal(softmax_by(regime, x[:n_rows], y[:n_rows]), whole[:n_rows])
    for these in (slice(6, 7), slice(14, 17)):
        assert torch.equal(softmax_by(regime, x[these], y[these]), whole[these])


@every_dtype
@aligned_layouts
@every_regime
def test_an_aligned_row_does_not_know_its_place(regime, layout, dtype):
    x, y = rows(regime, layout, dtype)
    whole = softmax_by(regime, x, y).clone()
    order = torch.tensor([3, 0, 4, 2, 1])
    x.copy_(x[order])
    assert torch.equal(softmax_by(regime, x, y), whole[order])


@every_dtype
@odd_layouts
@every_regime
def test_on_request_no_row_knows_its_place(regime, layout, dtype):
    x, y = rows(regime, layout, dtype)
    whole = softmax_by(regime, x, y, batch_invariant=True).clone()
    order = torch.tensor([3, 0, 4, 2, 1])
    x.copy_(x[order])
    assert torch.equal(softmax_by(regime, x, y, batch_invariant=True), whole[order])
    # alone, into an output of its own
    assert torch.equal(softmax_by(regime, x[3:4], batch_invariant=True)[0], whole[order[3]])


@pytest.mark.parametrize("layout", ["aligned", "unaligned", "sliced, odd"])
@every_regime
def test_nor_does_a_rows_gradient(regime, layout):
    x, y = rows(regime, layout, torch.float32)
    y = softmax_by(regime, x, y)
    dy, dx = rows(regime, layout, torch.float32)

    def gradient(these: slice) -> torch.Tensor:
        tensors = tuple(t[these] for t in (y, dy, dx))
        forced = plan(problem_of(*tensors, backward=True), describe(x.device), regime=regime)
        softmax_launch(tensors, forced, backward=True)()
        return dx[these].clone()

    whole = gradient(slice(None))
    assert whole.isfinite().all()
    for these in (slice(0, 1), slice(3, 4), slice(2, 5)):
        assert torch.equal(gradient(these), whole[these])


@pytest.mark.parametrize(
    ("n_cols", "dtype"), [*((n, torch.bfloat16) for n in (1, 5, 104, 257, 1000, 1001, 5504)), (1001, torch.float32)]
)
def test_the_public_way(n_cols, dtype):
    """The output is new, so aligned; the input's first row is too, and stays where it is."""
    field = logits(17, n_cols + 3, dtype=dtype)
    for x in (field[:, :n_cols], field[:, :n_cols].contiguous()):
        whole = fs.softmax(x)
        for n_rows in (1, 3):
            assert torch.equal(fs.softmax(x[:n_rows]), whole[:n_rows])
        assert torch.equal(fs.log_softmax(x[:1]), fs.log_softmax(x[:3])[:1])
        if x.stride(0) % 8 == 0 and n_cols % 8 == 0:
            assert all(torch.equal(fs.softmax(x[i : i + 1]), whole[i : i + 1]) for i in (1, 16))
        with fs.batch_invariant():
            whole = fs.softmax(x)
            assert torch.equal(fs.softmax(x[1:2]), whole[1:2])
            assert torch.equal(fs.softmax(x[9:12]), whole[9:12])


@pytest.mark.parametrize("before", ["outer", "outer, 1", "1, outer"])
@pytest.mark.parametrize("n_cols", [150, pytest.param(152, marks=pytest.mark.extended)])
def test_views_over_another_dim_do_not_know_outer(n_cols, before):
    """One index of `outer` keeps the distance of the others: contiguous, or cut from more columns."""
    shape = {"outer": (2,), "outer, 1": (2, 1), "1, outer": (1, 2)}[before]
    x = logits(2, 152 * 521, dtype=torch.float16).view(*shape, 152, 521)[..., :n_cols, :]
    one = x[:, :1] if before == "1, outer" else x[:1]
    for op in (fs.softmax, fs.log_softmax):
        assert torch.equal(op(one, -2), op(x, -2)[(slice(None), slice(1)) if before == "1, outer" else slice(1)])


# rows next to dimensions of size 1, which have strides of their own: (rows, dim of the softmax, dim of the rows)
ONES = {
    "after": lambda n: (logits(16, n).view(16, n, 1, 1), 1, 0),
    "between": lambda n: (logits(16, n).view(16, 1, n), 2, 0),
    "between, transposed": lambda n: (logits(16, n).view(16, n, 1).transpose(1, 2), 2, 0),
    "before, padded": lambda n: (logits(16, n + 6).view(1, 16, n + 6)[:, :, :n], 2, 1),
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("n_cols", [20, 1000])
@pytest.mark.parametrize("ones", ONES)
def test_a_row_keeps_its_stride_next_to_dimensions_of_size_1(ones, n_cols, invariant):
    x, dim, rows = ONES[ones](n_cols)
    ops = {"softmax": lambda x: fs.softmax(x, dim), "logsumexp": lambda x: fs.logsumexp(x, dim, keepdim=True)}
    if dim == 1:
        target = torch.zeros(len(x), *x.shape[2:], dtype=torch.int64)
        ops["cross_entropy"] = lambda x: fs.cross_entropy(x, target[: len(x)], reduction="none")
    else:
        ops["masked_softmax"] = lambda x: fs.masked_softmax(x, None)
        tokens = torch.zeros(x.shape[:-1], dtype=torch.int64)
        ops["token_logprobs"] = lambda x: fs.token_logprobs(x, tokens[tuple(slice(n) for n in x.shape[:-1])])
    for name, op in ops.items():
        with fs.batch_invariant() if invariant else contextlib.nullcontext():
            whole = op(x)
            for i in (0, 1, 7, 15) if invariant else (0,):  # the first row starts where it starts among others
                assert torch.equal(op(x.narrow(rows, i, 1)), whole.narrow(rows, i, 1)), (name, i)


def test_planes_that_lie_within_columns():
    """From one plane to the next is less than a plane, and still the stride that decides how it is planned."""
    x = logits(60, 17 * 1025, dtype=torch.float16).view(60, 17, 1025).transpose(0, 1)[:2]
    assert not fs.plan_for(x, dim=1).skewed and not fs.plan_for(x[:1], dim=1).skewed
    assert torch.equal(fs.softmax(x[:1], 1), fs.softmax(x, 1)[:1])


def test_one_transposed_row_of_logsumexp():
    x = logits(2000, 32).t()
    with fs.batch_invariant():
        whole = fs.logsumexp(x, -1)
        assert all(torch.equal(fs.logsumexp(x[i : i + 1], -1), whole[i : i + 1]) for i in range(32))


@pytest.mark.parametrize("n_cols", [30, 300])
def test_transposed_matrices(n_cols):
    """Rows that are neighbors in memory: any of them alone, too, within batch_invariant()."""
    x = logits(n_cols, 64).t()
    assert torch.equal(fs.softmax(x[:4]), fs.softmax(x)[:4])
    with fs.batch_invariant():
        assert "after a copy" in fs.plan_for(x).why
        whole = fs.softmax(x)
        for rows in (slice(0, 1), slice(5, 6), slice(3, 50)):
            assert torch.equal(fs.softmax(x[rows]), whole[rows])


def test_unaligned_rows_do_know_their_place_without_it():
    """What the request is for: the same numbers one place further start at another distance from 16 bytes."""
    x = logits(1, 5501).expand(4, 5501).contiguous()
    y = softmax_by("block", x)
    assert any(not torch.equal(y[0], other) for other in y[1:])
    y = softmax_by("block", x, batch_invariant=True)
    assert all(torch.equal(y[0], other) for other in y[1:])


def test_the_request_ends_with_its_block_and_is_the_threads_own():
    import threading

    x = logits(4, 1001)
    usual, seen = fs.plan_for(x), []
    with fs.batch_invariant():
        within = fs.plan_for(x)
        thread = threading.Thread(target=lambda: seen.append(fs.plan_for(x)))
        thread.start()
        thread.join()
        with fs.batch_invariant():
            pass
        assert fs.plan_for(x) == within
    assert usual.unaligned and not within.unaligned
    assert fs.plan_for(x) == usual and seen == [usual]


@pytest.mark.parametrize("n_cols", [33, 1000, 1001, 5504])
def test_losses_of_a_row_do_not_depend_on_the_others(n_cols):
    """Losses, log-probabilities and logsumexp of the first rows, beside those of all; their gradients too."""
    x, target = logits(9, n_cols, dtype=torch.bfloat16), torch.randint(0, n_cols, (9,))

    def results(n_rows: int) -> list[torch.Tensor]:
        given = x[:n_rows].clone().requires_grad_()
        loss = fs.cross_entropy(given, target[:n_rows], reduction="none", label_smoothing=0.1)
        logprobs, entropy, lse = fs.token_logprobs(given, target[:n_rows], return_entropy=True, return_logsumexp=True)
        (loss + logprobs + entropy).sum().backward()
        masked = fs.masked_softmax(given, causal=False, scale=0.5)
        return [t.detach() for t in (loss, logprobs, entropy, lse, fs.logsumexp(given, 1), masked, given.grad)]

    whole = results(9)
    for n_rows in (1, 3):
        for got, want in zip(results(n_rows), whole, strict=True):
            assert torch.equal(got, want[:n_rows])


@pytest.mark.parametrize("causal", [False, True])
def test_masked_rows_at_any_place_on_request(causal):
    # batches of 35 queries and columns, and of 3 of 1,001, start at every distance from a vector's boundary
    shape = (35, 35) if causal else (3, 1001)
    x, dy = (torch.randn(1, *shape).expand(8, *shape).contiguous() for _ in range(2))

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        z = x.clone().requires_grad_()
        return z, fs.masked_softmax(z, scale=3.0, causal=causal)

    with fs.batch_invariant():
        z, y = forward()
    # autograd runs backward where nothing is asked for
    (dx,) = torch.autograd.grad(y, z, dy)
    for batch in range(1, 8):
        assert torch.equal(y[batch], y[0]) and torch.equal(dx[batch], dx[0])
    z, y = forward()
    (dx,) = torch.autograd.grad(y, z, dy)
    for elsewhere in (y, dx):
        assert any(not torch.equal(elsewhere[batch], elsewhere[0]) for batch in range(1, 8))


@pytest.mark.parametrize("shape", [(3, 1032), (3, 1, 1032)], ids=str)
def test_a_single_row_of_a_loss_keeps_the_stride_of_its_tensor(shape):
    """A row may start on 16 bytes where not all rows of its tensor do."""
    stride = shape[-1] + 1
    x = torch.randn(*shape[:-1], stride).to(torch.bfloat16)[..., : shape[-1]]
    target, mask = torch.randint(0, shape[-1], shape[:-1]), torch.randn(shape)
    flat = x if len(shape) == 2 else x[:, 0]
    smooth = dict(reduction="none", label_smoothing=0.1)
    with fs.batch_invariant():
        for one in (slice(0, 1), slice(2, 3)):
            for function, given in ((fs.masked_softmax, mask), (fs.token_logprobs, target)):
                assert torch.equal(function(x, given)[one], function(x[one], given[one]))
            assert torch.equal(fs.logsumexp(x, -1)[one], fs.logsumexp(x[one], -1))
            losses = fs.cross_entropy(flat, target.flatten(), **smooth)
            assert torch.equal(losses[one], fs.cross_entropy(flat[one], target.flatten()[one], **smooth))
    rows = rows_of(x[1:2], shape[-1])
    assert rows.shape == (1, shape[-1]) and rows.stride() == (stride, 1)
    assert gradient_buffer(rows).stride() == (stride, 1)


@pytest.mark.parametrize("stride", [0, 8, 16])
@pytest.mark.parametrize("n_cols", [480, 483])
def test_a_mask_is_read_alike_for_a_batch_and_for_one_of_its_rows(n_cols, stride):
    """A vector access of another width gives a tile another layout, and a row's sum another order."""
    x = torch.randn(4, 1, 2, n_cols)
    mask = (torch.rand(4, 1, 1, n_cols + stride) > 0.3)[..., :n_cols]
    vectors = []
    for batch in (slice(None), slice(0, 1)):
        rows = x[batch].reshape(-1, n_cols)
        op = masked_softmax.FORWARD[True]
        chosen = op.plan((rows, rows), describe(x.device), False)
        _, flags, _ = masks.describe_mask(mask[batch], x[batch], chosen, rows)
        vectors.append(dict(flags)["MASK_VEC"])
    assert vectors[0] == vectors[1] and (vectors[0] == 1) == (n_cols % 2 == 1)


def test_it_decorates_functions_of_every_kind():
    seen = []

    @fs.batch_invariant()
    def function(n):
        return is_batch_invariant(), n

    @fs.batch_invariant()
    async def coroutine():
        await asyncio.sleep(0)
        return is_batch_invariant()

    @fs.batch_invariant()
    def generator():
        try:
            for step in range(3):
                sent = yield is_batch_invariant()
                seen.append((step, sent, is_batch_invariant()))
        except KeyError:
            seen.append(("thrown", is_batch_invariant()))
            yield "caught"
        finally:
            seen.append(("end", is_batch_invariant()))
        return "done"

    @fs.batch_invariant()
    async def asynchronous():
        try:
            while True:
                sent = yield is_batch_invariant()
                seen.append((sent, is_batch_invariant()))
        finally:
            seen.append(("closed", is_batch_invariant()))

    async def use():
        steps = asynchronous()
        found = [await steps.__anext__(), is_batch_invariant(), await steps.asend(5)]
        await steps.aclose()
        return found

    assert function(3) == (True, 3) and asyncio.run(coroutine()) is True
    steps = generator()
    assert next(steps) is True and not is_batch_invariant() and steps.send("a") is True
    assert steps.throw(KeyError) == "caught" and not is_batch_invariant()
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == "done"
    assert seen == [(0, "a", True), ("thrown", True), ("end", True)] and not is_batch_invariant()
    seen.clear()
    assert asyncio.run(use()) == [True, False, True] and seen == [(5, True), ("closed", True)]


def test_a_generator_that_holds_it_may_be_closed_in_another_thread():
    def held():
        with fs.batch_invariant():
            yield

    steps, failed = held(), []
    next(steps)
    thread = threading.Thread(target=lambda: failed.append(steps.close()))
    thread.start()
    thread.join()
    assert failed == [None]
    with fs.batch_invariant():  # this thread still holds it, as the block was left elsewhere
        assert is_batch_invariant()
    fs.batch_invariant().__exit__()
    assert not is_batch_invariant()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("n_cols", [9, 21, 39, 51, 63])
def test_gaps_between_narrow_rows_change_no_bits(n_cols, dtype):
    """Rows without gaps are moved as one piece, but not within `batch_invariant()`."""
    tokens = logits(12, n_cols, dtype=dtype).view(4, 3, n_cols)[:, -1:, :]
    padded = logits(12, n_cols + 2, dtype=dtype)[:, :n_cols]
    assert fs.plan_for(padded.contiguous()).gathered and not fs.plan_for(padded).gathered
    with fs.batch_invariant():
        assert not fs.plan_for(padded.contiguous()).gathered
        for function in (fs.softmax, fs.log_softmax):
            assert torch.equal(function(padded, -1), function(padded.contiguous(), -1))
            whole = function(tokens, -1)
            assert all(torch.equal(function(tokens[i : i + 1], -1), whole[i : i + 1]) for i in range(4))
            causal = fs.masked_softmax(padded, causal=True)
            assert torch.equal(causal, fs.masked_softmax(padded.contiguous(), causal=True))


@pytest.mark.interpreted
def test_gradients_of_rows_without_gaps_are_those_of_rows_with_gaps(monkeypatch):
    """Within the block no kernel runs that takes rows as one piece of memory, in a backward neither."""
    from fused_softmax.launch import cross_entropy_gradient, row_statistics

    called = []
    for module in (cross_entropy_gradient, row_statistics):
        kernel = module._backward_gathered
        monkeypatch.setattr(module, "_backward_gathered", lambda kernel=kernel: called.append(kernel) or kernel())
    wide, target = torch.randn(5, 24), torch.randint(0, 19, (5,))

    def gradients(x):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        losses, found = fs.cross_entropy(a, target, reduction="none"), fs.token_logprobs(b, target, return_entropy=True)
        with torch.no_grad():
            g = torch.linspace(-1, 2, 5)
        return (losses * g).sum(), (found.logprobs * g + found.entropy).sum(), a, b

    for block, count in ((contextlib.nullcontext(), 2), (fs.batch_invariant(), 0)):
        called.clear()
        with block:
            first, second, a, b = gradients(wide[:, :19])
        first.backward()
        second.backward()
        assert len(set(called)) == count and a.grad.isfinite().all() and b.grad.isfinite().all()
