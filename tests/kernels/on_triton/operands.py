"""Inputs of kernels."""

import torch


def operands(rows, features, dtype, device, spread=1.0):
    """An input inside a frame of NaN, so that reading beyond its edge shows, and a mean."""
    frame = torch.full((rows + 2, features + 3), torch.nan, dtype=dtype, device=device)
    x = frame[1:-1, 2:-1]
    x.copy_(torch.randn(rows, features) * spread)
    return x, torch.randn(features, device=device) * spread
