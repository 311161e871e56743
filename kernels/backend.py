"""Which stage implementation runs where, and why. No silent fallback."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch

from flashqla_cp.kernels.arch import ARCHES, Arch
from flashqla_cp.kernels.host.launcher import machine_of
from flashqla_cp.kernels.stages import CONV_WIDTHS, HEAD_DIMS, RATIOS

BACKENDS = ("auto", "tilelang", "torch")
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
CONV_DTYPES = (*KERNEL_DTYPES, torch.float32)
_logger = logging.getLogger("flashqla_cp")


class Sizes(NamedTuple):
    """What decides whether there are kernels for a call."""

    dtype: torch.dtype
    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    def refusal(self) -> str:
        """Why no kernel takes these sizes, or an empty text."""
        if self.head_k_dim != self.head_v_dim or self.head_k_dim not in HEAD_DIMS:
            dims = " and ".join(map(str, HEAD_DIMS))
            return f"head sizes: got K = {self.head_k_dim}, V = {self.head_v_dim}, there are kernels for K = V = {dims}"
        if self.num_v_heads // self.num_heads not in RATIOS:
            return (
                f"HV / H: got {self.num_v_heads // self.num_heads}, there are kernels for {', '.join(map(str, RATIOS))}"
            )
        return _refused_dtype(self.dtype, KERNEL_DTYPES)


class ConvSizes(NamedTuple):
    """The same for a call of the convolution: width is its number of taps."""

    dtype: torch.dtype
    width: int

    def refusal(self) -> str:
        """Why no kernel takes these sizes, or an empty text."""
        if self.width not in CONV_WIDTHS:
            return f"weight: got {self.width} taps, there are kernels for {', '.join(map(str, CONV_WIDTHS))}"
        return _refused_dtype(self.dtype, CONV_DTYPES)


def _refused_dtype(dtype: torch.dtype, known: tuple[torch.dtype, ...]) -> str:
    return "" if dtype in known else f"dtype: got {dtype}, there are kernels for {', '.join(map(str, known))}"


class Kernels(NamedTuple):
    """TileLang kernels for an architecture, and the multiprocessors of the device."""

    arch: Arch
    processors: int


def explain(device_type: str, capability: tuple[int, int] | None = None) -> tuple[str, str]:
    """Name of the backend that "auto" means on a device, and the reason in one sentence."""
    if device_type != "cuda":
        return "torch", f"TileLang kernels run on CUDA devices only, this is {device_type}"
    if capability in {arch.capability for arch in ARCHES.values()}:
        return "tilelang", "kernels for the forward and the backward"
    known = ", ".join(f"sm_{a.capability[0]}{a.capability[1]}" for a in ARCHES.values())
    arch = "" if capability is None else f" for sm_{capability[0]}{capability[1]}"
    return "torch", f"this release has no TileLang kernels{arch}, only for {known}"


def select(
    backend: str, device: torch.device, *, needs_grad: bool, sizes: Sizes | ConvSizes | None = None
) -> Kernels | None:
    """The kernels that run a call, or None for the torch backend (flashqla_cp.kernels.reference).

    Raises:
        ValueError: an unknown name; backend="tilelang" with sizes that no kernel takes.
        NotImplementedError: the named backend cannot run here.
        RuntimeError: "auto" in training on CUDA where only the torch backend could: its speed is not what anyone
            trains with.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {BACKENDS}")
    if backend == "torch":
        return None
    arch, processors = machine_of(device)
    refusal = sizes.refusal() if sizes is not None else ""
    if arch is None:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        reason = explain(device.type, capability)[1]
    else:
        reason = refusal
    if backend == "tilelang":
        if arch is not None and refusal:
            raise ValueError(f'{refusal}; backend="torch" takes any')
        if reason:
            raise NotImplementedError(f'backend: "tilelang" cannot run here: {reason}; backend="torch" can')
    if arch is not None and not reason:
        return Kernels(arch=arch, processors=processors)
    if device.type == "cuda" and needs_grad:
        raise RuntimeError(f'backend: {reason}; pass backend="torch" to train with the plain torch backend')
    _tell_once("torch", reason, device.type == "cuda")
    return None


@cache
def _tell_once(name: str, reason: str, surprising: bool) -> None:
    _logger.log(logging.WARNING if surprising else logging.INFO, "runs on the %s backend: %s", name, reason)
