"""The fuzzer: draws calls of every op, by every way in, and judges them against float64.

draw (a case, and how it is drawn), values, layouts and inputs (its tensors), ways (how it reaches our kernels), judge
and exactness (what is wrong), shrink and program (what is shown), coverage, worker, pool and session (a run), record.
"""

from __future__ import annotations


def replay(text: str) -> list[str]:
    """Run one case again, from its JSON; print and return what is wrong with it."""
    import json

    import torch

    from . import linear
    from .draw import Case
    from .judge import evaluate

    fields = json.loads(text)
    if fields.get("op") in linear.LINEAR_OPS:
        wrong = linear.replay(fields)
        print("; ".join(wrong) or "right")
        return wrong
    outcome = evaluate(Case.from_json(text), "cuda" if torch.cuda.is_available() else "cpu")
    found = outcome.found()
    print("; ".join(found) or "right", f"(error over what is allowed: {outcome.largest_excess()})")
    return found
