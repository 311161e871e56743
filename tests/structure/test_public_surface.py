"""The names and signatures that users rely on."""

from __future__ import annotations

import inspect

import flashqla_cp

OP = (
    "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu "
    "state_v_first use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval cp_context "
    "backend deterministic recompute forget_below"
).split()
CONTEXT = ["cu_seqlens", "group", "conv1d_kernel_size", "cu_seqlens_cpu"]
CONTEXT_KEYWORDS = {"layout": "contiguous", "token_ranges": None, "num_tokens": None, "exchange": "auto"}
CONV = {"bias": None, "activation": "silu", "cu_seqlens": None, "cp_context": None, "backend": "auto"}
EMPTY = inspect.Parameter.empty


def parameters(function) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_public_names():
    names = ["CPContext", "GatedDeltaNet", "build_cp_context", "causal_conv1d", "chunk_gated_delta_rule"]
    assert sorted(flashqla_cp.__all__) == names
    assert set(names) <= set(dir(flashqla_cp))


def test_op_signature():
    found = parameters(flashqla_cp.chunk_gated_delta_rule)
    assert list(found) == OP
    assert all(found[name].default is EMPTY for name in OP[:5])
    flags = {name: found[name].default for name in OP[5:]}
    assert flags.pop("backend") == "auto"
    assert flags.pop("deterministic") is True
    assert flags.pop("recompute") == "none"
    assert all(value in (None, False) for value in flags.values())


def test_context_signature():
    found = parameters(flashqla_cp.build_cp_context)
    assert list(found)[:4] == CONTEXT
    keywords = {name: p.default for name, p in found.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords.items() >= CONTEXT_KEYWORDS.items()
    assert len(keywords) == len(found) - 4


def test_conv_signature():
    found = parameters(flashqla_cp.causal_conv1d)
    assert list(found) == ["x", "weight", *CONV]
    assert {name: found[name].default for name in CONV} == CONV
