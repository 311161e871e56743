"""What runs in the place of fla's functions: its arguments, offsets and contexts handed to ours."""

from __future__ import annotations

from typing import Any

import torch

from flashqla_cp.conv import causal_conv1d
from flashqla_cp.integrations.fla.contexts import translate_context
from flashqla_cp.integrations.fla.declined import UNREAD, op_names, why_not_conv
from flashqla_cp.integrations.fla.registration import registration
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.plan import offsets_to_read


def run_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *rest: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fla's signature; called by the dispatch after why_not_op has agreed."""
    registration.reached.add("op")
    told = dict(zip(op_names()[5:], rest, strict=False)) | kwargs
    told = {name: value for name, value in told.items() if name not in UNREAD}
    told |= _documents(told.pop("cp_context", None), told, q.device)
    return chunk_gated_delta_rule(q, k, v, g, beta, backend=registration.backend, **told)


def run_conv(
    own: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In the place of fla's autograd function, which is called with these positions."""
    registration.reached.add("conv")
    states = initial_state is not None or bool(output_final_state)
    if why_not_conv(x, weight, residual, activation, states, None) is None:
        offsets = offsets_of_conv(cu_seqlens, cu_seqlens_cpu, x.device, registration.backend)
        return causal_conv1d(x, weight, bias, activation, offsets, backend=registration.backend)  # type: ignore[arg-type]
    before = (x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens, cu_seqlens_cpu)
    return own(*before, *rest)


def run_sharded_conv(
    own: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """In the place of fla's convolution with a context."""
    registration.reached.add("conv with a context")
    if cp_context is not None and kwargs.get("backend", "triton") != "cuda":
        residual = kwargs.get("residual")
        if why_not_conv(x, weight, residual, activation, False, cp_context) is None:
            where, backend = _documents(cp_context, {}, x.device), registration.backend
            offsets = offsets_of_conv(where.pop("cu_seqlens"), where.pop("cu_seqlens_cpu"), x.device, backend)
            return causal_conv1d(x, weight, bias, activation, offsets, backend=backend, **where)[0]
    given = {"activation": activation, "chunk_indices": chunk_indices, "cp_context": cp_context}
    return own(x=x, weight=weight, bias=bias, **given, **kwargs)


def offsets_of_conv(
    cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None, device: torch.device, backend: str
) -> torch.Tensor | None:
    """The one that our convolution is to read. Raises ValueError or TypeError where they contradict each other."""
    offsets: torch.Tensor | None = offsets_to_read(cu_seqlens, cu_seqlens_cpu)[0]
    there = device.type == "cuda" and backend != "torch" and cu_seqlens is not None  # kernels read them there
    return cu_seqlens if there else offsets


def _documents(context: Any, told: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """cp_context or cu_seqlens, cu_seqlens_cpu for our functions. As in fla, a context overrides offsets."""
    if context is None:
        return {name: told.get(name) for name in ("cu_seqlens", "cu_seqlens_cpu")}
    nothing = {"cu_seqlens": None, "cu_seqlens_cpu": None}
    if isinstance(context, CPContext):
        return nothing | {"cp_context": context}
    if context.group is None:
        return {"cu_seqlens": context.cu_seqlens, "cu_seqlens_cpu": context.cu_seqlens_cpu}
    return nothing | {"cp_context": translate_context(context, registration.exchange, device)}
