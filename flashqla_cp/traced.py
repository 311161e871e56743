"""What the public functions do while torch.compile traces them: check shapes, and put one operator into the graph.

Offsets are tensors and stay tensors, a context is its handle: a graph has neither inside, and the next micro-batch
needs no other graph. What only values tell is checked when the graph runs, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashqla_cp import library as library  # enters the operators
from flashqla_cp.bound import wants_gradients
from flashqla_cp.checks import (
    check_double,
    check_forget_below,
    check_gate,
    check_op_inputs,
    check_recompute,
    check_scale,
)
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.plan import offsets_tensor, refuse_dtensor


def traced_rule(
    tensors: Sequence[torch.Tensor],
    *,
    scale: float | None,
    initial_state: torch.Tensor | None,
    final: bool,
    l2norm: bool,
    offsets: Any,
    state_v_first: bool,
    gate: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    sigmoid: bool,
    double: bool,
    context: CPContext | None,
    backend: str,
    recompute: str,
    forget_below: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Results of the op on q, k, v, g, beta, with what shapes tell checked now and the rest when the graph runs."""
    given = (*tensors, A_log, dt_bias, initial_state)
    for name, x in zip(("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"), given, strict=True):
        _check(x, name)
    check_op_inputs(*tensors)
    check_gate(A_log, dt_bias, gate)
    check_recompute(recompute)
    forget_below = check_forget_below(forget_below)
    check_double(double, sigmoid)
    scale = check_scale(scale, tensors[0].shape[3])
    trains = wants_gradients(given)
    o, final_state, _ = torch.ops.flashqla_cp.gated_delta_rule(
        *given,
        *_documents(offsets, context),
        scale,
        final,
        l2norm,
        state_v_first,
        sigmoid,
        double,
        backend,
        recompute if trains else "forward",  # then nothing is kept
        forget_below,
        trains,
    )
    return o, final_state if final else None


def traced_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    offsets: Any,
    context: CPContext | None,
    backend: str,
) -> torch.Tensor:
    """y of causal_conv1d, all but shapes checked when the graph runs."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        _check(tensor, name)
    documents = _documents(offsets, context)
    trains = wants_gradients((x, weight, bias))
    return torch.ops.flashqla_cp.causal_conv1d(x, weight, bias, *documents, silu, backend, trains)[0]


def padding_rows(
    hidden_states: torch.Tensor, offsets: torch.Tensor | None, context: CPContext | None
) -> torch.Tensor | None:
    """Mask [T, 1] of the rows that belong to no document, None where none can."""
    if offsets is None and context is None:
        return None
    offsets, handle = _documents(offsets, context)
    if offsets is None:
        return torch.ops.flashqla_cp.padding_rows(hidden_states, handle)
    rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    return (rows >= offsets[-1].to(rows.device))[:, None]


def _check(x: Any, name: str) -> None:
    refuse_dtensor(x, name)
    if x is not None and not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor inside torch.compile, got {type(x).__name__}")


def _documents(offsets: Any, context: CPContext | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Offsets and the handle of the context, at most one of them."""
    if context is None:
        return None if offsets is None else offsets_tensor(offsets, "cu_seqlens"), None
    if offsets is not None:
        raise ValueError("cu_seqlens: not allowed with cp_context, which has the offsets")
    return None, context.handle
