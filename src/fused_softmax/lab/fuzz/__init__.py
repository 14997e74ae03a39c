"""The fuzzer: draws calls of every op, by every way in, and judges them against float64.

draw (a case, and how it is drawn), values, layouts and inputs (its tensors), ways (how it reaches our kernels), judge
and exactness (what is wrong), shrink and program (what is shown), coverage, worker, pool and session (a run), record.
"""

from __future__ import annotations


def replay(text: str) -> list[str]:
    """Run one case again, from its JSON; print and return what is wrong with it. ValueError for what is no case."""
    import dataclasses
    import json

    import torch

    from . import linear
    from .draw import Case
    from .judge import evaluate

    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--replay: no JSON ({error}): give the object that a failure printed") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--replay: {text} is no case: give the JSON object that a failure printed")
    kind = linear.LinearCase if fields.get("op") in linear.LINEAR_OPS else Case
    missing = [field.name for field in dataclasses.fields(kind) if field.name not in fields]
    if missing:
        raise ValueError(f"--replay: a case that a failure printed has all its fields; missing: {', '.join(missing)}")
    if fields["op"] in linear.LINEAR_OPS:
        wrong = linear.replay(fields)
        print("; ".join(wrong) or "right")
        return wrong
    outcome = evaluate(Case.from_json(text), "cuda" if torch.cuda.is_available() else "cpu")
    found = outcome.found()
    print("; ".join(found) or "right", f"(error over what is allowed: {outcome.largest_excess()})")
    return found
