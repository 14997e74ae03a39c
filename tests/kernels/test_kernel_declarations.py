"""A launch follows what a kernel declares: the names of its run-time arguments carry no meaning."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import torch
import triton.language as tl
from planned import problem

from fused_softmax.kernels import cross_entropy_backward, row_statistics, softmax_resident
from fused_softmax.kernels.common.arguments import Float32, Int64, Rows, kernel
from fused_softmax.launch.launcher import RowOp, always, row_launch
from fused_softmax.planning.losses import plan_elementwise
from fused_softmax.planning.softmax import plan
from fused_softmax.planning.types import DEVICES

KERNELS = (
    (softmax_resident, "softmax_resident", plan, 2, 0),
    (row_statistics, "row_statistics_backward", plan_elementwise, 2, 4),
    (cross_entropy_backward, "scale_unless_one", plan_elementwise, 1, 1),
)
FLAGS = dict(PICKS=0, ENTROPY=False, LSE=True, SCALE=0, HAS_MOMENTS=True, SHARDED=False, LOG=False)


def renamed(module, name, folder):
    """The kernel from a copy of its module in which each of its run-time arguments has another name."""
    declared = getattr(module, name).declaration
    with open(module.__file__) as file:
        source = file.read()
    for argument in declared.arguments:
        source = re.sub(rf"\b{argument}\b", f"renamed_{argument}", source)
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.renamed_{name}", path)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    try:
        spec.loader.exec_module(copy)
    finally:
        del sys.modules[spec.name]
    return getattr(copy, name)


@pytest.mark.parametrize(("module", "name", "planner", "rows", "numbers"), KERNELS, ids=[k[1] for k in KERNELS])
def test_a_renamed_argument_changes_no_launch(module, name, planner, rows, numbers, tmp_path):
    device, n_cols = DEVICES["sm_90"], 128256
    x = torch.empty(3, n_cols, dtype=torch.bfloat16)
    chosen = planner(problem(n_cols, ("bfloat16", "bfloat16")), device)
    made = []
    for one in (getattr(module, name), renamed(module, name, tmp_path)):
        op = RowOp(planner, always(lambda one=one: one))
        flags = tuple(item for item in FLAGS.items() if item[0] in one.declaration.constexprs)
        made.append(row_launch(op, (x,) * rows, (), (1,) * numbers, flags, chosen, device))
    original, copy = made
    assert not set(original.kernel.declaration.arguments) & set(copy.kernel.declaration.arguments)
    assert [*original.kernel.declaration.arguments.values()] == [*copy.kernel.declaration.arguments.values()]
    assert original.args[rows:] == copy.args[rows:] and original.grid == copy.grid and original.meta == copy.meta
    assert original.meta.get("num_ctas", 1) == chosen.ctas


def test_an_argument_without_a_declaration_is_an_error():
    def undeclared(x_ptr: Rows, n_rows: Int64, scale, LOG: tl.constexpr):
        pass

    def mixed(x_ptr: Rows, LOG: tl.constexpr, scale: Float32):
        pass

    for function in (undeclared, mixed):
        with pytest.raises(TypeError, match="every argument is declared"):
            kernel()(function)
