"""Why the gradient of a compiled cross_entropy is not written in the forward: the smallest program that shows it.

    python benchmarks/compiled_gradient.py

`forward` stands for a loss that writes its gradient in the pass that reads the logits, for an upstream gradient of 1.
`scale_` stands for what backward does: nothing where the upstream gradient is 1, which only the device knows. In eager
mode that is one read and one write of the logits' size in all. A compiled program cannot have it, as the printed
backward shows: the saved gradient is an input of backward's graph, and torch.compile lets an operator write to an input
only where the program itself changes that input. So it clones the gradient first. With donated buffers the clone
has the memory of the original, and still reads and writes all of it. Two reads and two writes are more than what
cross_entropy does: its compiled forward reads, and its backward reads and writes.

The program needs no GPU. On one it also prints times, next to a copy of the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

library = torch.library.Library("smallest", "DEF")


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sum(x^2)/2, its gradient)."""
    return x.square().sum() / 2, x.clone()


def scale_(dx: Tensor, g: Tensor) -> None:
    """Stands for dx *= g where g is not 1: writes one element."""
    dx.view(-1)[:1].mul_(g)


for schema, kernel, fake in (
    ("forward(Tensor x) -> (Tensor, Tensor)", forward, lambda x: (x.new_empty(()), torch.empty_like(x))),
    ("scale_(Tensor(a!) dx, Tensor g) -> ()", scale_, lambda dx, g: None),
):
    name = library.define(schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"smallest::{name}", fake, lib=library)


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        loss, dx = torch.ops.smallest.forward(x)
        ctx.save_for_backward(dx)
        return loss

    @staticmethod
    def backward(ctx, g):
        (dx,) = ctx.saved_tensors
        torch.ops.smallest.scale_(dx, g)
        return dx


def backward_code(x: Tensor) -> str:
    """The body of the backward that torch.compile makes."""
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(lambda x: Loss.apply(x), fullgraph=True)
    _, (_, backward) = run_and_get_code(lambda: compiled(x).backward())
    body = backward[backward.index("def call(") :]
    return body[: body.index("return (")]


def seconds(step, rounds: int = 20) -> float:
    """Device time of a step."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        step()
    start.record()
    for _ in range(rounds):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds / 1000


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    code = backward_code(torch.randn(4, 8, device=device, requires_grad=True))
    print("\n".join(line for line in code.splitlines() if "assert_size_stride" not in line))
    print("clones the saved gradient:", "clone" in code)
    if device == "cpu":
        return
    x = torch.randn(8192, 32000, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = torch.empty_like(x)
    copy = seconds(lambda: y.copy_(x.detach()))
    compiled = torch.compile(lambda x: Loss.apply(x), fullgraph=True)
    for words, loss in (("eager", Loss.apply), ("compiled", compiled)):

        def step(loss=loss):
            torch.autograd.grad(loss(x), x)

        # the sum's own passes over x are not of interest
        both, forward_alone = seconds(step), seconds(lambda: torch.ops.smallest.forward(x.detach()))
        print(f"{words}: backward takes {(both - forward_alone) / copy:.2f} copies")


if __name__ == "__main__":
    main()
