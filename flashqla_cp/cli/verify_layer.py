"""The layer as `flashqla-cp verify` compares it: a small one, as a function of its rows, and the same on oracles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from flashqla_cp import layer as layer_module
from flashqla_cp.layer import GatedDeltaNet
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.testing.cases import Case
from flashqla_cp.testing.parity import Problem, conv_oracle, op_oracle

CONV_TAPS, HIDDEN_SIZE = 4, 24


def layer_problem(
    case: Case, dtype: torch.dtype, device: torch.device, op_backend: str
) -> tuple[GatedDeltaNet, Problem]:
    """A small layer, the same on every rank, and a step of it over the stream of a case."""
    generator = torch.Generator().manual_seed(2)
    layer = GatedDeltaNet(
        HIDDEN_SIZE,
        head_dim=max(16, case.head_k_dim),
        num_heads=2,
        num_v_heads=4,
        conv_size=CONV_TAPS,
        backend=op_backend,
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        # Rates from one that keeps its state over the whole stream to one that forgets within a few tokens.
        layer.A_log.copy_(torch.linspace(-6.0, 1.0, layer.num_v_heads))
        layer.dt_bias.copy_(torch.linspace(-4.0, -1.0, layer.num_v_heads))
    layer = layer.to(device=device, dtype=dtype)
    rows = torch.randn(2, 1, case.stream_length, HIDDEN_SIZE, generator=generator).to(device=device, dtype=dtype)
    problem = Problem(
        tokens={"hidden_states": rows[0]},
        upstream={"o": rows[1]},
        shared={name: parameter.detach() for name, parameter in layer.named_parameters()},
        cu_seqlens=torch.tensor(case.cu_seqlens),
    )
    return layer, problem


def functional(layer: GatedDeltaNet) -> Callable[..., Any]:
    """The layer as a function of its rows and parameters."""

    def call(
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        cp_context: CPContext | None = None,
        **parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        return torch.func.functional_call(layer, parameters, (hidden_states, cu_seqlens, cp_context)), None

    return call


def layer_oracle(layer: GatedDeltaNet) -> Callable[..., Any]:
    """The layer with the oracles in the place of the two calls that mix tokens."""

    def conv(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        cu_seqlens: torch.Tensor | None,
        cp_context: CPContext | None,
        backend: str,
    ) -> tuple[torch.Tensor, None]:
        return conv_oracle(x, weight, bias, activation, cu_seqlens)

    def op(*tensors: torch.Tensor, cp_context: CPContext | None, backend: str, recompute: str, **options: Any) -> Any:
        return op_oracle(*tensors, **options)

    def call(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        with (
            mock.patch.object(layer_module, "causal_conv1d", conv),
            mock.patch.object(layer_module, "chunk_gated_delta_rule", op),
        ):
            return functional(layer)(*args, **kwargs)

    return call
