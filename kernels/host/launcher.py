"""Launches kernels by spec: built or found in the cache once per process, then called with the tensors.

Tests put another loader in its place, which runs the same kernels on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from flashqla_cp.kernels import stages as stages  # enters the builders
from flashqla_cp.kernels.arch import ARCHES, Arch
from flashqla_cp.kernels.build import build
from flashqla_cp.kernels.spec import KernelSpec, make_spec

Loader = Callable[[KernelSpec], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class _Machine:
    """Where kernels come from, and for which machine: the device's own unless arch says otherwise."""

    loader: Loader
    arch: Arch | None = None
    processors: int = 0


@cache
def _loaded(spec: KernelSpec) -> Callable[..., Any]:
    return build(spec).load()


_machine = _Machine(_loaded)


@cache
def _of_device(index: int) -> tuple[Arch | None, int]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    found = [arch for arch in ARCHES.values() if arch.capability == capability]
    return (found[0] if found else None), properties.multi_processor_count


def machine_of(device: torch.device) -> tuple[Arch | None, int]:
    """Architecture whose kernels a device runs, or None, and its multiprocessors."""
    if _machine.arch is not None:
        return _machine.arch, _machine.processors
    if device.type != "cuda":
        return None, 0
    return _of_device(torch.cuda.current_device() if device.index is None else device.index)


@cache
def spec_of(
    stage: str,
    arch: str,
    dims: tuple[tuple[str, int], ...] = (),
    dtypes: tuple[tuple[str, torch.dtype], ...] = (),
    **flags: bool,
) -> KernelSpec:
    """A specialisation by parts that are quick to hash: made once, for it is asked for on every launch. arch: its
    name."""
    names = {operand: str(dtype).removeprefix("torch.") for operand, dtype in dtypes}
    return make_spec(stage, arch, dict(dims), names, flags)


def launch(spec: KernelSpec, *arguments: Any) -> None:
    """Run a kernel on the current stream.

    Raises:
        NotImplementedError: the stage has no kernel for the architecture.
        RuntimeError: it had to be compiled and could not be.
    """
    _machine.loader(spec)(*arguments)


@contextmanager
def machine(loader: Loader, arch: Arch, processors: int) -> Iterator[None]:
    """Launch what `loader` makes of specs, as if for `arch`: for tests."""
    global _machine
    before, _machine = _machine, _Machine(loader, arch, processors)
    try:
        yield
    finally:
        _machine = before
