"""The kernels of this package: which function builds a stage for which family of architectures, and what to compile ahead.

Importing this module enters them in build.py's table; tilelang is imported by the builders only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.build import register_builder
from flashqla_cp.kernels.spec import KernelSpec, make_spec

HEAD_DIMS = (64, 128)
RATIOS = (1, 2, 3, 4, 8)
_BLOCKS = Path(__file__).parent / "blocks"
# Schedules place their own barriers and keep their own indices inside the tensors.
_PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}


def _register(stage: str, folders: Mapping[str, str]) -> None:
    for family, folder in folders.items():
        module = f"flashqla_cp.kernels.{folder}.{stage}"
        sources = [_BLOCKS, Path(__file__).parent / "chunks.py"]
        register_builder(stage, family, f"{module}:build_{stage}", sources, _PASS_CONFIGS)


_PORTABLE = {"sm90": "portable", "sm100": "portable"}
for _stage in ("tables", "gate_cumsum", "affine_chain"):
    _register(_stage, _PORTABLE)
for _stage in ("solve",):
    _register(_stage, {"sm90": "portable"})
for _stage in ("summary", "forward"):
    _register(_stage, {"sm90": "sm90"})
