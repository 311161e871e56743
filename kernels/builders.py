"""Which function builds a stage for which family of architectures, and the key of what it builds.

A key is made of what decides the code (the spec, the builder's sources, the versions of tilelang and apache-tvm-ffi)
and not of the host, so that a cache made on one machine serves another. Builders are named, not imported: whoever only
asks for keys never loads tilelang.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.cache import content_key
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.toolchain import TESTED_VERSIONS, installed_version

FORMAT = 2  # of a cache entry; raise it when the files of an entry change


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Where the text of a kernel is: "module:function", and the files besides that module that decide its code.

    The function takes a KernelSpec and returns a TileLang PrimFunc. pass_configs: TileLang pass options, sorted pairs.
    rows: "module:function" that lists what to compile ahead, from an Arch and choices such as {"heads": [16, 32]}.
    """

    function: str
    sources: tuple[str, ...] = ()
    pass_configs: tuple[tuple[str, Any], ...] = ()
    rows: str = ""


_BUILDERS: dict[tuple[str, str], Builder] = {}


def register_builder(
    stage: str,
    family: str,
    function: str,
    sources: Iterable[str | Path] = (),
    pass_configs: dict[str, Any] | None = None,
    rows: str = "",
) -> None:
    """Enter the builder of a stage for a family of architectures.

    Raises:
        ValueError: another builder is registered for them.
    """
    builder = Builder(
        function=function,
        sources=tuple(str(s) for s in sources),
        pass_configs=tuple(sorted((pass_configs or {}).items())),
        rows=rows,
    )
    if _BUILDERS.setdefault((stage, family), builder) != builder:
        raise ValueError(
            f"stage: got {stage!r} for {family!r} twice, expected one builder ({_BUILDERS[stage, family].function})"
        )


def registered() -> list[tuple[str, str]]:
    """Every (stage, family) that has a builder, sorted."""
    return sorted(_BUILDERS)


def rows_to_compile(arch: Arch, choices: Mapping[str, Sequence[int]]) -> list[KernelSpec]:
    """Every spec that the registered stages want compiled ahead for an architecture, without repeats."""
    found: dict[KernelSpec, None] = {}
    for (_, family), builder in sorted(_BUILDERS.items()):
        if family == arch.family and builder.rows:
            module, _, function = builder.rows.partition(":")
            found |= dict.fromkeys(getattr(importlib.import_module(module), function)(arch, choices))
    return list(found)


def find_builder(spec: KernelSpec) -> Builder:
    """The builder of a spec.

    Raises:
        NotImplementedError: the stage has no kernel for this architecture.
    """
    family = spec.target.family
    if (spec.stage, family) not in _BUILDERS:
        others = sorted(f for s, f in _BUILDERS if s == spec.stage)
        raise NotImplementedError(
            f"stage {spec.stage!r} has no kernel for {spec.arch}; it has for: {', '.join(others) or 'none'}"
        )
    return _BUILDERS[spec.stage, family]


def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _source_files(builder: Builder) -> list[str]:
    module = builder.function.partition(":")[0]
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ValueError(f"function: got {builder.function!r}, but there is no module {module!r}")
    own = Path(__file__).parent
    shared = [own / "tuning.py", own / "arch.py", own / "spec.py"]
    folders = [Path(s) for s in builder.sources]
    listed = [f for folder in folders for f in (sorted(folder.rglob("*.py")) if folder.is_dir() else [folder])]
    return [found.origin, *map(str, shared), *map(str, listed)]


def cache_key(spec: KernelSpec) -> str:
    """Key of the entry that a spec has with the sources and versions installed here."""
    builder = find_builder(spec)
    return content_key(
        {
            "format": FORMAT,
            "spec": spec.to_dict(),
            "function": builder.function,
            "pass_configs": dict(builder.pass_configs),
            "sources": [_file_digest(path) for path in _source_files(builder)],
            "versions": {name: installed_version(name) for name in TESTED_VERSIONS},
        }
    )
