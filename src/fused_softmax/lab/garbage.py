"""What Python's garbage collector is to leave alone."""

from __future__ import annotations

import atexit
import functools
import gc


def freeze() -> None:
    """Leave out of each collection what is there now: torch.compile's modules, most of all.

    At the end of the process it is collected again, because Triton's bindings report what is left as leaks.
    """
    gc.collect()
    gc.freeze()
    _unfreeze_at_exit()


@functools.cache
def _unfreeze_at_exit() -> None:
    atexit.register(gc.unfreeze)
