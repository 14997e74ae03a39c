"""Lesson 01, the puzzle: softmax as five passes of PyTorch.

x is (n_rows, n_cols), and softmax works along each row. Write five lines: the row's maximum, the difference, the
exponential, the sum, the quotient. Each line makes a new tensor and calls no other softmax. The grader counts the
elements that your lines read and write.
"""

from __future__ import annotations

from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    # write: five passes over x, each of one PyTorch operation; the result has the shape of x
    row_max = x.amax(dim=1)
    z = x - row_max[:, None]
    numerator = z.exp()
    denominator = numerator.sum(dim=1)
    y = numerator / denominator[:, None]
    # end
    return y
