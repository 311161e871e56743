"""fully_shard (FSDP2) of the layer on kernels: the results of the layer whose parameters are whole."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flashqla_cp import GatedDeltaNet
from flashqla_cp.kernels.host.launcher import machine_of
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.spawn import run_ranks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
OFFSETS = [0, 300, 300, 1000]


@pytest.fixture(autouse=True)
def _needs_kernels():
    if machine_of(torch.device(DEVICE))[0] is None:
        pytest.skip("no kernels for this device")


def _step(layer, x):
    y = layer(x, cu_seqlens=torch.tensor(OFFSETS, device=DEVICE))
    y.float().square().sum().backward()
    return y.detach()


def _on_rank(rank, recompute):
    torch.cuda.set_device(0)
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(GatedDeltaNet(256, head_dim=64, num_heads=2, num_v_heads=4, device=DEVICE, recompute=recompute))
    x = torch.randn(1, OFFSETS[-1], 256, device=DEVICE).bfloat16()
    whole, sharded = layers[0].bfloat16(), layers[1]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(sharded, mesh=init_device_mesh("cuda", (1,)), mp_policy=policy)
    errors = {"y": relative_l2(_step(sharded, x), _step(whole, x))}
    expected = dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        errors[name] = relative_l2(parameter.grad.full_tensor(), expected[name].grad.float())
    return {name: float(error) for name, error in errors.items()}


@pytest.mark.parametrize("recompute", ("none", "forward"))
def test_one_rank(recompute):
    (errors,) = run_ranks(_on_rank, 1, recompute, backend="nccl", timeout=300.0)
    assert max(errors.values()) <= 1e-6, errors
