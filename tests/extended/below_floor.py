"""What must hold with a torch and a Triton below the floors; run by a fresh environment's own Python.

Importing works, every function gives PyTorch's own result and gradient, plan_for names the versions, one warning is
given, patch() changes nothing, and the command line ends without a traceback. Prints one line for each check.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings


def gradients(function, *tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    result = function(*leaves)
    result.sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def same(ours, own, *tensors) -> None:
    import torch

    for a, b in zip(gradients(ours, *tensors), gradients(own, *tensors), strict=True):
        torch.testing.assert_close(a, b)


def check_functions() -> None:
    import torch
    import torch.nn.functional as F

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        import fused_softmax as fs

        x, target = torch.randn(6, 40), torch.randint(0, 40, (6,))
        g = torch.randn(6, 40)
        assert torch.equal(fs.softmax(x), torch.softmax(x, -1))
        for dim in (0, -1):
            same(lambda t, dim=dim: fs.softmax(t, dim) * g, lambda t, dim=dim: torch.softmax(t, dim) * g, x)
            same(lambda t, dim=dim: fs.log_softmax(t, dim) * g, lambda t, dim=dim: torch.log_softmax(t, dim) * g, x)
        same(lambda t: fs.logsumexp(t, -1), lambda t: torch.logsumexp(t, -1), x)
        same(lambda t: fs.cross_entropy(t, target), lambda t: F.cross_entropy(t, target), x)
        same(lambda t: fs.masked_softmax(t, x > 0) * g, lambda t: own_masked(t, x > 0) * g, x)
        same(lambda t: fs.token_logprobs(t, target), lambda t: -F.cross_entropy(t, target, reduction="none"), x)
        same(lambda t: fs.nn.Softmax(-1)(t) * g, lambda t: torch.softmax(t, -1) * g, x)
        operator = torch.ops.fused_softmax.softmax
        same(lambda t: operator(t, -1) * g, lambda t: torch.softmax(t, -1) * g, x)
        with fs.patch():
            same(lambda t: torch.softmax(t, -1) * g, lambda t: torch.softmax(t, -1) * g, x)
        why = fs.plan_for(x).why
        assert isinstance(fs.plan_for(x), fs.Fallback)
        try:
            fs.softmax(x, 2)
        except IndexError:
            pass
        else:
            raise AssertionError("no IndexError for a dim out of range")
    triton = sys.modules.get("triton")
    assert torch.__version__ in why and triton is not None and triton.__version__ in why, why
    said = [str(w.message) for w in given if "fused_softmax" in str(w.message)]
    assert len(said) == 1 and why in said[0], said
    print(f"functions and patch(): right, one warning, plan_for: {why}")


def own_masked(x, mask):
    import torch

    return torch.softmax(x.masked_fill(~mask, -float("inf")), -1)


# arguments -> the exit statuses that are right
COMMANDS = {
    (): (0, 2),
    ("--help",): (0,),
    ("explain", "64x1000"): (0,),
    ("lesson",): (0,),
    **{("lesson", str(number)): (0, 1, 2) for number in (1, 2, 7, 10, 12, 13, 15)},
    ("verify",): (0, 1, 2),
    ("tune",): (2,),
}
NO_EXTRAS = """
import sys
sys.modules["typer"] = sys.modules["rich"] = None
from fused_softmax.__main__ import main
main()
"""


def check_commands() -> None:
    for arguments, statuses in COMMANDS.items():
        command_says([sys.executable, "-m", "fused_softmax", *arguments], statuses)
    said = command_says([sys.executable, "-c", NO_EXTRAS, "--help"], (1,))
    assert "pip install" in said, said
    print(f"the command line: {len(COMMANDS)} commands and one without its packages, no traceback")


def command_says(command: list[str], statuses: tuple[int, ...]) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, f"{command}:\n{said}"
    assert done.returncode in statuses, f"{command}: status {done.returncode}\n{said}"
    assert said.strip(), f"{command} says nothing"
    return said


if __name__ == "__main__":
    check_functions()
    if "TRITON_INTERPRET" not in os.environ:
        check_commands()
