"""Trains a small language model whose output layer is spread over ranks, next to the same model on one rank.

    torchrun --nproc-per-node 2 benchmarks/train_vocab_parallel.py                       # GPUs, or gloo without them
    torchrun --nproc-per-node 2 benchmarks/train_vocab_parallel.py --out curves.json --plot curves.svg

The output layer is a ColwiseParallel layer, so each rank holds some columns of every row of logits, and
`fused_softmax.cross_entropy` exchanges a few numbers for each row. The other model holds all columns on every rank.
Both see the same bytes of text and start alike, so their losses must agree. The script fails where they are further
apart than FIRST in the first ten steps, or than TOLERANCE at any. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fused_softmax as fs

VOCABULARY = 256  # bytes
# relative, in float32: sums are cut at other places, and AdamW carries the difference on
FIRST, TOLERANCE = 1e-5, 1e-2


class Model(nn.Module):
    """Two layers of attention over bytes."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        hidden = self.body(self.embedding(ids) + self.positions, mask=causal, is_causal=True)
        return self.output(hidden)


def made(args: argparse.Namespace, device: torch.device) -> Model:
    """The model, which starts alike on every rank."""
    torch.manual_seed(0)
    return Model(args.width, args.length).to(device)


def batches(args: argparse.Namespace, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(inputs, targets) of every step, (batch, length): the source text of torch.nn.functional."""
    text = torch.frombuffer(bytearray(inspect.getsource(nn.functional).encode()), dtype=torch.uint8).long()
    made = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) - args.length - 1, (args.steps, args.batch), generator=made)
    rows = starts.unsqueeze(-1) + torch.arange(args.length + 1)
    return [(text[r][:, :-1].to(device), text[r][:, 1:].to(device)) for r in rows]


def train(model: Model, data: list[tuple[Tensor, Tensor]], rate: float) -> list[float]:
    """The loss of each step. The loss is the same function for both models."""
    # one tensor at a time: a group of plain tensors and DTensors has no fused step
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    losses = []
    for ids, target in data:
        logits = model(ids).flatten(0, 1)
        loss = fs.cross_entropy(logits, target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item())
    return losses


def plot(curves: dict[str, list[float]], ranks: int, file: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.plot(curves["one rank"], label="one rank", color="#9a9a9a", linewidth=3.0)
    axes.plot(curves["sharded"], label=f"output layer on {ranks} ranks", color="#c2410c", linewidth=1.0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (lower is better)")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--out", help="write both curves to this .json")
    parser.add_argument("--plot", help="draw both curves to this .svg or .png")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    data = batches(args, device)
    began = time.perf_counter()
    one = train(made(args, device), data, args.rate)

    model = made(args, device)
    mesh = init_device_mesh(device.type, (ranks,))
    # the layer keeps its logits sharded; with torch's own loss this needs `with loss_parallel():`
    layer = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"output": layer})
    with CommDebugMode() as seen, torch.no_grad():
        fs.cross_entropy(model(data[0][0]).flatten(0, 1), data[0][1].flatten())
    sharded = train(model, data, args.rate)

    each = [abs(a - b) / b for a, b in zip(sharded, one, strict=True)]
    apart, first = max(each), max(each[:10])
    if rank == 0:
        print(f"loss {one[0]:.4f} -> {one[-1]:.4f} on one rank, {sharded[0]:.4f} -> {sharded[-1]:.4f} on {ranks} ranks")
        print(f"at most {first:.1e} apart in ten steps, {apart:.1e} in all; ", end="")
        print(f"{seen.get_total_counts()} collective forward; ", end="")
        print(f"{time.perf_counter() - began:.0f} s on {ranks} x {device.type}")
        curves = {"one rank": one, "sharded": sharded}
        if args.out:
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump({"ranks": ranks, "device": device.type, "torch": torch.__version__, **curves}, file)
        if args.plot:
            plot(curves, ranks, args.plot)
    dist.barrier()  # no rank ends while another one is still in its last collective
    dist.destroy_process_group()
    if not (first <= FIRST and apart <= TOLERANCE and sharded[-1] < 0.8 * sharded[0]):
        raise SystemExit(f"the losses are {first:.1e} and {apart:.1e} apart, or they do not fall")


if __name__ == "__main__":
    main()
