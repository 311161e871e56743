"""Which modules of a transformers model are Gated DeltaNet layers that we know, told by their attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashqla_cp.integrations.attachment import check_unwrapped, is_changed

PROJECTIONS = ({"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"})
CHILDREN = {"conv1d", "norm", "out_proj"}
SIZES = "num_k_heads num_v_heads head_k_dim head_v_dim key_dim value_dim conv_kernel_size activation".split()


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers to change, by name; raises ValueError unless each can be changed and does what we know."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        check_unwrapped(name, module)
        children = set(module._modules)
        fits = children >= CHILDREN and any(projections <= children for projections in PROJECTIONS)
        if fits and all(hasattr(module, size) for size in SIZES):
            found[name] = module
        elif any("GatedDeltaNet" in cls.__name__ for cls in type(module).__mro__):
            raise ValueError(
                f"model: {name or 'it'} is a {type(module).__name__}, whose attributes are not those known"
            )
    if not found:
        raise ValueError("model: has no Gated DeltaNet layer, expected one like those of Qwen3-Next or Qwen3.5")
    for name, layer in found.items():
        if is_changed(layer):
            raise ValueError(f"model: {name or 'it'} is enabled already; call disable_context_parallel first")
        if not isinstance(layer.conv1d, nn.Conv1d):
            raise ValueError(
                f"model: conv1d of {name or 'it'} is a {type(layer.conv1d).__name__}, whose forward would never run: "
                "its weight alone is read; expected a Conv1d, so leave it out where adapters are added"
            )
        if layer.activation not in ("silu", "swish"):
            raise ValueError(f"model: {name or 'it'} has activation {layer.activation!r}, expected 'silu'")
    return found


def project(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(q, k, v) in one [B, T, 2 H K + HV V], z of HV V numbers a row in head order, b and a [B, T, HV]."""
    if "in_proj_qkv" in layer._modules:
        return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
    H, group = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    widths = [layer.head_k_dim] * 2 + [group * layer.head_v_dim] * 2
    *qkv, z = layer.in_proj_qkvz(x).unflatten(2, (H, sum(widths))).split(widths, dim=3)
    b, a = layer.in_proj_ba(x).unflatten(2, (H, 2 * group)).split(group, dim=3)
    return torch.cat([y.flatten(2) for y in qkv], dim=2), z, b.flatten(2), a.flatten(2)
