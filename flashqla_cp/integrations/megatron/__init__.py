"""Megatron-core: the Gated DeltaNet layers of a spec run on this library, with context parallelism.

spec = with_context_parallel_gdn(spec)  # GPT block and layer specs, hybrid stacks, multi-token prediction
--spec flashqla_cp.integrations.megatron hybrid_stack_spec

Names resolve lazily, and Megatron is imported inside functions only. That this is a package matters: Megatron's --spec
takes a name from vars(module) after an import, which makes lazy names real in packages only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashqla_cp.integrations.megatron.spec import with_context_parallel_gdn

__all__ = ["CPGatedDeltaNet", "hybrid_stack_spec", "with_context_parallel_gdn"]
_MADE_IN = {"CPGatedDeltaNet": ("layer", "layer_class"), "hybrid_stack_spec": ("spec", "make_hybrid_stack_spec")}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, maker = _MADE_IN.get(name, ("spec", name))
    value = getattr(import_module(f"{__name__}.{home}"), maker)
    globals()[name] = value() if name in _MADE_IN else value
    return globals()[name]
