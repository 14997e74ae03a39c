"""The public names, their signatures, and what was pickled or imported with the last release."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import sys

import pytest
import torch

import fused_softmax as fs
from fused_softmax import integrations, nn, parallel

NAMES = {
    "Fallback": "(why: 'str', regime: 'str' = 'torch', reason: 'str' = 'unsupported') -> None",
    "Plan": (
        "(regime: 'str', rows: 'int', ctas: 'int', warps_per_row: 'int', vectors_per_chunk: 'int', vec: "
        "'int', chunks: 'int', unpredicated_chunks: 'int', unaligned: 'bool', recompute: 'bool', "
        "num_warps: 'int', max_registers: 'int | None', why: 'str', prefetched_chunks: 'int | None' = "
        "None, resident_chunks: 'int' = 0, smem_staged: 'int' = 0, outers: 'int' = 1, "
        "part_cols: 'int' = 0, invariant: 'bool' = False, skewed: 'int' = 0, overlap: 'int' = 0, "
        "finish_rows: 'int' = 0, finish_chunks: 'int' = 0, gathered: 'bool' = False, piece: 'int' = 0, "
        "runs: 'bool' = False, "
        "output_gathered: 'bool' = False, stagger: 'int' = 0, fitting: 'int' = 1, periodic: 'int' = 0, "
        "dynamic_bytes: 'int' = 0, unseen_chunks: 'int' = 0, bundle: 'int' = 0) -> None"
    ),
    "TokenStatistics": (
        "(logprobs: ForwardRef('Tensor'), entropy: ForwardRef('Tensor | None'), logsumexp: ForwardRef('Tensor | None'))"
    ),
    "batch_invariant": "()",
    "cross_entropy": (
        "(input: 'Tensor', target: 'Tensor', weight: 'Tensor | None' = None, size_average: 'bool | None' "
        "= None, ignore_index: 'int' = -100, reduce: 'bool | None' = None, reduction: 'str' = 'mean', "
        "label_smoothing: 'float' = 0.0, *, softcap: 'float | None' = None, z_loss: 'float' = 0.0, "
        "inplace_backward: 'bool' = False) -> 'Tensor'"
    ),
    "linear_cross_entropy": (
        "(input: 'Tensor', linear_weight: 'Tensor', target: 'Tensor', *, linear_bias: 'Tensor | None' = None, "
        "weight: 'Tensor | None' = None, reduction: 'str' = 'mean', ignore_index: 'int | None' = -100, "
        "label_smoothing: 'float' = 0.0, softcap: 'float | None' = None, z_loss: 'float' = 0.0, "
        "chunk_rows: 'int | None' = None, accumulate: 'str' = 'float32', logits_dtype: 'torch.dtype | None' = "
        "None) -> 'Tensor'"
    ),
    "linear_token_logprobs": (
        "(input: 'Tensor', linear_weight: 'Tensor', token_ids: 'Tensor', *, linear_bias: 'Tensor | None' = "
        "None, temperature: 'float | Tensor' = 1.0, return_entropy: 'bool' = False, return_logsumexp: 'bool' "
        "= False, chunk_rows: 'int | None' = None) -> 'Tensor | TokenStatistics'"
    ),
    "log_softmax": (
        "(input: 'Tensor', dim: 'int' = -1, dtype: 'torch.dtype | None' = None, *, out: 'Tensor | None' ="
        " None) -> 'Tensor'"
    ),
    "logsumexp": (
        "(input: 'Tensor', dim: 'int | tuple[int, ...]', keepdim: 'bool' = False, *, out: 'Tensor | None'"
        " = None) -> 'Tensor'"
    ),
    "masked_softmax": (
        "(x: 'Tensor', mask: 'Tensor | None' = None, *, scale: 'float' = 1.0, causal: 'bool' = False, "
        "fully_masked: 'str' = 'nan') -> 'Tensor'"
    ),
    "patch": "(ops: 'Iterable[str] | None' = None)",
    "plan_for": (
        "(x: 'Tensor', dim: 'int' = -1, dtype: 'torch.dtype | None' = None, *, op: 'str' = 'softmax', "
        "mask: 'Tensor | None' = None, backward: 'bool' = False, log: 'bool | None' = None, "
        "linear_weight: 'Tensor | None' = None, causal: 'bool' = False) -> 'Plan | Fallback'"
    ),
    "softmax": (
        "(input: 'Tensor', dim: 'int' = -1, dtype: 'torch.dtype | None' = None, *, out: 'Tensor | None' ="
        " None) -> 'Tensor'"
    ),
    "stats": "() -> 'None'",
    "token_logprobs": (
        "(logits: 'Tensor', token_ids: 'Tensor', *, temperature: 'float | Tensor' = 1.0, return_entropy: "
        "'bool' = False, return_logsumexp: 'bool' = False) -> 'Tensor | TokenStatistics'"
    ),
    "warmup": (
        "(shapes: 'Any', *, ops: 'str | Iterable[str] | None' = None, dtype: 'torch.dtype | Iterable[torch.dtype] | "
        "None' = None, backward: 'bool' = True, device: 'torch.device | str | int | None' = None) -> 'dict[tuple[str, "
        "torch.dtype, int], float]'"
    ),
    "nn.Softmax": "(dim: int | None = None) -> None",
    "nn.LogSoftmax": "(dim: int | None = None) -> None",
    "nn.CrossEntropyLoss": (
        "(weight: 'Tensor | None' = None, size_average: 'bool | None' = None, ignore_index: 'int' = -100,"
        " reduce: 'bool | None' = None, reduction: 'str' = 'mean', label_smoothing: 'float' = 0.0, *, "
        "softcap: 'float | None' = None, z_loss: 'float' = 0.0, inplace_backward: 'bool' = False) -> "
        "'None'"
    ),
    "nn.LinearCrossEntropyLoss": (
        "(in_features: 'int', num_classes: 'int', *, bias: 'bool' = False, device: 'torch.device | str | None' "
        "= None, dtype: 'torch.dtype | None' = None, reduction: 'str' = 'mean', weight: 'Tensor | None' = None, "
        "ignore_index: 'int | None' = -100, label_smoothing: 'float' = 0.0, softcap: 'float | None' = None, "
        "z_loss: 'float' = 0.0, chunk_rows: 'int | None' = None, accumulate: 'str' = 'float32', "
        "logits_dtype: 'torch.dtype | None' = None) -> 'None'"
    ),
    "integrations.selective_log_softmax": (
        "(logits: 'Tensor', index: 'Tensor', temperature: 'float' = 1.0, row_mask: 'Tensor | None' = None) -> 'Tensor'"
    ),
    "integrations.patch_trl": "() -> 'Replaced'",
    "integrations.patch_torchtitan": "() -> 'Replaced'",
    "integrations.patch_verl": "() -> 'Replaced'",
    "integrations.torchtitan_cross_entropy_loss": (
        "(pred: 'Tensor', labels: 'Tensor', *, global_vocab_size: 'int | None' = None) -> 'Tensor'"
    ),
    "integrations.verl_logprobs_from_logits": (
        "(logits: 'Tensor', labels: 'Tensor', inplace_backward: 'bool' = True) -> 'Tensor'"
    ),
    "integrations.compute_token_logprobs": (
        "(logits: 'Tensor', token_ids: 'Tensor', *, return_rank: 'bool' = False) -> 'Tensor | tuple[Tensor, Tensor]'"
    ),
    "integrations.batch_invariant_log_softmax": (
        "(input: 'Tensor', dim: 'int', half_to_float: 'bool' = False) -> 'Tensor'"
    ),
    "integrations.Replaced": "(package: 'str', known: 'str', names: 'Sequence[Name]')",
    "integrations.causal_lm_loss": (
        "(outputs: 'Any', labels: 'Tensor', num_items_in_batch: 'int | Tensor | None' = None) -> 'Tensor'"
    ),
    "integrations.apply_to": (
        "(model: 'Any', *, logits_in_eval: 'bool' = True, chunk_rows: 'int | None' = None, accumulate: 'str' = "
        "'float32', logits_dtype: 'torch.dtype | None' = None) -> 'AppliedLoss'"
    ),
    "integrations.AppliedLoss": "(model: 'Any', function: 'Any', text: 'str')",
    "parallel.cross_entropy": (
        "(local_logits: 'Tensor', target: 'Tensor', weight: 'Tensor | None' = None, *, group: 'Any' = None, "
        "vocab_start: 'int | None' = None, vocab_size: 'int | None' = None, ignore_index: 'int' = -100, "
        "reduction: 'str' = 'mean', label_smoothing: 'float' = 0.0, softcap: 'float | None' = None, z_loss: "
        "'float' = 0.0, inplace_backward: 'bool' = False, check: 'bool' = False) -> 'Tensor'"
    ),
    "parallel.linear_cross_entropy": (
        "(input: 'Tensor', local_weight: 'Tensor', target: 'Tensor', *, local_bias: 'Tensor | None' = None, "
        "weight: 'Tensor | None' = None, group: 'Any' = None, vocab_start: 'int | None' = None, vocab_size: "
        "'int | None' = None, reduction: 'str' = 'mean', ignore_index: 'int' = -100, label_smoothing: 'float'"
        " = 0.0, softcap: 'float | None' = None, z_loss: 'float' = 0.0, chunk_rows: 'int | None' = None, "
        "accumulate: 'str' = 'float32', logits_dtype: 'torch.dtype | None' = None, check: 'bool' = False) -> "
        "'Tensor'"
    ),
    "parallel.log_softmax": (
        "(local_logits: 'Tensor', *, group: 'Any' = None, vocab_start: 'int | None' = None, vocab_size: 'int "
        "| None' = None, dtype: 'torch.dtype | None' = None, check: 'bool' = False) -> 'Tensor'"
    ),
    "parallel.logsumexp": (
        "(local_logits: 'Tensor', *, group: 'Any' = None, vocab_start: 'int | None' = None, vocab_size: 'int "
        "| None' = None, keepdim: 'bool' = False, check: 'bool' = False) -> 'Tensor'"
    ),
    "parallel.softmax": (
        "(local_logits: 'Tensor', *, group: 'Any' = None, vocab_start: 'int | None' = None, vocab_size: 'int "
        "| None' = None, dtype: 'torch.dtype | None' = None, check: 'bool' = False) -> 'Tensor'"
    ),
    "parallel.token_logprobs": (
        "(local_logits: 'Tensor', token_ids: 'Tensor', *, group: 'Any' = None, vocab_start: 'int | None' = "
        "None, vocab_size: 'int | None' = None, temperature: 'float | Tensor' = 1.0, return_entropy: 'bool' ="
        " False, return_logsumexp: 'bool' = False, check: 'bool' = False) -> 'Tensor | TokenStatistics'"
    ),
    "patch.enable": "(self) -> 'None'",
    "patch.disable": "(self) -> 'None'",
    "patch.__enter__": "(self) -> 'patch'",
    "patch.__exit__": "(self, *exception: 'object') -> 'None'",
    "patch.__call__": "(self, function: 'F') -> 'F'",
}


def signatures() -> dict[str, str]:
    """Each public name that can be called, with its signature."""
    found = {name: getattr(fs, name) for name in fs.__all__ if name not in ("nn", "parallel")}
    for module in (nn, integrations):
        short = module.__name__.rpartition(".")[2]
        found |= {
            f"{short}.{name}": value
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        }
    found |= {f"parallel.{name}": getattr(parallel, name) for name in parallel.__all__}
    for name in ("enable", "disable", "__enter__", "__exit__", "__call__"):
        found[f"patch.{name}"] = getattr(fs.patch, name)
    return {name: str(inspect.signature(value)) for name, value in found.items()}


def test_names_and_signatures():
    found = signatures()
    assert set(fs.__all__) == {name for name in NAMES if "." not in name} | {"nn", "parallel"}
    assert found.keys() == NAMES.keys()
    wrong = {name: (found[name], wanted) for name, wanted in NAMES.items() if found[name] != wanted}
    # annotations of a NamedTuple differ between versions of Python, those of torch's own between its versions
    for name in ("TokenStatistics", "nn.Softmax", "nn.LogSoftmax"):
        wrong.pop(name, None)
    assert not wrong
    assert [*inspect.signature(nn.Softmax).parameters] == [*inspect.signature(nn.LogSoftmax).parameters] == ["dim"]
    assert fs.TokenStatistics._fields == ("logprobs", "entropy", "logsumexp")
    assert all(callable(getattr(fs, name)) for name in fs.__all__ if name not in ("nn", "parallel"))


MODULES = {
    "Softmax": nn.Softmax(dim=1),
    "LogSoftmax": nn.LogSoftmax(dim=-1),
    "CrossEntropyLoss": nn.CrossEntropyLoss(torch.rand(4), label_smoothing=0.1, softcap=3.0, z_loss=0.01),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_modules_are_pickled(name, protocol):
    module = MODULES[name]
    text = pickle.dumps(module, protocol)
    assert b"fused_softmax.nn" in text  # the path by which a later release finds the class
    for found in (pickle.loads(text), copy.deepcopy(module)):
        assert type(found) is type(module) and repr(found) == repr(module)
        x, target = torch.randn(3, 4), torch.tensor([0, 3, 1])
        given = (x, target) if name == "CrossEntropyLoss" else (x,)
        torch.testing.assert_close(found(*given), module(*given))
        assert found.__dict__.keys() == module.__dict__.keys()


def test_a_patch_is_pickled():
    held = fs.patch(ops=("softmax",))
    text = pickle.dumps(held)
    assert b"fused_softmax.patch" in text
    found = pickle.loads(text)
    assert type(found) is fs.patch and found.ops == ("softmax",)


def test_results_are_pickled():
    found = fs.token_logprobs(torch.zeros(2, 4), torch.tensor([1, 3]), return_entropy=True)
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is fs.TokenStatistics and torch.equal(again.entropy, found.entropy) and again.logsumexp is None


def test_adapters_is_a_deprecated_name():
    sys.modules.pop("fused_softmax.adapters", None)
    adapters = importlib.import_module("fused_softmax.adapters")
    for name in ("selective_log_softmax", "causal_lm_loss"):
        with pytest.warns(DeprecationWarning, match="fused_softmax.integrations"):
            assert getattr(adapters, name) is getattr(integrations, name)


def test_log_of_plan_for_is_deprecated():
    x = torch.zeros(2, 8, dtype=torch.float64)
    with pytest.warns(DeprecationWarning, match='op="log_softmax"'):
        assert fs.plan_for(x, log=True) == fs.plan_for(x, op="log_softmax")
