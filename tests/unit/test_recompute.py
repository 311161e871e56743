"""Tiers of what the torch backend keeps for its backward: fewer bytes, the same gradients bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import GatedDeltaNet, build_cp_context, chunk_gated_delta_rule
from flashqla_cp.kernels.host.memory import RECOMPUTE
from flashqla_cp.parallel.comm import record_collectives
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.spawn import run_ranks

OFFSETS = [0, 150, 150, 171, 290]
TOKENS = 300


def saved_bytes(run: Any, given: Iterable[torch.Tensor]) -> tuple[Any, int]:
    """What run() returns, and the bytes of all tensors that autograd keeps for it beside the given ones."""
    known = {x.untyped_storage().data_ptr() for x in given}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = run()
    return results, sum(size for pointer, size in kept.items() if pointer not in known)


def test_fewer_bytes_and_the_same_gradients() -> None:
    sizes, gradients = [], []
    for recompute in RECOMPUTE:
        x = make_inputs(TOKENS, 1, 2, 16, 16)
        x["initial_state"] = torch.ones(len(OFFSETS) - 1, 2, 16, 16, dtype=torch.float64, requires_grad=True)
        options = {"cu_seqlens": torch.tensor(OFFSETS), "output_final_state": True, "recompute": recompute}
        results, size = saved_bytes(lambda x=x, options=options: chunk_gated_delta_rule(**x, **options), x.values())
        torch.manual_seed(1)
        torch.autograd.backward(results, [torch.randn_like(r) for r in results])
        sizes.append(size)
        gradients.append([leaf.grad for leaf in x.values()])
    assert sizes[0] > sizes[1] > sizes[2]
    for found in gradients[1:]:
        assert all(map(torch.equal, found, gradients[0]))


def test_the_layer_hands_it_on() -> None:
    x = torch.randn(1, 70, 16)
    sizes, gradients = [], []
    for recompute in RECOMPUTE:
        torch.manual_seed(0)
        layer = GatedDeltaNet(16, head_dim=8, num_heads=2, backend="torch", recompute=recompute)
        y, size = saved_bytes(lambda layer=layer: layer(x), layer.parameters())
        y.square().sum().backward()
        sizes.append(size)
        gradients.append([p.grad for p in layer.parameters()])
    assert sizes[0] > sizes[1] > sizes[2]
    for found in gradients[1:]:
        assert all(map(torch.equal, found, gradients[0]))
    with pytest.raises(ValueError, match="recompute: got 'solved', expected one of 'none', 'solve', 'forward'"):
        GatedDeltaNet(16, recompute="solved")


def _on_rank(rank: int, exchange: str, recompute: str) -> list[bool]:
    torch.set_num_threads(1)
    context = build_cp_context(torch.tensor(OFFSETS), dist.group.WORLD, layout="zigzag", exchange=exchange)
    gradients, calls = [], []
    for tier in ("none", recompute):
        x = {
            name: context.shard(t.detach()).requires_grad_() for name, t in make_inputs(OFFSETS[-1], 1, 2, 8, 8).items()
        }
        with record_collectives() as log:
            o, _ = chunk_gated_delta_rule(**x, cp_context=context, recompute=tier)
            sent = len(log)
            (o * torch.arange(1.0, 1 + o.shape[1])[:, None, None]).sum().backward()
        gradients.append([leaf.grad for leaf in x.values()])
        calls.append([(record.name, record.bytes_sent) for record in log])
    again = calls[0][:sent] if recompute == "forward" and exchange != "headwise" else []
    same_calls = calls[1] == calls[0][:sent] + again + calls[0][sent:]
    return [same_calls, *map(torch.equal, *gradients)]


@pytest.mark.parametrize("recompute", RECOMPUTE[1:])
@pytest.mark.parametrize("exchange", ("allgather", "sharded", "headwise"))
def test_two_ranks(exchange: str, recompute: str) -> None:
    assert all(all(found) for found in run_ranks(_on_rank, 2, exchange, recompute))
