"""FlashQLA-CP: context-parallel Gated Delta Rule layers. Public names resolve lazily; importing touches no GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashqla_cp.conv import causal_conv1d
    from flashqla_cp.layer import GatedDeltaNet
    from flashqla_cp.op import chunk_gated_delta_rule
    from flashqla_cp.parallel.context import CPContext, build_cp_context

__version__ = "0.1.0"
_HOME = {
    "CPContext": "parallel.context",
    "GatedDeltaNet": "layer",
    "build_cp_context": "parallel.context",
    "causal_conv1d": "conv",
    "chunk_gated_delta_rule": "op",
}
__all__ = ["CPContext", "GatedDeltaNet", "build_cp_context", "causal_conv1d", "chunk_gated_delta_rule"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
