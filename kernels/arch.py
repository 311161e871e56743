"""What a kernel must know about a GPU architecture. Values only: nothing here touches a GPU at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One compilation target.

    name: the compiler's name, say "sm_90a". family: the folder of schedules that fits, "sm90" or "sm100".
    capability: (major, minor) of the devices it runs on. mma: the tensor-core instruction of the schedules.
    accumulator: where it keeps its sums. Sizes are per block unless they say otherwise.
    """

    name: str
    family: str
    capability: tuple[int, int]
    mma: str
    accumulator: str
    shared_memory_bytes: int = 227 * KIB
    registers: int = 64 * KIB
    max_registers_per_thread: int = 255
    named_barriers: int = 16
    tensor_memory_columns: int = 0

    def __post_init__(self) -> None:
        if self.mma not in ("wgmma", "tcgen05"):
            raise ValueError(f"mma: got {self.mma!r}, expected 'wgmma' or 'tcgen05'")
        if self.accumulator not in ("registers", "tensor_memory"):
            raise ValueError(f"accumulator: got {self.accumulator!r}, expected 'registers' or 'tensor_memory'")
        if (self.accumulator == "tensor_memory") != (self.tensor_memory_columns > 0):
            raise ValueError(
                f"tensor_memory_columns: got {self.tensor_memory_columns} with accumulator {self.accumulator!r}; "
                "expected columns exactly when sums live in tensor memory"
            )

    @property
    def target(self) -> dict[str, str]:
        """Explicit compilation target, so that a build needs no GPU."""
        return {"kind": "cuda", "arch": self.name}


_TCGEN05: dict[str, Any] = {
    "family": "sm100",
    "mma": "tcgen05",
    "accumulator": "tensor_memory",
    "tensor_memory_columns": 512,
}

ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch(name="sm_90a", family="sm90", capability=(9, 0), mma="wgmma", accumulator="registers"),
        Arch(name="sm_100a", capability=(10, 0), **_TCGEN05),
        Arch(name="sm_103a", capability=(10, 3), **_TCGEN05),
    )
}


def arch_by_name(name: str) -> Arch:
    """The architecture called `name`.

    Raises:
        ValueError: no such architecture.
    """
    if name not in ARCHES:
        raise ValueError(f"arch: got {name!r}, expected one of {', '.join(ARCHES)}")
    return ARCHES[name]


def detect(device: torch.device | int | str | None = None) -> Arch:
    """Architecture of a CUDA device, asked at call time.

    Raises:
        RuntimeError: no CUDA device is visible.
        NotImplementedError: there are no kernels for this device's capability.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is visible; name an architecture instead: " + ", ".join(ARCHES))
    capability = torch.cuda.get_device_capability(device)
    for arch in ARCHES.values():
        if arch.capability == capability:
            return arch
    known = ", ".join(f"{a.capability[0]}.{a.capability[1]}" for a in ARCHES.values())
    raise NotImplementedError(
        f"compute capability {capability[0]}.{capability[1]} has no kernels; there are for {known}"
    )
