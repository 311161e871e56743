"""A second stream per stream of the caller, for work that nothing needs at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _partner(device: torch.device, stream: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _partner_of(main: torch.cuda.Stream) -> torch.cuda.Stream:
    return _partner(main.device, main.cuda_stream)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is launched inside runs after all that was launched before, beside what is launched after; until rejoin.

    Tensors need no record of it: what lives longer than this is used behind rejoin, and memory of the second stream is
    not used again before the next `beside` has waited for the first. On a CPU this does nothing.
    """
    if device.type != "cuda":
        yield
        return
    main = torch.cuda.current_stream(device)
    side = _partner_of(main)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield


def rejoin(device: torch.device) -> None:
    """What is launched from here on runs after all that ran beside."""
    if device.type == "cuda":
        main = torch.cuda.current_stream(device)
        main.wait_stream(_partner_of(main))
