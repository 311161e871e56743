"""The op's forward on kernels: the stages in order, where kernels and ranks meet.

    tables, gate_cumsum, solve, summary, [chain_maps, send, receive], affine_chain, forward

The bracketed stages exist only where documents were cut between ranks. A document is a chain; a device cuts long chains
into segments, whose maps it chains, so that all its multiprocessors work. A rank's fragments are chains too: their maps
are chains of the same segments' maps, so context parallelism adds the chain and the exchange, and no second pass over
tokens. Without it nothing here knows of a rank's final_correction. Whether a head has forgotten its entry state is
decided on the device; nothing is read back from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashqla_cp.kernels.backend import Kernels
from flashqla_cp.kernels.host import chunked as kernels
from flashqla_cp.kernels.host.chunked import Entries, Inputs, Maps, Solved
from flashqla_cp.kernels.host.tables import Tables, tables_of_batch, to_device
from flashqla_cp.parallel.affine import fold_with
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.exchange.base import PendingStates
from flashqla_cp.program import Program

fold_with(kernels.fold)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call:
    """Options of one call of the op, as chunk_gated_delta_rule names them, and the kernels that run it."""

    kernels: Kernels
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    l2norm: bool
    sigmoid: bool
    double: bool
    scale: float
    final: bool
    state_v_first: bool

    def after_gates(self) -> Call:
        """The same call on log gates and write strengths instead of what they are made of, with plain final states."""
        plain: dict[str, Any] = {"A_log": None, "dt_bias": None, "sigmoid": False, "double": False}
        return replace(self, **plain, final=True, state_v_first=False)

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        initial_state: torch.Tensor | None,
        offsets: Sequence[int] | torch.Tensor,
        context: CPContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results of chunk_gated_delta_rule. tensors: its q, k, v, g, beta; offsets: a list if the host knows them."""
        q, k, v, g, beta = tensors
        batch, length = q.shape[:2]
        x = Inputs(
            q=_readable(q),
            k=_readable(k),
            v=_readable(v),
            g=_plain_gate(g.flatten(0, 1)),
            beta=_plain_gate(beta.flatten(0, 1)),
            A_log=None if self.A_log is None else self.A_log.float().contiguous(),
            dt_bias=self._shift(),
            l2norm=self.l2norm,
            sigmoid=self.sigmoid,
            double=self.double,
            arch=self.kernels.arch,
        )
        initial = None
        if initial_state is not None:
            initial = (initial_state if self.state_v_first else initial_state.mT).float().contiguous()
        final, processors = self.final, self.kernels.processors
        if context is not None:
            o, states = forward_sharded(x, context, initial, self.scale, final=final, processors=processors)
        else:
            documents = _documents(offsets, batch, length, q.device)
            o, states = forward(x, documents, initial, self.scale, final=final, processors=processors)
        if states is not None and not self.state_v_first:
            states = states.mT
        return o.view(v.shape), states

    def _shift(self) -> torch.Tensor | None:
        if self.A_log is None:
            return None
        return torch.zeros_like(self.A_log).float() if self.dt_bias is None else self.dt_bias.float().contiguous()


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Token rows [T, heads, dim] that TMA can read: the view itself where strides and address allow, else a copy."""
    rows = x.flatten(0, 1)
    steps = rows.stride()
    aligned = all(step * rows.element_size() % 16 == 0 for step in steps[:-1])
    if steps[-1] == 1 and aligned and rows.data_ptr() % 16 == 0:
        return rows
    return rows.contiguous()


def _plain_gate(x: torch.Tensor) -> torch.Tensor:
    """Gates in a dtype that kernels read."""
    return x if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x.float()


def _documents(offsets: Sequence[int] | torch.Tensor, batch: int, length: int, device: torch.device) -> Documents:
    """Whole rows of a batch, known by their length alone, or offsets on the device."""
    count = len(offsets) - 1
    if isinstance(offsets, torch.Tensor):
        return Documents(num_documents=count, length=length, offsets=offsets.to(torch.int32).contiguous())
    if count == batch and all(end == (row + 1) * length for row, end in enumerate(offsets[1:])):
        return Documents(num_documents=count, length=length, offsets=None)
    return Documents(num_documents=count, length=length, offsets=to_device(offsets, device))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Documents:
    """Documents of one process: num_documents of `length` tokens each, or offsets int32 [N+1] where the tensors are."""

    num_documents: int
    length: int
    offsets: torch.Tensor | None


def forward(
    x: Inputs, documents: Documents, initial: torch.Tensor | None, scale: float, *, final: bool, processors: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o [T, HV, V] and, with `final`, the states behind documents [N, HV, V, K], for one process with all tokens.

    initial: states in front of documents [N, HV, V, K] or None.
    """
    count, heads, offsets = documents.num_documents, x.v.shape[1], documents.offsets
    if not count or not len(x.q):
        return torch.zeros_like(x.v), _pass_on(x, count, initial) if final else None
    if offsets is None:
        tables = tables_of_batch(count, documents.length, x.arch, heads, processors, x.q.device)
    else:
        tables = Tables.of(offsets[:-1], offsets[1:], len(x.q), x.arch, num_v_heads=heads, processors=processors)
    entries = None
    if initial is not None:
        entries = Entries(values=initial, row=torch.arange(count, dtype=torch.int32, device=x.q.device))
    solved = kernels.solve(x, kernels.gate_cumsum(x, tables), tables)
    carried = None
    if tables.divided:
        maps = kernels.summary(x, solved, tables, entered=entries is not None)
        carried = kernels.affine_chain(x, maps, tables, entries)
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    states = _pass_on(x, count, initial) if final else None
    kernels.forward(x, solved, tables, carried, entries, scale, o, states)
    if offsets is not None:
        kernels.clear_rows(o, offsets[1:], x.arch)
    return o, states


def _pass_on(x: Inputs, num_documents: int, initial: torch.Tensor | None) -> torch.Tensor:
    """Final states before the kernel fills those of documents with tokens: an empty document's state passes through."""
    if initial is not None:
        return initial.clone()
    return x.numbers(num_documents, x.v.shape[1], x.v.shape[2], x.q.shape[2]).zero_()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Local:
    """A context's fragments on one device: tables, rows of the states that leave, indices as the kernels want them."""

    program: Program
    tables: Tables
    exit_rows: torch.Tensor
    entry_row: torch.Tensor
    known_row: torch.Tensor

    @classmethod
    @torch.inference_mode(False)
    def of(cls, context: CPContext, x: Inputs, processors: int) -> _Local:
        key = ("fused", x.q.device, x.v.shape[1], x.arch.name)
        if key not in context.memo:
            context.memo[key] = cls._build(context, x, processors)
        return context.memo[key]

    @classmethod
    def _build(cls, context: CPContext, x: Inputs, processors: int) -> _Local:
        device, pieces = x.q.device, context.plan.fragments
        program, mine = Program.of_context(context, device), pieces.of_rank(context.rank)
        start = pieces.offset[mine]
        length = (pieces.end - pieces.start)[mine]
        emits = pieces.has_successor[mine].int()
        tables = Tables.of(
            start.int().to(device),
            (start + length).int().to(device),
            context.local_tokens,
            x.arch,
            num_v_heads=x.v.shape[1],
            processors=processors,
            emits=emits.to(device) if program.exchange is not None else None,
            longest=int(length.max()) if len(length) else 0,
        )
        rows = tables.rows_of(length, emits).cumsum(0) - 1
        own = program.entries.shape[1]
        entry_row = program.entry_row.int()
        return cls(
            program=program,
            tables=tables,
            exit_rows=to_device(rows[emits.bool()].tolist(), device).long(),
            entry_row=entry_row,
            known_row=torch.where(entry_row < own, entry_row, -1),
        )


def forward_sharded(
    x: Inputs, context: CPContext, initial: torch.Tensor | None, scale: float, *, final: bool, processors: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As forward, for this rank's tokens; states count the documents of the whole stream."""
    local = _Local.of(context, x, processors)
    program, tables = local.program, local.tables
    heads, width = x.v.shape[1], x.q.shape[2]
    if not tables.num_chains:
        if program.exchange is not None:
            nothing = x.numbers(0, heads, width, width)
            program.exchange.forward(nothing, nothing).wait()
        states = x.numbers(program.num_documents, heads, width, width).zero_() if final else None
        return torch.zeros_like(x.v), states
    solved = kernels.solve(x, kernels.gate_cumsum(x, tables), tables)
    own = None if initial is None else initial.index_select(0, program.entries[1])
    entered = own is not None or program.exchange is not None
    maps = kernels.summary(x, solved, tables, entered=entered) if tables.divided else None
    entries = None if own is None else Entries(values=own, row=local.known_row)
    if program.exchange is not None and maps is not None:
        arrived = _send(x, local, maps, entries).wait().states.mT.contiguous()
        if own is None and program.entries.shape[1]:
            own = x.numbers(program.entries.shape[1], heads, width, width).zero_()
        values = arrived if own is None or not len(own) else torch.cat([own, arrived])
        entries = Entries(values=values, row=local.entry_row)
    return _finish(x, local, solved, maps, entries, initial, scale, final)


def _send(x: Inputs, local: _Local, maps: Maps, known: Entries | None) -> PendingStates:
    """Start to bring the states in front of the fragments that go on with a document."""
    program = local.program
    assert program.exchange is not None
    if len(program.interior.index):
        carried, correction = kernels.chain_maps(x, maps, local.tables, known)
        correction = correction.mT.index_select(0, program.interior.index)
    else:
        carried = kernels.affine_chain(x, maps, local.tables, known, apart=True)
        correction = maps.correction[:0]
    boundary = carried.mT.index_select(0, local.exit_rows)
    return program.exchange.forward(boundary, correction)


def _finish(
    x: Inputs,
    local: _Local,
    solved: Solved,
    maps: Maps | None,
    entries: Entries | None,
    initial: torch.Tensor | None,
    scale: float,
    final: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stages that need the entry states."""
    program, tables = local.program, local.tables
    carried = None if maps is None else kernels.affine_chain(x, maps, tables, entries)
    fill = torch.empty_like if program.covered is None else torch.zeros_like
    o = fill(x.v, memory_format=torch.contiguous_format)
    heads, width = x.v.shape[1], x.q.shape[2]
    exits = x.numbers(tables.num_chains, heads, width, width) if final else None
    kernels.forward(x, solved, tables, carried, entries, scale, o, exits)
    if exits is None:
        return o, None
    states = x.numbers(program.num_documents, heads, width, width).zero_()
    states.index_copy_(0, program.exits[1], exits.index_select(0, program.exits[0]))
    if initial is not None:
        states.index_copy_(0, program.empty, initial.index_select(0, program.empty))
    return o, states
