"""Trains a small GPT-2, made from a config, twice: with torch's cross-entropy and with ours. The curves must agree.

    python benchmarks/train_gpt2_loss.py --out benchmarks/results/h200

Same seed, same data, same float32 weights under bfloat16 autocast; the losses differ by what a gradient differs that is
rounded to bfloat16 from float32 sums in another order. The script fails where any step's losses are further apart than
TOLERANCE, and writes both curves to train_gpt2_loss.json and a plot. The data are Markov chains over the vocabulary,
made here: a loss that falls needs something to learn. Needs transformers and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_softmax

# relative, at any step. bfloat16 keeps 8 bits: one rounding of the logits' gradient is 2**-9 of it, and 100 steps of
# AdamW carry the difference on
TOLERANCE = 2e-2
IGNORED = -100


def torchs(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def ours(logits: Tensor, labels: Tensor) -> Tensor:
    return fused_softmax.cross_entropy(logits, labels)


def chains(n_steps: int, batch: int, length: int, vocabulary: int, device: str) -> Tensor:
    """Token ids (n_steps, batch, length): each token has four successors, one of them likely."""
    generator = torch.Generator().manual_seed(0)
    successors = torch.randint(0, vocabulary, (vocabulary, 4), generator=generator)
    weights = torch.tensor([0.7, 0.1, 0.1, 0.1])
    tokens = torch.randint(0, min(vocabulary, 512), (n_steps, batch, 1), generator=generator)
    columns = [tokens[..., 0]]
    for _ in range(length - 1):
        choice = torch.multinomial(weights, n_steps * batch, replacement=True, generator=generator)
        columns.append(successors[columns[-1].flatten(), choice].view(n_steps, batch) % min(vocabulary, 512))
    return torch.stack(columns, -1).to(device)


def train(loss_of: Callable[[Tensor, Tensor], Tensor], data: Tensor, args: argparse.Namespace) -> dict[str, object]:
    """The loss of each step, and the peak memory and time of all."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=args.vocabulary, n_embd=args.width, n_layer=args.layers, n_head=args.heads, n_positions=args.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, began = [], time.perf_counter()
    for tokens in data:
        # the labels are shifted, not the logits
        labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        with torch.autocast(args.device, torch.bfloat16):
            logits = model(input_ids=tokens).logits
            loss = loss_of(logits.view(-1, logits.shape[-1]), labels.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    values = [float(loss) for loss in losses]
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    return {"loss": values, "seconds": time.perf_counter() - began, "peak_mib": peak, "logits": str(logits.dtype)}


def plot(curves: dict[str, dict], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    for (name, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        top.plot(curve["loss"], style, label=name)
    top.set(ylabel="loss (nats a token)", title=title)
    top.legend()
    a, b = (curve["loss"] for curve in curves.values())
    below.semilogy([max(abs(x - y) / abs(x), 1e-9) for x, y in zip(a, b, strict=True)])
    below.axhline(TOLERANCE, linestyle=":", color="grey")
    below.set(xlabel="step", ylabel="relative difference")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=3e-4)
    defaults = dict(steps=100, batch=8, length=256, vocabulary=50257, width=256, layers=4, heads=4)
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    data = chains(args.steps, args.batch, args.length, args.vocabulary, args.device)
    curves = {"torch": train(torchs, data, args), "fused_softmax": train(ours, data, args)}
    a, b = (torch.tensor(curve["loss"]) for curve in curves.values())
    worst = ((a - b).abs() / a.abs()).max().item()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    record = {
        "device": device,
        "torch": torch.__version__,
        "settings": {name: getattr(args, name) for name in (*defaults, "lr")},
        "tolerance": TOLERANCE,
        "worst_relative_difference": worst,
        "curves": curves,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train_gpt2_loss.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(curves, args.out / "train_gpt2_loss.png", f"GPT-2, {args.vocabulary} tokens, bfloat16 logits, {device}")
    print(f"loss {a[0]:.3f} -> {a[-1]:.3f} (torch), {b[-1]:.3f} (ours); worst relative difference {worst:.2e}")
    if not worst <= TOLERANCE:
        raise SystemExit(f"the curves are further apart than {TOLERANCE}")


if __name__ == "__main__":
    main()
