"""What the public functions do while torch.compile traces them: check shapes, and put one operator into the graph.

Offsets are tensors and stay tensors, a context is its handle: a graph has neither inside, and the next micro-batch
needs no other graph. What only values tell is checked when the graph runs, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashqla_cp import library as library  # enters the operators
from flashqla_cp.bound import Options, wants_gradients
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
    given: Sequence[Any], options: Options, offsets: Any, context: CPContext | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Results of the op, with what shapes tell checked now and the rest when the graph runs. given: as bind has it."""
    for x, name in zip(given, ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"), strict=True):
        _check(x, name)
    q, k, v, g, beta, A_log, dt_bias, _ = given
    check_op_inputs(q, k, v, g, beta)
    check_gate(A_log, dt_bias, options.gate)
    check_recompute(options.recompute)
    check_double(options.double, options.sigmoid)
    trains = wants_gradients(given)
    *passed, _ = options._replace(
        scale=check_scale(options.scale, q.shape[3]),
        recompute=options.recompute if trains else "forward",  # then nothing is kept
        forget_below=check_forget_below(options.forget_below),
    )
    documents = _documents(offsets, context)
    o, final_state, _ = torch.ops.flashqla_cp.gated_delta_rule(*given, *documents, *passed, trains)
    return o, final_state if options.final else None


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
