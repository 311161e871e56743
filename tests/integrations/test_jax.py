"""The page docs/jax.md: its code runs, and gives the values and gradients of the fp64 recurrence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqla_cp import build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import gated_delta_rule_oracle

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

PAGE = (Path(__file__).parents[2] / "docs" / "jax.md").read_text()
OFFSETS = [0, 7, 30, 96]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Everything that the blocks of the page define, run one after the other."""
    namespace: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/jax.md", "exec"), namespace)
    return namespace


def as_jax(tensor: torch.Tensor) -> Any:
    return jnp.from_dlpack(tensor.detach().contiguous())


@pytest.fixture
def _doubles() -> Any:
    with jax.enable_x64(True):
        yield


def problem(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Any, list[torch.Tensor]]:
    """Inputs, a weight for every output, and the recurrence's output and gradients."""
    tensors, documents = make_inputs(96, 2, 4, 16, 8), torch.tensor(OFFSETS)
    tensors = {name: x.detach().to(dtype).double().requires_grad_() for name, x in tensors.items()}
    o, _ = gated_delta_rule_oracle(**tensors, cu_seqlens=documents, use_qk_l2norm=True)
    weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
    gradients = torch.autograd.grad((o * weight).sum(), list(tensors.values()))
    return {name: x.detach().to(dtype) for name, x in tensors.items()}, as_jax(weight.to(dtype)), [o, *gradients]


@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_delta_rule_in_jit"])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_values_and_gradients(page: dict[str, Any], name: str, dtype: torch.dtype, bar: float, _doubles: None) -> None:
    tensors, weight, wanted = problem(dtype)
    arrays, documents = [as_jax(x) for x in tensors.values()], jnp.array(OFFSETS)
    assert arrays[0].dtype == str(dtype).removeprefix("torch.")

    def loss(*arrays: Any) -> Any:
        o = page[name](*arrays, documents)
        return (o * weight).sum(), o

    differentiate = jax.grad(loss, argnums=tuple(range(5)), has_aux=True)
    if name.endswith("jit"):
        differentiate = jax.jit(differentiate)
    gradients, o = differentiate(*arrays)
    for found, exact in zip([o, *gradients], wanted, strict=True):
        assert relative_l2(torch.from_dlpack(found).double(), exact) < bar


def test_only_one_is_for_jit(page: dict[str, Any]) -> None:
    """Why the page has two: arrays do not exist yet while jit traces."""
    arrays = [as_jax(x.detach().float()) for x in make_inputs(96, 2, 4, 16, 8).values()]
    with pytest.raises(TypeError, match=r"q: .*Tracer cannot be taken over"):
        jax.jit(page["gated_delta_rule"])(*arrays, jnp.array(OFFSETS))


def test_arrays_of_jax_go_in_as_they_are() -> None:
    tensors = {name: x.detach().bfloat16() for name, x in make_inputs(96, 2, 4, 16, 8).items()}
    arrays = {name: as_jax(x) for name, x in tensors.items()}
    o, _ = chunk_gated_delta_rule(**arrays, cu_seqlens=jnp.array(OFFSETS))
    wanted, _ = chunk_gated_delta_rule(**tensors, cu_seqlens=torch.tensor(OFFSETS))
    assert torch.equal(o, wanted)
    assert jnp.from_dlpack(o).dtype == jnp.bfloat16
    y, _ = causal_conv1d(jnp.ones((1, 96, 6)), jnp.ones((6, 4)), cu_seqlens=jnp.array(OFFSETS))
    assert torch.equal(y, causal_conv1d(torch.ones(1, 96, 6), torch.ones(6, 4), cu_seqlens=torch.tensor(OFFSETS))[0])


def test_offsets_of_jax_make_a_context(pg: Any) -> None:
    if pg.size() != 1:
        pytest.skip("needs one rank")
    assert build_cp_context(jnp.array(OFFSETS), pg).plan.cu_seqlens == tuple(OFFSETS)
