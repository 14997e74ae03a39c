"""The core as a kernel repository: loaded from a folder by the `kernels` package, next to the installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_softmax as fs
from kernel_hub.__main__ import absolute_imports, sources, write

pytestmark = [pytest.mark.extended, pytest.mark.interpreted]


def test_the_core_has_no_absolute_import():
    files = sources()
    assert len(files) > 50 and absolute_imports(files) == []
    assert absolute_imports({"a.py": "x = 1\nfrom fused_softmax.launch import device\n"}) == ["a.py:2"]


def test_it_runs_next_to_the_installed_package(tmp_path: Path):
    kernels = pytest.importorskip("kernels")
    write(tmp_path)
    kernel = kernels.get_local_kernel(tmp_path / "build")
    metadata = json.loads((tmp_path / "build" / "torch-cpu" / "metadata.json").read_text())
    assert kernel.__name__ == metadata["id"] and kernel.softmax is not fs.softmax
    x = torch.randn(4, 131)
    assert torch.equal(kernel.softmax(x), fs.softmax(x))
    # each has operators of its own
    for package in (kernel, fs):
        names = [package.__name__, "softmax"]
        assert hasattr(getattr(torch.ops, names[0]), names[1])

    # another process, so that the layer's kernels are compiled for no test but this one
    program = f"""
import torch, transformers
from pathlib import Path
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from transformers.loss.loss_utils import ForCausalLMLoss

@use_kernel_forward_from_hub("ForCausalLMLoss")
class Loss(torch.nn.Module):
    def forward(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kw):
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kw)

layer = LocalLayerRepository(Path({str(tmp_path / "build")!r}), layer_name="ForCausalLMLoss")
mapping = {{"ForCausalLMLoss": {{"cpu": {{Mode.TRAINING | Mode.TORCH_COMPILE: layer}}}}}}
with use_kernel_mapping(mapping, inherit_mapping=False):
    loss = kernelize(Loss(), mode=Mode.TRAINING, device="cpu")
assert loss.forward.__func__.__module__.startswith("_fused_softmax"), loss.forward
logits, labels = torch.randn(2, 5, 33, requires_grad=True), torch.randint(0, 33, (2, 5))
for n in (None, torch.tensor(7)):
    want, got = ForCausalLMLoss(logits, labels, 33, n), loss(logits, labels, 33, num_items_in_batch=n)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, logits)[0] for t in (got, want)))
print("equal")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=os.environ
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-2000:]
