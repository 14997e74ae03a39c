"""Our losses inside the programs that people run: transformers, TRL, torchtitan, verl, vLLM.

A function has the name and signature of what it stands for. `apply_to` and the `patch_*` functions put it in place, say
what they did, and can be undone. They check the names and signatures that they replace, and raise where these have
changed. Nothing of another package is imported before one of them is called. docs/programs.md shows each.
"""

from .causal_lm import AppliedLoss, apply_to, causal_lm_loss
from .replacing import Replaced
from .serving import batch_invariant_log_softmax, compute_token_logprobs
from .trainers import patch_torchtitan, patch_verl, torchtitan_cross_entropy_loss, verl_logprobs_from_logits
from .trl_trainers import patch_trl, selective_log_softmax

__all__ = [
    "AppliedLoss",
    "Replaced",
    "apply_to",
    "batch_invariant_log_softmax",
    "causal_lm_loss",
    "compute_token_logprobs",
    "patch_torchtitan",
    "patch_trl",
    "patch_verl",
    "selective_log_softmax",
    "torchtitan_cross_entropy_loss",
    "verl_logprobs_from_logits",
]

# the path by which a later release finds what was pickled
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
