"""Trains a small Qwen2-shaped model with torch's loss, Liger's and ours: the same curve, memory, tokens a second.

    python benchmarks/train_qwen2_linear_loss.py --out benchmarks/training

The model is made here: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings, Qwen2's vocabulary
of 151,936. Same seed, data and float32 weights under bfloat16 autocast for all. The script fails where a step's losses
are further apart than TOLERANCE, relative, and writes the curves to a JSON and a plot (where matplotlib is installed).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_softmax

# relative, at any step: see train_gpt2_loss.py
TOLERANCE = 2e-2
IGNORED = -100
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def torchs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return fused_softmax.linear_cross_entropy(hidden, weight, target)


def ligers() -> Loss | None:
    if not find_spec("liger_kernel"):
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda hidden, weight, target: liger_fused_linear_cross_entropy(hidden, weight, target)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * groups * self.size)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, turn), rotated(k, turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = turn.cos(), turn.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, groups)
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.first(x), turn)
        gate, up = self.gate_up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """Hidden states of tokens; `embedding.weight` makes the logits too."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        sizes = (args.width, args.heads, args.groups, args.inner)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width, eps=1e-6)
        half = args.width // args.heads // 2
        frequencies = 1e6 ** (-torch.arange(half) / half)
        self.register_buffer("turn", torch.arange(args.length)[:, None] * frequencies, persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turn)
        return self.norm(x)


def chains(n_steps: int, batch: int, length: int, vocabulary: int, device: str) -> Tensor:
    """Token ids (n_steps, batch, length + 1): each token has four successors, one of them likely."""
    generator = torch.Generator().manual_seed(0)
    known = min(vocabulary, 512)
    successors = torch.randint(0, known, (known, 4), generator=generator)
    choices = torch.multinomial(
        torch.tensor([0.7, 0.1, 0.1, 0.1]), n_steps * batch * length, replacement=True, generator=generator
    ).view(length, -1)  # fmt: skip
    tokens = [torch.randint(0, known, (n_steps * batch,), generator=generator)]
    for choice in choices:
        tokens.append(successors[tokens[-1], choice])
    return torch.stack(tokens, -1).view(n_steps, batch, length + 1).to(device)


def train(loss_of: Loss, data: Tensor, args: argparse.Namespace) -> dict[str, object]:
    """Each step's loss, the peak memory, and tokens a second after the first steps, which compile."""
    torch.manual_seed(0)
    model = Model(args).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    # without a slow start the curves have spikes, after which any two of them part
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    cuda = args.device == "cuda"
    losses: list[Tensor] = []
    began, warm = 0.0, min(5, len(data) - 1)
    for step, tokens in enumerate(data):
        if step == warm:
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        target = tokens[:, 1:].clone()
        target[:, : args.prompt] = IGNORED
        with torch.autocast(args.device, torch.bfloat16):
            hidden = model(tokens[:, :-1])
            loss = loss_of(hidden.view(-1, args.width), model.embedding.weight, target.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach().float())
    values = [float(loss) for loss in losses]
    seconds = time.perf_counter() - began
    tokens_a_second = (len(data) - warm) * args.batch * args.length / seconds
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    return {"loss": values, "tokens_a_second": tokens_a_second, "peak_mib": peak}


def plot(curves: dict[str, dict], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, left) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(2, 1))
    for (name, curve), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        top.plot(curve["loss"], style, label=name)
    top.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    top.legend()
    left.bar(list(curves), [(curve["peak_mib"] or 0) / 1024 for curve in curves.values()])
    left.set(ylabel="peak memory (GiB, lower is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--plot", type=Path, default=None, help="the plot's file; default: next to the JSON")
    defaults = dict(
        steps=60, batch=16, length=1024, vocabulary=151936, width=896, layers=8, heads=14, groups=2, inner=4864,
        prompt=0, warmup=30,
    )  # fmt: skip
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    data = chains(args.steps, args.batch, args.length, args.vocabulary, args.device)
    ways = {"torch": torchs, "liger": ligers(), "fused_softmax": ours}
    curves = {name: train(loss, data, args) for name, loss in ways.items() if loss is not None}
    own = torch.tensor(curves["torch"]["loss"])
    apart = {name: ((torch.tensor(c["loss"]) - own).abs() / own.abs()).max().item() for name, c in curves.items()}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    record = {
        "device": device,
        "torch": torch.__version__,
        "settings": {name: getattr(args, name) for name in (*defaults, "lr")},
        "tolerance": TOLERANCE,
        "worst_relative_difference": apart,
        "curves": curves,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train_qwen2_linear_loss.json").write_text(json.dumps(record, indent=1) + "\n")
    if find_spec("matplotlib"):
        plot(curves, args.plot or args.out / "train_qwen2_linear_loss.png", f"Qwen2-shaped, {args.vocabulary} tokens")
    for name, curve in curves.items():
        memory = "" if curve["peak_mib"] is None else f", {curve['peak_mib'] / 1024:.2f} GiB"
        print(
            f"{name}: loss {curve['loss'][0]:.3f} -> {curve['loss'][-1]:.3f}, {curve['tokens_a_second']:,.0f} tokens/s"
            f"{memory}, worst relative difference {apart[name]:.1e}"
        )
    if not apart["fused_softmax"] <= TOLERANCE:
        raise SystemExit(f"the curves are further apart than {TOLERANCE}")


if __name__ == "__main__":
    main()
