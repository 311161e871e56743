"""A fork of the caller's stream, for work that nothing needs at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _partner(device: torch.device, stream: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Fork:
    """Two streams, or on a CPU nothing: what is launched in `beside` runs after all that was launched before the fork
    and beside all that is launched outside from then on, until `join`."""

    def __init__(self, device: torch.device) -> None:
        self._main = self._side = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side = _partner(self._main.device, self._main.cuda_stream)
            self._side.wait_stream(self._main)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on the second stream."""
        if self._side is None:
            yield
        else:
            with torch.cuda.stream(self._side):
                yield

    def join(self) -> None:
        """What is launched from here on runs after all that ran beside."""
        if self._main is not None and self._side is not None:
            self._main.wait_stream(self._side)

    def close(self) -> None:
        """Join, and let the second stream wait for the first: memory that was taken beside may be given back then,
        though the first stream still reads it. In a capture the graph itself keeps that order."""
        self.join()
        if self._main is not None and self._side is not None and not torch.cuda.is_current_stream_capturing():
            self._side.wait_stream(self._main)


@contextmanager
def fork(device: torch.device) -> Iterator[Fork]:
    """A fork that is closed at the end. All tensors that were made or read beside must live until then."""
    forked = Fork(device)
    try:
        yield forked
    finally:
        forked.close()
