"""How `flashqla-cp bench` measures: times of a call, what the device can do, and the least that a call must do.

Counted, for chunks of C = 64 tokens and head size D: every input read once and every output written once; and the
multiply-adds of the matrix products, none of them twice,

    forward     3 C D^2 + 2 C^2 D + C^3/3 a chunk and value head, 2 C^2 D a chunk and key head
    backward    8 C D^2 + 5 C^2 D + C^3/3 and 6 C^2 D: states are computed again, not kept

The floor is the larger of bytes over the measured speed of a copy and operations over that of a matrix product, in
bf16 on a GPU and in fp32 on a CPU, where the torch backend computes in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashqla_cp.testing.workload import Workload

CHUNK = 64
HOST_CALLS = 30
CPU_SECONDS, CPU_CALLS = 0.2, 3

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What this device was measured to do: bytes a second of a copy, read and written ones both counted, and
    operations a second of a matrix product in dtype."""

    copy_bytes: float
    operations: float
    dtype: torch.dtype

    @classmethod
    def of(cls, device: torch.device) -> Ceilings:
        """Measure them now."""
        on_gpu = device.type == "cuda"
        size, width = (2**30, 8192) if on_gpu else (2**25, 512)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        left = torch.randn(width, width, device=device).to(dtype)
        copy_ms = eager_ms(lambda: target.copy_(source), device)
        product_ms = eager_ms(lambda: left @ left, device)
        return cls(copy_bytes=2 * size / copy_ms * 1e3, operations=2 * width**3 / product_ms * 1e3, dtype=dtype)

    def described(self) -> dict[str, Any]:
        """As the report holds them."""
        return {
            "copy_gb_per_s": self.copy_bytes / 1e9,
            "product_tflop_per_s": self.operations / 1e12,
            "product_dtype": str(self.dtype).removeprefix("torch."),
        }

    def floor_ms(self, work: Workload, direction: str) -> float:
        """Milliseconds below which no call can come on this device."""
        traffic, operations = cost(work, direction)
        return max(traffic / self.copy_bytes, operations / self.operations) * 1e3


def cost(work: Workload, direction: str) -> tuple[int, int]:
    """Bytes and operations (two a multiply-add) of one call, as the head of this file counts them."""
    keys, values = work.heads * work.head_dim, work.v_heads * work.head_dim
    chunks = work.documents * -(-(work.tokens // work.documents) // CHUNK)
    full, half = CHUNK * work.head_dim**2, CHUNK**2 * work.head_dim
    if direction == "forward":
        narrow, gates = 2 * keys + 2 * values, 2 * work.v_heads
        per_value, per_key = 3 * full + 2 * half, 2 * half
    else:
        narrow, gates = 4 * keys + 3 * values, 4 * work.v_heads
        per_value, per_key = 8 * full + 5 * half, 6 * half
    multiply_adds = chunks * (work.v_heads * (per_value + CHUNK**3 // 3) + work.heads * per_key)
    return work.tokens * (narrow * work.dtype.itemsize + gates * 4), 2 * multiply_adds


def measure(call: Call, device: torch.device) -> dict[str, Any]:
    """Medians of a call that has run before: eager_ms; graph_ms, replayed from a CUDA graph; host_us, until an eager
    call returns; peak_mib above what was allocated. None where the device has no such thing, and graph_failed says why
    a call could not be captured."""
    found: dict[str, Any] = {"eager_ms": eager_ms(call, device), "graph_ms": None, "host_us": None, "peak_mib": None}
    if device.type != "cuda":
        return found
    found["host_us"], found["peak_mib"] = host_us(call), peak_mib(call)
    try:
        found["graph_ms"] = graph_ms(call, device)
    except Exception as error:  # whatever the call does that a graph cannot hold
        torch.cuda.synchronize()
        found["graph_failed"] = first_line(error)
    return found


def eager_ms(call: Call, device: torch.device) -> float:
    """Median milliseconds of a call; on a GPU between events, from a cold cache."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=50, rep=200, return_mode="median"))
    call()
    taken: list[float] = []
    while len(taken) < CPU_CALLS or sum(taken) < CPU_SECONDS:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def graph_ms(call: Call, device: torch.device) -> float:
    """Median milliseconds of a call that is replayed from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return eager_ms(graph.replay, device)


def host_us(call: Call) -> float:
    """Median microseconds after which a call returns to an idle host, the GPU still at work."""
    taken = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return statistics.median(taken) * 1e6


def peak_mib(call: Call) -> float:
    """MiB that a call allocates at most at one time, its results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def first_line(error: BaseException) -> str:
    """What went wrong, on one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]:.160}" if text else type(error).__name__
