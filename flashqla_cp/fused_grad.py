"""The op's backward on kernels, and the autograd function that joins it to the forward in fused.py.

    summary_grad, [chain, send, receive], affine_chain in reverse, then for each slab of value heads
    replay, sweep, gradients, and at last gate_grad

The bracketed stages exist only where documents were cut between ranks. The first line runs on a stream of its own,
beside the first slab's replay, which needs none of it: it leaves most of a device idle where most heads forget, and in
its exchange. The maps' corrections stay where the forward brought them. A call that keeps less (`recompute`) runs
stages of the forward again in front of all this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashqla_cp.chains import Kept, Local, joined
from flashqla_cp.fused import Call, pass_on, passed_on, readable
from flashqla_cp.gate import without_autocast
from flashqla_cp.kernels.host import backward as kernels
from flashqla_cp.kernels.host.backward import TokenGradients
from flashqla_cp.kernels.host.chunked import Entries, Inputs, Maps, affine_chain, clear_rows
from flashqla_cp.kernels.host.streams import fork
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.exchange.base import Arrived, PendingStates
from flashqla_cp.parallel.once import differentiable_once


def run(
    call: Call,
    tensors: Sequence[torch.Tensor],
    gate: Sequence[torch.Tensor | None],
    initial_state: torch.Tensor | None,
    offsets: Sequence[int] | torch.Tensor,
    context: CPContext | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call.run, differentiable where anything that it is given is."""
    given = (*tensors, *gate, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        assert call.trains, "a call that drops what its backward reads"
        return GatedDeltaRuleOnKernels.apply(*given, call, offsets, context)
    return call.run(tensors, gate, initial_state, offsets, context)[:2]


class GatedDeltaRuleOnKernels(torch.autograd.Function):
    """q, k, v, g, beta, A_log, dt_bias, initial_state of the op -> o and, if the call asks for them, final states."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        *differentiable, call, offsets, context = given
        tensors, gate, initial = differentiable[:5], differentiable[5:7], differentiable[7]
        if isinstance(offsets, torch.Tensor):
            offsets = offsets.to(torch.int32, copy=True)  # the caller's may be others by the time of the backward
        with without_autocast(tensors[0].device):
            o, states, kept = call.run(tensors, gate, initial, offsets, context)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.context = call, context
        ctx.kept, grown = kept.trimmed(call.recompute).without_tensors()
        ctx.save_for_backward(*differentiable, *grown)
        return o, states

    @staticmethod
    @differentiable_once("chunk_gated_delta_rule")
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing makes them anew
        given, kept = saved[:8], ctx.kept.with_tensors(saved[8:])
        found = gradients(ctx.call, given, kept, ctx.context, do, dfinal, ctx.needs_input_grad[7])
        return *found, None, None, None


def gradients(
    call: Call,
    given: Sequence[Any],
    kept: Kept,
    context: CPContext | None,
    do: torch.Tensor | None,
    dfinal: torch.Tensor | None,
    wants_initial: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and the initial state, which are `given`; None of what is None,
    and of the initial state if it is not wanted. kept: as much of it as call.recompute says."""
    tensors, gate = given[:5], given[5:7]
    with without_autocast(tensors[0].device):
        x = call.inputs(tensors, gate)
        kept = call.regain(x, kept, given[7], context)
        do = readable(torch.zeros_like(tensors[2]) if do is None else do)
        whole = kept, do, call.state(dfinal), wants_initial, call.scale, call.machine.processors
        if context is None:
            grads, dinitial = backward(x, *whole)
        else:
            grads, dinitial = backward_sharded(x, call.local(x, context), *whole)
        if kept.solved is None:  # no token of any document
            dg, *dgate = (None if like is None else torch.zeros_like(like) for like in (x.g, x.A_log, x.dt_bias))
        else:
            dg, *dgate = kernels.gate_grad(x, grads.dg)
    if dinitial is not None and not call.state_v_first:
        dinitial = dinitial.mT
    found = (grads.dq, grads.dk, grads.dv, dg, grads.dbeta, *dgate, dinitial)
    return tuple(None if like is None else _like(dx, like) for dx, like in zip(found, given, strict=True))


def _like(dx: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if dx is None else dx.reshape(x.shape).to(x.dtype)


def backward(
    x: Inputs,
    kept: Kept,
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    wants_initial: bool,
    scale: float,
    processors: int,
) -> tuple[TokenGradients, torch.Tensor | None]:
    """Gradients for one process with all tokens, that of the initial states [N, HV, V, K] if it is wanted.

    do [T, HV, V]; dfinal [N, HV, V, K] or None for zeros.
    """
    documents, tables = kept.documents, kept.tables
    assert documents is not None
    dinitial = pass_on(x, documents.num_documents, dfinal) if wants_initial else None
    if tables is None:
        return TokenGradients.of(x, padded=True, zero=True), dinitial
    exits = None if dfinal is None else documents.entries(dfinal)
    padded = documents.offsets is not None
    grads = TokenGradients.of(x, padded=padded, zero=False)
    if kept.maps is None:
        _fill(x, kept, do, lambda: (None, exits), scale, processors, grads, dinitial)
    else:
        with fork(x.q.device) as forked:
            with forked.beside():
                dmaps = _gradient_maps(x, kept, kept.maps, do, exits, scale)
                dcarried = affine_chain(x, dmaps, tables, None, reverse=True)

            def arrive() -> tuple[torch.Tensor | None, Entries | None]:
                forked.join()
                return dcarried, exits

            _fill(x, kept, do, arrive, scale, processors, grads, dinitial)
    if documents.offsets is not None:
        for dx in (grads.dq, grads.dk, grads.dv):
            clear_rows(dx, tables.end, x.arch)
    return grads, dinitial


def backward_sharded(
    x: Inputs,
    local: Local,
    kept: Kept,
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    wants_initial: bool,
    scale: float,
    processors: int,
) -> tuple[TokenGradients, torch.Tensor | None]:
    """As backward, for this rank's tokens; states count the documents of the whole stream."""
    program, tables = local.program, local.tables
    dinitial = passed_on(x, program, dfinal) if wants_initial else None
    padded = program.covered is not None
    if not tables.num_chains:
        if program.exchange is not None:
            program.exchange.backward(_nothing(x), kept.exchanged).wait()
        return TokenGradients.of(x, padded=padded, zero=True), dinitial
    own = known = None
    if dfinal is not None and program.exits.shape[1]:
        own = dfinal.index_select(0, program.exits[1])
        known = Entries(values=own, row=local.known_exit)
    grads = TokenGradients.of(x, padded=padded, zero=padded)
    begun = x.numbers(tables.num_chains, x.v.shape[1], x.v.shape[2], x.q.shape[2]) if dinitial is not None else None
    with fork(x.q.device) as forked:
        with forked.beside():
            dmaps = None if kept.maps is None else _gradient_maps(x, kept, kept.maps, do, known, scale)
            fronts, pending = _send(x, local, dmaps, kept)

        behind = fronts, known  # what arrive gives lives until the fork is closed

        def arrive() -> tuple[torch.Tensor | None, Entries | None]:
            nonlocal behind
            with forked.beside():
                arrived = pending.wait().states.contiguous()
                if dmaps is not None and len(arrived):
                    arriving = Entries(values=arrived, row=local.arriving_exit)
                    exits = joined(own, arrived, local.exit_row, local.arriving_exit)
                    behind = affine_chain(x, dmaps, tables, arriving, reverse=True), exits
            forked.join()
            return behind

        _fill(x, kept, do, arrive, scale, processors, grads, begun)
    if dinitial is not None and begun is not None:
        dinitial.index_copy_(0, program.entries[1], begun.index_select(0, program.entries[0]))
    return grads, dinitial


def _gradient_maps(x: Inputs, kept: Kept, maps: Maps, do: torch.Tensor, exits: Entries | None, scale: float) -> Maps:
    assert kept.solved is not None and kept.tables is not None
    return kernels.summary_grad(x, kept.solved, maps, kept.tables, do, exits, scale)


def _send(x: Inputs, local: Local, dmaps: Maps | None, kept: Kept) -> tuple[torch.Tensor | None, PendingStates]:
    """Start to bring the gradients behind the fragments whose document goes on elsewhere. -> gradients in front of the
    segments here, as far as they are known yet: all of them where nothing will arrive."""
    program = local.program
    if dmaps is None:
        return None, PendingStates(lambda: Arrived(_nothing(x)))
    emits = len(program.emitters.index) > 0
    if emits and not len(local.fronts):
        fronts, sent = None, _nothing(x)
    else:
        fronts = affine_chain(x, dmaps, local.tables, None, apart=emits, reverse=True)
        sent = local.fronts.of_tensor(fronts)
    if program.exchange is None:
        return fronts, PendingStates(lambda: Arrived(_nothing(x)))
    return fronts, program.exchange.backward(sent, kept.exchanged)


def _nothing(x: Inputs) -> torch.Tensor:
    """No states, [0, HV, V, K]."""
    return x.numbers(0, x.v.shape[1], x.v.shape[2], x.q.shape[2])


def _fill(
    x: Inputs,
    kept: Kept,
    do: torch.Tensor,
    arrive: Callable[[], tuple[torch.Tensor | None, Entries | None]],
    scale: float,
    processors: int,
    grads: TokenGradients,
    dentry: torch.Tensor | None,
) -> None:
    """Fills grads and dentry [chains, HV, V, K]. arrive() gives the gradients behind segments and behind chains; what
    does not depend on them runs first."""
    solved, tables = kept.solved, kept.tables
    assert solved is not None and tables is not None
    carried = None if kept.maps is None else kept.maps.boundary
    slabs = kernels.slabs_of(x, tables)
    kernels.replay(x, solved, tables, carried, kept.entries, slabs[0])
    dcarried, exits = arrive()
    for slab in slabs:
        if slab is not slabs[0]:
            kernels.replay(x, solved, tables, carried, kept.entries, slab)
        kernels.sweep(x, solved, tables, do, dcarried, exits, scale, slab, grads.dv, dentry)
        kernels.gradients(x, solved, tables, do, slab, grads, kept.entries, scale, processors)
