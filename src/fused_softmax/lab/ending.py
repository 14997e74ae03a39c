"""How a command of this package ends: on Ctrl-C with status 130, and quietly where its reader has gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
NO_READER = 1


def run_main(main: Callable[[], object]) -> None:
    """Call `main` and flush what it printed; Ctrl-C and a closed pipe end the process without a traceback."""
    try:
        try:
            main()
        finally:
            # a pipe that was closed shows itself at the latest here, not while the interpreter shuts down
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(NO_READER)
