"""Deprecated: import from fused_softmax.integrations; this name goes with the next release but one."""

import warnings

from .integrations import causal_lm_loss, selective_log_softmax

__all__ = ["causal_lm_loss", "selective_log_softmax"]

warnings.warn("fused_softmax.adapters is fused_softmax.integrations now", DeprecationWarning, stacklevel=2)
