"""torch.compile of the convolution on kernels: the bits of an eager call, its kernels, and its exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conv_cases import F32, Conv
from test_op_emulated import emulation
from torch._dynamo.testing import CompileCounterWithBackend

from flashqla_cp import build_cp_context, causal_conv1d
from flashqla_cp.testing.spawn import run_ranks


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def step(case, function, given, dy, **options):
    """y and the gradients, and the stages that ran but for the tables, which are kept or made again."""
    leaves = [x.detach().requires_grad_() for x in given]
    with emulation("sm_90a", races=False) as launched:
        y, _ = case.call(function, leaves, backend="tilelang", **options)
        found = torch.autograd.grad(y, leaves, dy)
    return [y.detach(), *found], [spec.stage for spec, _ in launched if spec.stage != "conv_places"]


def compiled(counter="aot_eager"):
    return torch.compile(causal_conv1d, fullgraph=True, backend=counter)


@pytest.mark.parametrize("offsets", (None, [0, 70, 70, 290]))
def test_bits_and_kernels_are_those_of_an_eager_call(offsets):
    case = Conv(channels=16)
    given, dy = case.draw()
    options = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    eager, stages = step(case, causal_conv1d, given, dy, **options)
    found, found_stages = step(case, compiled(), given, dy, **options)
    assert all(map(torch.equal, found, eager))
    assert found_stages == stages == ["causal_conv", "causal_conv_grad"]


def _on_rank(rank, case):
    torch.set_num_threads(1)
    counter, same = CompileCounterWithBackend("aot_eager"), []
    run = compiled(counter)
    (x, *parameters), dy = case.draw()
    for offsets in ([0, 40], [0, 13, 40]):
        context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, case.width, layout="zigzag")
        given = [context.shard(x), *parameters]
        eager, stages = step(case, causal_conv1d, given, context.shard(dy), cp_context=context)
        found, found_stages = step(case, run, given, context.shard(dy), cp_context=context)
        same += [*map(torch.equal, found, eager), found_stages == stages, "conv_halo_grad" in stages]
    return [*same, counter.frame_count == 1]


def test_two_ranks():
    for same in run_ranks(_on_rank, 2, Conv(channels=16, wide=F32, tokens=40, offsets=None), timeout=600.0):
        assert all(same), same
