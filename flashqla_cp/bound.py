"""One call of the op: its arguments checked, then run on kernels, in torch, or with its heads exchanged for tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashqla_cp import fused_grad
from flashqla_cp.autograd import GatedDeltaRule
from flashqla_cp.chains import offsets_of_stream
from flashqla_cp.checks import (
    as_parameter,
    as_tensor,
    check_double,
    check_forget_below,
    check_gate,
    check_op_inputs,
    check_recompute,
    check_scale,
    offsets_for_kernels,
    read_documents,
)
from flashqla_cp.fused import Call
from flashqla_cp.gate import floor_gate, l2_normalize, log_decay, write_strength
from flashqla_cp.kernels.backend import Kernels, Sizes, select
from flashqla_cp.kernels.reference import chunked
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.exchange.headwise import Headwise
from flashqla_cp.program import Program


class Options(NamedTuple):
    """What chunk_gated_delta_rule is given beside tensors and documents, here by shorter names. In the order in which
    the operator of library.py takes them, which sees from A_log whether there is a gate."""

    scale: float | None
    final: bool
    l2norm: bool
    state_v_first: bool
    sigmoid: bool
    double: bool
    backend: str
    recompute: str
    forget_below: float | None
    gate: bool


class Bound(NamedTuple):
    """A call whose arguments are right: its q, k, v, g, beta; its A_log, dt_bias; offsets as a list if the host knows
    them, as a tensor where they were left on the device."""

    call: Call
    tensors: tuple[torch.Tensor, ...]
    gate: tuple[torch.Tensor | None, torch.Tensor | None]
    initial_state: torch.Tensor | None
    offsets: Sequence[int] | torch.Tensor
    context: CPContext | None

    @property
    def on_kernels(self) -> bool:
        """Whether kernels take all of it; torch has a part in it otherwise."""
        return self.call.kernels is not None and (self.context is None or self.context.headwise is None)

    def run(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results of chunk_gated_delta_rule, differentiable."""
        if self.on_kernels:
            return fused_grad.run(self.call, self.tensors, self.gate, self.initial_state, self.offsets, self.context)
        return _run_prepared(self)


def bind(
    given: Sequence[Any],
    options: Options,
    cu_seqlens: Any,
    cu_seqlens_cpu: Any,
    context: CPContext | None,
    trains: bool | None = None,
) -> Bound:
    """Check the arguments of chunk_gated_delta_rule and decide what runs it.

    given: its q, k, v, g, beta, A_log, dt_bias and initial_state. trains: whether gradients will be wanted, None to
    look for oneself.
    """
    q, k, v, g, beta = tensors = tuple(map(as_tensor, given[:5], ("q", "k", "v", "g", "beta")))
    A_log, dt_bias, initial_state = given[5:]
    check_op_inputs(q, k, v, g, beta)
    key_dim, (_, _, num_v_heads, value_dim) = q.shape[3], v.shape
    check_gate(A_log, dt_bias, options.gate)
    A_log = as_parameter(A_log, "A_log", (num_v_heads,), q.device)
    dt_bias = as_parameter(dt_bias, "dt_bias", (num_v_heads,), q.device)
    scale = check_scale(options.scale, key_dim)
    check_recompute(options.recompute)
    forget_below = check_forget_below(options.forget_below)
    check_double(options.double, options.sigmoid)
    if trains is None:
        trains = wants_gradients((*tensors, initial_state, A_log, dt_bias))
    kernels = kernels_for(options.backend, q, v, trains)
    find_offsets = read_documents if kernels is None else offsets_for_kernels
    offsets = find_offsets(q, "q", cu_seqlens, cu_seqlens_cpu, context)
    state_dims = (value_dim, key_dim) if options.state_v_first else (key_dim, value_dim)
    state_shape = (len(offsets) - 1, num_v_heads, *state_dims)
    initial_state = as_parameter(initial_state, "initial_state", state_shape, q.device)
    call = Call(
        kernels=kernels,
        trains=trains,
        l2norm=options.l2norm,
        sigmoid=options.sigmoid,
        double=options.double,
        scale=scale,
        final=options.final,
        state_v_first=options.state_v_first,
        recompute=options.recompute,
        forget_below=forget_below,
    )
    return Bound(
        call=call,
        tensors=tensors,
        gate=(A_log, dt_bias),
        initial_state=initial_state,
        offsets=offsets,
        context=context,
    )


def wants_gradients(given: Sequence[Any]) -> bool:
    """Whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in given)


def kernels_for(backend: str, q: torch.Tensor, v: torch.Tensor, trains: bool) -> Kernels | None:
    """The kernels that run a call, or None for the torch backend."""
    (_, _, num_heads, key_dim), (_, _, num_v_heads, value_dim) = q.shape, v.shape
    sizes = Sizes(dtype=q.dtype, num_heads=num_heads, num_v_heads=num_v_heads, head_k_dim=key_dim, head_v_dim=value_dim)
    return select(backend, q.device, needs_grad=trains, sizes=sizes)


def _run_prepared(bound: Bound) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The torch backend, and on kernels the exchange of activations: what is per token is made in torch first."""
    call, context, offsets = bound.call, bound.context, bound.offsets
    if isinstance(offsets, torch.Tensor):
        offsets = offsets.tolist()
    q, v = bound.tensors[0], bound.tensors[2]
    if context is None:
        program = Program.of_documents(offsets, q.shape[0] * q.shape[1], q.device)
    else:
        program = Program.of_context(context, q.device, tables=call.kernels is None)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tensors = _token_rows(bound.tensors, program, dtype, *bound.gate)
    if call.sigmoid:
        tensors[4] = write_strength(tensors[4], call.double, dtype)
    state = None
    if bound.initial_state is not None:
        state = (bound.initial_state.mT if call.state_v_first else bound.initial_state).to(dtype)
    if call.kernels is None:
        run = functools.partial(_on_torch, call, dtype)
    else:
        assert context is not None, "without headwise, kernels take all of a call"
        run = functools.partial(_on_kernels, call, offsets_of_stream(context, q.device))
    if context is not None and context.headwise is not None:
        o, final_state = _run_headwise(context, context.headwise, tensors, state, run, call.kernels is None)
    else:
        o, final_state = run(program, tensors, state)
    if call.state_v_first and final_state is not None:
        final_state = final_state.mT
    return o.view(v.shape).to(v.dtype), final_state if call.final else None


def _on_torch(
    call: Call,
    dtype: torch.dtype,
    program: Program,
    tensors: Sequence[torch.Tensor],
    state: torch.Tensor | None,
) -> Any:
    """o [T, HV, V] and the final states [N, HV, K, V], differentiable."""
    query, key, value, gate, strength = tensors
    if call.l2norm:
        query, key = l2_normalize(query, dtype), l2_normalize(key, dtype)
    wide = query.to(dtype), key.to(dtype), value.to(dtype), gate, strength
    return GatedDeltaRule.apply(*wide, state, program, chunked, call.scale, call.recompute)


def _on_kernels(
    call: Call,
    offsets: Sequence[int] | torch.Tensor,
    program: Program,
    tensors: Sequence[torch.Tensor],
    state: torch.Tensor | None,
) -> Any:
    """The same on kernels, for gates that were made already."""
    rows = [x[None] for x in tensors]
    o, final_state = fused_grad.run(call.after_gates(), rows, (None, None), state, offsets, None)
    return o[0], final_state


def _token_rows(
    named: Sequence[torch.Tensor],
    program: Program,
    dtype: torch.dtype,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    """q, k, v [T, ..] as they are, log gate and beta [T, HV] in dtype; 0 in rows of no document, whatever they hold."""
    flat = [x.flatten(0, 1) for x in named]
    if program.covered is not None:
        flat = [x.masked_fill(~program.covered.view(-1, *[1] * (x.ndim - 1)), 0) for x in flat]
    gate = flat[3] if A_log is None else log_decay(flat[3], A_log, dt_bias, dtype)
    return [*flat[:3], floor_gate(gate, dtype), flat[4].to(dtype)]


def _run_headwise(
    context: CPContext,
    headwise: Headwise,
    tensors: list[torch.Tensor],
    state: torch.Tensor | None,
    run: Callable[..., tuple[torch.Tensor, ...]],
    on_torch: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole stream for some heads instead of some tokens for all heads."""
    plan, device, dtype = context.plan, tensors[0].device, tensors[2].dtype
    keys, values = headwise.owned_heads(tensors[0].shape[1], tensors[2].shape[1])
    moved, rows, heads = list(tensors), [headwise.tokens] * 5, [keys, keys, values, values, values]
    if state is not None:
        own = headwise.entry_rows.own(context.rank, device)
        moved, rows, heads = [*moved, state.index_select(0, own)], [*rows, headwise.entry_rows], [*heads, values]
    arrived = headwise.to_heads(moved, rows, heads)
    local, state = arrived[:5], arrived[5] if state is not None else None
    if values[context.rank]:
        o, final_state = run(Program.of_stream(context, device, tables=on_torch), local, state)
    else:
        # No head is left for this rank; it still takes part in every collective, in backward too: what is empty here
        # stays a part of the graph.
        o = local[2]
        empty = (plan.num_documents, 0, local[0].shape[2], o.shape[2])
        final_state = o.reshape(empty).to(local[3].dtype) if state is None else state
    results, rows = [o.to(dtype), final_state], [headwise.tokens, headwise.exit_rows]
    o, ends = headwise.to_rows(results, rows, [values, values])
    own = headwise.exit_rows.own(context.rank, device)
    return o, ends.new_zeros(plan.num_documents, *ends.shape[1:]).index_copy(0, own, ends)
