"""The least time of a linear loss: its matrix products, and the passes over the logits of each chunk between them.

The products and the passes follow each other on one stream, so their times add up. Products run at the rate that cuBLAS
reaches on an H200 (the median of benchmarks/results/h200-linear); for another GPU the same fraction of its datasheet's
rate is assumed. What a sum of the weight's gradient over chunks takes overlaps in part, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fused_softmax.lab.bench.inputs import DTYPES
from fused_softmax.lab.roofline.gpus import Gpu
from fused_softmax.lab.roofline.predict import gpu_named
from fused_softmax.planning.linear_losses import Chunks, plan_chunks

# dense 16-bit products, 10^12 operations a second, by the datasheets
DATASHEET_TFLOPS: Mapping[str, float] = {
    "H200": 989.4, "H100 SXM": 989.4, "A100 80GB SXM": 312.0, "L40S": 362.0, "RTX 4090": 165.2, "RTX 5090": 209.5,
    "B200": 2250.0, "MI300X": 1307.4,
}  # fmt: skip
REACHED = 713.0 / 989.4
# op, with its gradients -> (products of hidden states and weight's size, reads and writes of all logits by our kernels)
LINEAR: Mapping[str, tuple[int, int]] = {
    "linear_cross_entropy": (3, 2),  # the gradient is written over the logits that were read
    "linear_token_logprobs": (4, 3),  # backward makes the logits again
}


@dataclass(frozen=True)
class LinearPrediction:
    """One step of a linear loss, forward and gradients. Microseconds; bytes are those of our kernels."""

    op: str
    dtype: str
    n_rows: int
    n_cols: int
    hidden: int
    gpu: Gpu
    tflops: float
    chunks: Chunks
    operations: int
    kernel_bytes: int
    products_us: float
    kernels_us: float

    @property
    def floor_us(self) -> float:
        return self.products_us + self.kernels_us

    @property
    def logits_bytes(self) -> int:
        """Of a chunk: what is held in place of all logits."""
        return self.chunks.rows * self.chunks.stride * DTYPES[self.dtype].itemsize


def predict_linear(op: str, n_rows: int, n_cols: int, hidden: int, dtype: str, gpu: str | Gpu) -> LinearPrediction:
    """Predict a linear loss of (n_rows, hidden) x (hidden, n_cols) in a 16-bit dtype, with both gradients.

    ValueError for float32, whose products are not described, and for a GPU without a rate; KeyError for another op.
    """
    on = gpu_named(gpu) if isinstance(gpu, str) else gpu
    if DTYPES[dtype].itemsize != 2:
        raise ValueError("the rate of float32 products is not described: give bfloat16 or float16")
    if on.name not in DATASHEET_TFLOPS:
        raise ValueError(f"the rate of {on.name}'s products is not described")
    products, passes = LINEAR[op]
    tflops, row_bytes = DATASHEET_TFLOPS[on.name] * REACHED, 2 * n_cols
    chunks = plan_chunks(n_rows, n_cols, row_bytes, 2, op == "linear_cross_entropy", 4 * hidden * n_cols)
    operations = 2 * products * n_rows * n_cols * hidden
    kernel_bytes = passes * n_rows * n_cols * 2
    return LinearPrediction(
        op, dtype, n_rows, n_cols, hidden, on, tflops, chunks, operations, kernel_bytes,
        operations / tflops / 1e6, kernel_bytes / on.gbps / 1e3,
    )  # fmt: skip


def lines(said: LinearPrediction) -> Iterator[str]:
    """A prediction in words."""
    gpu, shape = said.gpu, f"{said.n_rows:,} x {said.n_cols:,} {said.dtype}, hidden size {said.hidden:,}"
    yield f"{said.op} of {shape}, with its gradients, on {gpu.name} ({gpu.target})"
    moved = said.kernel_bytes / 1e6
    held, whole = said.logits_bytes / 1e6, said.n_rows * said.n_cols * 2 / 1e6
    yield (
        f"chunks       {said.chunks.count} of {said.chunks.rows:,} rows: {held:,.1f} MB of logits are held, "
        f"and not {whole:,.1f} MB"
    )
    products, passes = LINEAR[said.op]
    source = "measured" if gpu.measured else "an estimate from the datasheet"
    yield f"floor        {said.floor_us:,.1f} us: products bind; the two times add up"
    yield (
        f"    products   {said.products_us:9,.1f} us, {products} of {said.operations / products:.3g} operations, at "
        f"{said.tflops:,.0f} TFLOP/s ({source})"
    )
    yield (
        f"    kernels    {said.kernels_us:9,.1f} us, {passes} passes over the logits, {moved:,.1f} MB "
        f"at {gpu.gbps:,.0f} GB/s"
    )


def as_data(said: LinearPrediction) -> dict[str, Any]:
    """A prediction as plain data. Bytes and microseconds."""
    return {**asdict(said), "floor_us": said.floor_us, "logits_bytes": said.logits_bytes}
