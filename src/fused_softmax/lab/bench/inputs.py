"""The inputs of the workloads: random rows with outliers, targets, masks, gradients; and tensors of a file.

Outliers stand in the first, middle and last columns, so that a system that skips columns gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
IGNORED = -100
Inputs = tuple[Tensor, ...]
# of attention scores: batches, heads, queries
Scores = tuple[int, int, int]


def rows_of_logits(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """(n_rows, n_cols) random normal rows with outliers planted in every third row, at the row's start, middle, end."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(n_rows, n_cols, dtype=dtype, device=device, generator=generator)
    if n_rows and n_cols:
        x[0::3, n_cols - 1] = 12.0
        x[1::3, n_cols // 2] = 11.0
        x[2::3, 0] = 10.0
    return x


def _calm(x: Tensor) -> Tensor:
    """A quarter of the logits. Where one column has 99% of a row, the row's gradient is rounding error only."""
    return x / 4


def one_input(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Logits alone: a file of real data can replace them."""
    return (rows_of_logits(n_rows, n_cols, dtype, device, seed),)


def softmax_gradient(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(the result's gradient, the result)."""
    y = torch.softmax(rows_of_logits(n_rows, n_cols, dtype, device, seed), -1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y


def log_softmax_gradient(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(the result's gradient, the result)."""
    y = torch.log_softmax(rows_of_logits(n_rows, n_cols, dtype, device, seed), -1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y


def logits_and_gradient(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(logits that need a gradient, the result's gradient)."""
    x = _calm(rows_of_logits(n_rows, n_cols, dtype, device, seed))
    return x.requires_grad_(), rows_of_logits(n_rows, n_cols, dtype, device, seed + 1)


def _classes(n_rows: int, n_cols: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed + 7)
    return torch.randint(0, n_cols, (n_rows,), device=device, generator=generator)


def logits_and_targets(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(logits, targets with one in 64 ignored, the number of targets that count)."""
    target = _classes(n_rows, n_cols, device, seed)
    target[5::64] = IGNORED
    return rows_of_logits(n_rows, n_cols, dtype, device, seed), target, (target != IGNORED).sum().double()


def logits_and_ids(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(logits, token ids)."""
    return rows_of_logits(n_rows, n_cols, dtype, device, seed), _classes(n_rows, n_cols, device, seed)


def logprob_gradients(n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """(logits, ids, upstream gradients of log-probabilities, entropies and logsumexps)."""
    generator = torch.Generator(device=device).manual_seed(seed + 9)
    upstream = torch.randn(3, n_rows, device=device, generator=generator)
    return (*logits_and_ids(n_rows, n_cols, dtype, device, seed), *upstream.unbind())


def queries(n_rows: int, n_cols: int, scores: Scores | None = None) -> int:
    """Queries of one head: n_cols where the rows are whole heads of that many, else all rows belong to one head."""
    if scores is not None:
        return scores[2]
    return n_cols if n_cols and n_rows % n_cols == 0 else n_rows


def heads(x: Tensor, mask: Tensor) -> Tensor:
    """Rows as (1, heads, queries, columns), for a mask (queries, columns)."""
    return x.view(1, -1, *mask.shape)


def causal_scores(
    n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int, scores: Scores | None = None
) -> Inputs:
    """(scores, each row's query, the hidden elements of a head)."""
    n_queries = queries(n_rows, n_cols, scores)
    query = torch.arange(n_rows, device=device) % max(n_queries, 1)
    hidden = torch.ones(n_queries, n_cols, dtype=torch.bool, device=device).triu_(1)
    return rows_of_logits(n_rows, n_cols, dtype, device, seed), query, hidden


def biased_scores(
    n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int, scores: Scores | None = None
) -> Inputs:
    """(scores, each row's query, a bias for every query and column, one in eight -inf)."""
    x, query, hidden = causal_scores(n_rows, n_cols, dtype, device, seed, scores)
    mask = rows_of_logits(len(hidden), n_cols, dtype, device, seed + 3)
    mask[:, 3::8] = -float("inf")
    return x, query, mask


def kept_scores(
    n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int, scores: Scores | None = None
) -> Inputs:
    """(scores, each row's query, a boolean mask for every query and column, which hides one in eight)."""
    x, query, hidden = causal_scores(n_rows, n_cols, dtype, device, seed, scores)
    generator = torch.Generator(device=device).manual_seed(seed + 3)
    kept = torch.rand(hidden.shape, device=device, generator=generator) >= 0.125
    kept[:, :1] = True  # no row without a column
    return x, query, kept


def batches(n_rows: int, n_cols: int, scores: Scores | None = None) -> int:
    """Batches that share a bias for each head: up to 4, so that they divide the heads."""
    if scores is not None:
        return scores[0]
    n_heads = n_rows // max(queries(n_rows, n_cols), 1)
    return next(n for n in (4, 3, 2, 1) if n_heads % n == 0)


def scores_of_biased_heads(
    n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int, scores: Scores | None = None
) -> Inputs:
    """(scores, each row's place in the bias, a bias (heads, queries, columns) of a batch, one in eight -inf)."""
    x = rows_of_logits(n_rows, n_cols, dtype, device, seed)
    of_batch = n_rows // max(batches(n_rows, n_cols, scores), 1)
    bias = rows_of_logits(of_batch, n_cols, dtype, device, seed + 3)
    bias[:, 3::8] = -float("inf")
    n_queries = max(queries(n_rows, n_cols, scores), 1)
    return x, torch.arange(n_rows, device=device) % max(of_batch, 1), bias.view(-1, n_queries, n_cols)


def biased_heads(x: Tensor, row: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(scores (batches, heads, queries, columns), their bias (1, heads, queries, columns))."""
    return x.view(-1, *bias.shape), bias[None]


def causal_softmax(x: Tensor, query: Tensor, hidden: Tensor) -> Tensor:
    """torch's softmax of causal scores."""
    return torch.softmax(heads(x, hidden).masked_fill(hidden, -float("inf")), -1).view_as(x)


def biased_softmax(x: Tensor, query: Tensor, mask: Tensor) -> Tensor:
    """torch's softmax of scores with a bias."""
    return torch.softmax(heads(x, mask) + mask, -1).view_as(x)


def kept_softmax(x: Tensor, query: Tensor, kept: Tensor) -> Tensor:
    """torch's softmax of scores under a boolean mask."""
    return causal_softmax(x, query, ~kept)


def softmax_of_biased_heads(x: Tensor, row: Tensor, bias: Tensor) -> Tensor:
    """torch's softmax of scores with a bias for each head."""
    scores, bias = biased_heads(x, row, bias)
    return torch.softmax(scores + bias, -1).view_as(x)


def _gradient_of(scores_of: Callable[..., Inputs], softmax: Callable[..., Tensor]) -> Callable[..., Inputs]:
    """What makes (the result's gradient, the result, each row's query, the mask), where `scores_of` makes scores."""

    def inputs(
        n_rows: int, n_cols: int, dtype: torch.dtype, device: torch.device, seed: int, scores: Scores | None = None
    ) -> Inputs:
        x, query, mask = scores_of(n_rows, n_cols, dtype, device, seed, scores)
        y = softmax(_calm(x), query, mask)
        return rows_of_logits(n_rows, n_cols, dtype, device, seed + 1), y, query, mask

    return inputs


causal_gradient = _gradient_of(causal_scores, causal_softmax)
biased_gradient = _gradient_of(biased_scores, lambda x, query, mask: biased_softmax(x, query, _calm(mask)))
kept_gradient = _gradient_of(kept_scores, kept_softmax)


# --- files ----------------------------------------------------------------------------------------------------------


def excerpt() -> Path:
    """The excerpt of real logits in the package (data/README.md names its source)."""
    return Path(__file__).resolve().parent.parent / "data" / "minilm_excerpt.safetensors"


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Floating tensors of a .safetensors, .npy or .pt file, by name; raises ValueError when there is none to use."""
    readers = {".safetensors": _safetensors, ".npy": _npy, ".pt": _pt, ".pth": _pt}
    if path.suffix not in readers:
        raise ValueError(f"{path} has none of the suffixes that are read: give a .safetensors, .npy or .pt file")
    with path.open("rb"):  # what cannot be opened is no damaged file
        pass
    try:
        loaded = readers[path.suffix](path)
    except (ModuleNotFoundError, MemoryError):
        raise
    except Exception as error:  # each reader has exceptions of its own for a damaged file
        why = " ".join(str(error).split()).split(". ")[0][:160] or type(error).__name__
        raise ValueError(f"{path} cannot be read as {path.suffix} ({why}): give a whole file of that format") from None
    named = {str(n): t for n, t in loaded.items() if isinstance(t, Tensor) and t.layout is torch.strided}
    tensors = {
        n: t for n, t in named.items() if t.ndim > 0 and t.numel() > 0 and not t.is_meta
        if str(t.dtype).removeprefix("torch.") in DTYPES
    }  # fmt: skip
    if not tensors:
        raise ValueError(f"{path} holds no tensor in {', '.join(DTYPES)} with an element and a dimension: give one")
    return tensors


def _safetensors(path: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return dict(load_file(path))


def _npy(path: Path) -> dict[str, object]:
    import numpy

    return {path.stem: torch.from_numpy(numpy.load(path))}


def _pt(path: Path) -> dict[str, object]:
    content = torch.load(path, map_location="cpu", weights_only=True)
    return dict(content) if isinstance(content, dict) else {path.stem: content}
