"""Losses that make their own logits, against their peers and against the matrix products that bound them."""
