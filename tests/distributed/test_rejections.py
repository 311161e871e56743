"""Bad input: the same error with the same text on every rank, before the first collective of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import build_cp_context, causal_conv1d
from flashqla_cp.parallel.comm import record_collectives
from flashqla_cp.testing.cases import Case
from flashqla_cp.testing.parity import op_problem, shard_problem

pytestmark = pytest.mark.mpi(min_size=2)


def _refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, int]:
    """The error's type and text, and the number of collectives issued before it."""
    with record_collectives() as log:
        try:
            call(*args, **kwargs)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}", len(log)
    return "accepted", len(log)


CONTEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "start": ("cu_seqlens", {"cu_seqlens": torch.tensor([1, 50])}),
    "decrease": ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 50, 40])}),
    "past_the_end": ("cu_seqlens", {"num_tokens": 60}),
    "floating_offsets": ("cu_seqlens", {"cu_seqlens": torch.tensor([0.0, 50.0])}),
    "two_dimensional_offsets": ("cu_seqlens", {"cu_seqlens": torch.tensor([[0, 50]])}),
    "no_offsets": ("cu_seqlens", {"cu_seqlens": torch.tensor([], dtype=torch.int64)}),
    "start_of_the_copy": ("cu_seqlens", {"cu_seqlens_cpu": torch.tensor([1, 50])}),
    "layout": ("layout", {"layout": "ring"}),
    "exchange": ("exchange", {"exchange": "gossip"}),
    "conv": ("conv1d_kernel_size", {"conv1d_kernel_size": 0}),
    "no_ranges": ("token_ranges", {"layout": "custom"}),
    "needless_ranges": ("token_ranges", {"token_ranges": [[(0, 120)]]}),
    "num_tokens": ("num_tokens", {"num_tokens": 120.5}),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts(name: str, pg, all_ranks) -> None:
    argument, changes = CONTEXTS[name]
    arguments = {"cu_seqlens": torch.tensor([0, 50, 120]), **changes}
    for check_plan in (True, False):
        text, num_collectives = _refused(build_cp_context, group=pg, check_plan=check_plan, **arguments)
        assert argument in text and text != "accepted", text
        assert num_collectives <= check_plan  # the comparison of plans itself
        assert set(all_ranks(text)) == {text}


@pytest.mark.parametrize(
    ("ranges", "told"),
    [
        (lambda P: [[(0, 60)], [(61, 120)], *[[]] * (P - 2)], "60 to 61"),
        (lambda P: [[(0, 60)], [(59, 120)], *[[]] * (P - 2)], "59"),
        (lambda P: [[(0, 60)], [(60, 119)], *[[]] * (P - 2)], "119 to 120"),
        (lambda P: [[(0, 60)], [(60, 121)], *[[]] * (P - 2)], "120 to 121"),
        (lambda P: [[(0, 60)], [(120, 60)], *[[]] * (P - 2)], "120, 60"),
        (lambda P: [[(-1, 60)], [(60, 120)], *[[]] * (P - 2)], "-1"),
        (lambda P: [[(0, 120)]], "expected"),
        (lambda P: [[(0, 60, 1)], [(60, 120)], *[[]] * (P - 2)], "(0, 60, 1)"),
    ],
    ids=["gap", "overlap", "short", "long", "reversed", "negative", "one_list", "triple"],
)
def test_ranges(ranges, told: str, pg, all_ranks) -> None:
    offsets = torch.tensor([0, 50, 120])
    owned = ranges(dist.get_world_size())
    text, _ = _refused(build_cp_context, offsets, pg, layout="custom", token_ranges=owned)
    assert text.startswith("ValueError: token_ranges") and told in text, text
    assert set(all_ranks(text)) == {text}


def test_groups(pg, device, all_ranks) -> None:
    mesh = dist.init_device_mesh(device.type, (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    for group, told in ((mesh, "2 dimensions"), (3, "int"), ("cp", "str")):
        text, num_collectives = _refused(build_cp_context, torch.tensor([0, 50]), group)
        assert "group" in text and told in text, text
        assert num_collectives == 0
        assert set(all_ranks(text)) == {text}


Tensors = dict[str, torch.Tensor]


def _longer(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([x, x.narrow(dim, 0, 1)], dim)


# Argument that the text names, and what is passed instead: a function of the good tensors and the context.
OPS: dict[str, tuple[str, Callable[[Tensors, Any], dict[str, Any]]]] = {
    "offsets_beside_a_context": ("cu_seqlens", lambda x, context: {"cu_seqlens": context.cu_seqlens}),
    "heads": ("v", lambda x, _: {name: _longer(x[name], 2) for name in ("v", "g", "beta")}),
    "heads_of_g": ("g", lambda x, _: {"g": x["g"][..., :1]}),
    "heads_of_beta": ("beta", lambda x, _: {"beta": x["beta"][..., :1]}),
    "heads_of_k": ("k", lambda x, _: {"k": x["k"][:, :, :1]}),
    "width_of_k": ("k", lambda x, _: {"k": x["k"][..., :-1]}),
    "batch": ("q", lambda x, _: {name: torch.cat([t, t]) for name, t in x.items()}),
    "dimensions": ("q", lambda x, _: {"q": x["q"][0]}),
    "length_of_k": ("k", lambda x, _: {"k": _longer(x["k"], 1)}),
    "integers": ("v", lambda x, _: {"v": x["v"].long()}),
    "mixed_types": ("k", lambda x, _: {"k": x["k"].float()}),
    "rows_of_the_state": ("initial_state", lambda x, _: {"initial_state": x["v"].new_zeros(1, 4, 8, 12)}),
    "width_of_the_state": ("initial_state", lambda x, _: {"initial_state": x["v"].new_zeros(5, 4, 8, 11)}),
    "order_of_the_state": (
        "initial_state",
        lambda x, _: {"initial_state": x["v"].new_zeros(5, 4, 8, 12), "state_v_first": True},
    ),
    "backend": ("backend", lambda x, _: {"backend": "cuda"}),
    "not_a_tensor": ("beta", lambda x, _: {"beta": 0.5}),
    "not_a_context": ("cp_context", lambda x, context: {"cp_context": context.plan}),
    "gate_without_parameters": ("A_log", lambda x, _: {"use_gate_in_kernel": True}),
    "parameters_of_another_size": (
        "A_log",
        lambda x, _: {"use_gate_in_kernel": True, "A_log": x["g"].new_zeros(3), "dt_bias": x["g"].new_zeros(4)},
    ),
    "bias_of_another_size": (
        "dt_bias",
        lambda x, _: {"use_gate_in_kernel": True, "A_log": x["g"].new_zeros(4), "dt_bias": x["g"].new_zeros(3)},
    ),
}
STREAM = Case(id="", cu_seqlens=(0, 40, 80, 80, 120, 160), num_heads=2, num_v_heads=4)


@pytest.mark.parametrize("name", OPS)
def test_ops(name: str, make_context, device, op_under_test, all_ranks) -> None:
    argument, change = OPS[name]
    context = make_context(STREAM)
    tensors = shard_problem(op_problem(STREAM, device=device), context).tokens
    good = {**tensors, "cp_context": context}
    text, num_collectives = _refused(op_under_test, **{**good, **change(tensors, context)})
    assert argument in text.split(": ", 1)[1].split(":")[0], text
    assert num_collectives == 0
    assert set(all_ranks(text)) == {text}


def test_a_dtensor_is_refused(make_context, device, op_under_test, all_ranks) -> None:
    from torch.distributed.tensor import DTensor

    context = make_context(STREAM)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    tensors = shard_problem(op_problem(STREAM, device=device), context).tokens
    q = DTensor.from_local(tensors["q"], mesh, run_check=False)
    text, num_collectives = _refused(op_under_test, **{**tensors, "q": q}, cp_context=context)
    assert text.startswith("TypeError: q: ") and "DTensor" in text, text
    assert num_collectives == 0
    assert set(all_ranks(text)) == {text}


def test_a_fault_of_one_rank_is_raised_there(make_context, device, op_under_test) -> None:
    """The length of a rank's own tensors is known to that rank only; it speaks before it communicates."""
    context = make_context(STREAM)
    if dist.get_rank() == 1:
        tensors = shard_problem(op_problem(STREAM, device=device), context).tokens
        for change in (lambda x: x[:, :-1], lambda x: _longer(x, 1)):
            changed = {name: change(x) for name, x in tensors.items()}
            weight = torch.randn(4, 4, dtype=torch.float64, device=device)
            for argument, call, arguments in (
                ("q", op_under_test, changed),
                ("x", causal_conv1d, {"x": changed["g"], "weight": weight}),
            ):
                text, num_collectives = _refused(call, **arguments, cp_context=context)
                assert text.startswith(f"ValueError: {argument}: ") and str(context.local_tokens) in text, text
                assert num_collectives == 0


CONVOLUTIONS: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor, Any], dict[str, Any]]]] = {
    "offsets_beside_a_context": ("cu_seqlens", lambda x, weight, context: {"cu_seqlens": context.cu_seqlens}),
    "batch": ("x", lambda x, weight, _: {"x": torch.cat([x, x])}),
    "dimensions": ("x", lambda x, weight, _: {"x": x[0]}),
    "channels": ("weight", lambda x, weight, _: {"weight": weight[:-1]}),
    "bias": ("bias", lambda x, weight, _: {"bias": weight[:-1, 0]}),
    "activation": ("activation", lambda x, weight, _: {"activation": "relu"}),
    "other_taps_than_planned": ("weight", lambda x, weight, _: {"weight": weight[:, 1:]}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, make_context, device, all_ranks) -> None:
    argument, change = CONVOLUTIONS[name]
    context = make_context(STREAM)
    x = torch.randn(1, context.local_tokens, 6, dtype=torch.float64, device=device)
    weight = torch.randn(6, 4, dtype=torch.float64, device=device)
    arguments = {"x": x, "weight": weight, "cp_context": context, **change(x, weight, context)}
    text, num_collectives = _refused(causal_conv1d, **arguments)
    assert argument in text.split(": ", 1)[1].split(":")[0], text
    assert num_collectives == 0
    assert set(all_ranks(text)) == {text}


def test_shard_and_unshard(make_context, device, all_ranks) -> None:
    context = make_context(STREAM)
    for call, rows, told in (
        (context.shard, 161, "161"),
        (context.unshard, context.local_tokens + 1, "this rank stores"),
    ):
        text, num_collectives = _refused(call, torch.zeros(1, rows, 2, device=device))
        assert text.startswith("ValueError: x: ") and told in text, text
        assert num_collectives == 0
        assert set(all_ranks(text)) == {text}
