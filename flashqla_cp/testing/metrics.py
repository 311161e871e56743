"""Scores: relative L2 error of a whole tensor and of the window behind each cut.

A wrong entry state shows in the tokens right after a cut and fades from there, so the whole tensor alone can hide it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def relative_l2(x: torch.Tensor, ref: torch.Tensor) -> float:
    """||x - ref|| / ||ref|| in fp64; ||x|| where ref is 0 everywhere; inf where x is not finite.

    Raises:
        ValueError: the shapes differ.
    """
    if x.shape != ref.shape:
        raise ValueError(f"relative_l2: got shape {tuple(x.shape)}, expected {tuple(ref.shape)}")
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    if not torch.isfinite(x).all():
        return float("inf")
    error, size = torch.linalg.vector_norm(x - ref).item(), torch.linalg.vector_norm(ref).item()
    return error / size if size > 0 else error


def worst_after_cuts(x: torch.Tensor, ref: torch.Tensor, cuts: Iterable[int], window: int = 32, dim: int = 1) -> float:
    """The largest relative_l2 over the `window` tokens that follow each cut; 0 without cuts inside the tensor."""
    length = ref.shape[dim]
    windows = [(cut, min(window, length - cut)) for cut in cuts if 0 <= cut < length]
    scores = (relative_l2(x.narrow(dim, start, size), ref.narrow(dim, start, size)) for start, size in windows)
    return max(scores, default=0.0)
