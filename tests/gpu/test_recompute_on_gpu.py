"""Tiers of what a call keeps for its backward, on the device: bytes of the allocator, gradients bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_gradients_on_gpu import DEVICE, draw, leaves, op

from flashqla_cp import build_cp_context
from flashqla_cp.kernels.host.launcher import machine_of
from flashqla_cp.kernels.host.memory import RECOMPUTE, training_bytes
from flashqla_cp.testing.spawn import run_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_kernels():
    if machine_of(torch.device(DEVICE))[0] is None:
        pytest.skip("no kernels for this device")


@pytest.mark.parametrize("final", (False, True))
def test_bytes_and_gradients(final):
    tokens, heads, v_heads, dim = 8192, 2, 4, 128
    tensors = draw(tokens, heads, v_heads, dim)
    do = torch.randn_like(tensors["v"])[..., :1].expand(tensors["v"].shape)
    dfinal = torch.randn(1, v_heads, dim, dim, device=DEVICE)
    processors = machine_of(torch.device(DEVICE))[1]
    found = {}
    for recompute in (RECOMPUTE[0], *RECOMPUTE):  # the first time fills caches
        given = leaves(tensors)
        results = None  # what the last turn kept
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        results = [x for x in op(**given, output_final_state=final, recompute=recompute) if x is not None]
        kept = torch.cuda.memory_allocated() - before - sum(x.numel() * x.element_size() for x in results)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        found[recompute] = torch.autograd.grad(results, list(given.values()), [do, dfinal][: len(results)])
        scratch = torch.cuda.max_memory_allocated() - start
        said = training_bytes(
            tokens,
            1,
            num_heads=heads,
            num_v_heads=v_heads,
            head_dim=dim,
            processors=processors,
            longest=tokens,
            recompute=recompute,
            strided_do=True,
            num_exits=int(final),
        )
        gradients = sum(x.numel() * x.element_size() for x in given.values())
        assert abs(kept - said.saved) <= 2**16
        gates = 2 * tokens * v_heads * 4
        assert scratch <= said.scratch + gradients + 2**16
        assert scratch >= said.scratch + gradients - gates - 2**16
    for recompute in RECOMPUTE[1:]:
        assert all(map(torch.equal, found[recompute], found["none"]))


def _on_rank(rank, exchange):
    offsets = [0, 2200, 2200, 2600, 4001]
    tensors = draw(offsets[-1], 1, 2, 128, "mixed")
    context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, layout="zigzag", exchange=exchange)
    do = context.shard(torch.randn(tensors["v"].shape, generator=torch.Generator().manual_seed(2)))
    found = []
    for recompute in RECOMPUTE:
        given = leaves({name: context.shard(x) for name, x in tensors.items()})
        o, _ = op(**given, cp_context=context, recompute=recompute)
        found.append(torch.autograd.grad(o, list(given.values()), do.to(o)))
    return [all(map(torch.equal, other, found[0])) for other in found[1:]]


@pytest.mark.parametrize("exchange", ("allgather", "sharded"))
def test_gradients_on_ranks(exchange):
    assert run_ranks(_on_rank, 2, exchange, timeout=300.0) == [[True, True]] * 2
