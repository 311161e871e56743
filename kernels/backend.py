"""Which stage implementation runs where, and why. No silent fallback."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch

BACKENDS = ("auto", "tilelang", "torch")
_logger = logging.getLogger("flashqla_cp")


def explain(device_type: str, capability: tuple[int, int] | None = None) -> tuple[str, str]:
    """Name of the backend that "auto" means on a device, and the reason in one sentence."""
    if device_type != "cuda":
        return "torch", f"TileLang kernels run on CUDA devices only, this is {device_type}"
    arch = "" if capability is None else f" for sm_{capability[0]}{capability[1]}"
    return "torch", f"this release has no TileLang kernels{arch}"


def select(backend: str, device: torch.device, *, needs_grad: bool) -> ModuleType:
    """The module with the stage functions (flashqla_cp.kernels.reference.chunked or its like).

    Raises ValueError for an unknown name, NotImplementedError where the named backend cannot run, and RuntimeError
    for "auto" in training on CUDA where only the torch backend could: its speed is not what anyone trains with.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {BACKENDS}")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    name, reason = explain(device.type, capability)
    if backend == "tilelang" and name != "tilelang":
        raise NotImplementedError(f'backend: "tilelang" cannot run here: {reason}; backend="torch" can')
    if backend == "auto":
        if device.type == "cuda" and name == "torch" and needs_grad:
            raise RuntimeError(f'backend: {reason}; pass backend="torch" to train with the plain torch backend')
        _tell_once(name, reason, device.type == "cuda")
    from flashqla_cp.kernels.reference import chunked

    return chunked


@cache
def _tell_once(name: str, reason: str, surprising: bool) -> None:
    _logger.log(logging.WARNING if surprising else logging.INFO, "runs on the %s backend: %s", name, reason)
