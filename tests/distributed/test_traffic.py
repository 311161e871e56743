"""Bytes and order of the collectives of a step, counted where they are issued."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import causal_conv1d
from flashqla_cp.parallel.comm import record_collectives
from flashqla_cp.testing.cases import STRATEGIES, Case
from flashqla_cp.testing.parity import conv_problem, differentiate, op_problem, shard_problem

pytestmark = pytest.mark.mpi(min_size=2)

Traffic = dict[str, list[tuple[str, int]]]
LONG = Case(id="long", cu_seqlens=(0, 260), num_v_heads=3)
CASES = [
    LONG,
    Case(id="packed", num_v_heads=3),
    Case(id="zigzag", layout="zigzag", num_v_heads=3),
    Case(id="interleaved", layout="custom", custom="interleaved", num_v_heads=3),
    Case(id="rank_without_tokens", layout="custom", custom="middle_rank_without", num_v_heads=3),
    Case(id="padded", cu_seqlens=(0, 20, 41), num_tokens=240, num_v_heads=3),
]


def _step(case: Case, context, device, op) -> Traffic:  # type: ignore[no-untyped-def]
    """(name, bytes sent) of every collective of one fp32 step, in order of issue."""
    problem = shard_problem(op_problem(case, torch.float32, device), context)
    leaves = {name: x.clone().requires_grad_() for name, x in {**problem.tokens, **problem.shared}.items()}
    with record_collectives() as forward:
        o, _ = op(**leaves, **problem.options, cp_context=context)
    with record_collectives() as backward:
        o.backward(problem.upstream["o"])
    logs = {"forward": forward, "backward": backward}
    return {way: [(record.name, record.bytes_sent) for record in log] for way, log in logs.items()}


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_are_what_the_context_says(
    case, exchange, make_context, device, op_under_test, all_ranks, monkeypatch
) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    context = make_context(case, exchange=exchange)
    traffic = _step(case, context, device, op_under_test)
    assert traffic == context.comm_bytes(case.num_v_heads, case.head_k_dim, case.head_v_dim)
    names = [{way: [name for name, _ in calls] for way, calls in t.items()} for t in all_ranks(traffic)]
    assert all(other == names[0] for other in names), "the ranks issue different collectives"


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical"])
def test_counts_do_not_depend_on_the_length(exchange, make_context, device, op_under_test, monkeypatch) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    short, long = (replace(LONG, cu_seqlens=(0, length)) for length in (64, 640))
    traffic = [_step(case, make_context(case, exchange=exchange), device, op_under_test) for case in (short, long)]
    assert traffic[0] == traffic[1]
    assert traffic[0]["forward"] and traffic[0]["backward"]


def test_headwise_sends_the_activations(make_context, device, op_under_test) -> None:
    case = replace(LONG, num_heads=3)
    context = make_context(case, exchange="headwise")
    traffic = _step(case, context, device, op_under_test)
    assert traffic == context.comm_bytes(case.num_v_heads, case.head_k_dim, case.head_v_dim, dtype=torch.float32)
    longer = replace(case, cu_seqlens=(0, 520))
    sent = [
        sum(size for calls in t.values() for _, size in calls)
        for t in (traffic, _step(longer, make_context(longer, exchange="headwise"), device, op_under_test))
    ]
    assert 1.9 < sent[1] / sent[0] < 2.1


def test_two_ranks_send_no_final_correction(make_context, device, op_under_test) -> None:
    """A document over two ranks has no fragment strictly inside: one boundary state each way, K * V fp32 a head."""
    group = [dist.new_group([rank, rank + 1]) for rank in range(0, dist.get_world_size() - 1, 2)][dist.get_rank() // 2]
    context = make_context(LONG, group, exchange="allgather")
    size = 4 * LONG.num_v_heads * LONG.head_k_dim * LONG.head_v_dim
    expected = [("all_gather", size)]
    assert _step(LONG, context, device, op_under_test) == {"forward": expected, "backward": expected}


@pytest.mark.mpi(min_size=4)
def test_a_chain_of_ranks_sends_final_corrections_forward_only(make_context, device, op_under_test) -> None:
    context = make_context(LONG, exchange="allgather")
    peers, state = context.world_size - 1, LONG.head_k_dim * LONG.head_v_dim
    sizes = [4 * LONG.num_v_heads * n * peers for n in (state + LONG.head_k_dim**2, state)]
    traffic = _step(LONG, context, device, op_under_test)
    assert traffic == {"forward": [("all_gather", sizes[0])], "backward": [("all_gather", sizes[1])]}


@pytest.mark.parametrize("exchange", ["auto", *STRATEGIES[:3]])
def test_nothing_is_sent_where_no_document_crosses_a_rank(
    exchange: str, make_context, device, op_under_test, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    size = dist.get_world_size()
    case = Case(id="", cu_seqlens=tuple(range(0, 30 * 2 * size + 1, 30)), num_v_heads=3)
    context = make_context(case, exchange=exchange)
    assert _step(case, context, device, op_under_test) == {"forward": [], "backward": []}
    with record_collectives() as log:
        differentiate(causal_conv1d, shard_problem(conv_problem(case, device=device), context), cp_context=context)
    assert log == []


@pytest.mark.parametrize("exchange", STRATEGIES[:3])
def test_a_document_cut_within_a_rank_sends_nothing(
    exchange: str, make_context, add_up, device, op_under_test, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 holds both halves of a document against stream order; its maps are folded at home."""
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    size = dist.get_world_size()
    case = Case(id="", cu_seqlens=tuple(range(0, 60 * size + 1, 60)), num_v_heads=3)
    ranges = [[(60 * r + 30, 60 * r + 60), (60 * r, 60 * r + 30)] for r in range(size)]
    context = make_context(case, layout="custom", token_ranges=ranges, exchange=exchange)
    assert _step(case, context, device, op_under_test) == {"forward": [], "backward": []}


def test_the_halo_is_one_exchange_each_way(make_context, device, all_ranks) -> None:
    """Three rows behind each cut, whatever the length; each row goes to the ranks that read it and to no other."""
    context = make_context(LONG)
    problem = shard_problem(conv_problem(LONG, torch.float32, device), context)
    with record_collectives() as log:
        differentiate(causal_conv1d, problem, cp_context=context)
    rows, last = 3 * 5 * 4, context.world_size - 1
    sent = [(record.name, record.bytes_sent, record.bytes_received) for record in log]
    ahead, behind = rows * (context.rank < last), rows * (context.rank > 0)
    assert sent == [("all_to_all", ahead, behind), ("all_to_all", behind, ahead)]


def test_a_context_costs_one_small_collective(make_context, all_ranks) -> None:
    with record_collectives() as checked:
        make_context(Case(id=""), exchange="allgather")
    with record_collectives() as unchecked:
        make_context(Case(id=""), exchange="allgather", check_plan=False)
    assert len(checked) == 1 and checked[0].bytes_sent <= 1024 * dist.get_world_size()
    assert unchecked == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_headwise_sends_the_activations_in_their_own_type(dtype, make_context, device, op_under_test) -> None:
    context = make_context(LONG, exchange="headwise")
    problem = shard_problem(op_problem(LONG, dtype, device), context)
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tokens.items()}
    with record_collectives() as forward:
        o, _ = op_under_test(**leaves, cp_context=context)
    with record_collectives() as backward:
        o.backward(problem.upstream["o"])
    said = context.comm_bytes(LONG.num_v_heads, LONG.head_k_dim, LONG.head_v_dim, num_heads=LONG.num_heads, dtype=dtype)
    logs = {"forward": forward, "backward": backward}
    assert {way: [(record.name, record.bytes_sent) for record in log] for way, log in logs.items()} == said


def test_headwise_sends_nothing_where_no_document_crosses(make_context, device, op_under_test, pg) -> None:
    length = 50 * pg.size()
    case = Case(id="", cu_seqlens=tuple(range(0, length + 1, 50)), exchange="headwise")
    assert _step(case, make_context(case), device, op_under_test) == {"forward": [], "backward": []}
