"""Where `flashqla-cp bench` captures: a backward runs on the stream of its forward, so both share the capturing one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flashqla_cp.cli import bench_timing

GPU = torch.device("cuda")


class Stream:
    """Stands for a stream of a GPU, of which there is none here."""

    current: Any = None

    def wait_stream(self, other: Stream) -> None:
        assert other is not self


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Like torch.cuda.graph, and unlike torch.cuda.stream, it stays on the stream if its block fails."""
    outer, Stream.current = Stream.current, stream
    yield
    Stream.current = outer


class Graph:
    """Stands for a CUDA graph."""

    def replay(self) -> None:
        raise AssertionError("replayed")


@pytest.fixture
def outer(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that is current outside."""
    first = Stream.current = Stream()
    fakes: dict[str, Any] = {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "stream": on,
        "current_stream": lambda: Stream.current,
        "set_stream": lambda stream: setattr(Stream, "current", stream),
        "synchronize": lambda: None,
        "graph": lambda graph, stream: on(stream),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(bench_timing, "eager_ms", lambda call, device: 1.5 if call.__name__ == "replay" else 2.5)
    monkeypatch.setattr(bench_timing, "peak_mib", lambda call: call() or 3.0)
    return first


def test_forward_and_backward_are_on_the_stream_that_captures(outer: Stream) -> None:
    seen: list[tuple[str, Stream]] = []

    def prepare() -> Callable[[], None]:
        seen.append(("forward", Stream.current))
        return lambda: seen.append(("backward", Stream.current))

    assert bench_timing.graph_ms(prepare, GPU) == 1.5
    assert [name for name, _ in seen] == ["forward"] + 4 * ["backward"]
    assert len({stream for _, stream in seen}) == 1 and seen[0][1] is not outer and Stream.current is outer


def test_a_capture_that_fails_gives_back_the_stream(outer: Stream) -> None:
    calls = []

    def call() -> None:
        calls.append(Stream.current)
        if Stream.current is not outer and len([x for x in calls if x is not outer]) == 4:
            raise RuntimeError("operation not permitted when stream is capturing\n...")

    found = bench_timing.measure(lambda: call, GPU)
    assert Stream.current is outer and (found["eager_ms"], found["graph_ms"], found["peak_mib"]) == (2.5, None, 3.0)
    assert found["graph_failed"] == "RuntimeError: operation not permitted when stream is capturing"
