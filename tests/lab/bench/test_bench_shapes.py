"""Random shapes follow from a seed, lie as their layout says, and are checked softmax by softmax."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fused_softmax.lab.bench.cases import Case, shape_text, shaped_cases, workload
from fused_softmax.lab.bench.checking import Judge
from fused_softmax.lab.bench.ops import OPS
from fused_softmax.lab.bench.report import shape_classes
from fused_softmax.lab.bench.run import Request, requested_tables
from fused_softmax.lab.bench.shapes import (
    CLASSES,
    FEWEST,
    LAYOUTS,
    MOST,
    OF_IMAGES,
    SHAPED_OPS,
    class_of,
    random_shapes,
)
from fused_softmax.lab.record import Record, from_json, header, to_json
from fused_softmax.lab.timing import EventStopwatch, input_sets

CPU = torch.device("cpu")
OUTER, N_COLS, INNER = 3, 7, 12


def of(op: str, layout: str) -> Case:
    return Case(op, "float32", OUTER * INNER, N_COLS, outer=OUTER, inner=INNER, layout=layout)


def test_shapes_follow_from_the_seed():
    shapes = random_shapes(80, 7)
    assert shapes == random_shapes(80, 7) != random_shapes(80, 8) and shapes[:20] == random_shapes(20, 7)
    elements = [s.outer * s.n_cols * s.inner for s in shapes]
    assert all(FEWEST <= n <= MOST for n in elements) and sum(n >= MOST // 4 for n in elements) > 30
    assert {class_of(s.n_cols, s.inner, "") for s in shapes} == set(CLASSES)
    assert {s.layout for s in shapes} == set(LAYOUTS) and sum(s.layout == "" for s in shapes) > 45
    assert {s.dtype for s in shapes} == {"bfloat16", "float32"}
    assert any(s.inner % 2 for s in shapes) and any(s.n_cols % 2 for s in shapes)
    assert any(s.inner % 8 in (2, 4, 6) and s.inner > 8 for s in shapes)  # such as 14 x 14
    assert any(s.inner % 8 == 4 and s.inner > 1024 for s in shapes)  # halves of sectors of float32


def test_a_small_budget_has_small_shapes():
    assert all(2**12 <= s.outer * s.n_cols * s.inner <= 2**14 for s in random_shapes(30, 1, 2**14))


@pytest.mark.parametrize(
    ("n_cols", "inner", "layout", "name"),
    [
        (64, 1024, "", "up to 64 columns"),
        (65, 1024, "", "65 to 1,024 columns"),
        (4096, 1024, "", "1,025 to 4,096 columns"),
        (4097, 1024, "", "more columns"),
        (4097, 1022, "", "more columns, inner below 1,024"),
        (4096, 1022, "", "inner below 1,024"),
        (1024, 1023, "", "odd inner below 1,024"),
        (1025, 1023, "", "more columns, odd inner"),
        (4097, 1025, "", "more columns, odd inner"),
        (21, 513 * 513, "", "odd inner"),
        (21, 513 * 513, "cropped", "cropped"),
    ],
)
def test_every_shape_has_a_class(n_cols: int, inner: int, layout: str, name: str):
    assert class_of(n_cols, inner, layout) == name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", SHAPED_OPS)
def test_results_are_judged_softmax_by_softmax(op: str, layout: str):
    if op == "cross_entropy" and layout not in OF_IMAGES:
        pytest.skip("a loss takes the classes of dimension 1")
    case = of(op, layout)
    entry = workload(case)
    inputs = entry.inputs(case.n_rows, case.n_cols, torch.float32, CPU, 0)
    assert inputs[0].numel() == OUTER * N_COLS * INNER and inputs[0].shape[entry.dim] == N_COLS
    assert not torch.isnan(inputs[0]).any()
    if not LAYOUTS[layout].repeats:  # the rows are those of the op itself
        assert torch.equal(entry.as_rows(inputs[0]), OPS[op].inputs(OUTER * INNER, N_COLS, torch.float32, CPU, 0)[0])
    judge = Judge(entry, inputs)
    right = entry.torch_call(*inputs)
    assert judge.judge(right).ok
    parts = [t.clone() for t in (right if isinstance(right, tuple) else (right,))]
    # one softmax of one index of `outer` is wrong
    entry.as_rows(parts[-1])
    parts[-1][1, ..., -1] += 0.1
    assert not judge.judge(tuple(parts) if isinstance(right, tuple) else parts[0]).ok


def test_layouts_lie_as_they_say():
    lies = {
        name: workload(of("softmax", name)).inputs(OUTER * INNER, N_COLS, torch.float32, CPU, 0)[0] for name in LAYOUTS
    }
    strides = {name: x.stride() for name, x in lies.items()}
    assert strides == {
        "": (N_COLS * INNER, INNER, 1),
        "channels last": (N_COLS * INNER, 1, N_COLS),
        "transposed": (N_COLS * INNER, 1, INNER),
        "steps": (2 * N_COLS * INNER, 2 * INNER, 2),
        "steps of columns": (2 * N_COLS * INNER, 2 * N_COLS, 2),
        "cropped": (N_COLS * 4 * 11, 4 * 11, 11, 1),
        "expanded": (0, INNER, 1),
    }


def test_a_copy_of_the_inputs_keeps_the_layout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    x = workload(of("softmax", "steps")).inputs(OUTER * INNER, N_COLS, torch.float32, CPU, 0)[0]
    sets = list(input_sets((x,), "events", torch.device("cuda")))
    assert len(sets) > 1
    for (other,) in sets[1:]:
        assert other.stride() == x.stride() and torch.equal(other, x) and other.data_ptr() != x.data_ptr()


def test_the_table_of_random_shapes():
    request = Request(ops=("softmax", "cross_entropy"), random_shapes=20, seed=4)
    softmax, loss = requested_tables(request, on_gpu=True)
    assert softmax.cases == shaped_cases("softmax", 20, 4) and softmax.systems == (
        "fused_softmax",
        "torch",
        "torch.compile",
    )
    assert {c.layout for c in loss.cases} <= set(OF_IMAGES)
    both = requested_tables(replace(request, ops=("softmax",), dtypes=("bfloat16", "float32")), on_gpu=True)
    assert [c.dtype for c in both[0].cases] == ["bfloat16", "float32"] * 20
    named = requested_tables(Request(ops=("cross_entropy",), tables=("shapes",)), on_gpu=True)[0]
    assert [shape_text(c) for c in named.cases[:2]] == ["16x19x524288"] * 2
    assert all(c.n_cols <= 1000 for c in named.cases) and named.systems == softmax.systems
    with pytest.raises(ValueError, match="takes rows only"):
        requested_tables(Request(ops=("token_logprobs",), tables=("shapes",)), on_gpu=True)
    with pytest.raises(ValueError, match="takes rows only"):
        requested_tables(replace(request, ops=("token_logprobs",)), on_gpu=True)


def test_the_table_of_named_shapes():
    request = Request(ops=("softmax", "cross_entropy"), shapes=((2, 19, 4096), (1, 3, 7)))
    softmax, loss = requested_tables(request, on_gpu=True)
    assert [(shape_text(c), c.dtype, c.layout) for c in softmax.cases[:3]] == [
        ("2x19x4096", "bfloat16", ""), ("2x19x4096", "float32", ""), ("1x3x7", "bfloat16", "")
    ]  # fmt: skip
    assert [c.op for c in loss.cases] == ["cross_entropy"] * 4
    one = requested_tables(replace(request, ops=("logsumexp",), dtypes=("float16",)), on_gpu=True)[0]
    assert [c.dtype for c in one.cases] == ["float16"] * 2 and one.systems == softmax.systems
    with pytest.raises(ValueError, match="takes rows only: --shapes"):
        requested_tables(replace(request, ops=("token_logprobs",)), on_gpu=True)


def timed(system: str, inner: int, ms: float, **fields: object) -> Record:
    found = Record("softmax", system, "bfloat16", 8 * inner, 19, "ok", ms=ms, timed_by=EventStopwatch.describe)
    return replace(found, outer=8, inner=inner, ceiling="copy", **fields)  # type: ignore[arg-type]


def test_the_summary_has_classes_and_the_slowest_next_to_torch():
    records = [
        timed("fused_softmax", 4096, 1.0, fraction=0.9),
        timed("fused_softmax", 8192, 1.0, fraction=0.4),
        timed("fused_softmax", 1025, 2.0, fraction=0.5, layout="steps"),
        timed("torch", 4096, 4.0),
        timed("torch", 8192, 2.0),
        timed("torch", 1025, 1.0, layout="steps"),
    ]
    classes, slowest = shape_classes(records)
    assert classes.rows == (
        ("softmax", "bf16", "up to 64 columns", "2", "0.400", "8x19x8192", "0.600"),
        ("softmax", "bf16", "steps", "1", "0.500", "8x19x1025 steps", "0.500"),
    )
    assert [row[1:3] for row in slowest.rows] == [
        ("bf16 8x19x1025 steps", "2.00"), ("bf16 8x19x8192", "0.50"), ("bf16 8x19x4096", "0.25"),
    ]  # fmt: skip
    # a record keeps its shape
    _, read = from_json(to_json(header(CPU, True), records))
    assert read == records and [shape_text(r) for r in read[2:4]] == ["8x19x1025 steps", "8x19x4096"]
    assert len({r.key for r in read}) == 6
