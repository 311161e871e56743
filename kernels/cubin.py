"""Reads compiled device code without any tool: registers, stack, shared memory, and the cubin inside a library.

Follows the ELF layout; the attribute records of .nv.info sections are (format, attribute, size or value) triples.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_ELF_MAGIC = b"\x7fELF"
_MACHINE_CUDA = 190
_NO_BITS = 8
_SIZED_RECORD = 4
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one kernel of a cubin uses: registers per thread, stack bytes per thread, static shared bytes per block."""

    kernel: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int


def _sections(image: bytes, base: int = 0) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, base + 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, base + 58)
    raw = []
    for i in range(count):
        at = base + table + i * entry_size
        name, kind = struct.unpack_from("<II", image, at)
        offset, size = struct.unpack_from("<QQ", image, at + 24)
        raw.append((name, kind, offset, size))
    names_at = base + raw[names_index][2]
    result = []
    for name, kind, offset, size in raw:
        start = names_at + name
        result.append(
            _Section(name=image[start : image.index(b"\0", start)].decode(), kind=kind, offset=offset, size=size)
        )
    return result


def extract_cubins(library: bytes) -> list[bytes]:
    """The cubins embedded in a shared library (or any bytes), in order."""
    found = []
    at = library.find(_ELF_MAGIC)
    while at >= 0:
        is_cubin = len(library) >= at + 64 and struct.unpack_from("<H", library, at + 18)[0] == _MACHINE_CUDA
        if is_cubin:
            (table,) = struct.unpack_from("<Q", library, at + 40)
            (programs,) = struct.unpack_from("<Q", library, at + 32)
            entry_size, count = struct.unpack_from("<HH", library, at + 58)
            program_size, program_count = struct.unpack_from("<HH", library, at + 54)
            end = max(table + entry_size * count, programs + program_size * program_count)
            end = max([end] + [s.offset + s.size for s in _sections(library, at) if s.kind != _NO_BITS])
            found.append(library[at : at + end])
        at = library.find(_ELF_MAGIC, at + (len(found[-1]) if is_cubin else 4))
    return found


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    records, at = [], 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = data[at : at + value] if form == _SIZED_RECORD else b""
        at += len(payload)
        records.append((attribute, payload))
    return records


def _function_names(image: bytes, sections: list[_Section]) -> dict[int, str]:
    symbols = next(s for s in sections if s.name == ".symtab")
    strings = next(s for s in sections if s.name == ".strtab")
    names = {}
    for index in range(symbols.size // 24):
        (name,) = struct.unpack_from("<I", image, symbols.offset + index * 24)
        start = strings.offset + name
        names[index] = image[start : image.index(b"\0", start)].decode()
    return names


def read_resources(cubin: bytes) -> list[Resources]:
    """Resources of every kernel in a cubin, in the order of its sections.

    Raises:
        ValueError: the bytes are not a cubin.
    """
    if cubin[:4] != _ELF_MAGIC or struct.unpack_from("<H", cubin, 18)[0] != _MACHINE_CUDA:
        raise ValueError(f"cubin: got bytes that start with {cubin[:4]!r}, expected an ELF file for CUDA")
    sections = _sections(cubin)
    names = _function_names(cubin, sections)
    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    info = next(s for s in sections if s.name == ".nv.info")
    for attribute, payload in _attributes(cubin[info.offset : info.offset + info.size]):
        if attribute in (_REGISTER_COUNT, _FRAME_SIZE) and len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            (registers if attribute == _REGISTER_COUNT else stack)[names[symbol]] = value
    shared = {s.name[len(".nv.shared.") :]: s.size for s in sections if s.name.startswith(".nv.shared.")}
    return [
        Resources(
            kernel=kernel,
            registers=registers[kernel],
            stack_bytes=stack.get(kernel, 0),
            static_shared_bytes=shared.get(kernel, 0),
        )
        for kernel in (s.name[len(".text.") :] for s in sections if s.name.startswith(".text."))
        if kernel in registers
    ]
