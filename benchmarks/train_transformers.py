"""Trains models of transformers with their own loss, Liger's and ours: loss, gradient norm, tokens a second, memory.

    python benchmarks/train_transformers.py --out benchmarks/training

The models have the shapes of Llama 3.2 1B, Qwen2 1.5B and Gemma 2 2B with fewer layers, so that each has about 1e9
parameters, and random weights. Weights and AdamW are float32, forward and backward run under bfloat16 autocast. Every
system has the same seed, data, schedule (linear warm-up) and gradient clipping. Only lm_head and loss are replaced:
by `integrations.apply_to(model)`, and by Liger's fused_linear_cross_entropy without its other kernels. Above 8,192
tokens the layers are checkpointed. A system that runs out of memory is recorded as such.

The script fails where ours is missing, or where its loss or gradient norm of a step differs from plain transformers' by
more than --tolerance or --norm-tolerance, relative. Where plain transformers ran out of memory, Liger is the reference.
Where that did not run either, ours has to be finite, and the record says that nothing was compared.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fused_softmax.integrations import apply_to
from fused_softmax.lab.record import header, without_folders, write_atomically

PLAIN, LIGER, OURS = "transformers", "liger", "fused_softmax"
OUT_OF_MEMORY, NO_TIME = "out of memory", "not run: no time left"
# name -> (config, model, what the config is told)
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=12, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True,
    )),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", dict(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=16, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True,
    )),
    # its attention has a softcap, which torch's fused attention has not: transformers runs it eager
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", dict(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, final_logit_softcapping=30.0,
    )),
}  # fmt: skip
TINY = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip


def with_liger(shape: str) -> Callable[[Any], object]:
    import liger_kernel.transformers as liger

    function = getattr(liger, f"apply_liger_kernel_to_{shape}")
    flags = {name: False for name, p in inspect.signature(function).parameters.items() if p.default in (True, False)}
    return lambda model: function(**{**flags, "fused_linear_cross_entropy": True}, model=model)


def systems(shape: str) -> dict[str, Callable[[Any], object]]:
    """Each system, and what it does to a model."""
    found: dict[str, Callable[[Any], object]] = {PLAIN: lambda model: "its own lm_head and loss"}
    if find_spec("liger_kernel"):
        found[LIGER] = with_liger(shape)
    found[OURS] = apply_to
    return found


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


def build(shape: str, args: argparse.Namespace) -> Any:
    config_class, model_class, sizes = SHAPES[shape]
    given = {**sizes, **(TINY if args.tiny else {}), "max_position_embeddings": args.length}
    attention = "eager" if shape == "gemma2" else "sdpa"
    config = getattr(transformers, config_class)(
        **given, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, attn_implementation=attention
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        return getattr(transformers, model_class)(config).float().train()


def train(shape: str, apply: Callable[[Any], object], data: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Each step's loss, gradient norm and milliseconds, the peak memory, and tokens a second after the first steps."""
    cuda = args.device == "cuda"
    model = build(shape, args)
    n_parameters = sum(p.numel() for p in model.parameters())
    applied = str(apply(model))
    checkpointed = data[0, :, :-1].numel() > args.checkpoint_above
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=cuda)
    # a spike is chaotic: after one, any two curves part
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    losses, norms, milliseconds = [], [], []
    warm = min(5, len(data) - 1)
    for step, tokens in enumerate(data):
        if step == warm and cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        ids = tokens[:, :-1]
        counted = torch.tensor(ids.shape[0] * (ids.shape[1] - 1), device=ids.device)
        with torch.autocast(args.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=counted).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        # waits for the device, so the next step begins with nothing queued
        losses.append(float(loss.detach()))
        norms.append(float(norm))
        milliseconds.append((time.perf_counter() - began) * 1e3)
    median = statistics.median(milliseconds[warm:])
    return {
        "applied": applied,
        "parameters": n_parameters,
        "checkpointed": checkpointed,
        "loss": losses,
        "gradient_norm": norms,
        "milliseconds": [round(ms, 3) for ms in milliseconds],
        "median_milliseconds": median,
        "tokens_a_second": data[0, :, :-1].numel() / median * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def worst(curve: list[float], other: list[float]) -> float:
    """The largest relative difference of two curves at one step; inf where one is not finite."""
    pairs = [*zip(curve, other, strict=True)]
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in pairs)


def judge(case: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Adds to a case how far apart its curves are, and returns what is wrong with ours."""
    curves = {name: found for name, found in case["systems"].items() if "loss" in found}
    reference = next((name for name in (PLAIN, LIGER) if name in curves), None)
    name = f"{case['shape']}, {case['tokens']} tokens"
    if OURS not in curves:
        return [f"{name}: ours has no curve: {case['systems'].get(OURS)}"]
    case["reference"] = reference
    if reference is None:
        values = curves[OURS]["loss"] + curves[OURS]["gradient_norm"]
        return [] if all(map(math.isfinite, values)) else [f"{name}: ours is not finite"]
    own = curves[reference]
    case["worst_relative_difference"] = {
        which: {what: worst(curve[what], own[what]) for what in ("loss", "gradient_norm")}
        for which, curve in curves.items()
    }
    ours, wrong = case["worst_relative_difference"][OURS], []
    for what, allowed in (("loss", args.tolerance), ("gradient_norm", args.norm_tolerance)):
        if not ours[what] <= allowed:
            wrong.append(f"{name}: {what} differs from that of {reference} by {ours[what]:.1e}, above {allowed}")
    return wrong


def told(case: dict[str, Any]) -> str:
    lines = [f"{case['shape']}, {case['tokens']} tokens"]
    for name, found in case["systems"].items():
        if "loss" not in found:
            lines.append(f"  {name:14} {found['failed']}")
            continue
        memory = "" if found["peak_gib"] is None else f", {found['peak_gib']:.1f} GiB"
        apart = case.get("worst_relative_difference", {}).get(name)
        far = f", apart {apart['loss']:.1e} and {apart['gradient_norm']:.1e}" if apart else ""
        first, last, norm = found["loss"][0], found["loss"][-1], found["gradient_norm"][-1]
        lines.append(
            f"  {name:14} loss {first:.3f} -> {last:.3f}, norm {norm:.3f}, "
            f"{found['tokens_a_second']:,.0f} tokens/s{memory}{far}"
        )
    return "\n".join(lines)


def cases_of(records: list[Path]) -> list[dict[str, Any]]:
    """The cases in which ours has a curve; a later record replaces a case of an earlier one."""
    found = {}
    for record in records:
        for case in json.loads(record.read_text())["cases"]:
            if "loss" in case["systems"].get(OURS, {}):
                found[case["shape"], case["tokens"]] = case
    return list(found.values())


def table(cases: list[dict[str, Any]]) -> str:
    """A Markdown table of the cases, with a column for each system."""
    names = (PLAIN, LIGER, OURS)
    lines = [
        "| model, tokens a step | " + " | ".join(f"{what}: {name}" for what in ("tokens/s", "GiB") for name in names)
        + " | loss, norm apart |",
        "|---" * (2 + 2 * len(names)) + "|",
    ]  # fmt: skip
    for case in cases:
        cells = []
        for what, shown in (("tokens_a_second", "{:,.0f}"), ("peak_gib", "{:.1f}")):
            for name in names:
                found = case["systems"].get(name, {})
                cells.append(shown.format(found[what]) if what in found else found.get("failed", "not run"))
        apart = case.get("worst_relative_difference", {}).get(OURS)
        far = "nothing to compare with" if apart is None else f"{apart['loss']:.1e}, {apart['gradient_norm']:.1e}"
        lines.append(f"| {case['shape']}, {case['tokens']:,} | {' | '.join(cells)} | {far} |")
    return "\n".join(lines)


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """The curves of each case in the first row, tokens a second and peak memory below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, len(cases), figsize=(3.2 * len(cases), 8.5), squeeze=False)
    for column, case in enumerate(cases):
        curves = {name: found for name, found in case["systems"].items() if "loss" in found}
        top, middle, low = axes[:, column]
        for name, found in curves.items():
            place = (PLAIN, LIGER, OURS).index(name)
            top.plot(found["loss"], ("-", "--", ":")[place], color=f"C{place}", label=name)
        top.set(title=f"{case['shape']}, {case['tokens']:,} tokens", xlabel="step", ylabel="loss (nats a token)")
        top.legend(fontsize=7)
        names = list(case["systems"])
        for axis, what, label in (
            (middle, "tokens_a_second", "tokens a second (higher is better)"),
            (low, "peak_gib", "peak memory, GiB (lower is better)"),
        ):
            colors = [f"C{(PLAIN, LIGER, OURS).index(name)}" for name in names]
            axis.bar(names, [case["systems"][name].get(what) or 0 for name in names], color=colors)
            axis.set_ylabel(label, fontsize=8)
            axis.tick_params(axis="x", labelrotation=20, labelsize=7)
            for place, name in enumerate(names):
                if "loss" not in case["systems"][name]:
                    axis.text(
                        place, 0, case["systems"][name]["failed"], rotation=90, ha="center", va="bottom", fontsize=7
                    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--systems", nargs="+", choices=(PLAIN, LIGER, OURS), default=[PLAIN, LIGER, OURS])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768], help="of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the learning rate is --lr")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--tolerance", type=float, default=5e-3, help="of a step's loss, relative")
    parser.add_argument("--norm-tolerance", type=float, default=5e-2, help="of a step's gradient norm, relative")
    parser.add_argument("--checkpoint-above", type=int, default=8192, help="tokens above which layers are checkpointed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run starts that may end later than this")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64, to try the script")
    parser.add_argument("--plot", type=Path, default=None, help="the plot's file; default: next to the JSON")
    parser.add_argument("--plot-only", type=Path, nargs="+", help="draw the plot and print the table of these records")
    args = parser.parse_args()
    if args.plot_only:
        plot(cases_of(args.plot_only), args.plot or args.plot_only[0].with_suffix(".png"))
        print(table(cases_of(args.plot_only)))
        return
    began, cases, wrong = time.perf_counter(), [], []
    about = header(torch.device(args.device), False)
    packages = {"transformers": transformers.__version__}
    if find_spec("liger_kernel"):
        from importlib.metadata import version

        with contextlib.suppress(Exception):
            packages["liger_kernel"] = version("liger_kernel")
    record: dict[str, Any] = {
        "device": about.device, "driver": about.driver, "versions": {**about.versions, **packages},
        "python": about.python, "commit": about.commit, "dirty": about.dirty, "date": about.date,
        "command": without_folders(" ".join(["benchmarks/train_transformers.py", *sys.argv[1:]])),
        "settings": {name: v for name, v in vars(args).items() if v != math.inf and not isinstance(v, Path)},
        "cases": cases,
    }  # fmt: skip
    path = args.out / "train_transformers.json"
    for tokens in args.tokens:
        for shape in args.shapes:
            vocabulary = TINY["vocab_size"] if args.tiny else SHAPES[shape][2]["vocab_size"]
            data = chains(args.steps, tokens // args.length, args.length, vocabulary, args.device)
            case: dict[str, Any] = {"shape": shape, "tokens": tokens, "systems": {}}
            cases.append(case)
            longest = 0.0
            for name, apply in systems(shape).items():
                if name not in args.systems:
                    continue
                start = time.perf_counter()
                if start - began + longest > args.seconds:
                    case["systems"][name] = {"failed": NO_TIME}
                    continue
                try:
                    case["systems"][name] = train(shape, apply, data, args)
                except torch.cuda.OutOfMemoryError:
                    case["systems"][name] = {"failed": OUT_OF_MEMORY}
                except Exception as error:  # a result too: ours without a curve fails the script
                    case["systems"][name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                gc.collect()
                if args.device == "cuda":
                    torch.cuda.empty_cache()
                longest = max(longest, time.perf_counter() - start)
            wrong += judge(case, args)
            print(told(case), f"  ({time.perf_counter() - began:.0f} s)", sep="\n", flush=True)
            record["wrong"] = wrong
            write_atomically(path, json.dumps(record, indent=1) + "\n")
    if find_spec("matplotlib"):
        plot(cases, args.plot or path.with_suffix(".png"))
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
