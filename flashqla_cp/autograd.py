"""The stages of the op in order, forward and backward, on the torch backend; here its stages meet the ranks.

    forward    gate_cumsum, solve, [summary, send states], prepare, [receive], forward
    backward   [summary_grad, send gradients], prepare, replay, [receive], backward, reverse gate_cumsum

The bracketed stages exist only where documents were cut, and the exchange runs behind what stands between sending and
receiving. One autograd function holds the exchange in both directions, so every rank that differentiates the op takes
part in the same collectives. fused.py and fused_grad.py are the same on TileLang kernels.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from flashqla_cp.parallel.exchange.base import Arrived, PendingStates
from flashqla_cp.program import Program


class GatedDeltaRule(torch.autograd.Function):
    """q, k [T, H, K], v [T, HV, V], g, beta [T, HV], initial_state [N, HV, K, V] or None -> o, final_state.

    All of one dtype, fp32 or fp64. States count the documents of the whole stream: rows that this process does not
    look after are neither read nor filled.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        program: Program,
        stages: ModuleType,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            decay = stages.gate_cumsum(g, program.table)
            inverse = stages.solve(k, beta, decay, program.table)
            own = _own_entries(initial_state, program, v, k.shape[-1])
            pending = _send_states(k, v, beta, decay, inverse, own, program, stages)
            prepared = stages.prepare(q, k, v, beta, decay, inverse, program.table)
            arrived = pending.wait()
            values = torch.cat([own, arrived.states])
            o, exits = stages.forward(prepared, stages.EntryStates(values, program.entry_row), scale)
            final_state = own.new_zeros(program.num_documents, *own.shape[1:])
            final_state.index_copy_(0, program.exits[1], exits.index_select(0, program.exits[0]))
            if initial_state is not None:
                final_state.index_copy_(0, program.empty, initial_state.index_select(0, program.empty))
        ctx.program, ctx.stages, ctx.scale = program, stages, scale
        ctx.has_initial = initial_state is not None
        ctx.save_for_backward(q, k, v, beta, decay, inverse, values, *arrived.kept)
        return o, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: torch.Tensor, dfinal: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, beta, decay, inverse, values, *kept = ctx.saved_tensors
        program, stages, scale = ctx.program, ctx.stages, ctx.scale
        with torch.autocast(q.device.type, enabled=False):
            own = dfinal.index_select(0, program.exits[1])
            pending = _send_gradients(q, k, beta, decay, inverse, do, own, tuple(kept), program, stages, scale)
            prepared = stages.prepare(q, k, v, beta, decay, inverse, program.table)
            ahead = stages.replay(prepared, stages.EntryStates(values, program.entry_row))
            dexit = stages.EntryStates(torch.cat([own, pending.wait().states]), program.exit_row)
            grads = stages.backward(prepared, ahead, do, dexit, scale)
            dg = stages.gate_cumsum(grads.ddecay, program.table, reverse=True)
            dinitial = None
            if ctx.has_initial:
                dinitial = torch.zeros_like(dfinal)
                dinitial.index_copy_(0, program.entries[1], grads.dentry.index_select(0, program.entries[0]))
                dinitial.index_copy_(0, program.empty, dfinal.index_select(0, program.empty))
        return grads.dq, grads.dk, grads.dv, dg, grads.dbeta, dinitial, None, None, None


def _own_entries(initial: torch.Tensor | None, program: Program, v: torch.Tensor, key_dim: int) -> torch.Tensor:
    """States in front of the documents that begin here, [entries, HV, K, V]."""
    if initial is not None:
        return initial.index_select(0, program.entries[1])
    return v.new_zeros(program.entries.shape[1], v.shape[1], key_dim, v.shape[2])


def _send_states(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    inverse: torch.Tensor,
    own: torch.Tensor,
    program: Program,
    stages: ModuleType,
) -> PendingStates:
    """Start to bring the states in front of the segments that go on with a document."""
    if program.exchange is None:
        return PendingStates(lambda: Arrived(own[:0]))
    emitters, interior = program.emitters, program.interior
    row = program.entry_row.index_select(0, emitters.index)
    known = stages.EntryStates(own, torch.where(row < len(own), row, -1))
    maps = stages.summary(k, v, beta, decay, inverse, known, emitters.table, interior.table)
    return program.exchange.forward(*maps)


def _send_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    inverse: torch.Tensor,
    do: torch.Tensor,
    own: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    program: Program,
    stages: ModuleType,
    scale: float,
) -> PendingStates:
    """Start to bring the gradients of the states behind the segments whose document goes on elsewhere."""
    if program.exchange is None:
        return PendingStates(lambda: Arrived(own[:0]))
    receivers = program.receivers
    row = program.exit_row.index_select(0, receivers.index)
    known = stages.EntryStates(own, torch.where(row < len(own), row, -1))
    maps = stages.summary_grad(q, k, beta, decay, inverse, do, known, receivers.table, scale)
    return program.exchange.backward(maps, kept)
