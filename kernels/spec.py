"""KernelSpec: what is fixed when a kernel is compiled. Hashable, so it is a cache key and a row of warm-up alike.

Sizes that change from call to call (tokens, documents, chunks) are run-time values and have no place here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashqla_cp.kernels.arch import Arch, arch_by_name

RUN_TIME_SIZES = ("tokens", "documents", "chunks", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One specialisation of one stage.

    stage: name of the stage. arch: name of the architecture. dims: sorted pairs (name, positive int).
    dtypes: sorted pairs (operand, dtype name). flags: sorted names of the options that are on.
    Build one with make_spec, which sorts and checks.
    """

    stage: str
    arch: str
    dims: tuple[tuple[str, int], ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.stage.isidentifier():
            raise ValueError(f"stage: got {self.stage!r}, expected an identifier")
        arch_by_name(self.arch)
        for name, value in self.dims:
            if name in RUN_TIME_SIZES:
                raise ValueError(f"dims: got {name!r}, which is a run-time size and must not be compiled in")
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"dims[{name!r}]: got {value!r}, expected a positive int")
        for label, names in (
            ("dims", [n for n, _ in self.dims]),
            ("dtypes", [n for n, _ in self.dtypes]),
            ("flags", list(self.flags)),
        ):
            if names != sorted(set(names)):
                raise ValueError(f"{label}: got {names}, expected sorted distinct names")

    def dim(self, name: str) -> int:
        """Size of a dimension; KeyError when the stage has none of that name."""
        return dict(self.dims)[name]

    def dtype(self, name: str) -> str:
        """Dtype of an operand; KeyError when the stage has none of that name."""
        return dict(self.dtypes)[name]

    def has(self, flag: str) -> bool:
        """Whether an option is on."""
        return flag in self.flags

    @property
    def target(self) -> Arch:
        """The architecture itself."""
        return arch_by_name(self.arch)

    def label(self) -> str:
        """One line for people: stage, architecture, dims, dtypes, flags."""
        dims = " ".join(f"{name}={value}" for name, value in self.dims)
        dtypes = " ".join(f"{name}:{value}" for name, value in self.dtypes)
        return " ".join(part for part in (self.stage, self.arch, dims, dtypes, " ".join(self.flags)) if part)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the same for equal specs; from_dict is the inverse."""
        return {
            "stage": self.stage,
            "arch": self.arch,
            "dims": dict(self.dims),
            "dtypes": dict(self.dtypes),
            "flags": list(self.flags),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelSpec:
        """Inverse of to_dict."""
        return make_spec(values["stage"], values["arch"], values["dims"], values["dtypes"], values["flags"])


def make_spec(
    stage: str,
    arch: str | Arch,
    dims: Mapping[str, int] | None = None,
    dtypes: Mapping[str, str] | None = None,
    flags: Mapping[str, bool] | list[str] | tuple[str, ...] = (),
) -> KernelSpec:
    """A KernelSpec from mappings in any order.

    Args:
        flags: names that are on, or a mapping from name to bool.

    Raises:
        ValueError: an unknown architecture, a run-time size among dims, a size that is not a positive int.
    """
    on = [name for name, value in flags.items() if value] if isinstance(flags, Mapping) else list(flags)
    return KernelSpec(
        stage=stage,
        arch=arch if isinstance(arch, str) else arch.name,
        dims=tuple(sorted((dims or {}).items())),
        dtypes=tuple(sorted((dtypes or {}).items())),
        flags=tuple(sorted(on)),
    )
