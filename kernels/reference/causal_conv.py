"""Depthwise causal convolution of packed segments in plain torch, forward and backward.

    y_t = act(bias + sum_w weight[:, w] x_{t - (W-1) + w})        rows in front of a segment come from `history`

Letters: T tokens, D channels, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, eq=False)
class ConvTable:
    """taps [T, W]: for each token the row of each tap in cat([x, halo, zero row]), the nearest last; tokens of no
    segment and places in front of a document point at the zero row, `zero_row`. covered [T, 1]: in some segment."""

    taps: torch.Tensor
    covered: torch.Tensor
    zero_row: int

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        lengths: Sequence[int],
        num_tokens: int,
        history: torch.Tensor,
        num_halo: int,
        device: torch.device | str = "cpu",
    ) -> ConvTable:
        """history [segments, W-1]: rows in front of each segment in cat([x, halo]), nearest last, -1 for none."""
        start, length = (torch.tensor(values, dtype=torch.int64, device="cpu") for values in (starts, lengths))
        width, zero_row = history.shape[1] + 1, num_tokens + num_halo
        segment = torch.repeat_interleave(torch.arange(len(start), device="cpu"), length)
        place = torch.arange(len(segment), device="cpu") - (length.cumsum(0) - length)[segment]
        token = start[segment] + place
        reach = torch.arange(width - 1, -1, -1, device="cpu")
        known = torch.cat([history, history.new_zeros(len(start), 1)], dim=1)
        ahead = known[segment[:, None], (width - 1 - reach + place[:, None]).clamp(max=width - 1)]
        row = torch.where(place[:, None] >= reach, token[:, None] - reach, ahead)
        taps = torch.full((num_tokens, width), zero_row, dtype=torch.int64, device="cpu")
        taps[token] = torch.where(row < 0, zero_row, row)
        covered = torch.zeros(num_tokens, 1, dtype=torch.bool, device="cpu")
        covered[token] = True
        return cls(taps.to(device), covered.to(device), zero_row)


def _linear(x: torch.Tensor, halo: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, table: ConvTable):
    rows = torch.cat([x, halo, x.new_zeros(1, x.shape[1])])
    y = x.new_zeros(x.shape) if bias is None else bias.expand_as(x)
    for tap in range(weight.shape[1]):
        y = y + weight[:, tap] * rows.index_select(0, table.taps[:, tap])
    return rows, y


def forward(
    x: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: ConvTable,
    silu: bool,
) -> torch.Tensor:
    """x [T, D], halo [rows, D], weight [D, W], bias [D] or None -> y [T, D], exactly zero outside segments."""
    _, y = _linear(x, halo, weight, bias, table)
    return torch.where(table.covered, F.silu(y) if silu else y, 0)


def backward(
    x: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: ConvTable,
    silu: bool,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx [T, D], dhalo [rows, D], dweight [D, W], dbias [D]. Each tap meets a row once, so sums repeat bitwise."""
    rows, y = _linear(x, halo, weight, bias, table)
    if silu:
        gate = torch.sigmoid(y)
        dy = dy * gate * (1 + y * (1 - gate))
    dy = torch.where(table.covered, dy, 0)
    drows = torch.zeros_like(rows)
    dweight = torch.empty_like(weight)
    for tap in range(weight.shape[1]):
        index = table.taps[:, tap]
        drows.index_add_(0, index, weight[:, tap] * dy)
        dweight[:, tap] = (dy * rows.index_select(0, index)).sum(0)
    return drows[: len(x)], drows[len(x) : table.zero_row], dweight, dy.sum(0)
