"""Remember something about foreign objects without keeping them alive and without asking them to be hashable."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WeakTable(Generic[T]):
    """Values by object. An entry ends with its object, so that one that takes its address never meets it."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, owner: Any) -> T | None:
        """The value remembered for this very object, or None."""
        entry = self._entries.get(id(owner))
        return None if entry is None or entry[0]() is not owner else entry[1]

    def set(self, owner: Any, value: T) -> None:
        """Remember a value, instead of an earlier one. The value must not refer to the object."""
        key = id(owner)

        def forget(ended: weakref.ref[Any]) -> None:
            if self._entries.get(key, (None,))[0] is ended:
                del self._entries[key]

        self._entries[key] = (weakref.ref(owner, forget), value)
