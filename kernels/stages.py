"""The kernels of this package: which function builds a stage for which family, and what to compile ahead.

Importing this module enters them in builders.py's table; tilelang is imported by the builders only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.builders import register_builder
from flashqla_cp.kernels.spec import KernelSpec, make_spec

HEAD_DIMS = (64, 128)
RATIOS = (1, 2, 3, 4, 8)
CONV_WIDTHS = (2, 3, 4)
_ROWS = f"{__name__}:rows"
_HERE = Path(__file__).parent
# Schedules place their own barriers and keep their own indices inside the tensors.
_PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}


def rows(arch: Arch, choices: Mapping[str, Sequence[Any]]) -> list[KernelSpec]:
    """What a model meets, for all of head_dim, ratio, dtype and conv_width in `choices`.

    With norms and write strengths made in the kernels or not, with states in and out or not, for one rank or many.
    """
    found = [make_spec("tables", arch, flags={"exchange": exchange}) for exchange in (False, True)]
    for dtype in choices["dtype"]:
        found.append(make_spec("clear_rows", arch, {}, {"x": dtype}))
        found += [
            make_spec(stage, arch, {}, {"g": g}, {"gate": gate})
            for stage in ("gate_cumsum", "gate_grad")
            for g in (dtype, "float32")
            for gate in (0, 1)
        ]
    for width in choices["conv_width"]:
        found += _conv_rows(arch, width, choices["dtype"])
    for head_dim in choices["head_dim"]:
        chain = {"head_dim": head_dim}
        found += [make_spec("fold", arch, chain), make_spec("fold", arch, chain, {}, {"adjoint": True})]
        found.append(make_spec("affine_chain", arch, chain, {}, {"reverse": True, "apart": True}))
        found.append(make_spec("enter_chains", arch, chain))
        for initial_state in (False, True):
            for reverse in (False, True):
                flags = {"initial_state": initial_state, "reverse": reverse}
                found.append(make_spec("affine_chain", arch, chain, {}, flags))
            for flag in ("apart", "final_correction"):
                flags = {"initial_state": initial_state, flag: True}
                found.append(make_spec("affine_chain", arch, chain, {}, flags))
    for head_dim, ratio, dtype, l2norm in product(
        choices["head_dim"], choices["ratio"], choices["dtype"], (False, True)
    ):
        dims, qkv = {"head_dim": head_dim, "ratio": ratio}, {"qkv": dtype}
        for beta, made in product((dtype, "float32"), ((), ("sigmoid",), ("sigmoid", "double"))):
            flags = {"l2norm": l2norm, **dict.fromkeys(made, True)}
            found += [make_spec(stage, arch, dims, qkv | {"beta": beta}, flags) for stage in ("solve", "gradients")]
        for initial_state in (False, True):
            flags = {"l2norm": l2norm, "initial_state": initial_state}
            found.append(make_spec("summary", arch, dims, qkv, flags))
            found.append(make_spec("replay", arch, dims, qkv, flags))
            found += [make_spec("forward", arch, dims, qkv, flags | {"final_state": final}) for final in (False, True)]
        for final_grad in (False, True):
            flags = {"l2norm": l2norm, "final_grad": final_grad}
            found.append(make_spec("summary_grad", arch, dims, qkv, flags))
            found += [make_spec("sweep", arch, dims, qkv, flags | {"initial_grad": want}) for want in (False, True)]
    return found


def _conv_rows(arch: Arch, width: int, dtypes: Sequence[str]) -> list[KernelSpec]:
    """The convolution with silu, for parameters as narrow as the rows or in fp32."""
    found = [make_spec("conv_places", arch, {"width": width})]
    for dtype, bias in product(dtypes, (False, True)):
        for wide in (dtype, "float32"):
            dims, names, flags = {"width": width}, {"x": dtype, "weight": wide}, {"silu": True, "bias": bias}
            found.append(make_spec("conv_halo_grad", arch, dims, names, flags))
            for stage, exchange in product(("causal_conv", "causal_conv_grad"), (False, True)):
                found.append(make_spec(stage, arch, dims, names, flags | {"exchange": exchange}))
    return found


def _register(stage: str, folders: Mapping[str, str], module_name: str = "") -> None:
    for family, folder in folders.items():
        module = f"flashqla_cp.kernels.{folder}.{module_name or stage}"
        register_builder(
            stage, family, f"{module}:build_{stage}", [_HERE / "blocks", _HERE / "chunks.py"], _PASS_CONFIGS, _ROWS
        )


_PORTABLE = {"sm90": "portable", "sm100": "portable"}
for _stage in ("tables", "gate_cumsum", "solve", "affine_chain", "clear_rows", "fold", "gate_grad"):
    _register(_stage, _PORTABLE)
_register("enter_chains", _PORTABLE, "affine_chain")
for _stage in ("conv_places", "causal_conv"):
    _register(_stage, _PORTABLE, "causal_conv")
for _stage in ("causal_conv_grad", "conv_halo_grad"):
    _register(_stage, _PORTABLE, "causal_conv_grad")
for _stage, _module in (
    ("summary", ""),
    ("forward", ""),
    ("replay", ""),
    ("sweep", ""),
    ("summary_grad", "sweep"),
    ("gradients", ""),
):
    _register(_stage, {"sm90": "sm90", "sm100": "sm100"}, _module)
