"""Puts the arguments of a call into the emulated device memory, and tensors back."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

_DTYPES = {  # DLPack code and bits
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}
_CUDA = 2
_NONE, _INT, _FLOAT, _TENSOR = 0, 1, 3, 7  # TVM-FFI type indices


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Payload(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class Value(ctypes.Structure):
    """TVMFFIAny."""

    _fields_ = [("type", ctypes.c_int32), ("padding", ctypes.c_uint32), ("payload", _Payload)]


@dataclass(frozen=True, slots=True)
class Virtual:
    """A tensor argument of zeros that takes no memory until touched: for offsets past 32 bits. Not copied back."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Group:
    """Arguments whose bytes overlap on the host: one buffer, so that a write through one is seen through the others."""

    start: int  # host address, 0 for Virtual tensors
    end: int
    members: list[int]
    address: int = 0


def check_argument(index: int, argument: Any) -> None:
    """Raise TypeError for what cannot be passed to an emulated kernel."""
    if argument is None or isinstance(argument, (bool, int, float)):
        return
    if not isinstance(argument, (torch.Tensor, Virtual)):
        raise TypeError(f"argument {index}: got {type(argument).__name__}, expected a tensor or a number")
    if argument.dtype not in _DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise TypeError(f"argument {index}: got a tensor of {argument.dtype}, expected one of {known}")
    if isinstance(argument, torch.Tensor) and (argument.device.type != "cpu" or argument.layout != torch.strided):
        got = f"a {argument.layout} tensor on {argument.device}"
        raise TypeError(f"argument {index}: got {got}, expected a strided CPU tensor")


def _strides(argument: torch.Tensor | Virtual) -> tuple[int, ...]:
    if isinstance(argument, torch.Tensor):
        return argument.stride()
    strides, step = [], 1
    for extent in reversed(argument.shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _span(argument: torch.Tensor | Virtual) -> int:
    """Bytes from the first element to the end of the last."""
    if 0 in argument.shape:
        return 0
    last = sum((n - 1) * s for n, s in zip(argument.shape, _strides(argument), strict=True))
    return (1 + last) * argument.dtype.itemsize


def _groups(arguments: tuple[Any, ...]) -> list[_Group]:
    """Buffers to place: overlapping host tensors together, everything else on its own."""
    groups, hosts = [], []
    for index, argument in enumerate(arguments):
        if isinstance(argument, (torch.Tensor, Virtual)):
            start = argument.data_ptr() if isinstance(argument, torch.Tensor) else 0
            group = _Group(start, start + _span(argument), [index])
            shareable = isinstance(argument, torch.Tensor) and group.end > group.start
            (hosts if shareable else groups).append(group)
    end = 0
    for group in sorted(hosts, key=lambda g: g.start):
        if group.start < end:
            groups[-1].members += group.members
            groups[-1].end = end = max(end, group.end)
        else:
            groups.append(group)
            end = group.end
    return groups


class Arguments:
    """The arguments of one call. Tensors that overlap share one buffer, as on a GPU; bounds are those of the buffer."""

    def __init__(self, lib: ctypes.CDLL, arguments: tuple[Any, ...]) -> None:
        """Place the tensors.

        Raises:
            TypeError: neither tensor nor number, a dtype the emulator lacks, a tensor not on the CPU or not strided.
            MemoryError: the emulated device memory is full.
        """
        for index, argument in enumerate(arguments):
            check_argument(index, argument)
        self._keep: list[Any] = list(arguments)
        self._copies: list[_Group] = []
        addresses = {}
        for group in _groups(arguments):
            self._place(lib, group, copies=isinstance(arguments[group.members[0]], torch.Tensor))
            for index in group.members:
                offset = arguments[index].data_ptr() - group.start if group.start else 0
                addresses[index] = group.address + offset
        self.values = (Value * len(arguments))(*[self._value(a, addresses.get(i)) for i, a in enumerate(arguments)])

    def _place(self, lib: ctypes.CDLL, group: _Group, copies: bool) -> None:
        name, size = "argument " + " and ".join(map(str, sorted(group.members))), group.end - group.start
        group.address = lib.emu_tensor(name.encode(), size)
        if not group.address:
            raise MemoryError(f"{name}: {size} bytes do not fit in the emulated device memory")
        if copies:
            ctypes.memmove(group.address, group.start, size)
            self._copies.append(group)

    def _value(self, argument: Any, address: int | None) -> Value:
        value = Value(type=_NONE, padding=0)
        if address is not None:
            rank, (code, bits) = len(argument.shape), _DTYPES[argument.dtype]
            extents, steps = (ctypes.c_int64 * rank)(*argument.shape), (ctypes.c_int64 * rank)(*_strides(argument))
            tensor = _DLTensor(address, _CUDA, 0, rank, code, bits, 1, extents, steps, 0)
            self._keep += [extents, steps, tensor]
            value.type, value.payload.pointer = _TENSOR, ctypes.addressof(tensor)
        elif isinstance(argument, (bool, int)):
            value.type, value.payload.integer = _INT, int(argument)
        elif isinstance(argument, float):
            value.type, value.payload.real = _FLOAT, argument
        return value

    def copy_out(self) -> None:
        """Copy the tensors back to the host."""
        for group in self._copies:
            ctypes.memmove(group.start, group.address, group.end - group.start)
