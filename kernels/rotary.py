"""The table by which positions turn heads, made once for a model on the host."""

import torch
from torch import Tensor


def rope_table(rotary_dim: int, theta: float, max_positions: int, factors: Tensor | None = None) -> Tensor:
    """Cosines, then sines, of every position: float32 `[max_positions, rotary_dim]`, computed in float64.

    Frequency i turns by theta^(-2i / rotary_dim) / factors[i] radians a position; `factors` is `[rotary_dim / 2]`, as a
    file's rope_freqs tensor gives it.
    """
    frequencies = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    if factors is not None:
        if factors.numel() != rotary_dim // 2:
            raise ValueError(f"{rotary_dim // 2} frequency factors expected, got {factors.numel()}")
        frequencies = frequencies / factors.double()
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()
