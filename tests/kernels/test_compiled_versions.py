"""What no version of Triton may add to, or take from, a kernel: vectors, and barriers.

`make compiled` runs these with the pinned Triton, `make compiled-others` with others. With the pinned one it compiles
a sixth of the kernels, and `make compiled-targets` the rest.
"""

from __future__ import annotations

import os
import re

import pytest
from launches import BFLOAT16, as_called, cross_compiled, launches, rows_like
from params import few

from fused_softmax.lab.fuzz.coverage import all_kernels
from fused_softmax.launch.compile import compile_kernel
from fused_softmax.launch.layout import problem_of
from fused_softmax.launch.softmax import softmax_launch
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES

pytestmark = pytest.mark.compiled

KERNELS = {name: (launch, plan) for name, launch, plan in launches("sm_90")}
# one of each kernel that runs on a cluster
ON_CLUSTERS = (
    "softmax bfloat16 50257", "softmax float32 1048576", "softmax backward bfloat16 128256",
    "softmax backward bfloat16 1048576", "softmax backward float32 1048576", "log_softmax backward float32 262144",
    "row_statistics torch.bfloat16 128256", "cross_entropy_forward torch.bfloat16 128256",
    "cross_entropy_resident torch.bfloat16 50257", "masked_softmax additive torch.bfloat16 50257",
    "masked_softmax backward torch.bfloat16 50257", "count_targets", "reduce_losses",
)  # fmt: skip
# one of each kernel that takes several rows a program, whose width is 0 for a row that does not exist
SHORT_ROWS = (
    "softmax bfloat16 64", "softmax float32 64", "softmax backward bfloat16 1000", "log_softmax bfloat16 400",
    "log_softmax bfloat16 1000", "softmax float32 1000",
    "row_statistics torch.bfloat16 64", "row_statistics entropy torch.bfloat16 1000",
    "row_statistics backward torch.bfloat16 1000", "cross_entropy_forward torch.bfloat16 1000",
    "cross_entropy_resident torch.bfloat16 1000", "cross_entropy_backward torch.bfloat16 1000",
    "cross_entropy_backward torch.float32 64", "masked_softmax causal torch.bfloat16 64",
    "masked_softmax additive torch.bfloat16 64", "masked_softmax backward torch.bfloat16 64",
)  # fmt: skip


def one_of_each() -> list[str]:
    """The name of one launch of each kernel, on a cluster and not, and with each set of its options."""
    found: dict[tuple[object, ...], str] = {}
    for name, (launch, _) in KERNELS.items():
        options = (n for n in launch.kernel.declaration.constexprs if launch.meta.get(n) is True)
        on_cluster = launch.meta.get("CTAS", 1) > 1
        kind = (
            launch.kernel.fn.__name__,
            on_cluster,
            *(n for n in options if n not in ("PTX", "EARLY", "TRIGGER", "WAITS")),
        )
        found.setdefault(kind, name)
    return list(found.values())


ALL = one_of_each()
BY_DEFAULT = ALL if os.environ.get("FUSED_SOFTMAX_WHOLE") == "1" else ALL[::6]


def test_no_kernel_is_left_out():
    assert {launch.kernel.fn.__name__ for launch, _ in KERNELS.values()} == {k.fn.__name__ for k in all_kernels()}


@pytest.mark.parametrize("name", few(BY_DEFAULT, ALL))
def test_every_kernel_compiles(name):
    """What one version takes another may refuse, and then PyTorch's own kernel runs."""
    used, _ = cross_compiled(KERNELS[name][0], "sm_90")
    assert used.fits()


@pytest.mark.parametrize("name", ON_CLUSTERS)
def test_a_cluster_meets_once_and_ends_without_waiting(name):
    """Beside the exchange's barrier there is none, and what ends the kernel waits neither for stores nor for CTAs."""
    used, asm = cross_compiled(KERNELS[name][0], "sm_90")
    assert used.num_ctas > 1 and used.cluster_barriers == 1
    machine = asm["sass"]
    assert len(re.findall(r"\bUCGABAR_ARV", machine)) == 1
    after = machine[max(found.start() for found in re.finditer(r"\bSTG", machine)) :]
    assert not re.search(r"MEMBAR|UCGABAR|BAR\.SYNC", after)
    # a thread ends where it meets the exit: no store of the program text may lie behind it
    for unreached in re.split(r"\n\s*exit;", asm["ptx"])[1:]:
        assert not re.search(r"\bst\.(?:global|async|shared)|\bred\.|\batom\.", unreached)


@pytest.mark.parametrize("name", SHORT_ROWS)
def test_rows_of_a_warp_or_less_are_moved_16_bytes_at_a_time(name):
    launch, plan = KERNELS[name]
    assert plan.rows > 1 or plan.regime == "warp"
    used, _ = cross_compiled(launch, "sm_90")
    assert plan.vec * launch.args[0].element_size() == 16 == used.widest_load_bytes
    rows_written = launch.kernel.arg_names[1] in ("y_ptr", "dx_ptr") or "backward" in name
    assert not rows_written or used.widest_store_bytes == 16


@pytest.mark.parametrize("name", ("softmax backward float32 50257", "softmax backward bfloat16 50257"))
def test_a_gradient_issues_its_loads_before_it_waits_for_one(name):
    """The bytes in flight are the speed: adding up what came first is no work to start with."""
    used, asm = cross_compiled(KERNELS[name][0], "sm_90")
    assert used.spilled_bytes == 0
    vectors = [found.start() for found in re.finditer(r"\bLDG\.\S*128", asm["sass"])]
    assert len(vectors) == dict(used.loads)[16]
    assert "FFMA" not in asm["sass"][vectors[0] : vectors[-1]]


@pytest.mark.parametrize(
    ("name", "registers"),
    [("row_statistics torch.bfloat16 50257", 40), ("row_statistics torch.bfloat16 128256", 64)],
)
def test_an_online_reduction_keeps_its_programs_on_a_multiprocessor(name, registers):
    """A reduction in a thread that holds several partial results at a time costs a program of each multiprocessor."""
    assert cross_compiled(KERNELS[name][0], "sm_90")[0].registers <= registers


@pytest.mark.parametrize(
    ("op", "n_cols", "registers"),
    [("softmax backward", 128256, 128), ("log_softmax backward", 155278, 128), ("log_softmax", 131700, 80)],
)
def test_a_row_that_is_converted_twice_is_held_as_loaded(op, n_cols, registers):
    """Float32 numbers that are held as well cost programs of each multiprocessor. The limits are Triton 3.6's."""
    x, backward, log = rows_like(n_cols, BFLOAT16), "backward" in op, op.startswith("log")
    tensors = (x, x, x) if backward else (x, x)
    chosen = plan(problem_of(*tensors, backward=backward, log=log), DEVICES["sm_90"])
    assert chosen.recompute and chosen.max_registers is None
    launch = softmax_launch(tensors, chosen, log=log, backward=backward, device=DEVICES["sm_90"])
    used, _ = cross_compiled(as_called(launch), "sm_90")
    assert used.spilled_bytes == 0 and used.registers <= registers


def test_a_loss_of_narrow_rows_keeps_its_programs_on_a_multiprocessor():
    """At least 9 programs of 4 warps; 10 with Triton 3.7."""
    used, _ = cross_compiled(KERNELS["cross_entropy_resident torch.bfloat16 4096"][0], "sm_90")
    assert used.spilled_bytes == 0 and used.num_warps == 4 and used.registers <= 56


@pytest.mark.parametrize("name", KERNELS)
def test_no_option_is_left_to_a_version(name):
    """Defaults change: fused multiply-adds are off from Triton 3.10 on, and backends differ in num_stages."""
    meta = KERNELS[name][0].meta
    assert meta["enable_fp_fusion"] is True and meta["num_stages"] >= 1


def test_a_call_compiles_with_the_options_of_its_launch(monkeypatch):
    """compile_kernel hands the options to Triton, and none of them to the kernel as a constant."""
    import triton

    given = {}
    launch = KERNELS["softmax bfloat16 64"][0]

    class Compiled:
        def _init_handles(self):
            pass

    def compile(source, target, options):
        given.update(options, constants=set(source.constants))
        return Compiled()

    monkeypatch.setattr(triton, "compile", compile)
    monkeypatch.setattr(
        triton.runtime.driver, "_active", type("Driver", (), {"get_current_target": lambda self: None})()
    )
    dtype = launch.args[0].dtype
    compile_kernel(launch.kernel, ((dtype, 16), (dtype, 16)), {**launch.meta, "LOG": None}, 0)
    assert given["enable_fp_fusion"] is True and given["num_stages"] == launch.meta["num_stages"]
    assert not given["constants"] & {"enable_fp_fusion", "num_stages"}
