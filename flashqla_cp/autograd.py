"""The stages of the op in order, forward and backward, on the torch backend; here its stages meet the ranks.

    forward    gate_cumsum, solve, [summary, send states], prepare, [receive], forward
    backward   [summary_grad, send gradients], prepare, replay, [receive], backward, reverse gate_cumsum

The bracketed stages exist only where documents were cut, and the exchange runs behind what stands between sending and
receiving. One autograd function holds the exchange in both directions, so every rank that differentiates the op takes
part in the same collectives. fused.py and fused_grad.py are the same on TileLang kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashqla_cp.gate import without_autocast
from flashqla_cp.parallel.exchange.base import Arrived, PendingStates
from flashqla_cp.parallel.once import differentiable_once
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
        recompute: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with without_autocast(q.device):
            ahead = _Ahead.of(q, k, v, g, beta, initial_state, program, stages)
            values = ahead.values
            o, exits = stages.forward(ahead.prepared, stages.EntryStates(values, program.entry_row), scale)
            final_state = values.new_zeros(program.num_documents, *values.shape[1:])
            final_state.index_copy_(0, program.exits[1], exits.index_select(0, program.exits[0]))
            if initial_state is not None:
                final_state.index_copy_(0, program.empty, initial_state.index_select(0, program.empty))
        ctx.program, ctx.stages, ctx.scale = program, stages, scale
        ctx.has_initial, ctx.recompute = initial_state is not None, recompute
        if recompute == "forward":
            ctx.save_for_backward(q, k, v, beta, g, initial_state)
        else:
            solved = (g,) if recompute == "solve" else (ahead.decay, ahead.inverse)
            ctx.save_for_backward(q, k, v, beta, *solved, values, *ahead.kept)
        return o, final_state

    @staticmethod
    @differentiable_once("chunk_gated_delta_rule")
    def backward(ctx: Any, do: torch.Tensor, dfinal: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, beta, *saved = ctx.saved_tensors
        program, stages, scale = ctx.program, ctx.stages, ctx.scale
        with without_autocast(q.device):
            ahead = _Ahead.again(q, k, v, beta, saved, program, stages, ctx.recompute)
            solved, prepared = (ahead.decay, ahead.inverse), ahead.prepared
            own = dfinal.index_select(0, program.exits[1])
            pending = _send_gradients(q, k, beta, *solved, do, own, ahead.kept, program, stages, scale)
            if prepared is None:
                prepared = stages.prepare(q, k, v, beta, *solved, program.table)
            replayed = stages.replay(prepared, stages.EntryStates(ahead.values, program.entry_row))
            dexit = stages.EntryStates(torch.cat([own, pending.wait().states.mT]), program.exit_row)
            grads = stages.backward(prepared, replayed, do, dexit, scale)
            dg = stages.gate_cumsum(grads.ddecay, program.table, reverse=True)
            dinitial = None
            if ctx.has_initial:
                dinitial = torch.zeros_like(dfinal)
                dinitial.index_copy_(0, program.entries[1], grads.dentry.index_select(0, program.entries[0]))
                dinitial.index_copy_(0, program.empty, dfinal.index_select(0, program.empty))
        return grads.dq, grads.dk, grads.dv, dg, grads.dbeta, dinitial, None, None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """What all stages but the last have found. values: states in front of segments; kept: of the exchange, for its
    backward. prepared is None where it is still to be made."""

    decay: torch.Tensor
    inverse: torch.Tensor
    values: torch.Tensor
    kept: tuple[torch.Tensor, ...]
    prepared: Any

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        program: Program,
        stages: ModuleType,
    ) -> _Ahead:
        decay = stages.gate_cumsum(g, program.table)
        inverse = stages.solve(k, beta, decay, program.table)
        own = _own_entries(initial_state, program, v, k.shape[-1])
        pending = _send_states(k, v, beta, decay, inverse, own, program, stages)
        prepared = stages.prepare(q, k, v, beta, decay, inverse, program.table)
        arrived = pending.wait()
        return cls(decay, inverse, torch.cat([own, arrived.states.mT]), arrived.kept, prepared)

    @classmethod
    def again(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
        saved: Sequence[Any],
        program: Program,
        stages: ModuleType,
        recompute: str,
    ) -> _Ahead:
        """In the backward, from what the forward has saved."""
        if recompute == "forward":
            g, initial_state = saved
            return cls.of(q, k, v, g, beta, initial_state, program, stages)
        if recompute == "none":
            decay, inverse, values, *kept = saved
            return cls(decay, inverse, values, tuple(kept), None)
        g, values, *kept = saved
        decay = stages.gate_cumsum(g, program.table)
        return cls(decay, stages.solve(k, beta, decay, program.table), values, tuple(kept), None)


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
        return PendingStates(lambda: Arrived(own.mT[:0]))
    emitters, interior = program.emitters, program.interior
    row = program.entry_row.index_select(0, emitters.index)
    known = stages.EntryStates(own, torch.where(row < len(own), row, -1))
    maps = stages.summary(k, v, beta, decay, inverse, known, emitters.table, interior.table)
    return program.exchange.forward(*(x.mT for x in maps))


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
        return PendingStates(lambda: Arrived(own.mT[:0]))
    receivers = program.receivers
    row = program.exit_row.index_select(0, receivers.index)
    known = stages.EntryStates(own, torch.where(row < len(own), row, -1))
    maps = stages.summary_grad(q, k, beta, decay, inverse, do, known, receivers.table, scale)
    return program.exchange.backward(maps.mT, kept)
