"""fully_shard (FSDP2) of the layer: outputs and gradients are those of the layer whose parameters are whole."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flashqla_cp import GatedDeltaNet, build_cp_context
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.spawn import run_ranks

OFFSETS = [0, 23, 23, 61]
POLICIES = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


def make_layer(**options: object) -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(16, head_dim=8, num_heads=2, num_v_heads=4, backend="torch", conv_bias=True, **options)


def whole_step(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients of the whole layer with parameters in dtype."""
    layer = make_layer().to(dtype)
    y = layer(x.to(dtype), cu_seqlens=torch.tensor(OFFSETS))
    y.float().square().sum().backward()
    return y.detach(), {name: p.grad.float() for name, p in layer.named_parameters() if p.grad is not None}


def _on_rank(rank: int, ranks: int, policy: str, compiled: bool) -> dict[str, float]:
    """Ranks with a batch each: FSDP averages their gradients."""
    torch.set_num_threads(1)
    dtype = POLICIES[policy].get("param_dtype", torch.float32)
    batches = [torch.randn(1, OFFSETS[-1], 16, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    layer = make_layer()
    fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=MixedPrecisionPolicy(**POLICIES[policy]))
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    y = run(batches[rank], cu_seqlens=torch.tensor(OFFSETS))
    y.float().square().sum().backward()
    expected = [whole_step(x, dtype) for x in batches]
    errors = {"y": relative_l2(y, expected[rank][0])}
    for name, parameter in layer.named_parameters():
        mean = sum(gradients[name] for _, gradients in expected) / ranks
        errors[name] = relative_l2(parameter.grad.full_tensor(), mean)
        assert parameter.grad.to_local().shape != mean.shape or ranks == 1, name
    return {name: float(error) for name, error in errors.items()}


@pytest.mark.parametrize(
    ("ranks", "policy", "compiled"), ((1, "fp32", False), (1, "bf16", False), (2, "bf16", False), (2, "fp32", True))
)
def test_a_batch_on_each_rank(ranks: int, policy: str, compiled: bool) -> None:
    for errors in run_ranks(_on_rank, ranks, ranks, policy, compiled, timeout=180.0):
        assert max(errors.values()) <= 1e-6, errors


def _sharded_twice(rank: int) -> dict[str, float]:
    """Parameters and tokens over the same ranks: the loss is multiplied by their number, since FSDP averages."""
    torch.set_num_threads(1)
    x = torch.randn(1, OFFSETS[-1], 16, generator=torch.Generator().manual_seed(3))
    layer, mesh = make_layer(recompute="forward"), init_device_mesh("cpu", (2,))
    fully_shard(layer, mesh=mesh)
    context = build_cp_context(torch.tensor(OFFSETS), mesh, layout="zigzag")
    y = layer(context.shard(x), cp_context=context)
    (2 * y.square().sum()).backward()
    expected, gradients = whole_step(x, torch.float32)
    errors = {name: relative_l2(p.grad.full_tensor(), gradients[name]) for name, p in layer.named_parameters()}
    return {name: float(error) for name, error in (errors | {"y": relative_l2(context.unshard(y), expected)}).items()}


def test_tokens_over_the_same_ranks() -> None:
    for errors in run_ranks(_sharded_twice, 2):
        assert max(errors.values()) <= 1e-4, errors


def _module_alone(rank: int) -> str:
    layer = make_layer()
    fully_shard(layer.conv1d, mesh=init_device_mesh("cpu", (1,)))
    try:
        layer(torch.randn(1, 8, 16))
    except TypeError as error:
        return str(error)
    return "ran"


def test_a_parameter_that_is_still_sharded_is_refused() -> None:
    (text,) = run_ranks(_module_alone, 1)
    assert text.startswith("weight: DTensor is not supported"), text
