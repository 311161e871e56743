"""What is counted on the host stays there, whatever torch.set_default_device says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashqla_cp import GatedDeltaNet, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.cli.bench_contenders import middle_context
from flashqla_cp.kernels.host import tables
from flashqla_cp.parallel.exchange.choose import EXCHANGES
from flashqla_cp.testing.inputs import make_inputs

CPU, TOKENS = torch.device("cpu"), 128


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """A default device on which nothing has values, so that whatever lands there by chance fails."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


INPUTS = make_inputs(TOKENS, 2, 4, 8, 8)
WEIGHT = torch.randn(32, 4, dtype=torch.float64)
HIDDEN = torch.randn(1, TOKENS, 16)
LAYER = GatedDeltaNet(16, head_dim=8, num_heads=2)
OFFSETS = torch.tensor([0, 30, TOKENS])


def _op(**options: Any) -> torch.Tensor:
    return chunk_gated_delta_rule(**INPUTS, **options)[0]


def _on_a_rank(exchange: str) -> torch.Tensor:
    context = middle_context(TOKENS, 3, CPU, exchange)
    v, _ = causal_conv1d(INPUTS["v"].flatten(2), WEIGHT, cp_context=context)
    return _op(cp_context=context) + v.unflatten(2, (4, 8))


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": _op,
    "offsets": lambda: _op(cu_seqlens=OFFSETS),
    "list": lambda: _op(cu_seqlens=[0, 30, TOKENS]),
    "convolution": lambda: causal_conv1d(INPUTS["v"].flatten(2), WEIGHT, cu_seqlens=OFFSETS)[0],
    "layer": lambda: LAYER(HIDDEN, cu_seqlens=OFFSETS),
} | {exchange: (lambda name=exchange: _on_a_rank(name)) for exchange in EXCHANGES}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, elsewhere: None) -> None:
    found = CALLS[name]()
    found.sum().backward()
    torch.set_default_device(None)
    assert found.device == CPU and torch.equal(found, CALLS[name]())


def test_numbers_for_kernels(elsewhere: None) -> None:
    assert tables.to_device([1, 2, 3], CPU).tolist() == [1, 2, 3]
