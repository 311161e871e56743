"""Calls that stay with fla, and why: what this library does not know, do, or have kernels for."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from flashqla_cp.checks import check_conv_inputs, check_op_inputs
from flashqla_cp.integrations.fla.registration import registration
from flashqla_cp.kernels.backend import ConvSizes, explain
from flashqla_cp.parallel.context import CPContext

GATE = ("use_gate_in_kernel", "A_log", "dt_bias")
UNREAD = ("chunk_indices", "chunk_size")  # how fla cuts its work; results do not depend on it


def why_not_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *rest: Any,
    **kwargs: Any,
) -> str | None:
    """Why fla shall run a call itself, None if we take it. Communicates nothing."""
    told = dict(zip(op_names()[5:], rest, strict=False)) | kwargs
    unknown = sorted(set(told) - {*op_names(), *GATE, *UNREAD})
    reason = f"the argument {unknown[0]} is not known here" if unknown else None
    if reason is None:
        try:
            check_op_inputs(q, k, v, g, beta)
        except (TypeError, ValueError) as error:
            reason = str(error)
    states = told.get("initial_state") is not None or bool(told.get("output_final_state"))
    reason = reason or _why_not_context(told.get("cp_context"), states) or why_not_device(q.device)
    return _declined("chunk_gated_delta_rule", reason)


def why_not_conv(x: Any, weight: Any, residual: Any, activation: Any, states: bool, context: Any) -> str | None:
    """The same of a convolution."""
    reasons = {"this library is not registered": not registration.active, "no weight": weight is None}
    reasons |= {"a residual is not supported here": residual is not None, "states are not supported here": states}
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason is None:
        try:
            check_conv_inputs(x, weight, activation, None)
        except (TypeError, ValueError) as error:
            reason = str(error)
    if reason is None:
        sizes = ConvSizes(dtype=x.dtype, width=weight.shape[1])
        reason = _why_not_context(context, False) or why_not_device(x.device, sizes)
    return reason if not registration.active else _declined("causal_conv1d", reason)


def _why_not_context(context: Any, states: bool) -> str | None:
    if context is None or isinstance(context, CPContext):
        return None
    if states:
        return (
            "states in or out together with a context of fla, which does not know them; build_cp_context of ours does"
        )
    if getattr(context, "pre_num_ranks_dev", None) is not None:
        return "a context whose ranks are read on the device, for graph replay"
    return "a context without cu_seqlens" if context.cu_seqlens is None else None


def why_not_device(device: torch.device, sizes: ConvSizes | None = None) -> str | None:
    """Why a GPU's call stays with fla: there are no kernels here for the device, or for a convolution's sizes."""
    if not registration.active or registration.backend != "auto" or device.type != "cuda":
        return None
    name, reason = explain(device.type, torch.cuda.get_device_capability(device))
    if name == "tilelang":
        reason = "" if sizes is None else sizes.refusal()
    return reason or None


def _declined(name: str, reason: str | None) -> str | None:
    if reason is not None:
        _say_once(f"fla runs its own {name}: {reason}")
    return reason


@functools.cache
def op_names() -> tuple[str, ...]:
    """fla's parameters of the op, in its order."""
    import inspect

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

    found = inspect.signature(op).parameters.values()
    return tuple(p.name for p in found if p.kind is not inspect.Parameter.VAR_KEYWORD)


@functools.cache
def _say_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)
