"""fla (flash-linear-attention): its chunk_gated_delta_rule and causal_conv1d run on this library.

    fla call site -> fla's dispatch (op) or the two names its convolution looks up (conv), hooked here
                  -> declined.py: what we leave to fla, with the reason -> calls.py: our op or convolution

Call sites and imports stay as they are, whenever they were made. A context of fla's build_cp_context holds one rank's
offsets only; on its first use contexts.py makes ours of those of all ranks.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from flashqla_cp.integrations.fla.calls import run_conv, run_op, run_sharded_conv
from flashqla_cp.integrations.fla.declined import why_not_op
from flashqla_cp.integrations.fla.registration import registration
from flashqla_cp.integrations.refusals import need
from flashqla_cp.kernels.backend import BACKENDS
from flashqla_cp.parallel.exchange.choose import check_exchange_name

__all__ = ["register_fla_backend", "unregister_fla_backend"]

SWITCH = "FLA_FLASHQLA_CP"


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
    check_exchange_name(exchange)
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {BACKENDS}")
    need("fla.backends", "fla")
    _hook_op()
    _hook_conv()
    registration.active, registration.exchange, registration.backend = True, exchange, backend
    missing = _probe()
    if missing:
        unregister_fla_backend()
        raise RuntimeError(
            f"fla: {', '.join(missing)} did not reach this library; expected a release like 0.6.0 without "
            f"FLA_DISABLE_BACKEND_DISPATCH=1 and {SWITCH}=0"
        )


def unregister_fla_backend() -> None:
    """Leave all calls to fla again."""
    registration.active = False


def _hook_op() -> None:
    """Put ourselves first among fla's backends of the op; the dispatch finds functions by their names."""
    import fla.ops.gated_delta_rule  # noqa: F401  its own backends first
    from fla.backends import BaseBackend, register

    class FlashQLACPBackend(BaseBackend):
        backend_type = "flashqla_cp"
        env_var = SWITCH
        priority = -1
        chunk_gated_delta_rule = staticmethod(run_op)

        def is_enabled(self) -> bool:
            return registration.active and super().is_enabled()

        @staticmethod
        def chunk_gated_delta_rule_verifier(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            reason = why_not_op(*args, **kwargs)
            return reason is None, reason

    register("gated_delta_rule")(FlashQLACPBackend)


def _hook_conv() -> None:
    """fla's convolution has no dispatch; it looks these two names up in each call."""
    from fla.modules.causal_conv1d import cp, ops

    if not isinstance(ops.CausalConv1dFunction, SimpleNamespace):
        own = ops.CausalConv1dFunction.apply
        ops.CausalConv1dFunction = SimpleNamespace(apply=functools.partial(run_conv, own))
    if not isinstance(cp.causal_conv1d_cp, functools.partial):
        cp.causal_conv1d_cp = functools.partial(run_sharded_conv, cp.causal_conv1d_cp)


def _probe() -> list[str]:
    """Call fla's functions on a few numbers; returns the names of those that did not come here."""
    from fla.modules.causal_conv1d import causal_conv1d as conv
    from fla.ops.cp import FLACPContext
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

    x, weight = torch.zeros(1, 2, 1, device="cpu"), torch.zeros(1, 1, device="cpu")
    context = FLACPContext(cu_seqlens=torch.tensor([0, 2], device="cpu"), conv1d_kernel_size=1)
    calls = {
        "chunk_gated_delta_rule": lambda: op(*(x[..., None],) * 3, x, x),
        "causal_conv1d": lambda: conv(x, weight),
        "causal_conv1d with cp_context": lambda: conv(x, weight, cp_context=context),
    }
    missing = []
    for name, call in calls.items():
        registration.reached.clear()
        try:
            call()
        except Exception:
            if registration.reached:
                raise
            # fla's own kernels, which do not take CPU tensors
        if not registration.reached:
            missing.append(name)
    return missing
