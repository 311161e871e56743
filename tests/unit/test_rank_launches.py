"""What a rank inside a document launches beside the stages of one device: a few kernels, whatever the number of ranks.

Kernels do nothing here; what torch itself would launch on a GPU is recorded beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashqla_cp import chunk_gated_delta_rule
from flashqla_cp.cli.bench_contenders import middle_context, middle_of_documents
from flashqla_cp.kernels.arch import arch_by_name
from flashqla_cp.kernels.host import launcher

TOKENS, HEADS, V_HEADS, DIM = 1024, 4, 8, 64
PROCESSORS = 132  # so that the document is cut into segments
LOCAL_COPY = "repeat", "expand", "clone"  # what stands in for the other ranks
NO_WORK = "empty", "new_empty", "empty_like", "detach", "fill_"  # the tests fill what is uninitialised
ALONE = {
    "forward": "gate_cumsum solve summary affine_chain forward",
    "backward": "summary_grad affine_chain replay sweep gradients gate_grad",
}
INSIDE = {
    "forward": "gate_cumsum solve summary affine_chain fold enter_chains forward",
    "backward": "summary_grad affine_chain replay fold affine_chain sweep gradients gate_grad",
}


class Recorder(TorchDispatchMode):
    """Names of operators that compute or copy: not of those that only look at tensors otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and name not in NO_WORK:
            self.names.append(name)
        return out


@contextmanager
def nothing_runs(processors: int = PROCESSORS) -> Iterator[list[str]]:
    """Kernels' stages in the order of their launches."""
    launched: list[str] = []
    with launcher.machine(lambda spec: lambda *_: launched.append(spec.stage), arch_by_name("sm_90a"), processors):
        yield launched


def launches(ranks: int, exchange: str) -> dict[str, tuple[str, list[str]]]:
    """By direction: kernels, and what torch computes or copies; no backward follows "forward alone". ranks 0: one
    device that holds all."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.rand(1, TOKENS, *shape, generator=generator).bfloat16().requires_grad_()

    q, k, v, beta = tensor(HEADS, DIM), tensor(HEADS, DIM), tensor(V_HEADS, DIM), tensor(V_HEADS)
    g = (-tensor(V_HEADS).detach().float()).requires_grad_()
    leaves = q, k, v, g, beta
    context = middle_context(TOKENS, ranks, torch.device("cpu"), exchange) if ranks else None
    found = {}
    with nothing_runs() as launched:
        for _ in range(2):  # the first call makes what later ones find in the context
            launched.clear()
            with Recorder() as torch_forward:
                o, _ = chunk_gated_delta_rule(*leaves, cp_context=context, backend="tilelang")
            found["forward"] = (" ".join(launched), torch_forward.names)
            launched.clear()
            upstream = torch.ones_like(o)
            with Recorder() as torch_backward:
                torch.autograd.grad(o, leaves, upstream)
            found["backward"] = (" ".join(launched), torch_backward.names)
            launched.clear()
            with torch.no_grad(), Recorder() as torch_alone:
                chunk_gated_delta_rule(*leaves, cp_context=context, backend="tilelang")
            found["forward alone"] = (" ".join(launched), torch_alone.names)
    return found


@pytest.mark.parametrize(("exchange", "ranks"), [("allgather", 4), ("allgather", 8), ("sharded", 4), ("sharded", 8)])
def test_a_rank_inside_a_document(exchange: str, ranks: int) -> None:
    alone, inside = launches(0, exchange), launches(ranks, exchange)
    for direction, copies in (("forward", ["cat", "index_select"]), ("forward alone", ["cat"]), ("backward", [])):
        assert alone[direction][0] == ALONE[direction.split()[0]]
        assert inside[direction][0] == INSIDE[direction.split()[0]]
        own = [name for name in inside[direction][1] if name not in LOCAL_COPY]
        assert sorted(own) == sorted(alone[direction][1] + copies)


@pytest.mark.parametrize("exchange", ["allgather", "sharded"])
def test_what_is_kept_has_no_state_for_each_document(exchange: str) -> None:
    """Of a middle rank in which one document ends, others lie, and one begins."""

    def kept_bytes(documents: int) -> int:
        inside = range(TOKENS + 32, 2 * TOKENS, 960 // (documents - 1))
        offsets = (0, *list(inside)[: documents - 1], 3 * TOKENS)
        context = middle_of_documents(offsets, 3, torch.device("cpu"), exchange)
        shapes = (1, 128), (1, 128), (2, 128), (2,), (2,)
        q, k, v, g, beta = (torch.rand(1, TOKENS, *shape).bfloat16().requires_grad_() for shape in shapes)
        with nothing_runs(processors=2):  # which have enough to do without segments
            o, _ = chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context, backend="tilelang")
        assert o.grad_fn is not None
        saved = o.grad_fn.saved_tensors  # type: ignore[attr-defined]
        return sum(x.numel() * x.element_size() for x in saved if x is not None)

    state = 2 * 128 * 128 * 4
    chunk = 2 * 64 * 64 * 2 + 2 * 64 * 4  # a document has one more than its tokens fill: its inverse and decay
    assert kept_bytes(17) - kept_bytes(2) < 15 * (chunk + state // 4)
