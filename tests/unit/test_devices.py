"""Tensors on a device that no backend runs on are refused by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqla_cp import GatedDeltaNet, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.testing.inputs import make_inputs


def _op(*moved: str, **options: Any) -> Any:
    x = {name: t.detach() for name, t in make_inputs(20, 1, 2, 8, 6).items()}
    return chunk_gated_delta_rule(**{name: t.to("meta") if name in moved else t for name, t in x.items()}, **options)


def _layer() -> Any:
    return GatedDeltaNet(16, head_dim=8, num_heads=2, device="meta")(torch.randn(1, 20, 16, device="meta"))


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "all": ("q", lambda: _op("q", "k", "v", "g", "beta")),
    "backend": ("q", lambda: _op("q", "k", "v", "g", "beta", backend="torch")),
    "one": ("beta", lambda: _op("beta")),
    "convolution": ("x", lambda: causal_conv1d(torch.ones(1, 20, 5, device="meta"), torch.ones(5, 4, device="meta"))),
    "layer": ("hidden_states", _layer),
}


@pytest.mark.parametrize("call", CALLS)
def test_meta_is_refused(call: str) -> None:
    name, run = CALLS[call]
    with pytest.raises(ValueError, match=f"^{name}: is on meta, expected a device of type cpu or cuda$"):
        run()


class _Elsewhere(torch.Tensor):
    """What a tensor of another vendor's device says of itself."""

    @property
    def device(self) -> torch.device:
        return torch.device("xpu", 1)


def test_another_device_is_refused() -> None:
    x = {name: t.detach().as_subclass(_Elsewhere) for name, t in make_inputs(20, 1, 2, 8, 6).items()}
    with pytest.raises(ValueError, match=r"^q: is on xpu:1, expected a device of type cpu or cuda$"):
        chunk_gated_delta_rule(**x)


def test_tensors_without_values_that_are_traced_go_on() -> None:
    """The fake tensors of torch.compile are on the device that they stand for."""
    x = {name: t.detach() for name, t in make_inputs(20, 1, 2, 8, 6).items()}
    run = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(**x)[0], chunk_gated_delta_rule(**x)[0])
    with pytest.raises(Exception, match="q: is on meta, expected a device of type cpu or cuda"):
        run(**{name: t.to("meta") for name, t in x.items()})
