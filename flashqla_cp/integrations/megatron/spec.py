"""Replace the Gated DeltaNet layers in Megatron's specs: trees of dataclasses that say which classes build a model."""

from __future__ import annotations

import copy
import functools
from dataclasses import fields, is_dataclass
from typing import Any

from flashqla_cp.integrations.megatron.layer import CPLayer, check_options, layer_class
from flashqla_cp.integrations.refusals import need


def with_context_parallel_gdn(
    spec: Any, *, exchange: str = "auto", backend: str = "auto", packed_layout: str = "zigzag_per_document"
) -> Any:
    """Copy a spec, with every Gated DeltaNet layer in it replaced by CPGatedDeltaNet.

    Args:
        spec: a ModuleSpec, the submodules of a block or a hybrid stack, or a list of these. It is not changed.
        exchange: "auto", "allgather", "sharded", "hierarchical" or "headwise".
        backend: "auto", "tilelang" or "torch".
        packed_layout: how packed (THD) streams are sharded: "zigzag_per_document" as Megatron does it, "zigzag" where
            its data loader balances the whole stream instead, or "contiguous".

    Raises:
        ValueError: no such layer in the spec, one that is replaced already or is not Megatron's own, or a bad option.
            ImportError: no megatron-core with Gated DeltaNet is installed.
    """
    options = {"exchange": exchange, "backend": backend, "packed_layout": packed_layout}
    check_options(**options)
    need("megatron.core", "megatron")
    copies: dict[int, Any] = {}
    copied = _copy(spec, copies)
    found = [node for node in copies.values() if _is_layer(node)]
    if not found:
        raise ValueError("spec: has no Gated DeltaNet layer, expected one whose module is Megatron's GatedDeltaNet")
    for node in found:
        node.module = layer_class()
        node.params = {**(node.params or {}), **_causal(), **options}
    return copied


def make_hybrid_stack_spec() -> Any:
    """Megatron's spec of hybrid stacks with our layer. Raises ImportError before release 0.18, which has none."""
    need("megatron.core", "megatron")
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return with_context_parallel_gdn(hybrid_stack_spec)


def _copy(node: Any, copies: dict[int, Any]) -> Any:
    """Copy the structure of a spec, each object once, as the layers of a block often share one spec.

    Only the structure: what it holds are classes and functions, or stand-ins for missing ones, which deepcopy refuses.
    """
    if id(node) in copies:
        return copies[id(node)]
    copied = node
    if is_dataclass(node) and not isinstance(node, type):
        copied = copy.copy(node)
        for field in fields(node):
            if field.name == "module":  # the class that a ModuleSpec builds, looked at together with it
                continue
            object.__setattr__(copied, field.name, _copy(getattr(node, field.name), copies))
    elif type(node) in (list, tuple):
        copied = type(node)(_copy(part, copies) for part in node)
    elif isinstance(node, dict):
        copied = {key: _copy(value, copies) for key, value in node.items()}
    elif isinstance(node, functools.partial):
        keywords = {key: _copy(value, copies) for key, value in node.keywords.items()}
        copied = functools.partial(_copy(node.func, copies), *_copy(node.args, copies), **keywords)
    copies[id(node)] = copied
    return copied


def _is_layer(node: Any) -> bool:
    """Whether this is a ModuleSpec of Megatron's layer; raises ValueError for what only resembles it."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer.spec_utils import ModuleSpec, get_module

    module = node
    if isinstance(node, ModuleSpec):
        by_name = isinstance(node.module, tuple) and "GatedDeltaNet" in str(node.module[-1])
        module = get_module(node) if by_name else node.module
    if not isinstance(module, type) or not any(_is_named_so(cls) for cls in module.__mro__):
        return False
    if module is GatedDeltaNet and module is not node:
        return True
    what = "a bare class" if module is GatedDeltaNet else "not Megatron's own layer"
    if issubclass(module, CPLayer):
        what = "replaced already"
    raise ValueError(f"spec: {module.__name__} is {what}, expected ModuleSpec(module=GatedDeltaNet, ...)")


def _is_named_so(cls: type) -> bool:
    return "GatedDeltaNet" in cls.__name__ and "Submodules" not in cls.__name__


def _causal() -> dict[str, Any]:
    """Multi-token prediction wants the spec of its layer to say that it is causal."""
    from megatron.core.transformer.enums import AttnMaskType

    return {"attn_mask_type": AttnMaskType.causal}
