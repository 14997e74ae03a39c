"""Where the numbers of a payload lie, which a rank gives to a collective; kernels/vocab_shards.py names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Where a payload's parts begin, in elements. header: the header's numbers."""

    header: int
    n_rows: int
    segments: int
    picks: int = 1  # at least 1

    @property
    def head(self) -> int:
        return self.header + self.segments

    @property
    def picked(self) -> int:
        return self.head + 2 * self.segments * self.n_rows

    @property
    def spreads(self) -> int:
        return self.picked + self.n_rows * self.picks

    @property
    def weights(self) -> int:
        return self.spreads + self.segments * self.n_rows

    @property
    def length(self) -> int:
        return self.weights + self.n_rows
