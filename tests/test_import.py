"""Importing does nothing but define names, with or without triton, and plain CPU tensors get torch's own softmax.

Each case is a process of its own, without the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import fused_softmax


def python(code: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    source = os.path.dirname(os.path.dirname(fused_softmax.__file__))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "importing or calling printed something"


def test_import_has_no_side_effects():
    python("""
        import sys, torch
        before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
                  torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state().tolist(), torch.softmax)
        import fused_softmax
        after = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
                 torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state().tolist(), torch.softmax)
        assert before == after
        assert not torch.cuda.is_initialized(), "a CUDA context was made"
        extras = {"matplotlib", "typer", "rich", "safetensors", "hypothesis", "pytest"} & set(sys.modules)
        assert not extras, extras
    """)


def test_import_loads_little():
    """At 93ad51d it took 23 modules of ours and 31 ms of CPU; at these bounds it takes as long."""
    python("""
        import dataclasses, sys, torch
        from torch._library import autograd
        before, made, classes = set(sys.modules), [], []
        make, process = autograd.make_autograd_impl, dataclasses._process_class
        autograd.make_autograd_impl = lambda *args: made.append(args) or make(*args)
        dataclasses._process_class = lambda *args, **options: classes.append(args) or process(*args, **options)
        import fused_softmax as fs
        new = set(sys.modules) - before
        ours = {name for name in new if name.split(".")[0] == "fused_softmax"}
        assert new == ours, new - ours
        assert len(ours) <= 60, len(ours)
        assert len(classes) <= 6, classes  # each takes as long as two modules
        later = {"integrations", "lab", "linear_losses", "nn", "parallel"}
        assert not [name for name in ours if name.split(".")[1:2] in [[one] for one in later]], ours
        assert "fused_softmax.kernels.softmax_resident" not in ours
        assert not made  # 0.6 ms for each operator
        x = torch.randn(2, 3, requires_grad=True)
        torch.ops.fused_softmax.softmax(x, -1, torch.float32).sum().backward()
        assert x.grad is not None and len(made) == 2, made  # and of its gradient
    """)


def test_what_is_imported_later_is_found():
    python("""
        import importlib, pkgutil, sys, torch
        import fused_softmax as fs
        assert set(fs.__all__) <= set(dir(fs)) and "fused_softmax.parallel" not in sys.modules
        for name in ("parallel_read_loss", "linear_token_logprobs", "linear_cross_entropy_backward"):
            assert getattr(torch.ops.fused_softmax, name).default  # as a loaded program asks for it
        for package in ("torch_ops", "parallel"):
            folder = importlib.import_module(f"fused_softmax.{package}")
            for module in pkgutil.iter_modules(folder.__path__, folder.__name__ + "."):
                importlib.import_module(module.name)
        every = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fused_softmax::")]
        assert len(every) >= 25, every
        for name in ("nothing", "parallel_nothing"):
            assert not hasattr(torch.ops.fused_softmax, name) and not hasattr(fs, name)
        names = {}
        exec("from fused_softmax import *", names)
        assert set(fs.__all__) <= set(names)
    """)


def test_dtensors_find_the_rules_of_the_operators():
    python("""
        import sys, torch, torch.distributed.tensor
        import fused_softmax as fs
        assert "fused_softmax.parallel" in sys.modules
    """)


def test_plain_cpu_tensors_get_torchs_own():
    python("""
        import torch, fused_softmax as fs
        x = torch.randn(3, 1000)
        assert torch.equal(fs.softmax(x), torch.softmax(x, -1))
        assert torch.equal(fs.softmax(x, 0, dtype=torch.float64), torch.softmax(x, 0, dtype=torch.float64))
        plan = fs.plan_for(x)
        assert plan.regime == "torch", plan
        assert "cpu" in plan.why.lower(), plan.why
        assert not torch.cuda.is_initialized()
    """)


def test_works_without_triton():
    python("""
        import sys
        sys.modules["triton"] = None  # import triton raises ImportError
        import torch, fused_softmax as fs
        x = torch.randn(3, 1000)
        assert torch.equal(fs.softmax(x), torch.softmax(x, -1))
        plan = fs.plan_for(x)
        assert plan.regime == "torch", plan
        assert plan.why
        try:
            fs.softmax(x, 2)
        except IndexError:
            pass
        else:
            raise AssertionError("no IndexError")
    """)


def test_planning_needs_neither_torch_nor_triton():
    """planning/ is pure: it is loaded without the package, with both blocked."""
    python("""
        import importlib.util, sys, types
        folder = importlib.util.find_spec("fused_softmax").submodule_search_locations[0]
        sys.modules["torch"] = sys.modules["triton"] = None
        package = sys.modules["pure"] = types.ModuleType("pure")
        package.__path__ = [folder]
        plan, told = (importlib.import_module("pure.planning." + name) for name in ("softmax", "types"))
        assert {"sm_80", "sm_90", "sm_100", "sm_120", "gfx942"} <= set(told.DEVICES)
        assert plan.plan(told.Problem(50257, "bfloat16", "bfloat16", 1, True), told.DEVICES["sm_90"]).ctas > 1
    """)
