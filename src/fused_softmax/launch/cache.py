"""A bounded dictionary that any thread may use."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from itertools import islice
from typing import Any


class Cache(dict[Hashable, Any]):
    """Entries by key; when it is full, its oldest eighth goes."""

    CAPACITY = 8192
    _lock = threading.Lock()

    def store(self, key: Hashable, value: Any) -> Any:
        """Puts the value in, and returns it."""
        with self._lock:
            if len(self) >= self.CAPACITY:
                for old in list(islice(self, self.CAPACITY // 8)):
                    self.pop(old, None)
            self[key] = value
        return value
