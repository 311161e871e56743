"""Rewrites emitted CUDA source into host C++: shared-memory declarations, entry table. Line numbers stay."""

from __future__ import annotations

import re
from dataclasses import dataclass

ELEMENT_BYTES = {
    "uint64_t": 8,
    "int64_t": 8,
    "double": 8,
    "float": 4,
    "int": 4,
    "uint": 4,
    "bfloat16_t": 2,
    "half_t": 2,
    "short": 2,
    "ushort": 2,
    "signed char": 1,
    "uchar": 1,
    "bool": 1,
}

_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\)\s*(;|\{)')
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")
_STATIC = re.compile(r"__shared__ (?:__align__\((\d+)\) )?([\w ]+?) (\w+)\[(\d+)\];")


class UnsupportedSourceError(RuntimeError):
    """The emitted source uses something the emulator does not have; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEntry:
    """One __global__ function: its name, its parameter kinds (T P F L I) and types, its static shared bytes."""

    name: str
    kinds: str
    types: tuple[str, ...]
    static_shared_bytes: int
    uses_dynamic_shared: bool


def _keep_lines(match: re.Match[str]) -> str:
    return "\n" * match.group(0).count("\n")


def _parameter_type(text: str) -> str:
    return re.sub(r"__restrict__|__grid_constant__", "", text.rsplit(" ", 1)[0]).strip()


def _parameter_kind(ctype: str) -> str:
    if "CUtensorMap" in ctype:
        return "T"
    if "*" in ctype:
        return "P"
    if ctype == "float":
        return "F"
    if ctype in ("int64_t", "uint64_t", "long long"):
        return "L"
    if ctype in ("int", "uint", "int32_t", "uint32_t", "bool"):
        return "I"
    raise UnsupportedSourceError(f"kernel parameter of type {ctype!r}")


def _rewrite_static(body: str) -> tuple[str, int]:
    """Give every static shared array its offset; total bytes."""
    used = 0

    def place(match: re.Match[str]) -> str:
        nonlocal used
        align, ctype, name, count = (
            int(match.group(1) or 16),
            match.group(2).strip(),
            match.group(3),
            int(match.group(4)),
        )
        if ctype not in ELEMENT_BYTES:
            raise UnsupportedSourceError(f"shared array of type {ctype!r}")
        start = -(-used // align) * align
        used = start + ELEMENT_BYTES[ctype] * count
        return f"{ctype}* {name} = ({ctype}*)emu_static_shared({start});"

    return _STATIC.sub(place, body), used


def rewrite(device_source: str) -> tuple[str, list[KernelEntry]]:
    """Host C++ for emitted CUDA source, and its kernels in order.

    Raises:
        UnsupportedSourceError: inline assembly, an unknown shared-memory declaration or parameter type.
    """
    text = re.sub(r"#if defined\(_MSC_VER\).*?#endif", _keep_lines, device_source, count=1, flags=re.S)
    text = re.sub(r"#ifdef ENABLE_BF16\s.*?#endif", _keep_lines, text, flags=re.S)
    text = re.sub(r"^#include.*$", "", text, flags=re.M)
    assembly = re.search(r"\basm\b.*", text)
    if assembly:
        raise UnsupportedSourceError(f"inline assembly: {assembly.group(0).strip()}")
    if "__cluster_dims__" in text:
        raise UnsupportedSourceError("thread-block clusters")
    text = _DYNAMIC.sub(lambda m: f"{m.group(1)}* {m.group(2)} = ({m.group(1)}*)emu_dynamic_shared();", text)
    definitions = [m for m in _KERNEL.finditer(text) if m.group(3) == "{"]
    pieces, entries = [text[: definitions[0].start()] if definitions else text], []
    for i, match in enumerate(definitions):
        end = definitions[i + 1].start() if i + 1 < len(definitions) else len(text)
        body, static_bytes = _rewrite_static(text[match.start() : end])
        pieces.append(body)
        types = tuple(_parameter_type(p.strip()) for p in match.group(2).split(",") if p.strip())
        kinds = "".join(map(_parameter_kind, types))
        entries.append(
            KernelEntry(
                name=match.group(1),
                kinds=kinds,
                types=types,
                static_shared_bytes=static_bytes,
                uses_dynamic_shared="emu_dynamic_shared" in body,
            )
        )
    text = "".join(pieces)
    if not entries:
        raise UnsupportedSourceError("no __global__ function")
    left = re.search(r".*__shared__.*", text)
    if left:
        raise UnsupportedSourceError(f"shared-memory declaration: {left.group(0).strip()}")
    return '#include "emulated_device.h"\n#line 1 "kernel.cu"\n' + text + _entry_table(entries), entries


def _entry_table(entries: list[KernelEntry]) -> str:
    lines = ['\n#line 1 "entry_table"']
    for entry in entries:
        arguments = ", ".join(f"*({ctype}*)arguments[{i}]" for i, ctype in enumerate(entry.types))
        # Not instrumented: the arguments lie on the launcher's stack, which is no memory of the device.
        unseen = '__attribute__((no_sanitize("thread")))'
        lines.append(f"{unseen} static void emu_enter_{entry.name}(void** arguments) {{ {entry.name}({arguments}); }}")
    rows = ", ".join(
        f'{{"{e.name}", emu_enter_{e.name}, "{e.kinds}", {e.static_shared_bytes}, {int(e.uses_dynamic_shared)}}}'
        for e in entries
    )
    lines.append(f'extern "C" {{ extern const EmuKernel emu_kernels[] = {{ {rows} }}; }}')
    lines.append(f'extern "C" {{ extern const int emu_num_kernels = {len(entries)}; }}')
    return "\n".join(lines) + "\n"
