"""How `flashqla-cp bench` measures: times of a call, what the device can do, and the least that a call must do.

Counted, for chunks of C = 64 tokens and head size D: every input read once and every output written once; and the
multiply-adds of the matrix products,

    forward     3 C D^2 + 2 C^2 D + C^3/3 a chunk and value head, 2 C^2 D a chunk and key head, none of them twice
    backward    14.75 C D^2 a chunk and value head: states are computed again, not kept; the count is that for D = 128
    step        one after the other

Backward reads the forward's inputs and do, and writes a gradient for each of the inputs. The floor is the larger of
bytes over the measured speed of a copy and operations over that of a matrix product, in bf16 on a GPU and in fp32 on a
CPU, where the torch backend computes in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashqla_cp.testing.conv_workload import ConvWorkload
from flashqla_cp.testing.workload import Workload

CHUNK = 64
HOST_CALLS = 30
CPU_SECONDS, CPU_CALLS = 0.2, 3
BACKWARD_PRODUCTS = 14.75  # of C D^2 multiply-adds

Call = Callable[[], Any]
Prepare = Callable[[], Call]


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

    def floor_ms(self, work: Workload | ConvWorkload, direction: str) -> float:
        """Milliseconds that the counted bytes or operations take at least on this device."""
        if direction == "step":
            return self.floor_ms(work, "forward") + self.floor_ms(work, "backward")
        traffic, operations = cost(work, direction)
        return max(traffic / self.copy_bytes, operations / self.operations) * 1e3


def cost(work: Workload | ConvWorkload, direction: str) -> tuple[int, int]:
    """Bytes and operations (two a multiply-add) of one call, as the head of this file counts them."""
    if direction == "step":
        forward, backward = cost(work, "forward"), cost(work, "backward")
        return forward[0] + backward[0], forward[1] + backward[1]
    if isinstance(work, ConvWorkload):
        return work.cost(direction)
    keys, values = work.heads * work.head_dim, work.v_heads * work.head_dim
    chunks = work.documents * -(-(work.tokens // work.documents) // CHUNK)
    full, half = CHUNK * work.head_dim**2, CHUNK**2 * work.head_dim
    if direction == "forward":
        narrow, gates = 2 * keys + 2 * values, 2 * work.v_heads
        multiply_adds = chunks * (work.v_heads * (3 * full + 2 * half + CHUNK**3 // 3) + work.heads * 2 * half)
    else:
        narrow, gates = 4 * keys + 3 * values, 4 * work.v_heads
        multiply_adds = int(chunks * work.v_heads * BACKWARD_PRODUCTS * full)
    return work.tokens * (narrow * work.dtype.itemsize + gates * 4), 2 * multiply_adds


def measure(prepare: Prepare, device: torch.device) -> dict[str, Any]:
    """Medians of the call that prepare() returns: eager_ms; graph_ms, replayed from a CUDA
    graph; host_us, until an eager call returns; peak_mib of prepare() and the call together above what was allocated.
    None where the device has no such thing, and graph_failed says why a call could not be captured."""
    found: dict[str, Any] = {"eager_ms": None, "graph_ms": None, "host_us": None, "peak_mib": None}
    prepare()()  # compiles or tunes, if something still has to
    if device.type == "cuda":
        found["peak_mib"] = peak_mib(lambda: prepare()())
    call = prepare()
    found["eager_ms"] = eager_ms(call, device)
    if device.type != "cuda":
        return found
    found["host_us"] = host_us(call)
    del call
    try:
        found["graph_ms"] = graph_ms(prepare, device)
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


def graph_ms(prepare: Prepare, device: torch.device) -> float:
    """Median milliseconds of the call that prepare() returns, replayed from a CUDA graph."""
    return eager_ms(captured(prepare), device)


def captured(prepare: Prepare) -> Call:
    """A replay of a CUDA graph of the call that prepare() returns.

    Autograd runs a backward on the stream of its forward, so both belong on the stream that captures."""
    outer, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(outer)
    try:
        with torch.cuda.stream(side):
            call = prepare()
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            call()
    finally:
        torch.cuda.set_stream(outer)  # a capture that fails leaves its own stream behind
    torch.cuda.synchronize()
    return graph.replay


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
