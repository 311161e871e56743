"""The op's forward on kernels: the stages in order, where kernels and ranks meet.

    tables, gate_cumsum, solve, summary, affine_chain, forward
    tables, gate_cumsum, solve, summary, chain_maps, exchange, enter_chains, forward

The second line is of ranks between which documents were cut; one that no document crosses from end to end has
affine_chain in place of chain_maps and of enter_chains. A document is a chain; a device cuts long chains into segments,
whose maps it chains, so that all its multiprocessors work. A rank's fragments are chains too: their maps are chains of
the same segments' maps, so context parallelism adds steps of chains and the exchange, and no second pass over tokens;
fragments that receive no state run to their end behind the exchange. Without it nothing here knows of a rank's
final_correction. Whether a head has forgotten its entry state is decided on the device; nothing is read back from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from flashqla_cp.chains import Documents, Kept, Local, documents_of, joined
from flashqla_cp.kernels.backend import Kernels
from flashqla_cp.kernels.host import chunked as kernels
from flashqla_cp.kernels.host.chunked import Entries, Inputs, Maps
from flashqla_cp.kernels.host.tables import Tables, tables_of_batch
from flashqla_cp.parallel.affine import fold_with
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.exchange.base import PendingStates
from flashqla_cp.program import Program

fold_with(kernels.fold)


class Call(NamedTuple):
    """Options of one call of the op, as chunk_gated_delta_rule names them, and the kernels that run it, None for the
    torch backend. trains: whether a backward may follow."""

    kernels: Kernels | None
    trains: bool
    l2norm: bool
    sigmoid: bool
    double: bool
    scale: float
    final: bool
    state_v_first: bool
    recompute: str
    forget_below: float

    @property
    def machine(self) -> Kernels:
        """The kernels, of a call that has them."""
        assert self.kernels is not None
        return self.kernels

    def after_gates(self) -> Call:
        """The same call on log gates and write strengths instead of what they are made of, with plain final states."""
        return self._replace(sigmoid=False, double=False, final=True, state_v_first=False)

    def inputs(self, tensors: Sequence[torch.Tensor], gate: Sequence[torch.Tensor | None]) -> Inputs:
        """Token rows of q, k, v, g, beta as kernels read them. gate: A_log and dt_bias, None where not made inside."""
        q, k, v, g, beta = tensors
        A_log, dt_bias = (None if x is None else x.float().contiguous() for x in gate)
        return Inputs(
            q=readable(q),
            k=readable(k),
            v=readable(v),
            g=_plain_gate(g),
            beta=_plain_gate(beta),
            A_log=A_log,
            dt_bias=torch.zeros_like(A_log) if A_log is not None and dt_bias is None else dt_bias,
            l2norm=self.l2norm,
            sigmoid=self.sigmoid,
            double=self.double,
            forgotten=math.log2(self.forget_below) if self.forget_below else -math.inf,
            arch=self.machine.arch,
        )

    def state(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """States of the op, or their gradients, as kernels have them; and the other way round."""
        if x is None:
            return None
        states = (x if self.state_v_first else x.mT).float().contiguous()
        return states if states.data_ptr() % 16 == 0 else states.clone()

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        gate: Sequence[torch.Tensor | None],
        initial_state: torch.Tensor | None,
        offsets: Sequence[int] | torch.Tensor,
        context: CPContext | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Kept]:
        """Results of chunk_gated_delta_rule, and what its backward reads again. tensors: its q, k, v, g, beta; gate:
        its A_log, dt_bias; offsets: a list if the host knows them."""
        x, initial = self.inputs(tensors, gate), self.state(initial_state)
        if context is not None:
            o, states, kept = forward_sharded(
                x, self.local(x, context), initial, self.scale, self.final, self.trains and self.recompute != "forward"
            )
        else:
            batch, length = tensors[0].shape[:2]
            begun = self.begin(x, documents_of(offsets, batch, length, x.q.device))
            o, states, kept = forward(x, begun, initial, self.scale, self.final, self.trains)
        if states is not None and not self.state_v_first:
            states = states.mT
        return o.view(tensors[2].shape), states, kept

    def begin(self, x: Inputs, documents: Documents) -> Kept:
        """Documents of one process that holds all tokens, and their tables if there are any tokens."""
        count, offsets, machine = documents.num_documents, documents.offsets, self.machine
        if not count or not x.q.shape[0]:
            return Kept(documents=documents)
        if offsets is None:
            shape = count, documents.length, x.arch, x.v.shape[1], machine.processors, self.trains
            return Kept(documents=documents, tables=tables_of_batch(*shape, x.q.device))
        ends, heads, processors = (offsets[:-1], offsets[1:]), x.v.shape[1], machine.processors
        tables = Tables.of(*ends, x.q.shape[0], x.arch, num_v_heads=heads, processors=processors, trains=self.trains)
        return Kept(documents=documents, tables=tables)

    def local(self, x: Inputs, context: CPContext) -> Local:
        """The context's fragments for this call."""
        return Local.of(context, x, self.machine.processors, self.trains)

    def regain(self, x: Inputs, kept: Kept, initial_state: torch.Tensor | None, context: CPContext | None) -> Kept:
        """What the backward reads: `kept`, with the stages run again whose results self.recompute let go."""
        if self.recompute == "forward" and context is not None:
            return prepare_sharded(x, self.local(x, context), self.state(initial_state))
        tables = kept.tables
        if self.recompute == "none" or tables is None or not tables.num_chains:
            return kept
        if self.recompute == "solve":
            return kept._replace(solved=kernels.solve(x, kernels.gate_cumsum(x, tables), tables))
        assert kept.documents is not None
        return prepare(x, kept.documents, tables, self.state(initial_state))


def readable(x: torch.Tensor) -> torch.Tensor:
    """Token rows [T, heads, dim] that TMA can read: the view itself where strides and address allow, else a copy."""
    rows = x.flatten(0, 1)
    token, head, element = rows.stride()
    step = 16 // rows.element_size()
    aligned = token > 0 and head > 0 and not (token % step or head % step or rows.data_ptr() % 16)
    if element == 1 and aligned:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)  # also what is contiguous at an address TMA cannot take


def _plain_gate(x: torch.Tensor) -> torch.Tensor:
    """Token rows [T, HV] of gates, in a dtype that kernels read."""
    rows = x.flatten(0, 1)
    return rows if rows.dtype in (torch.float32, torch.bfloat16, torch.float16) else rows.float()


def forward(
    x: Inputs, begun: Kept, initial: torch.Tensor | None, scale: float, final: bool, trains: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Kept]:
    """o [T, HV, V] and, with `final`, the states behind documents [N, HV, V, K], for one process with all tokens.

    begun: documents and tables; initial: states in front of documents [N, HV, V, K] or None; trains: whether all of
    what is kept will be read.
    """
    documents, tables = begun.documents, begun.tables
    assert documents is not None
    count, offsets = documents.num_documents, documents.offsets
    if tables is None:
        return torch.zeros_like(x.v), pass_on(x, count, initial) if final else None, begun
    kept = prepare(x, documents, tables, initial)
    if not trains:
        kept = kept.for_output()
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    states = pass_on(x, count, initial) if final else None
    _finish(x, kept, scale, o, states)
    if offsets is not None:
        kernels.clear_rows(o, tables.end, x.arch)
    return o, states, kept


def prepare(x: Inputs, documents: Documents, tables: Tables, initial: torch.Tensor | None) -> Kept:
    """All stages in front of the last, for one process with all tokens, of which there are some."""
    entries = None if initial is None else documents.entries(initial)
    solved = kernels.solve(x, kernels.gate_cumsum(x, tables), tables)
    maps = None
    if tables.divided:
        maps = kernels.summary(x, solved, tables, entered=entries is not None)
        kernels.affine_chain(x, maps, tables, entries)
    return Kept(documents=documents, tables=tables, solved=solved, maps=maps, entries=entries)


def _finish(x: Inputs, kept: Kept, scale: float, o: torch.Tensor, states: torch.Tensor | None) -> None:
    """The last stage. states: behind chains, if they are wanted."""
    assert kept.solved is not None and kept.tables is not None
    carried = None if kept.maps is None else kept.maps.boundary
    kernels.forward(x, kept.solved, kept.tables, carried, kept.entries, scale, o, states)


def pass_on(x: Inputs, num_documents: int, initial: torch.Tensor | None) -> torch.Tensor:
    """Final states before the kernel fills those of documents with tokens: an empty document's state passes through.
    So does the gradient, the other way."""
    if initial is not None:
        return initial.clone()
    return x.numbers(num_documents, x.v.shape[1], x.v.shape[2], x.q.shape[2]).zero_()


def forward_sharded(
    x: Inputs, local: Local, initial: torch.Tensor | None, scale: float, final: bool, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Kept]:
    """As forward, for this rank's tokens; states count the documents of the whole stream. keeps: whether what is kept
    of the exchange will be read."""
    program, tables = local.program, local.tables
    if not tables.num_chains:
        return (
            torch.zeros_like(x.v),
            passed_on(x, program, initial) if final else None,
            prepare_sharded(x, local, initial, keeps=keeps),
        )
    fill = torch.empty_like if program.covered is None else torch.zeros_like
    o = fill(x.v, memory_format=torch.contiguous_format)
    heads, width = x.v.shape[1], x.q.shape[2]
    exits = x.numbers(tables.num_chains, heads, width, width) if final else None

    def finish(kept: Kept, part: Tables | None) -> None:
        if part is not None and len(part.segments):
            _finish(x, kept._replace(tables=part), scale, o, exits)

    kept = prepare_sharded(x, local, initial, lambda known: finish(known, local.early), keeps)
    finish(kept, local.late)
    if exits is None:
        return o, None, kept
    states = passed_on(x, program, initial)
    return o, states.index_copy_(0, program.exits[1], exits.index_select(0, program.exits[0])), kept


def prepare_sharded(
    x: Inputs,
    local: Local,
    initial: torch.Tensor | None,
    meanwhile: Callable[[Kept], None] | None = None,
    keeps: bool = True,
) -> Kept:
    """As prepare, for this rank's tokens, if any: the exchange included, in which every rank takes part.

    meanwhile: work behind the exchange, given what is known before it: all that chains need which receive no state.
    keeps: whether what the exchange keeps for a backward will be read.
    """
    program, tables = local.program, local.tables
    if not tables.num_chains:
        kept = Kept(tables=tables)
        if program.exchange is not None:
            nothing = x.numbers(0, x.v.shape[1], x.v.shape[2], x.q.shape[2])
            kept = kept._replace(exchanged=program.exchange.forward(nothing, nothing, keeps=keeps).wait().kept)
        return kept
    solved = kernels.solve(x, kernels.gate_cumsum(x, tables), tables)
    own = None if initial is None else initial.index_select(0, program.entries[1])
    entered = own is not None or program.exchange is not None
    maps = kernels.summary(x, solved, tables, entered=entered) if tables.divided else None
    entries = None if own is None else Entries(values=own, row=local.known_entry)
    if program.exchange is None or maps is None:
        if maps is not None:
            kernels.affine_chain(x, maps, tables, entries)
        return Kept(tables=tables, solved=solved, maps=maps, entries=entries)
    whole, pending = _send(x, local, maps, entries, keeps)
    if meanwhile is not None:
        meanwhile(Kept(tables=tables, solved=solved, maps=maps._replace(boundary=whole.boundary), entries=entries))
    arrived = pending.wait()
    states = arrived.states.contiguous()
    entries = joined(own, states, local.entry_row, local.arriving_entry)
    if len(local.interior):
        kernels.enter_chains(x, whole, tables, Entries(values=states, row=local.arriving_entry))
    else:
        kernels.affine_chain(x, maps, tables, entries)
    return Kept(tables=tables, solved=solved, maps=maps, entries=entries, exchanged=arrived.kept)


def _send(x: Inputs, local: Local, maps: Maps, known: Entries | None, keeps: bool) -> tuple[Maps, PendingStates]:
    """Start to bring the states in front of the fragments that go on with a document. -> what chains make of the
    entries that are known yet; correction and corrects are theirs only on a rank that sends one, else the segments'."""
    program = local.program
    assert program.exchange is not None
    if len(local.interior):
        whole = kernels.chain_maps(x, maps, local.tables, known, local.arriving_entry)
        sent = local.interior.of_tensor(whole.correction)
    else:
        whole = maps._replace(boundary=kernels.affine_chain(x, maps, local.tables, known, apart=True))
        sent = maps.correction[:0]
    return whole, program.exchange.forward(local.exits.of_tensor(whole.boundary), sent, keeps=keeps)


def passed_on(x: Inputs, program: Program, initial: torch.Tensor | None) -> torch.Tensor:
    """As pass_on, for the documents of the whole stream: zeros, and the states of empty documents looked after here."""
    states = x.numbers(program.num_documents, x.v.shape[1], x.v.shape[2], x.q.shape[2]).zero_()
    if initial is not None:
        states.index_copy_(0, program.empty, initial.index_select(0, program.empty))
    return states
