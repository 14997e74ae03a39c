"""The tables of docs/parallel.md, from the records of 2, 4 and 8 GPUs, and the model that they check."""

from __future__ import annotations

from pathlib import Path

from fused_softmax.lab.parallel.bounds import BOUND, CHUNKS, EXCHANGE
from fused_softmax.lab.record import Record
from fused_softmax.lab.results import read_results

PAGE = Path("docs") / "parallel.md"
RESULTS = Path("benchmarks") / "results"
SYSTEMS = ("fused_softmax", "torch loss_parallel", "megatron", "torchtitan", "all_gather, one-GPU op")
# assumptions of the model, not measured here: bytes a microsecond and GPU within a host of 8, and between hosts; and
# microseconds that each further rank adds to a ring
WITHIN, BETWEEN, HOP = 300e3, 50e3, 2.0
PAYLOAD = 163980  # bytes that a rank gives for 8,192 rows


def load(root: Path) -> dict[int, list[Record]]:
    """The records by number of GPUs."""
    found: dict[int, list[Record]] = {}
    for n in (2, 4, 8):
        for name in ("parallel.json", "parallel_compiled.json"):
            file = root / RESULTS / f"h200x{n}" / name
            if file.exists():
                found.setdefault(n, []).extend(read_results(file)[1])
    return found


def _found(records: list[Record], op: str, n_cols: int) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for r in records:  # the bound is measured again with the compiled systems
        if (r.op, r.n_cols) == (op, n_cols) and r.ms is not None:
            found.setdefault(r.system, r)
    return found


def _columns(records: list[Record]) -> list[int]:
    return sorted({r.n_cols for r in records})


def times(found: dict[int, list[Record]], op: str) -> str:
    """Times of an op in ms, and ours over the bound."""
    lines = ["| GPUs | columns | " + " | ".join(SYSTEMS) + " | bound | ours over the bound |"]
    lines.append("|" + "---|" * (len(SYSTEMS) + 4))
    for n, records in found.items():
        for n_cols in _columns(records):
            rows = _found(records, op, n_cols)
            cells = [f"{r.ms:.2f}" if (r := rows.get(s)) and r.ms is not None else "" for s in SYSTEMS]
            bound, ours = rows[BOUND].ms, rows["fused_softmax"].ms
            assert bound is not None and ours is not None
            lines.append(f"| {n} | {n_cols:,} | " + " | ".join(cells) + f" | {bound:.2f} | {ours / bound:.2f} |")
    return "\n".join(lines)


def compiled(found: dict[int, list[Record]]) -> str:
    """Times of cross_entropy under torch.compile, in ms."""
    lines = ["| GPUs | columns | system | ms | memory taken, GB |", "|---|---|---|---|---|"]
    for n, records in found.items():
        for r in records:
            if "compiled" in r.system and r.op == "cross_entropy" and r.ms is not None:
                taken = "" if r.peak_bytes is None else f"{r.peak_bytes / 1e9:.1f}"
                lines.append(f"| {n} | {r.n_cols:,} | {r.system} | {r.ms:.2f} | {taken} |")
    return "\n".join(lines)


def chunks(found: dict[int, list[Record]]) -> str:
    """The bound in one piece and in chunks of rows, whose exchanges overlap the next chunk's read, in us."""
    names = (EXCHANGE, BOUND, *(f"{BOUND}, in {n} chunks" for n in CHUNKS))
    lines = [
        "| GPUs | op | columns | all_gather alone | bound | in 2 chunks | in 4 chunks |",
        "|---|---|---|---|---|---|---|",
    ]
    for n, records in found.items():
        for op in ("token_logprobs", "cross_entropy"):
            for n_cols in _columns(records):
                rows = _found(records, op, n_cols)
                cells = [f"{1000 * r.ms:.0f}" if (r := rows.get(s)) and r.ms is not None else "" for s in names]
                if all(cells):
                    lines.append(f"| {n} | {op} | {n_cols:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory(found: dict[int, list[Record]]) -> str:
    """Peak memory of cross_entropy above its inputs, in GB, at the widest rows."""
    lines = ["| GPUs | columns | " + " | ".join(SYSTEMS) + " |", "|" + "---|" * (len(SYSTEMS) + 2)]
    for n, records in found.items():
        n_cols = _columns(records)[-1]
        rows = _found(records, "cross_entropy", n_cols)
        cells = [f"{(rows[s].peak_bytes or 0) / 1e9:.1f}" if s in rows else "" for s in SYSTEMS]
        lines.append(f"| {n} | {n_cols:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fit(records: list[Record], n: int, op: str = "cross_entropy") -> tuple[float, float]:
    """(fixed us, us for each local column) by least squares over one number of GPUs."""
    points = [(c / n, 1000 * (_found(records, op, c)["fused_softmax"].ms or 0.0)) for c in _columns(records)]
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def exchange(n: int) -> float:
    """Microseconds that the all_gather takes beyond that of 2 ranks, by the assumptions above."""
    inside = min(n, 8)
    return (inside - 2) * PAYLOAD / WITHIN + (n - inside) * PAYLOAD / BETWEEN + (n - 2) * HOP


def equality(root: Path) -> str:
    """What the records of equality say: the largest difference from one GPU, and on how many ranks bits are equal."""
    lines = ["| GPUs | op | off from one GPU, over what is allowed | bits |", "|---|---|---|---|"]
    for n in (2, 4, 8):
        file = root / RESULTS / f"h200x{n}" / "parallel_equality.json"
        records = read_results(file)[1] if file.exists() else []
        for op in dict.fromkeys(r.op for r in records):
            of_op = [r for r in records if r.op == op]
            bits = {r.note.rpartition("; ")[2].removeprefix("bits ") for r in of_op}
            worst = max(r.error or 0.0 for r in of_op)
            lines.append(f"| {n} | {op} | {worst:.2f} | {'; '.join(sorted(bits))} |")
    return "\n".join(lines)


def model(found: dict[int, list[Record]]) -> str:
    """The fit to 2 GPUs, what it says of 4 and 8, and of more."""
    fixed, slope = fit(found[2], 2)
    lines = [
        f"For 8,192 rows of bfloat16 and cross_entropy forward and backward, the three points of 2 GPUs give T = "
        f"{fixed:.0f} us + {slope * 1000:.2f} ns x local columns: {3 * 2 * 8192 / slope / 1e6:.2f} TB/s for one read, "
        f"and one read and one write. The fixed time is that of {fixed / slope:,.0f} local columns.",
        "",
        "| GPUs | columns | model, ms | measured, ms |",
        "|---|---|---|---|",
    ]
    for n in (4, 8):
        for n_cols in _columns(found[2]):
            said = (fixed + slope * n_cols / n + exchange(n)) / 1000
            ours = _found(found.get(n, []), "cross_entropy", n_cols).get("fused_softmax")
            measured = "not measured" if ours is None or ours.ms is None else f"{ours.ms:.2f}"
            lines.append(f"| {n} | {n_cols:,} | {said:.2f} | {measured} |")
    lines += [
        "",
        "| GPUs | fixed and exchange, us | share of 262,144 columns | share of 1,048,576 columns |",
        "|---|---|---|---|",
    ]
    for n in (8, 16, 32, 64):
        still = fixed + exchange(n)
        shares = [still / (still + slope * n_cols / n) for n_cols in (262144, 1048576)]
        lines.append(f"| {n} | {still:.0f} | {shares[0]:.0%} | {shares[1]:.0%} |")
    return "\n".join(lines)


def tables(root: Path) -> dict[str, str]:
    """The text between the markers."""
    found = load(root)
    return {
        "cross_entropy": times(found, "cross_entropy"),
        "token_logprobs": times(found, "token_logprobs"),
        "compiled": compiled(found),
        "chunks": chunks(found),
        "memory": memory(found),
        "model": model(found),
        "equality": equality(root),
    }
