"""fla's call sites run on this library once it is registered, from whatever name and whenever they were imported.

fla's own kernels need a GPU: here a call that they keep fails, which tells the two apart.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashqla_cp.kernels.backend import ConvSizes
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import causal_conv1d_oracle, gated_delta_rule_oracle

pytest.importorskip("fla", reason="flash-linear-attention is not installed")
pytest.importorskip("fla.backends", reason="flash-linear-attention before 0.6 has no way to register a backend")

import fla.ops
from fla.modules.causal_conv1d import ShortConvolution
from fla.modules.causal_conv1d import causal_conv1d as conv
from fla.modules.convolution import causal_conv1d as conv_of_old_name
from fla.ops import chunk_gated_delta_rule as op_of_ops
from fla.ops.cp import FLACPContext
from fla.ops.cp.context import get_cp_cu_seqlens
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op
from fla.ops.gated_delta_rule import chunk_gdn

from flashqla_cp.integrations import fla as plugin
from flashqla_cp.integrations.fla import calls, declined
from flashqla_cp.integrations.fla.contexts import join, tell

BAR = 1e-10
OFFSETS = [0, 7, 30, 30, 96]


@pytest.fixture
def registered() -> Iterator[None]:
    plugin.register_fla_backend()
    yield
    plugin.unregister_fla_backend()


def kept_by_fla() -> Any:
    return pytest.raises(RuntimeError, match="active drivers")


def inputs(num_tokens: int = 96, **kwargs: Any) -> dict[str, torch.Tensor]:
    return make_inputs(num_tokens, 2, 4, 16, 8, **kwargs)


def backward(o: torch.Tensor, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
    return list(torch.autograd.grad((o * weight).sum(), list(tensors.values())))


@pytest.mark.parametrize("call", [op, op_of_ops, chunk_gdn, fla.ops.gated_delta_rule.chunk_gated_delta_rule])
def test_op_by_every_name(registered: None, call: Any) -> None:
    tensors = inputs()
    o, state = call(**tensors, cu_seqlens=torch.tensor(OFFSETS), output_final_state=True)
    wanted, wanted_state = gated_delta_rule_oracle(**tensors, cu_seqlens=torch.tensor(OFFSETS))
    assert relative_l2(o, wanted) < BAR
    assert relative_l2(state, wanted_state) < BAR
    for found, gradient in zip(backward(o, tensors), backward(wanted, tensors), strict=True):
        assert relative_l2(found, gradient) < BAR


def test_op_as_layers_call_it(registered: None) -> None:
    """q, k, v by position, the rest by name, fla's extra arguments among it."""
    tensors, state = inputs(), torch.randn(4, 4, 16, 8, dtype=torch.float64)
    q, k, v, g, beta = tensors.values()
    A_log, dt_bias = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    o, _ = op(
        q,
        k,
        v,
        g,
        beta,
        0.3,
        state,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=torch.tensor(OFFSETS),
        cu_seqlens_cpu=torch.tensor(OFFSETS),
        chunk_indices=None,
        chunk_size=32,
    )
    gate = -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)
    documents = {"cu_seqlens": torch.tensor(OFFSETS), "initial_state": state, "scale": 0.3}
    wanted, _ = gated_delta_rule_oracle(q, k, v, gate, beta.sigmoid(), use_qk_l2norm=True, **documents)
    assert relative_l2(o, wanted) < BAR


@pytest.mark.parametrize("call", [conv, conv_of_old_name, fla.modules.causal_conv1d.ops.causal_conv1d])
@pytest.mark.parametrize("activation", ["silu", "swish", None])
def test_conv_by_every_name(registered: None, call: Any, activation: str | None) -> None:
    x = torch.randn(1, 96, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    tensors = {"x": x, "weight": weight, "bias": bias}
    y, state = call(**tensors, activation=activation, cu_seqlens=torch.tensor(OFFSETS))
    wanted = causal_conv1d_oracle(x, weight, bias, activation, torch.tensor(OFFSETS))
    assert state is None
    assert relative_l2(y, wanted) < BAR
    for found, gradient in zip(backward(y, tensors), backward(wanted, tensors), strict=True):
        assert relative_l2(found, gradient) < BAR


@pytest.mark.parametrize("call", ["op", "conv", "conv with a context"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.tensor([0, 8, 30, 30, 96]), "cu_seqlens: is 8 at index 1, expected 7 as in cu_seqlens_cpu, its copy"),
        (torch.tensor([0, 96]), "cu_seqlens: has 2 offsets, expected the 5 of cu_seqlens_cpu, its copy"),
        (torch.tensor([0.0, 7, 30, 30, 96]), "cu_seqlens: expected integers, got torch.float32"),
    ],
)
def test_offsets_are_compared_with_their_copy(registered: None, call: str, given: torch.Tensor, text: str) -> None:
    x, weight, where = torch.randn(1, 96, 6), torch.randn(6, 4), {"cu_seqlens_cpu": torch.tensor(OFFSETS)}
    calls = {
        "op": lambda **where: op(**inputs(), **where),
        "conv": lambda **where: conv(x, weight, **where),
        "conv with a context": lambda **where: conv(x, weight, cp_context=FLACPContext(**where)),
    }
    calls[call](cu_seqlens=torch.tensor(OFFSETS, dtype=torch.int32), **where)
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        calls[call](cu_seqlens=given, **where)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_offsets_that_the_convolution_reads(backend: str) -> None:
    """Kernels read them where they are, the torch backend their copy, which costs no waiting."""
    there, here = torch.tensor(OFFSETS, device="meta"), torch.tensor(OFFSETS)
    for device, expected in ((torch.device("cuda", 0), there if backend == "auto" else here), (here.device, here)):
        assert calls.offsets_of_conv(there, here, device, backend) is expected
        assert calls.offsets_of_conv(there, None, device, backend) is there
        assert calls.offsets_of_conv(None, here, device, backend) is here
        assert calls.offsets_of_conv(None, None, device, backend) is None


def test_module_of_fla(registered: None) -> None:
    module = ShortConvolution(6, 4, bias=True, activation="silu")
    x = torch.randn(2, 20, 6)
    y, _ = module(x)
    wanted = [causal_conv1d_oracle(row[None], module.weight.squeeze(1), module.bias, "silu") for row in x]
    assert relative_l2(y, torch.cat(wanted)) < 1e-6


def test_nothing_runs_here_unless_registered() -> None:
    """Also the control that shows what fla keeps."""
    for _ in range(2):
        with kept_by_fla():
            op(**inputs(dtype=torch.float32))
        with kept_by_fla():
            conv(torch.randn(1, 8, 4), torch.randn(4, 4))
        plugin.register_fla_backend()
        op(**inputs(dtype=torch.float32))
        conv(torch.randn(1, 8, 4), torch.randn(4, 4))
        plugin.unregister_fla_backend()


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"transpose_state_layout": True}, "the argument transpose_state_layout is not known here"),
        ({"v": torch.zeros(1, 96, 4, 8)}, "v: dtype torch.float32 differs from q's torch.float64"),
        (
            {"cp_context": FLACPContext(cu_seqlens=torch.tensor([0, 96])), "output_final_state": True},
            "states in or out",
        ),
        ({"cp_context": FLACPContext()}, "a context without cu_seqlens"),
        (
            {"cp_context": FLACPContext(cu_seqlens=torch.tensor([0, 96]), pre_num_ranks_dev=torch.zeros(1))},
            "a context whose ranks are read on the device",
        ),
    ],
)
def test_op_is_declined(registered: None, kwargs: dict[str, Any], reason: str, caplog: Any) -> None:
    declined._say_once.cache_clear()
    with caplog.at_level(logging.WARNING), pytest.raises((RuntimeError, AssertionError)):
        op(**inputs() | kwargs)
    assert f"fla runs its own chunk_gated_delta_rule: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"initial_state": torch.zeros(1, 6, 4)}, "states are not supported here"),
        ({"output_final_state": True}, "states are not supported here"),
        ({"residual": torch.zeros(1, 12, 6)}, "a residual is not supported here"),
        ({"weight": torch.zeros(3, 4)}, r"weight: expected shape [6, W]"),
        ({"activation": "gelu"}, "activation: got 'gelu'"),
    ],
)
def test_conv_is_declined(registered: None, kwargs: dict[str, Any], reason: str, caplog: Any) -> None:
    declined._say_once.cache_clear()
    with caplog.at_level(logging.WARNING), pytest.raises(Exception):  # noqa: B017 what fla makes of it
        conv(**{"x": torch.zeros(1, 12, 6), "weight": torch.zeros(6, 4)} | kwargs)
    assert f"fla runs its own causal_conv1d: {reason}" in caplog.text


def test_gpu_without_kernels_is_left_to_fla(registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    device, capability = torch.device("cuda", 0), (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert "no TileLang kernels for sm_80" in declined.why_not_device(device)
    capability = (9, 0)
    assert declined.why_not_device(device) is None
    four, five = (ConvSizes(dtype=torch.bfloat16, width=width) for width in (4, 5))
    assert declined.why_not_device(device, four) is None
    assert "weight: got 5 taps" in declined.why_not_device(device, five)
    plugin.register_fla_backend(backend="torch")
    assert declined.why_not_device(device, five) is None


def test_options_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="exchange: got 'ring'"):
        plugin.register_fla_backend(exchange="ring")
    with pytest.raises(ValueError, match="backend: got 'triton'"):
        plugin.register_fla_backend(backend="triton")
    monkeypatch.setenv("FLA_FLASHQLA_CP", "0")
    with pytest.raises(RuntimeError, match="chunk_gated_delta_rule did not reach this library"):
        plugin.register_fla_backend()
    with kept_by_fla():
        conv(torch.randn(1, 8, 4), torch.randn(4, 4))


def test_moved_convolution_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release whose convolution looks other names up raises when we register, not when a model trains."""
    from fla.modules.causal_conv1d import ops

    monkeypatch.setattr(plugin, "_hook_conv", lambda: None)
    found = ops.CausalConv1dFunction
    own = found.apply if isinstance(found, type) else found.apply.args[0]
    monkeypatch.setattr(ops, "CausalConv1dFunction", type("Own", (), {"apply": staticmethod(own)}))
    with pytest.raises(RuntimeError, match=r"fla: causal_conv1d.* did not reach this library"):
        plugin.register_fla_backend()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "offsets", [[0, 96], [0, 7, 30, 96], [0, 24, 48, 72, 96], [0, 95, 96], [0, 1, 24, 25, 96], [0, 12, 12, 96]], ids=str
)
def test_contexts_tell_the_whole_stream(layout: str, ranks: int, offsets: list[int]) -> None:
    told = []
    for rank in range(ranks):
        settings = {"world_size": ranks, "rank": rank, "layout": layout}
        told.append(tell(get_cp_cu_seqlens(torch.tensor(offsets), **settings)))
    assert join(told) == (sorted(set(offsets)), layout)


def test_contexts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"cp_context: ranks have \(parts, tokens\) \[\(1, 8\), \(1, 9\)\]"):
        join([[1, 0, 0, 8], [1, 1, 0, 9]])
    with pytest.raises(ValueError, match="goes on with a document that nobody began"):
        join([[1, 1, 0, 8]])
