"""What one process runs of a call on kernels: whole documents or a context's fragments; what it keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashqla_cp.kernels.host.chunked import Entries, Inputs, Maps, Solved
from flashqla_cp.kernels.host.tables import Tables, to_device
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.program import Program


class Documents(NamedTuple):
    """Documents of one process: num_documents of `length` tokens each, or offsets int32 [N+1] where the tensors are."""

    num_documents: int
    length: int
    offsets: torch.Tensor | None

    def entries(self, values: torch.Tensor) -> Entries:
        """States in front of all documents, or gradients of those behind them, [N, HV, V, K]."""
        return Entries(values=values, row=torch.arange(len(values), dtype=torch.int32, device=values.device))


def documents_of(offsets: Sequence[int] | torch.Tensor, batch: int, length: int, device: torch.device) -> Documents:
    """Whole rows of a batch, known by their length alone, or offsets on the device."""
    count = len(offsets) - 1
    if isinstance(offsets, torch.Tensor):
        return Documents(num_documents=count, length=length, offsets=offsets.int().contiguous())
    if count == batch and list(offsets) == [row * length for row in range(batch + 1)]:
        return Documents(num_documents=count, length=length, offsets=None)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "cu_seqlens: offsets on the CPU in the capture of a CUDA graph, which would replay them for ever; "
            "pass them on the GPU, without cu_seqlens_cpu"
        )
    return Documents(num_documents=count, length=length, offsets=to_device(offsets, device))


def offsets_of_stream(context: CPContext, device: torch.device) -> Sequence[int] | torch.Tensor:
    """Those of a context's whole stream: kept on the device, but for one document, of which the length says all."""
    offsets, num_tokens = context.plan.cu_seqlens, context.plan.num_tokens
    if list(offsets) == [0, num_tokens]:
        return offsets
    return context.kept(("offsets",), device, lambda: to_device(offsets, device))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of a tensor, known on the host: their numbers, int64 on the device, and the first of them where they
    follow one another."""

    index: torch.Tensor
    first: int | None

    @classmethod
    def of(cls, rows: torch.Tensor, device: torch.device) -> Rows:
        """rows: int64 on the CPU, ascending."""
        count = len(rows)
        together = count > 0 and int(rows[-1] - rows[0]) == count - 1
        return cls(to_device(rows.tolist(), device).long(), int(rows[0]) if together else None)

    def __len__(self) -> int:
        return len(self.index)

    def of_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x: a view where they follow one another, else a copy."""
        return x.index_select(0, self.index) if self.first is None else x.narrow(0, self.first, len(self))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Local:
    """A context's fragments on one device, with indices as the kernels want them.

    exits: carried rows of the states that leave; fronts: of the gradients that do; interior: rows of the corrections
    that do. entry_row, exit_row: rows of chains among the known states (of documents that begin here, or gradients of
    those that end here) followed by those that arrive; known_entry and known_exit have the known ones only,
    arriving_entry and arriving_exit the others, counted among themselves. early, late: the tables of chains that need
    no state of another rank, None where these are few, and of the others.
    """

    program: Program
    tables: Tables
    exits: Rows
    fronts: Rows
    interior: Rows
    entry_row: torch.Tensor
    known_entry: torch.Tensor
    arriving_entry: torch.Tensor
    exit_row: torch.Tensor
    known_exit: torch.Tensor
    arriving_exit: torch.Tensor
    early: Tables | None
    late: Tables

    @classmethod
    def of(cls, context: CPContext, x: Inputs, processors: int, trains: bool) -> Local:
        name = ("fused", x.v.shape[1], x.arch.name, trains)
        return context.kept(name, x.q.device, lambda: cls._build(context, x, processors, trains))

    @classmethod
    def _build(cls, context: CPContext, x: Inputs, processors: int, trains: bool) -> Local:
        device, own = x.q.device, context.plan.fragments.owned_by(context.rank)
        program, start, length = Program.of_context(context, device), own.offset, own.length
        emits, receives = own.has_successor.int(), own.has_predecessor.int()
        tables = Tables.of(
            start.int().to(device),
            (start + length).int().to(device),
            context.local_tokens,
            x.arch,
            num_v_heads=x.v.shape[1],
            processors=processors,
            exchanged=None if program.exchange is None else (emits.to(device), receives.to(device)),
            num_cut=max(int(emits.sum()), int(receives.sum())),
            longest=int(length.max()) if len(length) else 0,
            trains=trains,
        )
        exits = tables.rows_of(length, emits).cumsum(0) - 1
        behind = tables.rows_of(length, receives)
        early, late = _by_need(tables, length, receives) if program.exchange is not None else (None, tables)
        fronts = behind.cumsum(0) - behind
        entry_row, begun = program.entry_row.int(), program.entries.shape[1]
        exit_row, ended = program.exit_row.int(), program.exits.shape[1]
        return cls(
            program=program,
            tables=tables,
            exits=Rows.of(exits[emits.bool()], device),
            fronts=Rows.of(fronts[receives.bool()], device),
            interior=Rows.of(exits[(emits & receives).bool()], device),
            entry_row=entry_row,
            known_entry=torch.where(entry_row < begun, entry_row, -1),
            arriving_entry=torch.where(entry_row < begun, -1, entry_row - begun),
            exit_row=exit_row,
            known_exit=torch.where(exit_row < ended, exit_row, -1),
            arriving_exit=torch.where(exit_row < ended, -1, exit_row - ended),
            early=early,
            late=late,
        )


def _by_need(tables: Tables, length: torch.Tensor, receives: torch.Tensor) -> tuple[Tables | None, Tables]:
    """The tables of chains that receive nothing and of those that do: a launch each, which works on a part of the
    device, so all are one where the former are few tokens."""
    if 4 * int(length[receives.bool()].sum()) > 3 * int(length.sum()):
        return None, tables
    waits = receives.bool().repeat_interleave(tables.pieces_of(length))

    def part(rows: torch.Tensor) -> Tables:
        index = to_device(rows.nonzero().flatten().tolist(), tables.segments.device).long()
        return tables._replace(segments=tables.segments.index_select(0, index))

    return part(~waits), part(waits)


def joined(
    known: torch.Tensor | None, arrived: torch.Tensor, rows: torch.Tensor, arriving: torch.Tensor
) -> Entries | None:
    """States of chains: the known ones followed by those that arrived, of which chains have `rows`. Where none is
    known, so all are 0, those that arrived alone, of which chains have `arriving`; None without these either."""
    if known is not None:
        return Entries(values=torch.cat([known, arrived]), row=rows)
    return Entries(values=arrived, row=arriving) if len(arrived) else None


class Kept(NamedTuple):
    """What the backward reads again beside the op's inputs. Parts are None where a call has none of it.

    documents: of a process that holds all tokens. maps: boundary holds the states behind segments by now. exchanged:
    what the exchange of states keeps for that of gradients.
    """

    documents: Documents | None = None
    tables: Tables | None = None
    solved: Solved | None = None
    maps: Maps | None = None
    entries: Entries | None = None
    exchanged: tuple[torch.Tensor, ...] = ()

    def trimmed(self, recompute: str) -> Kept:
        """This without what the backward is told to compute again: "none", "solve" or "forward"."""
        if recompute == "none":
            return self
        kept = self._replace(solved=None)
        return kept if recompute == "solve" else kept._replace(maps=None, entries=None, exchanged=())

    def for_output(self) -> Kept:
        """This without what only the backward reads, to make room for o."""
        if self.maps is None:
            return self
        return self._replace(maps=self.maps._replace(correction=self.maps.boundary))  # which is there anyway

    def without_tensors(self) -> tuple[Kept, list[torch.Tensor | None]]:
        """This without what grows with the stream, and that: for autograd to keep."""
        parts = ((Solved, self.solved), (Maps, self.maps), (Entries, self.entries))
        tensors: list[torch.Tensor | None] = []
        for kind, part in parts:
            tensors += (None,) * len(kind._fields) if part is None else part
        return self._replace(solved=None, maps=None, entries=None, exchanged=()), [*tensors, *self.exchanged]

    def with_tensors(self, tensors: Sequence[Any]) -> Kept:
        """The inverse of without_tensors."""
        decay, inverse, key_scale, bound, boundary, correction, corrects, row, values, *exchanged = tensors
        solved = maps = entries = None
        if decay is not None:
            solved = Solved(decay=decay, inverse=inverse, key_scale=key_scale, bound=bound)
        if boundary is not None:
            maps = Maps(boundary=boundary, correction=correction, corrects=corrects)
        if row is not None:
            entries = Entries(values=values, row=row)
        return self._replace(solved=solved, maps=maps, entries=entries, exchanged=tuple(exchanged))
