"""fla (flash-linear-attention): its chunk_gated_delta_rule and causal_conv1d run on this library.

    fla call site -> fla's dispatch (op) or the two names its convolution looks up (conv)
                  -> _why_not: what we leave to fla, with the reason -> our op or convolution

Call sites and imports stay as they are, whenever they were made. A context of fla's build_cp_context holds one rank's
offsets only; on its first use fla_contexts.py makes ours of those of all ranks.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from flashqla_cp.checks import check_conv_inputs, check_op_inputs
from flashqla_cp.conv import causal_conv1d
from flashqla_cp.integrations.fla_contexts import translate_context
from flashqla_cp.integrations.refusals import need
from flashqla_cp.kernels.backend import BACKENDS, ConvSizes, explain
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.exchange.choose import check_exchange_name

SWITCH = "FLA_FLASHQLA_CP"
GATE = ("use_gate_in_kernel", "A_log", "dt_bias")
UNREAD = ("chunk_indices", "chunk_size")  # how fla cuts its work; results do not depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    exchange: str
    backend: str


_registered: _Settings | None = None
_seen: set[str] = set()  # what calls of fla's functions have reached


def register_fla_backend(*, exchange: str = "auto", backend: str = "auto") -> None:
    """Let fla's chunk_gated_delta_rule and causal_conv1d run on this library, for all call sites of this process.

    Calls that we do not support (and, with backend="auto", those on GPUs for which there are no kernels) stay with fla;
    a warning says why, once for each reason. A second call changes the options. The environment variable
    FLA_FLASHQLA_CP=0 switches the op off again, as fla's own switches do.

    Args:
        exchange: for fla's contexts: "auto", "allgather", "sharded", "hierarchical" or "headwise".
        backend: "auto", "tilelang" or "torch".

    Raises:
        ValueError: an option that does not exist. ImportError: no fla, or one before 0.6. RuntimeError: fla's dispatch
            is switched off, or its functions do not reach us.
    """
    global _registered
    check_exchange_name(exchange)
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {BACKENDS}")
    need("fla.backends", "fla")
    _hook_op()
    _hook_conv()
    _registered = _Settings(exchange=exchange, backend=backend)
    missing = _probe()
    if missing:
        unregister_fla_backend()
        raise RuntimeError(
            f"fla: {', '.join(missing)} did not reach this library; expected a release like 0.6.0 without "
            f"FLA_DISABLE_BACKEND_DISPATCH=1 and {SWITCH}=0"
        )


def unregister_fla_backend() -> None:
    """Leave all calls to fla again."""
    global _registered
    _registered = None


def _hook_op() -> None:
    """Put ourselves first among fla's backends of the op; the dispatch finds functions by their names."""
    import fla.ops.gated_delta_rule  # noqa: F401  its own backends first
    from fla.backends import BaseBackend, register

    class FlashQLACPBackend(BaseBackend):
        backend_type = "flashqla_cp"
        env_var = SWITCH
        priority = -1
        chunk_gated_delta_rule = staticmethod(_run_op)

        def is_enabled(self) -> bool:
            return _registered is not None and super().is_enabled()

        @staticmethod
        def chunk_gated_delta_rule_verifier(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            reason = _why_not_op(*args, **kwargs)
            return reason is None, reason

    register("gated_delta_rule")(FlashQLACPBackend)


def _hook_conv() -> None:
    """fla's convolution has no dispatch; it looks these two names up in each call."""
    from fla.modules.causal_conv1d import cp, ops

    if not isinstance(ops.CausalConv1dFunction, SimpleNamespace):
        own = ops.CausalConv1dFunction.apply
        ops.CausalConv1dFunction = SimpleNamespace(apply=functools.partial(_run_conv, own))
    if not isinstance(cp.causal_conv1d_cp, functools.partial):
        cp.causal_conv1d_cp = functools.partial(_run_sharded_conv, cp.causal_conv1d_cp)


def _probe() -> list[str]:
    """Call fla's functions on a few numbers; returns the names of those that did not come here."""
    from fla.modules.causal_conv1d import causal_conv1d as conv
    from fla.ops.cp import FLACPContext
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

    x, weight = torch.zeros(1, 2, 1), torch.zeros(1, 1)
    context = FLACPContext(cu_seqlens=torch.tensor([0, 2]), conv1d_kernel_size=1)
    calls = {
        "chunk_gated_delta_rule": lambda: op(*(x[..., None],) * 3, x, x),
        "causal_conv1d": lambda: conv(x, weight),
        "causal_conv1d with cp_context": lambda: conv(x, weight, cp_context=context),
    }
    missing = []
    for name, call in calls.items():
        _seen.clear()
        try:
            call()
        except Exception:
            if _seen:
                raise
            # fla's own kernels, which do not take CPU tensors
        if not _seen:
            missing.append(name)
    return missing


def _run_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *rest: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fla's signature; called by the dispatch after _why_not_op has agreed."""
    _seen.add("op")
    assert _registered is not None, "the dispatch asks is_enabled first"
    told = dict(zip(_op_names()[5:], rest, strict=False)) | kwargs
    told = {name: value for name, value in told.items() if name not in UNREAD}
    told |= _documents(told.pop("cp_context", None), told, q.device)
    return chunk_gated_delta_rule(q, k, v, g, beta, backend=_registered.backend, **told)


def _why_not_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *rest: Any,
    **kwargs: Any,
) -> str | None:
    """Why fla shall run a call itself, None if we take it. Communicates nothing."""
    told = dict(zip(_op_names()[5:], rest, strict=False)) | kwargs
    unknown = sorted(set(told) - {*_op_names(), *GATE, *UNREAD})
    reason = f"the argument {unknown[0]} is not known here" if unknown else None
    if reason is None:
        try:
            check_op_inputs(q, k, v, g, beta)
        except (TypeError, ValueError) as error:
            reason = str(error)
    states = told.get("initial_state") is not None or bool(told.get("output_final_state"))
    reason = reason or _why_not_context(told.get("cp_context"), states) or _why_not_device(q.device)
    return _declined("chunk_gated_delta_rule", reason)


@functools.cache
def _op_names() -> tuple[str, ...]:
    """fla's parameters of the op, in its order."""
    import inspect

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

    found = inspect.signature(op).parameters.values()
    return tuple(p.name for p in found if p.kind is not inspect.Parameter.VAR_KEYWORD)


def _run_conv(
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
    _seen.add("conv")
    backend = "auto" if _registered is None else _registered.backend
    states = initial_state is not None or bool(output_final_state)
    if _why_not_conv(x, weight, residual, activation, states, None) is None:
        there = x.device.type == "cuda" and backend != "torch" and cu_seqlens is not None  # kernels read them there
        offsets = cu_seqlens if there or cu_seqlens_cpu is None else cu_seqlens_cpu
        return causal_conv1d(x, weight, bias, activation, offsets, backend=backend)  # type: ignore[arg-type]
    before = (x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens, cu_seqlens_cpu)
    return own(*before, *rest)


def _run_sharded_conv(
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
    _seen.add("conv with a context")
    if cp_context is not None and kwargs.get("backend", "triton") != "cuda":
        residual = kwargs.get("residual")
        if _why_not_conv(x, weight, residual, activation, False, cp_context) is None:
            where = _documents(cp_context, {}, x.device)
            where.pop("cu_seqlens_cpu", None)
            backend = "auto" if _registered is None else _registered.backend
            return causal_conv1d(x, weight, bias, activation, backend=backend, **where)[0]
    given = {"activation": activation, "chunk_indices": chunk_indices, "cp_context": cp_context}
    return own(x=x, weight=weight, bias=bias, **given, **kwargs)


def _why_not_conv(x: Any, weight: Any, residual: Any, activation: Any, states: bool, context: Any) -> str | None:
    reasons = {"this library is not registered": _registered is None, "no weight": weight is None}
    reasons |= {"a residual is not supported here": residual is not None, "states are not supported here": states}
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason is None:
        try:
            check_conv_inputs(x, weight, activation, None)
        except (TypeError, ValueError) as error:
            reason = str(error)
    if reason is None:
        sizes = ConvSizes(dtype=x.dtype, width=weight.shape[1])
        reason = _why_not_context(context, False) or _why_not_device(x.device, sizes)
    return reason if _registered is None else _declined("causal_conv1d", reason)


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


def _why_not_device(device: torch.device, sizes: ConvSizes | None = None) -> str | None:
    """Why a GPU's call stays with fla: there are no kernels here for the device, or for a convolution's sizes."""
    if _registered is None or _registered.backend != "auto" or device.type != "cuda":
        return None
    name, reason = explain(device.type, torch.cuda.get_device_capability(device))
    if name == "tilelang":
        reason = "" if sizes is None else sizes.refusal()
    return reason or None


def _declined(name: str, reason: str | None) -> str | None:
    if reason is not None:
        _say_once(f"fla runs its own {name}: {reason}")
    return reason


def _documents(context: Any, told: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """cp_context or cu_seqlens, cu_seqlens_cpu for our functions. As in fla, a context overrides offsets."""
    if context is None:
        return {name: told.get(name) for name in ("cu_seqlens", "cu_seqlens_cpu")}
    nothing = {"cu_seqlens": None, "cu_seqlens_cpu": None}
    if isinstance(context, CPContext):
        return nothing | {"cp_context": context}
    if context.group is None:
        return {"cu_seqlens": context.cu_seqlens, "cu_seqlens_cpu": context.cu_seqlens_cpu}
    exchange = "auto" if _registered is None else _registered.exchange
    return nothing | {"cp_context": translate_context(context, exchange, device)}


@functools.cache
def _say_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)
