"""The loss of a causal language model of transformers: apply_to, and causal_lm_loss for Trainer's compute_loss_func.

apply_to puts linear_cross_entropy in the place of lm_head and loss.

In training, the model's forward runs the model below lm_head and hands its hidden states, with lm_head's own weight, to
linear_cross_entropy: the logits are never held. Calls without labels, generation among them, run the model's own
forward. What is not as this file expects it raises before anything is changed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..launch.torch_private import has_hooks
from ..linear_losses import linear_cross_entropy_over
from ..losses import cross_entropy_over
from ..torch_ops.arguments import denominator_of, stands_in
from .replacing import TRANSFORMERS, installed

# model_type of the config -> the class of the model. The logits of all are lm_head(hidden), with a softcap where the
# config has one, and their loss is ForCausalLMLoss.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# arguments of the forward that are not for the model below lm_head
_OF_THE_LOSS = ("shift_labels", "num_items_in_batch", "ignore_index")
_logger = logging.getLogger("fused_softmax")


class AppliedLoss:
    """What `apply_to` did to a model. `undo()` restores it, as the end of a `with` block does."""

    def __init__(self, model: Any, function: Any, text: str):
        self.model, self._function, self._text = model, function, text

    def undo(self) -> None:
        """Restore the model's forward.

        Raises:
            RuntimeError: It was restored already, or something else replaced the forward since.
        """
        if not self._is_ours():
            raise RuntimeError(
                "AppliedLoss.undo(): the model's forward is not the one that apply_to() installed: it was undone "
                "already, or something else replaced it since, as accelerate's prepare() does; undo that first"
            )
        del self.model.forward

    def _is_ours(self) -> bool:
        return getattr(self.model.__dict__.get("forward"), "__func__", None) is self._function

    def __enter__(self) -> AppliedLoss:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None or self._is_ours():
            self.undo()

    def __repr__(self) -> str:
        return self._text


def apply_to(
    model: Any,
    *,
    logits_in_eval: bool = True,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
    logits_dtype: torch.dtype | None = None,
) -> AppliedLoss:
    """Replace lm_head and loss of a causal language model of transformers with `linear_cross_entropy`.

    The model's family, softcap, bias and tied weights are read from its config and its lm_head. A call with labels then
    returns a loss and `logits=None`. Labels, shift_labels and num_items_in_batch mean what they mean to the model. A
    call without labels, as generate() makes it, runs the model's own forward. The loss is float32.

    Args:
        model: A `PreTrainedModel` of a family in `causal_lm.FAMILIES`, or a PEFT model whose adapters leave lm_head
            alone. It is changed in place.
        logits_in_eval: Whether `model.eval()` with labels runs the model's own forward, so that metrics get logits.
        chunk_rows: As in `linear_cross_entropy`.
        accumulate: As in `linear_cross_entropy`.
        logits_dtype: As in `linear_cross_entropy`.

    Returns:
        `AppliedLoss`, whose text says what was replaced, and whose `undo()` restores the model. The logger
        `fused_softmax` has the same text.

    Raises:
        NotImplementedError: The family is not known, or its loss is not transformers' ForCausalLMLoss.
        TypeError: model is no model of transformers, or lm_head is not a plain Linear: it is quantized, or an adapter
            wraps it.
        RuntimeError: Another version of transformers has another forward, the loss is applied already, or lm_head has
            hooks, which would not run, or the model's forward was replaced before.

    Source: https://huggingface.co/docs/transformers/model_doc/llama
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(model, "config"):
        raise TypeError(f"apply_to() takes a causal language model of transformers, not {type(model).__name__}")
    config = model.config
    _expect_family(model, config)
    _expect_forward(model)
    head = _expect_head(model)
    softcap = getattr(config, "final_logit_softcapping", None)
    options = dict(softcap=softcap, chunk_rows=chunk_rows, accumulate=accumulate, logits_dtype=logits_dtype)
    function = _forward_of(model, logits_in_eval, options)
    # a method, so that a copy of the model calls the copy
    model.forward = types.MethodType(function, model)
    applied = AppliedLoss(model, function, _told(model, config, head, softcap, logits_in_eval))
    _logger.info("%s", applied)
    return applied


def _expect_family(model: Any, config: Any) -> None:
    family, forward = getattr(config, "model_type", ""), type(model).forward
    # fully_shard makes a subclass; a subclass with a forward of its own is another model
    known = next((c for c in type(model).__mro__ if c.__name__ == FAMILIES.get(family)), None)
    if known is None or forward is not vars(known).get("forward"):
        raise NotImplementedError(
            f"apply_to(): {type(model).__name__} of model_type {family!r} is not known; it knows "
            f"{', '.join(sorted(FAMILIES.values()))}. For another model, call "
            "fused_softmax.linear_cross_entropy(hidden, lm_head.weight, target) in its forward"
        )
    loss = getattr(model.loss_function, "__name__", "")
    if loss != "ForCausalLMLoss":
        raise NotImplementedError(
            f"apply_to(): the model's loss function is {loss or model.loss_function!r}, not transformers' "
            "ForCausalLMLoss: it would be lost"
        )


def _expect_forward(model: Any) -> None:
    if getattr(model.__dict__.get("forward"), "fused_softmax", False):
        raise RuntimeError("apply_to(): it was applied to this model already; undo() that first")
    if "forward" in model.__dict__:
        raise RuntimeError(
            "apply_to(): something else replaced this model's forward, as accelerate's prepare() and device_map do. It "
            "would not run in training; call apply_to() before that"
        )
    parameters = inspect.signature(type(model).forward).parameters
    wanted = {"labels", "logits_to_keep"} - set(parameters)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    prefix = type(model).base_model_prefix
    below = f"{type(model).__name__}.{prefix}"
    if wanted or not takes_rest or not hasattr(model, prefix):
        lacks = [*sorted(wanted), *([] if takes_rest else ["**kwargs"]), *([] if hasattr(model, prefix) else [below])]
        raise RuntimeError(
            f"apply_to(): the forward of {type(model).__name__} has no {', '.join(lacks)} in transformers "
            f"{installed('transformers')}; this adapter knows versions {TRANSFORMERS}"
        )


def _expect_head(model: Any) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise TypeError(
            f"apply_to(): lm_head is a {type(head).__name__}, not a plain torch.nn.Linear: its weight alone may not "
            "make the logits; merge or remove the adapter, or dequantize the layer"
        )
    if has_hooks(head) or hasattr(head, "_hf_hook"):
        raise RuntimeError("apply_to(): lm_head has forward hooks, which would not run; remove them first")
    return head


def _told(model: Any, config: Any, head: torch.nn.Linear, softcap: float | None, logits_in_eval: bool) -> str:
    embedding = model.get_input_embeddings()
    facts = [
        f"weight {tuple(head.weight.shape)} {str(head.weight.dtype).removeprefix('torch.')}",
        "tied to the embedding" if embedding is not None and embedding.weight is head.weight else "not tied",
        "no bias" if head.bias is None else "bias",
        "no softcap" if softcap is None else f"softcap {softcap:g}",
    ]
    where = "in training" if logits_in_eval else "in training and evaluation"
    return (
        f"{type(model).__name__} ({config.model_type}): lm_head ({', '.join(facts)}) and ForCausalLMLoss -> "
        f"fused_softmax.linear_cross_entropy where labels are given {where}; the output's logits are None there"
    )


def _forward_of(model: Any, logits_in_eval: bool, options: dict[str, Any]) -> Any:
    """The forward that apply_to installs; it holds no model, so a copied model calls itself."""
    original = type(model).forward
    names = [*inspect.signature(original).parameters][1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False), **kwargs)
        labels = given.get("labels")
        kept = given.get("logits_to_keep", 0)
        plain = labels is None or not (type(kept) is int and kept == 0)
        if plain or (logits_in_eval and not self.training):
            return original(self, *args, **kwargs)
        return _loss_of_hidden_states(self, given, options)

    forward.fused_softmax = True  # type: ignore[attr-defined]
    return forward


def _loss_of_hidden_states(model: Any, given: dict[str, Any], options: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear or not isinstance(head, torch.nn.Linear):  # fully_shard makes a subclass
        _expect_head(model)  # an adapter or a hook may have come since
    labels, as_dict = given.pop("labels", None), given.pop("return_dict", None)
    given.pop("logits_to_keep", None)
    shifted, n_items, ignore_index = (given.pop(name, None) for name in _OF_THE_LOSS)
    ignore_index = -100 if ignore_index is None else ignore_index
    outputs = getattr(model, type(model).base_model_prefix)(**given, return_dict=True)
    hidden = outputs.last_hidden_state
    if shifted is None:
        # the labels are shifted, not the hidden states, which would have to be copied
        shifted = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden = hidden.to(head.weight.device)
    loss: Tensor = linear_cross_entropy_over(
        denominator_of(n_items, hidden), hidden.reshape(-1, hidden.shape[-1]), head.weight,
        shifted.reshape(-1).to(hidden.device), head.bias, ignore_index=ignore_index, **options,
    )  # fmt: skip
    found = CausalLMOutputWithPast(
        loss=loss,
        logits=None,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
    as_dict = getattr(model.config, "return_dict", True) if as_dict is None else as_dict
    return found if as_dict else found.to_tuple()


def causal_lm_loss(outputs: Any, labels: Tensor, num_items_in_batch: int | Tensor | None = None) -> Tensor:
    """Return the next-token loss of a causal language model, for `Trainer(compute_loss_func=causal_lm_loss)`.

    The labels are shifted, and the logits are not: a shifted view of the logits would have to be copied.

    Args:
        outputs: A mapping or an object with logits of shape (batch, length, V).
        labels: (batch, length) int64, -100 for positions without a label.
        num_items_in_batch: The divisor of the sum, as Trainer counts it over accumulated batches. None: the number of
            labels in this batch.

    Returns:
        A float32 scalar.

    Source: https://huggingface.co/docs/transformers/main_classes/trainer

    >>> causal_lm_loss({"logits": torch.zeros(1, 3, 4)}, torch.tensor([[0, 1, 2]]))
    tensor(1.3863)
    """
    if stands_in(outputs, labels, num_items_in_batch):
        given = (outputs, labels, num_items_in_batch)
        return handle_torch_function(causal_lm_loss, given, *given)
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    following = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    denominator = denominator_of(num_items_in_batch, logits)
    target = following.reshape(-1).to(logits.device)
    return cross_entropy_over(denominator, logits.reshape(-1, logits.shape[-1]), target)
