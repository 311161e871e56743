"""chunk_gated_delta_rule: the public op. Checks, preparations per token, then autograd.py (torch) or fused_grad.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashqla_cp import fused, fused_grad
from flashqla_cp.autograd import GatedDeltaRule
from flashqla_cp.checks import (
    as_parameter,
    as_tensor,
    check_gate,
    check_op_inputs,
    check_recompute,
    check_scale,
    offsets_left_on,
    read_documents,
)
from flashqla_cp.gate import floor_gate, l2_normalize, log_decay, write_strength
from flashqla_cp.kernels.backend import Kernels, Sizes, select
from flashqla_cp.kernels.reference import chunked
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.exchange.headwise import Headwise
from flashqla_cp.program import Program


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cp_context: CPContext | None = None,
    backend: str = "auto",
    deterministic: bool = True,
    recompute: str = "none",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule over documents, on one device or sharded over ranks.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Per value head; value head i uses query/key head i // (HV // H). Formula: Gated Delta Networks, arXiv 2412.06464.
    Differentiable once in every tensor argument.

    Args:
        q, k: [B, T, H, K] in bf16, fp16, fp32 or fp64, one dtype with v. Any tensor may be an
            array of another library (__dlpack__) or a DLPack capsule.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV] log gate <= 0, any float dtype; the raw gate input a with use_gate_in_kernel.
        beta: [B, T, HV] write strength in [0, 1] (or [0, 2]); its logit with use_beta_sigmoid_in_kernel.
        scale: factor of the output, K**-0.5 if None.
        initial_state: [N, HV, K, V] state in front of each document, zero if None. N counts the documents: B without
            cu_seqlens, and the documents of the whole stream with cp_context, where the row of a document is read by
            the owner of its first token only and has a zero gradient elsewhere.
        output_final_state: return the states behind the documents. With cp_context a row is filled by the owner of
            the document's last token and 0 elsewhere. The state of an empty document passes through.
        use_qk_l2norm_in_kernel: normalise q and k per head, x * rsqrt(sum(x^2) + 1e-6).
        cu_seqlens: [N+1] offsets of documents packed in one row (B = 1), any integer dtype. Rows past the last offset
            are padding: whatever they hold, their outputs and gradients are exactly 0.
        cu_seqlens_cpu: the same on the CPU, which saves the torch backend the copy from the device. Kernels read
            offsets on the device; in the capture of a CUDA graph pass them there only.
        state_v_first: states are [N, HV, V, K].
        use_gate_in_kernel: g = -exp(A_log) * softplus(g + dt_bias) with A_log, dt_bias [HV].
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta), doubled with allow_neg_eigval.
        cp_context: from build_cp_context; the tensors then hold this rank's local_tokens rows, B = 1.
        backend: "auto", "tilelang" or "torch". Kernels read q, k and v in place, views of one projection included.
        deterministic: bitwise equal results run to run; the torch backend always is.
        recompute: what the backward computes again instead of keeping it, with the same gradients bit for bit:
            "none"; "solve" (gates and the chunks' inverses, most of what is kept); "forward" (everything but the
            last stage: nothing is kept but the arguments). With cp_context the same on every rank, since "forward"
            sends the forward's maps again.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states, fp32 (fp64 for fp64 inputs), or None.

    Raises:
        TypeError, ValueError: a bad argument; the text names it. NotImplementedError: no kernel for it, with what
        would work. RuntimeError: backend="auto" in training on a GPU without kernels.
    """
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    q, k, v, g, beta = (as_tensor(x, name) for name, x in named.items())
    check_op_inputs(q, k, v, g, beta)
    num_v_heads, key_dim, value_dim = v.shape[2], q.shape[3], v.shape[3]
    check_gate(A_log, dt_bias, use_gate_in_kernel)
    A_log = as_parameter(A_log, "A_log", (num_v_heads,), q.device)
    dt_bias = as_parameter(dt_bias, "dt_bias", (num_v_heads,), q.device)
    scale = check_scale(scale, key_dim)
    check_recompute(recompute)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: only allowed with use_beta_sigmoid_in_kernel=True")
    tracked = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    kernels = _kernels(backend, q, v, tracked)
    there = None
    if kernels is not None and cp_context is None:
        there = offsets_left_on(q, "q", cu_seqlens, cu_seqlens_cpu)
    offsets = read_documents(q, "q", cu_seqlens, cu_seqlens_cpu, cp_context) if there is None else []
    num_documents = len(offsets if there is None else there) - 1
    state_dims = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
    state_shape = (num_documents, num_v_heads, *state_dims)
    initial_state = as_parameter(initial_state, "initial_state", state_shape, q.device)
    call = fused.Call(
        kernels=kernels,
        l2norm=use_qk_l2norm_in_kernel,
        sigmoid=use_beta_sigmoid_in_kernel,
        double=allow_neg_eigval,
        scale=scale,
        final=output_final_state,
        state_v_first=state_v_first,
        recompute=recompute,
    )
    tensors, gate = (q, k, v, g, beta), (A_log, dt_bias)
    if kernels is not None and (cp_context is None or cp_context.headwise is None):
        known = offsets if there is None else there
        return fused_grad.run(call, tensors, gate, initial_state, known, cp_context)
    return _run_prepared(call, tensors, gate, initial_state, offsets, cp_context)


def _run_prepared(
    call: fused.Call,
    named: Sequence[torch.Tensor],
    gate: tuple[torch.Tensor | None, torch.Tensor | None],
    initial_state: torch.Tensor | None,
    offsets: Sequence[int],
    context: CPContext | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The torch backend, and on kernels the exchange of activations: what is per token is made in torch first."""
    q, v = named[0], named[2]
    if context is None:
        program = Program.of_documents(offsets, q.shape[0] * q.shape[1], q.device)
    else:
        program = Program.of_context(context, q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tensors = _token_rows(named, program, dtype, *gate)
    if call.sigmoid:
        tensors[4] = write_strength(tensors[4], call.double, dtype)
    state = None
    if initial_state is not None:
        state = (initial_state.mT if call.state_v_first else initial_state).to(dtype)
    if call.kernels is None:
        run = functools.partial(_on_torch, call, dtype)
    else:
        run = functools.partial(_on_kernels, call, offsets)
    if context is not None and context.headwise is not None:
        o, final_state = _run_headwise(context, context.headwise, tensors, state, run)
    else:
        o, final_state = run(program, tensors, state)
    if call.state_v_first and final_state is not None:
        final_state = final_state.mT
    return o.view(v.shape).to(v.dtype), final_state if call.final else None


def _on_torch(
    call: fused.Call,
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
    call: fused.Call,
    offsets: Sequence[int],
    program: Program,
    tensors: Sequence[torch.Tensor],
    state: torch.Tensor | None,
) -> Any:
    """The same on kernels, for gates that were made already."""
    rows = [x[None] for x in tensors]
    o, final_state = fused_grad.run(call.after_gates(), rows, (None, None), state, offsets, None)
    return o[0], final_state


def _kernels(backend: str, q: torch.Tensor, v: torch.Tensor, tracked: Sequence[Any]) -> Kernels | None:
    """The kernels that run this call, or None for the torch backend."""
    needs_grad = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tracked)
    sizes = Sizes(
        dtype=q.dtype, num_heads=q.shape[2], num_v_heads=v.shape[2], head_k_dim=q.shape[3], head_v_dim=v.shape[3]
    )
    return select(backend, q.device, needs_grad=needs_grad, sizes=sizes)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole stream for some heads instead of some tokens for all heads."""
    plan, device, dtype = context.plan, tensors[0].device, tensors[2].dtype
    keys, values = headwise.owned_heads(tensors[0].shape[1], tensors[2].shape[1])
    moved, rows, heads = list(tensors), [headwise.tokens] * 5, [keys, keys, values, values, values]
    if state is not None:
        own = torch.tensor(plan.entry_documents(context.rank), dtype=torch.int64, device=device)
        moved, rows, heads = [*moved, state.index_select(0, own)], [*rows, headwise.entry_rows], [*heads, values]
    arrived = headwise.to_heads(moved, rows, heads)
    local, state = arrived[:5], arrived[5] if state is not None else None
    if values[context.rank]:
        o, final_state = run(Program.of_documents(plan.cu_seqlens, plan.num_tokens, device), local, state)
    else:
        # No head is left for this rank; it still takes part in every collective, in backward too: what is empty here
        # stays a part of the graph.
        o = local[2]
        empty = (plan.num_documents, 0, local[0].shape[2], o.shape[2])
        final_state = o.reshape(empty).to(local[3].dtype) if state is None else state
    results, rows = [o.to(dtype), final_state], [headwise.tokens, headwise.exit_rows]
    o, ends = headwise.to_rows(results, rows, [values, values])
    own = torch.tensor(plan.exit_documents(context.rank), dtype=torch.int64, device=device)
    return o, ends.new_zeros(plan.num_documents, *ends.shape[1:]).index_copy(0, own, ends)
