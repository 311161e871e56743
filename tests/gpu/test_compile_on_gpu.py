"""torch.compile on kernels, on the device: one graph, the bits of eager calls, nothing read back, no recompilation."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from test_gradients_on_gpu import DEVICE, draw, gradients, leaves, op
from torch._dynamo.testing import CompileCounterWithBackend

from flashqla_cp import GatedDeltaNet, build_cp_context
from flashqla_cp.kernels.host.launcher import machine_of
from flashqla_cp.kernels.host.memory import RECOMPUTE
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.spawn import run_ranks

pytestmark = pytest.mark.gpu

OFFSETS = [0, 900, 900, 963, 1990]
TOKENS = 2000


@pytest.fixture(autouse=True)
def _needs_kernels():
    torch._dynamo.reset()
    if machine_of(torch.device(DEVICE))[0] is None:
        pytest.skip("no kernels for this device")


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_bits_of_an_eager_call(recompute, backend):
    tensors = draw(TOKENS, 1, 2, 128)
    tensors["initial_state"] = torch.randn(4, 2, 128, 128, device=DEVICE)
    do, dfinal = torch.randn_like(tensors["v"]), torch.randn(4, 2, 128, 128, device=DEVICE)
    options = {"cu_seqlens": torch.tensor(OFFSETS, device=DEVICE), "recompute": recompute}
    found = [gradients(run, leaves(tensors), do, dfinal, **options) for run in (op, compiled(op, backend))]
    for name in tensors:
        assert torch.equal(found[1][name], found[0][name]), name


def test_nothing_is_read_back_and_batches():
    tensors = draw(700, 1, 2, 64)
    tensors = {name: torch.cat([x, x.flip(1)]) for name, x in tensors.items()}
    do, run = torch.randn_like(tensors["v"]), compiled(op)

    def step():
        given = leaves(tensors)
        return torch.autograd.grad(run(**given)[0], list(given.values()), do)

    first = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    given = leaves(tensors)
    eager = torch.autograd.grad(op(**given)[0], list(given.values()), do)
    assert all(map(torch.equal, first, eager)) and all(map(torch.equal, again, eager))


def test_other_offsets_and_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(op, counter, dynamic=True)
    for tokens in (TOKENS, 1999, 3000):
        tensors = draw(tokens, 1, 2, 64)
        do = torch.randn_like(tensors["v"])
        for offsets in ([0, 300, tokens], [0, 17, tokens - 1]):
            cu = torch.tensor(offsets, device=DEVICE)
            eager, found = (gradients(f, leaves(tensors), do, cu_seqlens=cu) for f in (op, run))
            assert all(torch.equal(eager[name], found[name]) for name in eager)
    assert counter.frame_count == 1


def layer_step(layer, run, x, **options):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x, **options)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("packed", (False, True))
def test_the_layer(packed, backend):
    torch.manual_seed(0)
    layer = GatedDeltaNet(256, head_dim=64, num_heads=2, num_v_heads=4, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(1, TOKENS, 256, device=DEVICE, dtype=torch.bfloat16)
    cu = torch.tensor(OFFSETS, device=DEVICE) if packed else None
    eager, found = (layer_step(layer, run, x, cu_seqlens=cu) for run in (layer, compiled(layer, backend)))
    for a, b in zip(eager, found, strict=True):
        assert torch.equal(a, b) if backend == "aot_eager" else relative_l2(a, b) <= 1e-2


def _on_rank(rank, exchange):
    torch._dynamo.reset()
    tensors = draw(TOKENS, 1, 2, 128)
    do = torch.randn(tensors["v"].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    counter, same = CompileCounterWithBackend("aot_eager"), []
    run = compiled(op, counter)
    for offsets in (OFFSETS, [0, 100, TOKENS]):
        build = functools.partial(build_cp_context, torch.tensor(offsets), dist.group.WORLD, layout="zigzag")
        found = []
        for function in (op, run):
            context = build(num_tokens=TOKENS, exchange=exchange)
            given = leaves({name: context.shard(x) for name, x in tensors.items()})
            found.append(gradients(function, given, context.shard(do), cp_context=context))
        same += [torch.equal(found[0][name], found[1][name]) for name in tensors]
    return [*same, counter.frame_count == 1]


@pytest.mark.parametrize("exchange", ("sharded", "headwise"))
def test_ranks(exchange):
    for same in run_ranks(_on_rank, 2, exchange, timeout=300.0):
        assert all(same), same
