"""What one process runs for one stream: its segments, whose states enter and leave, and the exchange between them.

A segment is a run of local tokens that starts from one state: a whole document without context parallelism, a
fragment of one with it. Built on the host from offsets, once per context; without a context, once per call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from flashqla_cp.kernels.chunks import ChunkTable
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.exchange.base import Exchange
from flashqla_cp.parallel.fragments import Fragments


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments and, for the torch backend, the table of their chunks, made on the device when it is first asked for."""

    starts: Sequence[int]
    lengths: Sequence[int]
    num_tokens: int
    device: torch.device

    @functools.cached_property
    def table(self) -> ChunkTable:
        # Counted on the host, whatever the default device is, and good for training even if inference asks first.
        with torch.device("cpu"), torch.inference_mode(False):
            return ChunkTable.of(self.starts, self.lengths, self.num_tokens, self.device)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Some segments, as an index on the device (int64) and as chunks of their own."""

    index: torch.Tensor
    segments: Segments

    @property
    def table(self) -> ChunkTable:
        return self.segments.table


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Segments of one process. Index tensors are int64 on the device of the tensors.

    segments: all of them; table: their chunks. covered: [T] bool, tokens of some segment, None when all are. entries,
    exits: (segment, document) pairs as two rows: segments that begin, or end, their document. empty: documents without
    tokens whose state passes through this process. emitters, receivers, interior: segments that send a map, receive a
    state, and send a correction; they exist only with an exchange.
    """

    num_tokens: int
    num_documents: int
    segments: Segments
    covered: torch.Tensor | None
    entries: torch.Tensor
    exits: torch.Tensor
    empty: torch.Tensor
    exchange: Exchange | None
    emitters: Group
    receivers: Group
    interior: Group
    entry_row: torch.Tensor = field(init=False)
    exit_row: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry_row", self._rows(self.entries, self.receivers))
        object.__setattr__(self, "exit_row", self._rows(self.exits, self.emitters))

    @property
    def table(self) -> ChunkTable:
        return self.segments.table

    def with_tables(self) -> Program:
        """This, once the tables of all its segments are made: a capture of a CUDA graph cannot make them."""
        for segments in (self.segments, self.emitters.segments, self.receivers.segments, self.interior.segments):
            _ = segments.table
        return self

    def _rows(self, own: torch.Tensor, exchanged: Group) -> torch.Tensor:
        """Row of each segment's state among the own documents' states followed by the exchanged ones."""
        rows = torch.full((len(self.segments.starts),), -1, dtype=torch.int64, device=own.device)
        order = torch.cat([own[0], exchanged.index])
        return rows.index_copy(0, order, torch.arange(len(order), device=own.device))

    @classmethod
    def of_documents(cls, cu_seqlens: Sequence[int], num_tokens: int, device: torch.device) -> Program:
        """One process that holds the whole stream: every document is a segment."""
        spans = list(pairwise(cu_seqlens))
        full = [doc for doc, (start, end) in enumerate(spans) if end > start]
        return cls._build(
            [spans[doc][0] for doc in full],
            [spans[doc][1] - spans[doc][0] for doc in full],
            num_tokens,
            len(spans),
            device,
            entries=list(enumerate(full)),
            exits=list(enumerate(full)),
            empty=[doc for doc, (start, end) in enumerate(spans) if end == start],
        )

    @classmethod
    def of_context(cls, context: CPContext, device: torch.device, *, tables: bool = False) -> Program:
        """The fragments that this rank holds, in slot order; kept in the context. tables: with all of its tables."""
        own = context.plan.fragments.owned_by(context.rank)

        def make() -> Program:
            made = cls._of_fragments(context, own, device)
            return made.with_tables() if tables else made

        return context.kept(("program of fragments", tables), device, make)

    @classmethod
    def of_stream(cls, context: CPContext, device: torch.device, *, tables: bool = False) -> Program:
        """The documents of a context's whole stream, as if this process held all of it; kept as that of of_context."""

        def make() -> Program:
            made = cls.of_documents(context.plan.cu_seqlens, context.plan.num_tokens, device)
            return made.with_tables() if tables else made

        return context.kept(("program of stream", tables), device, make)

    @classmethod
    def _of_fragments(cls, context: CPContext, own: Fragments, device: torch.device) -> Program:
        plan, document = context.plan, own.document.tolist()
        enters, leaves = own.has_predecessor, own.has_successor
        return cls._build(
            own.offset.tolist(),
            own.length.tolist(),
            context.local_tokens,
            plan.num_documents,
            device,
            entries=[(row, document[row]) for row in (~enters).nonzero().flatten().tolist()],
            exits=[(row, document[row]) for row in (~leaves).nonzero().flatten().tolist()],
            empty=plan.empty_documents(context.rank),
            exchange=context.map_exchange,
            emitters=leaves.nonzero().flatten().tolist(),
            receivers=enters.nonzero().flatten().tolist(),
            interior=(enters & leaves).nonzero().flatten().tolist(),
        )

    @classmethod
    def _build(
        cls,
        starts: list[int],
        lengths: list[int],
        num_tokens: int,
        num_documents: int,
        device: torch.device,
        *,
        entries: list[tuple[int, int]],
        exits: list[tuple[int, int]],
        empty: list[int],
        exchange: Exchange | None = None,
        emitters: Sequence[int] = (),
        receivers: Sequence[int] = (),
        interior: Sequence[int] = (),
    ) -> Program:
        def index(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def pairs(values: list[tuple[int, int]]) -> torch.Tensor:
            return index([number for pair in values for number in pair]).view(-1, 2).T.contiguous()

        def group(rows: Sequence[int]) -> Group:
            own = [starts[row] for row in rows], [lengths[row] for row in rows]
            return Group(index(rows), Segments(*own, num_tokens, device))

        covered = None
        if sum(lengths) < num_tokens:
            covered = torch.zeros(num_tokens, dtype=torch.bool, device="cpu")
            for start, length in zip(starts, lengths, strict=True):
                covered[start : start + length] = True
            covered = covered.to(device)
        return cls(
            num_tokens,
            num_documents,
            Segments(starts, lengths, num_tokens, device),
            covered,
            pairs(entries),
            pairs(exits),
            index(empty),
            exchange,
            group(emitters),
            group(receivers),
            group(interior),
        )
