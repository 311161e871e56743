"""Chunk tables: segments (runs of tokens that start from one state) cut into chunks of 64 tokens.

Chunks are ordered by their place in their segment, and within one place by falling segment length. So the chunks that
the state recurrence visits in step j stand together, and the segments that still run are a prefix of those of step
j-1: the recurrence costs one batched product a step, whatever the number of segments. Empty segments have no chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CHUNK = 64


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Chunks of a set of segments.

    num_tokens: rows of the tensors the table indexes. num_segments: segments, empty ones included. token: int64
    [chunks, CHUNK] row of each token, num_tokens where the chunk is short. order: int64 segment of each place in
    step 0. steps: (first chunk, number of chunks) of every step.
    """

    num_tokens: int
    num_segments: int
    token: torch.Tensor
    order: torch.Tensor
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, starts: Sequence[int], lengths: Sequence[int], num_tokens: int, device: torch.device | str = "cpu"
    ) -> ChunkTable:
        """Cut segments [start, start + length) of a tensor of num_tokens rows."""
        start, length = (torch.tensor(values, dtype=torch.int64) for values in (starts, lengths))
        chunks = (length + CHUNK - 1) // CHUNK
        order = chunks.argsort(descending=True, stable=True)[: int((chunks > 0).sum())]
        last = int(chunks.max()) if len(chunks) else 0
        ascending = chunks[order].flip(0).contiguous()
        running = len(order) - torch.searchsorted(ascending, torch.arange(last), right=True)
        first = running.cumsum(0) - running
        step = torch.repeat_interleave(torch.arange(last), running)
        segment = order[torch.arange(len(step)) - first[step]]
        inside = step[:, None] * CHUNK + torch.arange(CHUNK)
        token = torch.where(inside < length[segment][:, None], start[segment][:, None] + inside, num_tokens)
        steps = tuple(zip(first.tolist(), running.tolist(), strict=True))
        return cls(num_tokens, len(starts), token.to(device), order.to(device), steps)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, ...] -> [chunks, CHUNK, ...], zero rows where a chunk is short."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded.index_select(0, self.token.flatten()).view(*self.token.shape, *x.shape[1:])

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[chunks, CHUNK, ...] -> [num_tokens, ...], zero rows where no segment reaches."""
        out = x.new_zeros(self.num_tokens + 1, *x.shape[2:])
        return out.index_copy_(0, self.token.flatten(), x.flatten(0, 1))[:-1]
