"""How PyTorch sees the ops."""
