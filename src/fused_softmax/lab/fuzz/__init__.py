"""The fuzzer: draws calls of every op, by every way in, and judges them against float64.

draw (a case, and how it is drawn), values, layouts and inputs (its tensors), ways (how it reaches our kernels), judge
and exactness (what is wrong), shrink and program (what is shown), coverage, worker, pool and session (a run), record.
"""

from __future__ import annotations

from typing import Any


def case_fields(text: str) -> dict[str, Any]:
    """The fields of one case, from its JSON; ValueError where it is no case."""
    import dataclasses
    import json

    from fused_softmax.lab.registry import LINEAR_OPS, OPS, WAYS

    from .draw import DTYPES, OTHER_DTYPES, Case
    from .linear import LinearCase

    case = 'a case is the JSON object that a failure printed, such as \'{"op": "softmax", ...}\''
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON ({error}): {case}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{text!r} is no JSON object: {case}")
    allowed = dict(op=(*OPS, *LINEAR_OPS), way=WAYS, dtype=(*DTYPES, *OTHER_DTYPES))
    for name, values in allowed.items():
        if fields.get(name, values[0]) not in values:
            raise ValueError(f"{name} {fields[name]!r} is none of {', '.join(values)}")
    for name in ("shape", "dims", "layout", "frozen"):
        if not isinstance(fields.get(name, []), list):
            raise ValueError(f"{name} {fields[name]!r} is no list: {case}")
    known = dataclasses.fields(LinearCase if fields.get("op") in LINEAR_OPS else Case)
    required = [f.name for f in known if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"the case has no {', '.join(missing)}: {case}")
    if unknown := [name for name in fields if name not in {f.name for f in known}]:
        raise ValueError(f"a case has no field {', '.join(unknown)}: {case}")
    return fields


def replay(text: str) -> list[str]:
    """Run one case again, from its JSON; print and return what is wrong with it."""
    import torch

    from . import linear
    from .draw import Case
    from .judge import evaluate

    fields = case_fields(text)
    if fields["op"] in linear.LINEAR_OPS:
        wrong = linear.replay(fields)
        print("; ".join(wrong) or "right")
        return wrong
    outcome = evaluate(Case.from_json(text), "cuda" if torch.cuda.is_available() else "cpu")
    found = outcome.found()
    print("; ".join(found) or "right", f"(error over what is allowed: {outcome.largest_excess()})")
    return found
