"""What register_fla_backend has said, for what runs in the place of fla's functions."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Registration:
    """Whether fla's calls are ours now, and with which options. reached: what calls of fla's functions have come to."""

    active: bool = False
    exchange: str = "auto"
    backend: str = "auto"
    reached: set[str] = field(default_factory=set)


registration = Registration()
