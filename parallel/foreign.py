"""Arrays of other libraries, taken over through DLPack where they lie: JAX, CuPy, NumPy, capsules that C made."""

from __future__ import annotations

from typing import Any

import torch


def is_array(value: Any) -> bool:
    """Whether a value, not of torch, speaks DLPack or is a capsule, which has no name but its type's."""
    return not isinstance(value, torch.Tensor) and (hasattr(value, "__dlpack__") or _is_capsule(value))


def take_over(value: Any, name: str) -> torch.Tensor:
    """A tensor on the memory of an array; capsules without strides are compact, as DLPack has it.

    name is the argument that errors name. Raises ValueError for views with negative strides, which torch does not have,
    and TypeError for what DLPack or torch cannot carry.
    """
    if any(stride < 0 for stride in getattr(value, "strides", None) or ()):
        raise ValueError(f"{name}: a view with negative strides cannot be taken over; pass a copy")
    try:
        return torch.from_dlpack(value)
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:  # an AttributeError: of a tracer of JAX
        raise TypeError(f"{name}: {type(value).__name__} cannot be taken over: {error}") from error


def taken_over(value: Any, name: str) -> Any:
    """A tensor on the memory of an array, any other value as it is: for what is looked at more than once, since a
    capsule can be taken over only once."""
    return take_over(value, name) if is_array(value) else value


def _is_capsule(value: Any) -> bool:
    return type(value).__name__ == "PyCapsule"
