"""GatedDeltaNet: Qwen3-Next's state dict, values and gradients against a per-token composition, options, errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashqla_cp import GatedDeltaNet
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import causal_conv1d_oracle, gated_delta_rule_oracle

SIZES = {"hidden_size": 24, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 2.0}
OFFSETS = [0, 5, 5, 9, 40]

# Qwen3-Next's layer with hidden 24, 2 key heads of 8, 4 value heads of 16, 4 taps.
QWEN3_NEXT_STATE_DICT = {
    "dt_bias": (4,),
    "A_log": (4,),
    "conv1d.weight": (2 * 2 * 8 + 4 * 16, 1, 4),
    "in_proj_qkvz.weight": (2 * 2 * 8 + 2 * 4 * 16, 24),
    "in_proj_ba.weight": (2 * 4, 24),
    "norm.weight": (16,),
    "out_proj.weight": (24, 4 * 16),
}


def make_layer(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    layer = GatedDeltaNet(**{**SIZES, "backend": "torch", "dtype": torch.float64, **options})
    with torch.no_grad():
        # Half of the heads hardly decay, so that the whole past of a document matters.
        layer.A_log[::2] = -6.0
        layer.norm.weight.uniform_(0.5, 1.5)
    return layer


def slow_layer(layer: GatedDeltaNet, x: torch.Tensor, offsets: list[int] | None) -> torch.Tensor:
    """The layer's equations row by row from its state dict; shares only the parameters with the layer."""
    weights = dict(layer.named_parameters())
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    group = HV // H
    mixed_rows = weights["in_proj_qkvz.weight" if layer.use_gate else "in_proj_qkv.weight"]
    stride = 2 * K + (2 if layer.use_gate else 1) * group * V
    columns: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": [], "z": [], "b": [], "a": []}
    for h in range(H):
        block = mixed_rows[h * stride : (h + 1) * stride]
        for name, start, rows in (
            ("q", 0, K),
            ("k", K, K),
            ("v", 2 * K, group * V),
            ("z", 2 * K + group * V, group * V),
        ):
            columns[name].append(x @ block[start : start + rows].T)
        ba = weights["in_proj_ba.weight"][h * 2 * group : (h + 1) * 2 * group]
        columns["b"].append(x @ ba[:group].T)
        columns["a"].append(x @ ba[group:].T)
    q, k, v, z, b, a = (torch.cat(columns[name], dim=-1) for name in "qkvzba")
    mixed = torch.cat([q, k, v], dim=-1)
    if layer.use_short_conv:
        mixed = causal_conv1d_oracle(mixed, weights["conv1d.weight"][:, 0], weights.get("conv1d.bias"), "silu", offsets)
    else:
        mixed = mixed * torch.sigmoid(mixed)
    q, k, v = mixed.split([H * K, H * K, HV * V], dim=-1)
    g = -torch.exp(weights["A_log"]) * torch.log1p(torch.exp(a + weights["dt_bias"]))
    beta = torch.sigmoid(b) * (2.0 if layer.allow_neg_eigval else 1.0)
    shape = x.shape[:2]
    o, _ = gated_delta_rule_oracle(
        q.reshape(*shape, H, K),
        k.reshape(*shape, H, K),
        v.reshape(*shape, HV, V),
        g,
        beta,
        cu_seqlens=offsets,
        use_qk_l2norm=True,
    )
    o = o / torch.sqrt((o**2).mean(-1, keepdim=True) + layer.norm.eps) * weights["norm.weight"]
    if layer.use_gate:
        gate = z.reshape(*shape, HV, V)
        o = o * gate * torch.sigmoid(gate)
    return o.reshape(*shape, HV * V) @ weights["out_proj.weight"].T


def value_and_gradients(
    layer: GatedDeltaNet, y: torch.Tensor, x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    names = [name for name, _ in layer.named_parameters()]
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    return {"y": y, "x": gradients[0], **dict(zip(names, gradients[1:], strict=True))}


def test_state_dict_has_the_names_and_shapes_of_qwen3_next() -> None:
    shapes = {name: tuple(value.shape) for name, value in GatedDeltaNet(**SIZES).state_dict().items()}
    assert shapes == QWEN3_NEXT_STATE_DICT


def test_weights_and_values_of_transformers() -> None:
    qwen3_next = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="transformers with Qwen3-Next is not installed"
    )
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    )
    torch.manual_seed(0)
    theirs = qwen3_next.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    ours = GatedDeltaNet(**SIZES, norm_eps=config.rms_norm_eps, backend="torch")
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 50, 24)
    assert relative_l2(ours(x), theirs(x)) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_gate": False},
        {"use_short_conv": False},
        {"conv_bias": True, "conv_size": 3},
        {"allow_neg_eigval": True},
        {"expand_v": 0.5, "num_v_heads": None},
        {"num_heads": 1, "num_v_heads": 3, "expand_v": 1.5},
    ],
    ids=lambda options: "-".join(options) or "default",
)
@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["rows", "packed"])
def test_values_and_gradients(options: dict[str, Any], offsets: list[int] | None) -> None:
    layer = make_layer(**options)
    x = torch.randn(2 if offsets is None else 1, 40, 24, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    got = value_and_gradients(layer, layer(x, cu_seqlens=cu_seqlens), x, dy)
    expected = value_and_gradients(layer, slow_layer(layer, x, offsets), x, dy)
    errors = {name: relative_l2(got[name], expected[name]) for name in expected}
    assert max(errors.values()) < 1e-10, errors


def test_rows_past_the_last_document_are_zero_whatever_they_hold() -> None:
    layer, offsets = make_layer(), torch.tensor([0, 7, 21])
    torch.manual_seed(1)
    x, dy = torch.randn(2, 1, 30, 24, dtype=torch.float64).unbind()
    clean_x = x[:, :21].clone().requires_grad_()
    clean = value_and_gradients(layer, layer(clean_x, cu_seqlens=offsets), clean_x, dy[:, :21])
    x[:, 21:], dy[:, 21:25], dy[:, 25:] = torch.nan, torch.inf, torch.nan
    x.requires_grad_()
    got = value_and_gradients(layer, layer(x, cu_seqlens=offsets), x, dy)
    for name in ("y", "x"):
        assert torch.equal(got[name][:, 21:], torch.zeros(1, 9, 24, dtype=torch.float64)), name
        got[name] = got[name][:, :21]
    errors = {name: relative_l2(got[name], clean[name]) for name in clean}
    assert max(errors.values()) < 1e-12, errors


def test_row_without_documents() -> None:
    layer = make_layer()
    x = torch.full((1, 6, 24), torch.nan, dtype=torch.float64, requires_grad=True)
    y = layer(x, cu_seqlens=torch.tensor([0]))
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(x.grad, torch.zeros_like(y))
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())


def test_gate_stays_in_fp32_under_autocast() -> None:
    layer = make_layer(dtype=torch.float32)
    x = torch.randn(1, 40, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, cu_seqlens=torch.tensor(OFFSETS))
    assert y.dtype == torch.bfloat16
    assert relative_l2(y, layer(x, cu_seqlens=torch.tensor(OFFSETS))) < 2e-2
    y.float().square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


def test_initial_gate() -> None:
    torch.manual_seed(0)
    layer = GatedDeltaNet(hidden_size=8, head_dim=4, num_heads=512)
    rate, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 0 < rate.min() < 0.5 and 15 < rate.max() <= 16 and abs(rate.mean() - 8) < 1
    assert 1e-3 * 0.99 < dt.min() < 2e-3 and 5e-2 < dt.max() < 0.1 * 1.01
    assert abs(dt.log().mean().exp() - 1e-2) < 2e-3  # log-uniform: the geometric mean is the middle


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads": 0}, "num_heads: got 0"),
        ({"hidden_size": -1}, "hidden_size: got -1"),
        ({"num_heads": 3}, "num_v_heads: got 4, expected a multiple of num_heads=3"),
        ({"num_heads": 8}, "num_v_heads: got 4, expected a multiple of num_heads=8"),
        ({"expand_v": 0.3}, "expand_v: got 0.3"),
        ({"backend": "cuda"}, "backend: got 'cuda', expected one of auto, tilelang, torch"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GatedDeltaNet(**{**SIZES, **options})


@pytest.mark.parametrize(
    ("shape", "offsets", "text"),
    [
        ((1, 8, 23), None, r"hidden_states: got shape \(1, 8, 23\), expected \[B, T, 24\]"),
        ((8, 24), None, "hidden_states: got shape"),
        ((2, 8, 24), [0, 8], "cu_seqlens"),
        ((1, 8, 24), [0, 9], "cu_seqlens"),
        ((1, 8, 24), [[0, 8]], r"cu_seqlens: expected offsets of shape \[N\+1\], got \[1, 2\]"),
    ],
)
def test_wrong_input(shape: tuple[int, ...], offsets: Any, text: str) -> None:
    layer = make_layer()
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    with pytest.raises(ValueError, match=text):
        layer(torch.zeros(shape, dtype=torch.float64), cu_seqlens=cu_seqlens)


def test_repr_names_the_heads() -> None:
    assert "num_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=16" in repr(GatedDeltaNet(**SIZES))


def test_key_heads_own_consecutive_blocks_of_the_projection() -> None:
    layer = make_layer()
    # One key head with its two value heads is a layer of its own with half of the rows of every projection.
    half = make_layer(num_heads=1, num_v_heads=2)
    full, part = layer.state_dict(), half.state_dict()
    qkv = [slice(0, 8), slice(16, 24), slice(32, 64)]
    part["in_proj_qkvz.weight"] = full["in_proj_qkvz.weight"][:80]
    part["in_proj_ba.weight"] = full["in_proj_ba.weight"][:4]
    part["conv1d.weight"] = torch.cat([full["conv1d.weight"][rows] for rows in qkv])
    part.update({name: full[name][:2] for name in ("A_log", "dt_bias")})
    part.update({"norm.weight": full["norm.weight"], "out_proj.weight": full["out_proj.weight"][:, :32]})
    half.load_state_dict(part)
    x = torch.randn(1, 20, 24, dtype=torch.float64)
    with torch.no_grad():
        layer.out_proj.weight[:, 32:] = 0
        assert relative_l2(layer(x), half(x)) < 1e-12


def test_documents_do_not_see_each_other() -> None:
    layer, offsets = make_layer(), torch.tensor(OFFSETS)
    torch.manual_seed(2)
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    for start, end in itertools.pairwise(OFFSETS):
        changed = x.clone()
        changed[:, start:end] = torch.nan
        same = torch.ones(40, dtype=torch.bool)
        same[start:end] = False
        with torch.no_grad():
            assert torch.equal(layer(x, cu_seqlens=offsets)[:, same], layer(changed, cu_seqlens=offsets)[:, same])
