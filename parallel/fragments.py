"""Fragments: documents cut at the ends of the token ranges that ranks own. Pure integers, no ranks at run time.

A fragment is a maximal run of tokens of one document inside one range. Fragments are kept in stream order, as a
struct of arrays, so that a plan with many thousand documents costs a few vector operations. The index of a fragment
in these arrays is its slot. Tokens past the last document (the padded tail) belong to no fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fragments:
    """All fragments of a plan in stream order; int64 and bool CPU tensors of one length.

    document: document a fragment belongs to. start, end: its tokens in the stream. rank: its owner. offset: where it
    starts in the owner's local tokens. has_predecessor, has_successor: whether its document began in, or goes on
    in, another fragment; then that fragment is the neighbouring slot.
    """

    document: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    rank: torch.Tensor
    offset: torch.Tensor
    has_predecessor: torch.Tensor
    has_successor: torch.Tensor

    @property
    def length(self) -> torch.Tensor:
        """Tokens of each."""
        return self.end - self.start

    @property
    def crosses_ranks(self) -> bool:
        """Whether some document's state has to travel from one rank to another."""
        return bool((self.has_successor[:-1] & (self.rank[:-1] != self.rank[1:])).any())

    def of_rank(self, rank: int) -> torch.Tensor:
        """Slots of one rank in stream order, int64."""
        return (self.rank == rank).nonzero().flatten()

    def owned_by(self, rank: int) -> Fragments:
        """Those of one rank, in stream order."""
        mine = self.of_rank(rank)
        return Fragments(**{column.name: getattr(self, column.name)[mine] for column in fields(self)})


def merge_touching(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Drop empty ranges and join neighbours that continue each other, so that no document is cut without need."""
    merged: list[Range] = []
    for start, end in ranges:
        if start == end:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """Where each token of the stream lives: range starts in stream order with their rank and local offset, int64."""

    start: torch.Tensor
    rank: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, ranges: Sequence[Sequence[Range]]) -> Owners:
        rows = []
        for rank, owned in enumerate(ranges):
            offset = 0
            for start, end in owned:
                rows.append((start, rank, offset))
                offset += end - start
        columns = torch.tensor(sorted(rows), dtype=torch.int64, device="cpu").reshape(-1, 3)
        return cls(*columns.T.contiguous().unbind(0))

    def locate(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank and local offset of tokens of the stream, int64 of the same shape."""
        row = torch.searchsorted(self.start, tokens, right=True) - 1
        return self.rank[row], self.offset[row] + tokens - self.start[row]


def cut_documents(cu_seqlens: torch.Tensor, owners: Owners) -> Fragments:
    """Cut documents at range starts. cu_seqlens: int64 CPU offsets [N+1]; ranges that touch are merged already."""
    last = cu_seqlens[-1]
    bounds = torch.cat([cu_seqlens, owners.start[owners.start < last]]).unique()
    start, end = bounds[:-1], bounds[1:]
    document = torch.searchsorted(cu_seqlens, start, right=True) - 1
    rank, offset = owners.locate(start)
    return Fragments(
        document=document,
        start=start,
        end=end,
        rank=rank,
        offset=offset,
        has_predecessor=start > cu_seqlens[document],
        has_successor=end < cu_seqlens[document + 1],
    )
