"""fused_softmax.parallel on gloo, without a GPU: processes, and 8 simulated shards in one process."""

from __future__ import annotations

import threading

import pytest
import torch
from cases import INTERPRETED
from support import parallel_checks as checks
from support.ranks import simulated, spawn

import fused_softmax as fs
from fused_softmax import parallel


@pytest.fixture
def plain(monkeypatch):
    """Processes that a test starts run PyTorch's formulas, which is quick."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def two_processes(rank, ranks, device):
    checks.check_all(rank, ranks, device, 6, 40, (torch.float32,), even=False)
    check_collectives(rank, ranks)
    check_disagreements(rank, ranks)
    check_corners(rank)


@pytest.mark.extended
def test_two_processes(plain, tmp_path):
    """Every op and option against one process, the number of collectives, and what ranks must agree on."""
    spawn(two_processes, 2, tmp_path)


@pytest.mark.extended
def test_four_processes(plain, tmp_path):
    spawn(checks.check_all, 4, tmp_path, 6, 40, checks.DTYPES, False)
    spawn(checks.check_all, 4, tmp_path, 6, 40, (torch.float32,), True)
    spawn(checks.check_equal_bits, 4, tmp_path, ((5, 64), (3, 72)), (torch.float32, torch.bfloat16))


@pytest.mark.extended
def test_without_private_symbols_of_torch(plain, monkeypatch, tmp_path):
    """The public collectives."""
    monkeypatch.setenv("FUSED_SOFTMAX_PUBLIC_TORCH", "1")
    spawn(checks.check_all, 2, tmp_path, 6, 40, (torch.float32,), True)


@pytest.mark.extended
@pytest.mark.interpreted
def test_processes_whose_kernels_are_interpreted(tmp_path):
    spawn(checks.check_all, 2, tmp_path, 3, 40, (torch.float32, torch.bfloat16), False)
    spawn(checks.check_equal_bits, 4, tmp_path, ((3, 64), (2, 72)), (torch.float32, torch.bfloat16))


class Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts collectives, and the elements that each rank sends."""

    def __init__(self):
        super().__init__()
        self.names, self.elements = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")) and "wait_tensor" not in name:
            self.names.append(name.split(".")[1])
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def check_collectives(rank, ranks):
    from torch.distributed.tensor.debug import CommDebugMode

    n_rows, width = 16, 12
    x, ids = torch.randn(n_rows, width), torch.arange(n_rows)
    calls = {
        "cross_entropy": (lambda x: parallel.cross_entropy(x, ids), 0),
        "smoothed": (lambda x: parallel.cross_entropy(x, ids, label_smoothing=0.1, softcap=5.0, z_loss=0.1), 0),
        "token_logprobs": (lambda x: parallel.token_logprobs(x, ids, return_entropy=True)[0], 0),
        "logsumexp": (parallel.logsumexp, 0),
        "softmax": (parallel.softmax, 1),
        "log_softmax": (parallel.log_softmax, 1),
    }
    for name, (call, backward) in calls.items():
        local = x.clone().requires_grad_()
        with Collectives() as seen, CommDebugMode() as debug:
            y = call(local)
        assert seen.names == ["all_gather_into_tensor"] and debug.get_total_counts() == 1, (name, seen.names)
        assert seen.elements <= 8 * n_rows + 64, (name, seen.elements)
        with Collectives() as seen, CommDebugMode() as debug:
            y.sum().backward()
        assert seen.names == ["all_reduce"] * backward and debug.get_total_counts() == backward, (name, seen.names)
        assert seen.elements == n_rows * backward
    # the backend itself is asked as often: its sequence number counts
    group = torch.distributed.group.WORLD
    before = group._get_sequence_number_for_group()
    parallel.cross_entropy(x.clone().requires_grad_(), ids).backward()
    assert group._get_sequence_number_for_group() - before == 1


def raises_everywhere(match, call):
    """The same error on every rank."""
    with pytest.raises((RuntimeError, ValueError), match=match) as found:
        call()
    said = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(said, str(found.value))
    assert len(set(said)) == 1, said


def check_disagreements(rank, ranks):
    x, ids = torch.randn(6, 5), torch.arange(6)
    raises_everywhere(
        r"dtype torch.float32 on rank 0; dtype torch.bfloat16 on rank 1",
        lambda: parallel.cross_entropy(x.to((torch.float32, torch.bfloat16)[rank]), ids),
    )
    raises_everywhere(
        r"op parallel.cross_entropy on rank 0; op parallel.logsumexp on rank 1",
        lambda: parallel.logsumexp(x) if rank else parallel.cross_entropy(x, ids),
    )
    raises_everywhere(
        r"label_smoothing 0.0 on rank 0; label_smoothing 0.25 on rank 1",
        lambda: parallel.cross_entropy(x, ids, label_smoothing=0.25 * rank),
    )
    raises_everywhere(
        r"temperature 1.0 on rank 0; temperature 2.0 on rank 1",
        lambda: parallel.token_logprobs(x, ids, temperature=1.0 + rank),
    )
    raises_everywhere(
        r"do not make up 10 columns in rank order: \[0, 5\) on rank 0, \[0, 5\) on rank 1",
        lambda: parallel.logsumexp(x, vocab_start=0, vocab_size=10),
    )
    raises_everywhere(r"n_rows 6 on rank 0; n_rows 5 on rank 1", lambda: parallel.logsumexp(x[: 6 - rank], check=True))
    assert parallel.logsumexp(x, check=True).shape == (6,)


def check_corners(rank):
    where = dict(vocab_start=6 * rank, vocab_size=12)
    columns = slice(6 * rank, 6 * rank + 6)
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    x[0] = -float("inf")
    x[1, 6:] = -float("inf")  # a whole shard
    x[2, 3] = float("inf")
    x[3, 8] = float("nan")
    x[4, 1] = -float("inf")
    target = torch.tensor([1, 7, 3, 2, 1, 11])
    for options in ({}, dict(label_smoothing=0.1)):
        want = torch.nn.functional.cross_entropy(x, target, reduction="none", **options)
        got = parallel.cross_entropy(x[:, columns], target, reduction="none", **options, **where)
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m, o=options: f"{o}: {m}")
    torch.testing.assert_close(parallel.logsumexp(x[:, columns], **where), torch.logsumexp(x, -1), equal_nan=True)
    for name in ("softmax", "log_softmax"):
        want = getattr(torch, name)(x, -1)[:, columns]
        torch.testing.assert_close(getattr(parallel, name)(x[:, columns], **where), want, equal_nan=True)
    want = fs.token_logprobs(x, target, return_entropy=True)
    got = parallel.token_logprobs(x[:, columns], target, return_entropy=True, **where)
    torch.testing.assert_close(got[0], want[0], equal_nan=True)
    torch.testing.assert_close(got[1], want[1], equal_nan=True)
    with pytest.raises(IndexError, match="Target 12 is out of bounds"):
        parallel.cross_entropy(x[:, columns], torch.full((6,), 12), **where)
    # no rows; and a rank without columns
    assert parallel.logsumexp(x[:0, columns], **where).shape == (0,)
    local = x[5:, : 12 * (1 - rank)].clone().requires_grad_()
    loss = parallel.cross_entropy(local, target[5:], vocab_start=12 * rank, vocab_size=12)
    loss.backward()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x[5:], target[5:]))
    # over the logits
    local = torch.randn(4, 6).requires_grad_()
    held, want = local.detach().clone(), torch.empty(0)
    kept = held.clone().requires_grad_()
    ids = torch.arange(4)
    parallel.cross_entropy(kept, ids).backward()
    y = local * 1.0
    parallel.cross_entropy(y, ids, inplace_backward=True).backward()
    torch.testing.assert_close(local.grad, kept.grad)
    torch.testing.assert_close(y.detach(), kept.grad)


def late(rank, ranks, device):
    from datetime import timedelta

    group = torch.distributed.new_group(list(range(ranks)), timeout=timedelta(seconds=2))
    if rank:
        threading.Event().wait(4)  # it never calls
        return
    with pytest.raises(RuntimeError, match="(?i)timed out|timeout"):
        parallel.cross_entropy(torch.randn(4, 6), torch.arange(4), group=group)


@pytest.mark.extended
def test_a_rank_that_never_comes(plain, tmp_path):
    """Its group's timeout ends the wait."""
    spawn(late, 2, tmp_path)


# --- 8 simulated shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_cols", "dtype"),
    [
        (64, torch.float32),
        pytest.param(72, torch.bfloat16, marks=pytest.mark.extended),
        pytest.param(256, torch.bfloat16, marks=pytest.mark.extended),
    ],
)
def test_equal_bits_on_1_2_4_and_8_ranks(n_cols, dtype, monkeypatch):
    x, target, weight = checks.logits(3, n_cols, dtype, torch.device("cpu"))
    found = {}
    for ranks in (1, 2, 4, 8):

        def of_rank(group, ranks=ranks):
            each = n_cols // ranks
            columns = slice(group.rank() * each, (group.rank() + 1) * each)
            with fs.batch_invariant():
                return dict(checks.results(x, target, weight, columns, group))

        parts = simulated(of_rank, ranks, monkeypatch)
        found[ranks] = {
            name: torch.cat([p[name] for p in parts], 1) if "gradient" in name or "columns" in name else parts[-1][name]
            for name in parts[0]
        }
    for ranks in (2, 4, 8):
        for name, bits in found[1].items():
            assert torch.equal(found[ranks][name], bits), (name, ranks)


def test_the_bits_differ_without_batch_invariance(monkeypatch):
    """So that the test above can fail."""
    x, target, weight = checks.logits(64, 512, torch.float32, torch.device("cpu"))

    def of_rank(group):
        each = 512 // group.size()
        return parallel.logsumexp(x[:, group.rank() * each : (group.rank() + 1) * each], group=group)

    one, eight = simulated(of_rank, 1, monkeypatch)[0], simulated(of_rank, 8, monkeypatch)[0]
    torch.testing.assert_close(one, eight)
    assert not torch.equal(one, eight)


def test_shards_that_are_no_union_of_segments(monkeypatch):
    def of_rank(width, **where):
        def call(group):
            with fs.batch_invariant():
                parallel.logsumexp(torch.zeros(2, width), group=group, **where)

        simulated(call, 1, monkeypatch)

    with pytest.raises(ValueError, match="multiple of 8, not 12; pad it to 16"):
        of_rank(12)
    with pytest.raises(ValueError, match=r"whole segments of 2 columns, an eighth of 16.*not columns \[3, 7\)"):
        of_rank(4, vocab_start=3, vocab_size=16)


def test_arguments(monkeypatch):
    x, ids = torch.zeros(2, 4), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        parallel.cross_entropy(x, ids)

    def one(call):
        return simulated(lambda g: call(dict(group=g)), 1, monkeypatch)

    with pytest.raises(ValueError, match="vocab_start needs vocab_size"):
        one(lambda w: parallel.logsumexp(x, vocab_start=0, **w))
    with pytest.raises(ValueError, match=r"columns \[2, 6\) of rank 0 are outside \[0, 5\)"):
        one(lambda w: parallel.logsumexp(x, vocab_start=2, vocab_size=5, **w))
    with pytest.raises(ValueError, match="rank 0 of 1 holds 4 of 5 columns, where an even cut has 5"):
        one(lambda w: parallel.logsumexp(x, vocab_size=5, **w))
    with pytest.raises(TypeError, match="local_logits must be a Tensor"):
        one(lambda w: parallel.softmax([1.0], **w))
    with pytest.raises(ValueError, match="must have the shape"):
        one(lambda w: parallel.cross_entropy(x, ids[:1], **w))
    with pytest.raises(NotImplementedError, match="not implemented for torch.int64"):
        one(lambda w: parallel.logsumexp(x.long(), **w))
    with pytest.raises(TypeError, match="quantized|must be a Tensor"):
        one(lambda w: parallel.linear_cross_entropy(x, None, ids, **w))
    local = x.clone().requires_grad_()

    def twice(where):
        loss = parallel.cross_entropy(local, ids, **where)
        torch.autograd.grad(loss, local, create_graph=True)

    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        one(twice)


# --- corners that a reader found --------------------------------------------------------------------------------------


def shared(call, ranks, monkeypatch):
    """call(where, rank) on simulated ranks, whose results are equal; that of the first."""
    found = simulated(lambda group: call(dict(group=group), group.rank()), ranks, monkeypatch)
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"z_loss": 0.1}])
def test_smoothing_where_a_rank_has_no_columns(options, monkeypatch):
    x, target = torch.randn(4, 10), torch.randint(0, 10, (4,))
    options = dict(options, label_smoothing=0.1)

    def call(where, rank):
        local = x if rank == 0 else x[:, :0]
        return parallel.cross_entropy(local, target, vocab_start=10 * rank, vocab_size=10, **where, **options)

    torch.testing.assert_close(shared(call, 2, monkeypatch), fs.cross_entropy(x, target, **options))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1}])
def test_an_ignored_row_has_no_gradient_whatever_it_holds(options, monkeypatch):
    x, target = torch.randn(4, 16), torch.tensor([-100, 3, -100, 12])
    x[0, 3], x[2, 9] = float("nan"), float("inf")

    def of(group):
        local = x[:, 8 * group.rank() : 8 * group.rank() + 8].clone().requires_grad_()
        parallel.cross_entropy(local, target, group=group, **options).backward()
        return local.grad

    dx = torch.cat(simulated(of, 2, monkeypatch), 1)
    assert (dx[::2] == 0.0).all() and dx[1::2].isfinite().all() and (dx[1::2] != 0.0).any()


@pytest.mark.interpreted
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "sum"}])
def test_hooks_may_give_saved_tensors_back_with_other_strides(options, monkeypatch):
    x, target = torch.randn(4, 16), torch.tensor([1, 9, -100, 15])
    exact = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(exact, target, **options), exact)
    spread = lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t  # noqa: E731

    def of(group):
        local = x[:, 8 * group.rank() : 8 * group.rank() + 8].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, spread):
            loss = parallel.cross_entropy(local, target, group=group, **options)
        loss.backward()
        return local.grad

    torch.testing.assert_close(torch.cat(simulated(of, 2, monkeypatch), 1), wanted.float())


@pytest.mark.parametrize("weighted", [False, True])
def test_a_smoothed_loss_of_shards_with_hidden_classes(weighted, monkeypatch):
    """A shard has its target elsewhere, and its first, middle and last class are hidden."""
    n_cols, lowest = 200, torch.finfo(torch.float32).min if weighted else -1e9
    visible = torch.tensor([1, 31, 61, 91, 121, 151, 181])
    x, weight = torch.full((4, n_cols), lowest), torch.zeros(n_cols)
    x[:, visible], weight[visible] = torch.randn(4, 7), torch.rand(7) + 0.1
    if not weighted:  # a hidden class is part of the loss
        x[:, 2:-2] = torch.randn(4, n_cols - 4)
    target, given = visible[torch.randint(0, 7, (4,))], weight if weighted else None
    wide = None if given is None else given.double()
    want = torch.nn.functional.cross_entropy(x.double(), target, wide, label_smoothing=0.1)

    def call(where, rank):
        columns = slice(50 * rank, 50 * rank + 50)
        of_rank = None if given is None else given[columns]
        return parallel.cross_entropy(x[:, columns], target, weight=of_rank, label_smoothing=0.1, **where)

    torch.testing.assert_close(shared(call, 4, monkeypatch), want.float())


def test_an_entropy_of_shards_far_apart(monkeypatch):
    x = torch.full((1, 10), -3.4e38)
    x[0, 5:] = 3e38

    def call(where, rank):
        ids = torch.zeros(1, dtype=torch.int64)
        return parallel.token_logprobs(x[:, 5 * rank : 5 * rank + 5], ids, return_entropy=True, **where).entropy

    torch.testing.assert_close(shared(call, 2, monkeypatch), torch.tensor([5.0]).log())


def test_rows_that_share_memory_are_not_overwritten(monkeypatch):
    memory, target = torch.randn(50), torch.randint(0, 40, (3,))

    def gradient(inplace):
        def call(where, rank):
            x = memory.clone().as_strided((3, 40), (2, 1)).requires_grad_()
            parallel.cross_entropy(x, target, inplace_backward=inplace, **where).backward()
            return x.grad

        return simulated(lambda group: call(dict(group=group), 0), 1, monkeypatch)[0]

    torch.testing.assert_close(gradient(True), gradient(False))


def test_a_fake_call_leaves_nothing_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fused_softmax.parallel.agreement import header_tensor

    for _ in range(2):
        with FakeTensorMode():
            like = torch.empty(0)
            fake = header_tensor([1, 2, 375], 1, like)
        made = header_tensor([1, 2, 375], 1, torch.empty(0))
        assert type(fake) is not torch.Tensor and type(made) is torch.Tensor


def test_a_row_has_the_bits_that_it_has_alone(monkeypatch):
    x, ids = torch.randn(300, 64), torch.zeros(300, dtype=torch.int64)

    def of(rows):
        def call(where, rank):
            with fs.batch_invariant():
                found = parallel.token_logprobs(x[rows], ids[rows], return_entropy=True, **where)
            return torch.stack((found.logprobs, found.entropy))

        return shared(call, 1, monkeypatch)

    whole = of(slice(None))
    assert all(torch.equal(of(slice(i, i + 1))[:, 0], whole[:, i]) for i in range(0, 300, 20))


def test_what_is_returned_is_not_what_is_kept(monkeypatch):
    def call(where, rank):
        x = torch.randn(3, 8, requires_grad=True)
        found = parallel.token_logprobs(x, torch.zeros(3, dtype=torch.int64), return_entropy=True, **where)
        loss = found.entropy.sum()
        with torch.no_grad():
            found.entropy.mul_(2)
        loss.backward()
        return x.grad

    assert shared(call, 1, monkeypatch).isfinite().all()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "missing", ["_pack", "_merge_loss", "_merge_statistics", "_factors", "OF_SHARDS", "of softmax"]
)
def test_a_kernel_that_does_not_compile(missing, monkeypatch):
    """PyTorch's formulas take its place, for one that is right by itself."""
    from fused_softmax.launch import cross_entropy_gradient, softmax_shards, vocab_shards
    from fused_softmax.launch.availability import KernelUnavailable

    x, target, weight = checks.logits(4, 32, torch.float32, torch.device("cpu"))

    def of(group):
        columns = slice(16 * group.rank(), 16 * group.rank() + 16)
        local = x[:, columns].clone().requires_grad_()
        if missing == "of softmax":
            with fs.batch_invariant():  # whose sums are gathered: the simulated group adds nothing up
                y = parallel.log_softmax(local, group=group)
                (y.square() + parallel.softmax(local, group=group)).sum().backward()
            return y.detach(), local.grad
        loss = parallel.cross_entropy(local, target, weight[columns], group=group, label_smoothing=0.1, z_loss=0.1)
        logp = parallel.token_logprobs(local, target.clamp(min=0), group=group)
        (loss + logp.sum()).backward()
        return loss.detach(), logp.detach(), local.grad

    want = simulated(of, 2, monkeypatch)

    def unavailable(*plan):
        called.append(missing)
        raise KernelUnavailable(missing)

    called = []
    for name in ("SUMS", "GRADIENT", "LOG_SOFTMAX") if missing == "of softmax" else (missing,):
        module = {"of softmax": softmax_shards, "OF_SHARDS": cross_entropy_gradient}.get(missing, vocab_shards)
        op = getattr(module, name)
        monkeypatch.setattr(module, name, type(op)(op.planner, unavailable) if name.isupper() else unavailable)
    for got, known in zip(simulated(of, 2, monkeypatch), want, strict=True):
        for a, b in zip(got, known, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m: f"{missing}: {m}")
    assert bool(called) == INTERPRETED


def test_class_probabilities_and_dtensors_are_refused(monkeypatch):
    def call(where, rank):
        with pytest.raises(NotImplementedError, match="class probabilities"):
            parallel.cross_entropy(torch.randn(2, 8), torch.rand(2), **where)
        return torch.zeros(1)

    shared(call, 1, monkeypatch)
