"""GatedDeltaNet with its rows sharded over ranks against the same layer on one: values and gradients, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import GatedDeltaNet, build_cp_context
from flashqla_cp.testing.metrics import relative_l2

pytestmark = pytest.mark.mpi(min_size=2)

NUM_TOKENS, OFFSETS = 61, [0, 7, 7, 30, 52]


def empty_rank(world_size: int) -> list[list[tuple[int, int]]]:
    """Rank 0 stores nothing, rank 1 the padding before tokens, each in several pieces."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    ranges[1] = [(55, 61), (0, 20)]
    ranges[-1] += [(45, 55), (20, 45)]
    return ranges


@pytest.mark.parametrize(
    "placing",
    [
        {"layout": "contiguous"},
        {"layout": "zigzag"},
        {"layout": "zigzag_per_document"},
        {"layout": "custom", "token_ranges": empty_rank},
        {"layout": "contiguous", "exchange": "headwise"},
    ],
    ids=["contiguous", "zigzag", "zigzag_per_document", "rank-without-tokens", "headwise"],
)
def test_sharded_layer_equals_the_whole(placing: dict[str, Any], pg: dist.ProcessGroup) -> None:
    placing = dict(placing)
    if "token_ranges" in placing:
        placing["token_ranges"] = placing["token_ranges"](pg.size())
    torch.manual_seed(0)
    layer = GatedDeltaNet(hidden_size=16, head_dim=4, num_heads=4, num_v_heads=8, backend="torch", dtype=torch.float64)
    with torch.no_grad():
        layer.A_log[::2] = -6.0  # half of the heads hardly decay
    x, dy = torch.randn(2, 1, NUM_TOKENS, 16, dtype=torch.float64).unbind()
    x[:, OFFSETS[-1] :], dy[:, OFFSETS[-1] :] = torch.nan, torch.inf
    offsets = torch.tensor(OFFSETS)

    whole_x = x.clone().requires_grad_()
    whole_y = layer(whole_x, cu_seqlens=offsets)
    dx, *expected = torch.autograd.grad(whole_y, [whole_x, *layer.parameters()], dy)

    context = build_cp_context(offsets, pg, conv1d_kernel_size=4, num_tokens=NUM_TOKENS, **placing)
    local_x = context.shard(x).clone().requires_grad_()
    local_y = layer(local_x, cp_context=context)
    local_dx, *gradients = torch.autograd.grad(local_y, [local_x, *layer.parameters()], context.shard(dy))
    for gradient in gradients:
        dist.all_reduce(gradient)

    assert local_y.shape == (1, context.local_tokens, 16)
    y, unsharded_dx = context.unshard(local_y), context.unshard(local_dx)
    for tensor in (y, unsharded_dx):
        assert torch.equal(tensor[:, OFFSETS[-1] :], torch.zeros(1, NUM_TOKENS - OFFSETS[-1], 16, dtype=torch.float64))
    errors = {"y": relative_l2(y, whole_y), "x": relative_l2(unsharded_dx, dx)}
    names = [name for name, _ in layer.named_parameters()]
    errors |= {name: relative_l2(a, b) for name, a, b in zip(names, gradients, expected, strict=True)}
    assert max(errors.values()) < 1e-10, errors


def test_wrong_number_of_rows(pg: dist.ProcessGroup) -> None:
    layer = GatedDeltaNet(hidden_size=8, head_dim=4, num_heads=1, backend="torch")
    context = build_cp_context([0, 9], pg, conv1d_kernel_size=4)
    with pytest.raises(
        ValueError, match=f"hidden_states: has 9 tokens, rank {context.rank} stores {context.local_tokens}"
    ):
        layer(torch.zeros(1, 9, 8), cp_context=context)
    with pytest.raises(ValueError, match="cu_seqlens: not allowed with cp_context"):
        layer(torch.zeros(1, context.local_tokens, 8), cu_seqlens=torch.tensor([0, 9]), cp_context=context)


def test_training_after_inference_with_the_same_context(pg: dist.ProcessGroup) -> None:
    """What a context prepares on first use, in inference mode too, later calls can differentiate through."""
    torch.manual_seed(0)
    layer = GatedDeltaNet(hidden_size=8, head_dim=4, num_heads=1, backend="torch")
    context = build_cp_context([0, 60, 100], pg, num_tokens=107)
    x = context.shard(torch.randn(1, 107, 8))
    with torch.inference_mode():
        first = layer(x, cp_context=context).clone()
    y = layer(x, cp_context=context)
    y.square().sum().backward()
    assert torch.equal(first, y)
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
