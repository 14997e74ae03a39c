"""Softmax, its gradient, logsumexp and cross-entropy over a dimension that is not the last, in each regime."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from cases import assert_contract, assert_forward, assert_planes, edge_rows

import fused_softmax as fs
from fused_softmax.launch import cross_entropy_spatial, spatial
from fused_softmax.launch.device import device_of
from fused_softmax.planning.types import Plan

pytestmark = pytest.mark.gpu

SHAPES = (
    (3, 19, 1000), (2, 150, 333), (2, 1000, 512), (500, 5, 7), (2, 3000, 512), (1, 4096, 1000), (2, 9000, 65),
    (1, 300000, 8), (7, 2500, 3),
    # clusters of 2 to 16, staged chunks, and columns that start in the middle of a sector, where the last tile is short
    # a plane in added shared memory, one that a cluster shares, and planes in registers
    (3, 300, 119), (2, 400, 301), (3, 1450, 43), (2, 3000, 33), (50, 3001, 5),
    (2, 150, 1000), (3, 600, 520), (2, 700, 1032), (2, 1500, 2064), (1, 2000, 1032), (1, 2400, 272), (1, 3300, 1096),
    # columns in bundles
    (2, 66853, 17), (3, 9001, 103), (1, 26308, 72),
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_and_its_gradient(shape, dtype):
    x = torch.randn(shape, device="cuda", dtype=dtype) * 3
    x[0, 1, 0] = -float("inf")
    assert_contract(fs.softmax(x, 1), x, 1)
    assert_contract(fs.softmax(x, 1, dtype=torch.float32), x, 1, torch.float32)
    dy = torch.randn_like(x)
    for ours, torchs in ((fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)):
        leaf, own, exact = (t.detach().clone().requires_grad_() for t in (x, x, x.double()))
        ours(leaf, 1).backward(dy)
        torchs(own, 1).backward(dy)
        torchs(exact, 1).backward(dy.double())
        # the gradient is a difference of numbers of this size: dy, and for log_softmax p*sum(dy)
        scale = dy.double().abs().amax(1, keepdim=True)
        if ours is fs.log_softmax:
            p = torch.softmax(x.double(), 1).amax(1, keepdim=True)
            scale = scale + p * dy.double().sum(1, keepdim=True).abs()
        error, torch_error = ((t.grad.double() - exact.grad).abs().amax(1, keepdim=True) for t in (leaf, own))
        worst, torchs_worst = (float((e / scale).max()) / torch.finfo(dtype).eps for e in (error, torch_error))
        assert worst <= 2 * torchs_worst + 4, f"{ours.__name__}: {worst:.1f} eps, torch {torchs_worst:.1f}"


def check_planes(pick: random.Random, shape: tuple[int, int, int]) -> list[Plan]:
    """The plans of a softmax and of its gradient, after a check of their results and of the memory next to them."""
    return assert_planes(shape, pick.choice(DTYPES), pick.random() < 0.4, "cuda")


@pytest.mark.parametrize("seed", range(10))
def test_random_planes(seed):
    """Planes that move as pieces, between sentinels: each kernel, and what lies beside the output."""
    pick, gathered, ways = random.Random(seed), 0, set()
    large = seed >= 6  # in shared memory that the launch adds, or on a cluster
    for _ in range(12):
        n_cols, inner = round(2 * 500 ** pick.random()), round(2 * 300 ** pick.random()) - pick.choice((0, 1))
        if large:
            inner = round(9 * 50 ** pick.random()) | 1
            n_cols = round(15000 * 20 ** pick.random() / inner)
        shape = (pick.choice((1, 2, 37, 1 + 10**6 // (n_cols * inner))), n_cols, inner)
        chosen = check_planes(pick, shape)
        gathered += sum(plan.gathered or plan.periodic > 0 for plan in chosen)
        ways |= {(plan.periodic > 0, plan.ctas > 1, plan.dynamic_bytes > 0) for plan in chosen}
    assert gathered >= 6
    if large and torch.cuda.get_device_capability()[0] == 9:
        assert {(False, False, True), (True, True, False)} <= ways  # in added shared memory, in a cluster's registers


@pytest.mark.parametrize("seed", range(8))
def test_random_planes_in_registers(seed):
    """As `test_random_planes`, of few positions: one program or a cluster, and planes that start anywhere."""
    pick, sizes = random.Random(1000 + seed), set()
    for _ in range(10):
        inner = round(2 * 128 ** pick.random())
        n_cols = round(20_000 * 30 ** pick.random() / inner)
        shape = (pick.choice((1, 3, 1 + 3 * 10**6 // (n_cols * inner))), n_cols, inner)
        sizes |= {plan.ctas for plan in check_planes(pick, shape) if plan.periodic}
    if torch.cuda.get_device_capability()[0] == 9:
        assert len(sizes) >= 2, sizes


@pytest.mark.parametrize("seed", range(6))
def test_random_bundles(seed):
    """As `test_random_planes`, of many columns that are read in bundles, in planes that start anywhere."""
    pick, bundled = random.Random(2000 + seed), 0
    for _ in range(8):
        inner = round(3 * 200 ** pick.random())
        n_cols = round(7200 * 10 ** pick.random() * max(1.0, 60 / inner))
        shape = (pick.choice((1, 2, 5)), n_cols, inner)
        bundled += sum(plan.bundle > 0 for plan in check_planes(pick, shape))
    assert bundled >= 5


def test_bundles_past_two_to_the_31_elements():
    x = torch.randn((2, 66_000_001, 17), device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    assert x.numel() > 2**31 and spatial.softmax_plan((x, y), False, False, False, device_of(x)).bundle > 0
    spatial.prepare_softmax((x, y), False, False, False)((x, y))
    for plane in range(2):
        own = x[plane].float()
        want = torch.exp(own - torch.logsumexp(own, 0))
        assert ((y[plane].float() - want).abs() <= 0.01 * want).all()


@pytest.mark.parametrize(
    "shape", [(3, 300, 119), (2, 400, 301), (3, 1450, 43), (2, 3000, 33), (5, 3001, 5), (2, 66853, 17)]
)
def test_large_planes_in_place_and_their_edge_rows(shape):
    """The same bits in place, but for other tiles; infinities and NaN, also where another CTA has the column."""
    outer, n_cols, inner = shape
    x = torch.randn(shape, device="cuda")
    y, given = fs.softmax(x, 1), x.clone()
    apart, in_place = (spatial.softmax_plan((x, t), False, False, False, device_of(x)) for t in (y, x))
    spatial.prepare_softmax((x, x), False, False, False)((x, x))
    assert_forward(x, given, False)
    assert torch.equal(x, y) or (apart.overlap and apart != in_place)  # tiles that share positions
    rows = list(edge_rows(n_cols, torch.float32, "cuda").values())
    x = torch.stack([rows[i % len(rows)] for i in range(outer * inner)]).view(outer, inner, n_cols)
    x = x.transpose(1, 2).contiguous()
    assert_contract(fs.softmax(x, 1), x, 1)


# planes of which a program has several, the last one fewer; whole columns, short runs and parts of a logsumexp
SMALL_PLANES = ((1001, 3, 3), (301, 2, 144), (777, 20, 6), (333, 200, 4), (65, 64, 196), (9, 700, 49), (3, 2100, 77))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + SMALL_PLANES)
def test_logsumexp_and_its_gradient(shape, dtype):
    x = (torch.randn(shape, device="cuda") * 3).to(dtype).requires_grad_()
    want, eps = torch.logsumexp(x.detach().double(), 1), torch.finfo(dtype).eps
    lse = fs.logsumexp(x, 1)
    assert ((lse.double() - want).abs() <= eps * (1 + want.abs())).all()
    g = torch.randn_like(lse)
    (dx,) = torch.autograd.grad(lse, x, g)
    exact = g.double()[:, None] * (x.detach().double() - lse.detach().double()[:, None]).exp()
    torch.testing.assert_close(dx.double(), exact, rtol=4 * eps + 1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("shape", [*SMALL_PLANES, (2, 1000, 512), (2, 3000, 512), (3, 1450, 43), (2, 1320, 3)])
def test_casts_and_their_gradients(shape, dtype):
    x = (torch.randn(shape, device="cuda") * 3).to(dtype).requires_grad_()
    y = fs.softmax(x, 1, dtype=torch.float32)
    exact = torch.softmax(x.detach().double(), 1)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-9)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    want = exact * (dy.double() - (exact * dy.double()).sum(1, keepdim=True))
    torch.testing.assert_close(dx.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_on_neither_outer_nor_inner(shape):
    x = torch.randn(shape, device="cuda")
    assert torch.equal(fs.softmax(x[:1], 1), fs.softmax(x, 1)[:1])
    half = max(2, shape[2] // 2)  # one position is a row, with the bits of rows
    with fs.batch_invariant():
        assert torch.equal(fs.softmax(x[:, :, :half].contiguous(), 1), fs.softmax(x, 1)[:, :, :half])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("classes", [3, 19, 150, 1000])
def test_cross_entropy_of_images(classes, inplace, dtype):
    x = torch.randn(2, classes, 31, 33, device="cuda", dtype=dtype) * 2
    target = torch.randint(0, classes, (2, 31, 33), device="cuda")
    target[0, :5] = -100
    exact = x.double().requires_grad_()
    want = F.cross_entropy(exact, target)
    (2 * want).backward()
    leaf = x.clone().requires_grad_()
    loss = fs.cross_entropy(leaf * 1.0, target, inplace_backward=inplace)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    (2 * loss).backward()
    scale = exact.grad.abs().max()
    error = (leaf.grad.double() - exact.grad).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * scale, f"{error / scale / torch.finfo(dtype).eps:.1f} eps"


@pytest.mark.parametrize("seed", range(16))
def test_losses_of_random_planes(seed, monkeypatch):
    """Few classes and many. Programs and clusters that look at an upstream gradient take several blocks each."""
    monkeypatch.setattr(cross_entropy_spatial, "LOOKS", 128)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    classes = rng.randint(2, 30) if seed % 2 else round(2 ** rng.uniform(8, 13))
    inner = rng.choice((7, 49, 64, 100, 196, 333, 1024))
    outer = max(1, rng.choice((300_000, 6_000_000)) // (classes * inner))
    dtype, up = rng.choice((torch.bfloat16, torch.float32)), rng.choice((1.0, -0.5))
    x = (torch.randn(outer, classes, inner, device="cuda") * 3).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (outer, inner), device="cuda")
    target[0, ::3] = -100
    loss = fs.cross_entropy(x, target)
    (dx,) = torch.autograd.grad(loss, x, torch.full_like(loss, up))
    exact = x.detach().double().requires_grad_()
    want = F.cross_entropy(exact, target)
    (wanted,) = torch.autograd.grad(want, exact, torch.full_like(want, up))
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    error, scale = (dx.double() - wanted).abs().max(), wanted.abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * scale, f"{error / scale / torch.finfo(dtype).eps:.1f} eps"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 44, 61])
def test_cross_entropy_of_cropped_images(width, dtype):
    whole = torch.randn(3, 150, 40, 96, device="cuda", dtype=dtype) * 2
    whole[..., 8 + width] = float("nan")  # next to the images
    x, target = whole[:, :, 3:-2, 8 : 8 + width], torch.randint(0, 150, (3, 35, width), device="cuda")
    found = []
    for images in (x, x.contiguous()):
        leaf = images.detach().requires_grad_()
        loss = fs.cross_entropy(leaf, target)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-9)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_crops(dtype, seed):
    """Of one program and of clusters, in vectors of all lengths; what lies next to a crop changes nothing."""
    rng = random.Random(f"{dtype} {seed}")
    n_cols, rows = round(2 ** rng.uniform(1, 11.5)), rng.randint(2, 60)
    width, eps = rng.choice((2, 3, 8, 12, 30, 61, 64, 200)), torch.finfo(dtype).eps
    whole = torch.randn(rng.randint(1, 5), n_cols, rows + 3, width + 24, device="cuda", dtype=dtype) * 3
    first = rng.choice((0, 1, 4, 8))
    inside = torch.zeros_like(whole, dtype=torch.bool)
    inside[:, :, 1:-2, first : first + width] = True
    whole.masked_fill_(~inside, float("nan"))
    x = whole[:, :, 1:-2, first : first + width]
    for function, reference in ((fs.softmax, torch.softmax), (fs.log_softmax, torch.log_softmax)):
        y, want = function(x, 1), reference(x.double(), 1)
        torch.testing.assert_close(y.double(), want, rtol=2 * eps, atol=max(4e-6, eps / 64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 19, 150, 1000])
def test_a_sure_prediction_has_no_loss(classes, dtype):
    target = torch.randint(0, classes, (2, 900), device="cuda")
    x = torch.full((2, classes, 900), -40.0, device="cuda", dtype=dtype)
    sure = (torch.randn(2, 1, 900, device="cuda") * 9 + 50).to(dtype)
    x.scatter_(1, target.unsqueeze(1), sure.clamp(min=0))
    assert (fs.cross_entropy(x.requires_grad_(), target, reduction="none") == 0).all()


def test_a_target_outside_the_classes_ends_in_a_device_assertion():
    code = (
        "import torch, fused_softmax as fs\n"
        "x, target = torch.randn(2, 19, 8, 8, device='cuda'), torch.zeros(2, 8, 8, dtype=torch.int64, device='cuda')\n"
        "target[1, 2, 3] = 19\n"
        "print(fs.cross_entropy(x, target).item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode and "Assertion" in done.stderr and "Error" in done.stderr, done.stderr[-500:]


@pytest.mark.parametrize("n_cols", (58, 64, 200, 900))
def test_small_terms_of_transposed_rows_are_not_lost(n_cols):
    x = torch.full((4282, n_cols), -16.0, device="cuda", dtype=torch.float16)
    x[:, :: n_cols // 8] = 0
    x = x.t().contiguous().t()
    assert fs.plan_for(x, 1, torch.float32).regime == "strided"
    exact = torch.softmax(x.double(), 1)
    error = (fs.softmax(x, 1, dtype=torch.float32).double() - exact).abs().amax() / exact.amax()
    assert error <= 4 * torch.finfo(torch.float32).eps


# classes and positions of losses with shared factors. In skewed tiles: on 1, 2, 4, 8 and 16 CTAs, of 64, 128 and 256
# positions. Of columns that start together: of 64 and 128 positions, and of 32 in float32
EVEN_LOSSES = [(30, 4100), (45, 1000), (150, 168), (171, 196), (300, 2052), (480, 1104), (1024, 784), (1203, 236)]
EVEN_LOSSES += [(1700, 144), (2300, 2048), (4200, 2052)]
SKEWED_LOSSES = [(45, 1001), (60, 2050), (150, 167), (120, 2051), (300, 241), (480, 1111), (640, 599), (1200, 333)]
SKEWED_LOSSES += [(333, 1502), (1500, 239), (2300, 2051)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SKEWED_LOSSES, *EVEN_LOSSES])
def test_losses_with_shared_factors(shape, dtype, reduction):
    """With an upstream gradient of 1, so that no other kernel writes the gradient again."""
    classes, inner = shape
    x = (torch.randn(3, classes, inner, device="cuda") * 3).to(dtype)
    if torch.cuda.get_device_capability()[0] == 9:
        plan = cross_entropy_spatial.loss_plan(x, None, False)
        few = classes < 64 and inner % 2 == 0
        others = dtype == torch.float32 and (classes > 2048 or few)
        assert (plan.skewed > 0) != others
        assert (plan.overlap > 0) == (plan.skewed > 0 and shape in SKEWED_LOSSES)
    target = torch.randint(0, classes, (3, inner), device="cuda")
    x[0, :, 3], target[0, 3] = float("nan"), -100
    weight = torch.rand(classes, device="cuda") + 0.5 if inner % 3 else None
    leaf, exact = x.clone().requires_grad_(), x.double().nan_to_num(0.0).requires_grad_()
    loss = fs.cross_entropy(leaf, target, weight=weight, reduction=reduction)
    want = F.cross_entropy(exact, target, weight=None if weight is None else weight.double(), reduction=reduction)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    loss.sum().backward()
    want.sum().backward()
    near = 4 * torch.finfo(dtype).eps + 3e-6
    scale = exact.grad.abs().max().item()
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=near, atol=near * 0.1 * scale + least)
