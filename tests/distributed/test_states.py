"""States under sharding: who reads an initial state, who fills a final state, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.testing.cases import STRATEGIES, Case
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.parity import (
    differentiate,
    op_oracle,
    op_problem,
    run_sharded,
    run_whole,
    score,
    shard_problem,
)

pytestmark = pytest.mark.mpi(min_size=2)

CASES = [
    Case(id="contiguous", states=True, gates="weak"),
    Case(id="zigzag", layout="zigzag", states=True, gates="weak"),
    Case(id="backwards", layout="custom", custom="backwards", states=True, gates="weak"),
    Case(id="one_document", cu_seqlens=(0, 230), states=True, gates="weak"),
]


def _owners(ranges: Sequence[Sequence[tuple[int, int]]], tokens: Sequence[int]) -> list[int]:
    """The rank that owns each token."""
    return [
        next(rank for rank, owned in enumerate(ranges) if any(start <= token < end for start, end in owned))
        for token in tokens
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_live_with_their_owners(case: Case, make_context, device, op_under_test, all_ranks) -> None:
    """A final state is non-zero only at the owner of the last token, a gradient at the owner of the first."""
    problem, context = op_problem(case, device=device), make_context(case)
    mine = differentiate(op_under_test, shard_problem(problem, context), cp_context=context)
    filled = {name: mine[name].flatten(1).ne(0).any(1).tolist() for name in ("final_state", "dinitial_state")}
    starts, ends = case.cu_seqlens[:-1], case.cu_seqlens[1:]
    expected = {"final_state": [end - 1 for end in ends], "dinitial_state": list(starts)}
    for name, tokens in expected.items():
        owners = _owners(context.plan.ranges, tokens)
        assert filled[name] == [owner == dist.get_rank() for owner in owners], name
        everywhere = all_ranks(filled[name])
        assert [sum(row) for row in zip(*everywhere, strict=True)] == [1] * len(starts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_foreign_rows_are_not_read(case: Case, make_context, add_up, device, op_under_test) -> None:
    """NaN in the rows of documents that start elsewhere, and in the gradients of states that end elsewhere."""
    problem, context = op_problem(case, device=device), make_context(case)
    before = run_sharded(op_under_test, problem, context, add_up)
    starts, ends = case.cu_seqlens[:-1], [end - 1 for end in case.cu_seqlens[1:]]
    state, upstream = (x.clone() for x in (problem.shared["initial_state"], problem.upstream["final_state"]))
    for x, tokens in ((state, starts), (upstream, ends)):
        for document, owner in enumerate(_owners(context.plan.ranges, tokens)):
            if owner != dist.get_rank():
                x[document] = float("nan")
    own = replace(problem, shared={"initial_state": state}, upstream={**problem.upstream, "final_state": upstream})
    after = run_sharded(op_under_test, own, context, add_up)
    for name, x in before.items():
        assert torch.equal(x, after[name]), name


def test_an_empty_document_hands_its_state_on(make_context, add_up, device, op_under_test) -> None:
    case = Case(id="", cu_seqlens=(0, 0, 75, 75, 150, 150), states=True)
    problem, context = op_problem(case, device=device), make_context(case)
    results = run_sharded(op_under_test, problem, context, add_up)
    for document in (0, 2, 4):
        assert torch.equal(results["final_state"][document], problem.shared["initial_state"][document])
        assert torch.equal(results["dinitial_state"][document], problem.upstream["final_state"][document])


def test_final_state_alone_carries_gradients(make_context, add_up, device, op_under_test) -> None:
    """A loss on the final state only reaches the inputs on all ranks of its document, and q on none."""
    case = Case(id="", cu_seqlens=(0, 230), states=True, gates="weak")
    problem, context = op_problem(case, device=device), make_context(case)
    silent = replace(problem, upstream={**problem.upstream, "o": torch.zeros_like(problem.upstream["o"])})
    results = run_sharded(op_under_test, silent, context, add_up)
    assert context.shard(results["dv"]).abs().max() > 0
    assert torch.count_nonzero(results["dq"]) == 0
    scores = score(results, run_whole(op_oracle, silent), [])
    assert all(s.whole <= 1e-10 for s in scores), scores


@pytest.mark.parametrize("exchange", STRATEGIES)
def test_ranks_may_use_different_outputs(
    exchange: str, make_context, add_up, device, op_under_test, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank's loss is on its final states, the others' on their rows: no rank leaves out a collective."""
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    case = Case(id="", cu_seqlens=(0, 100, 230), states=True, gates="weak", exchange=exchange)
    problem, context = op_problem(case, device=device), make_context(case)
    on_states = context.rank == context.world_size - 1
    local = shard_problem(problem, context)
    leaves = {name: x.clone().requires_grad_() for name, x in {**local.tokens, **local.shared}.items()}
    o, final_state = op_under_test(**leaves, **local.options, cp_context=context)
    output, name = (final_state, "final_state") if on_states else (o, "o")
    (output * local.upstream[name]).sum().backward()

    last = context.plan.ranges[-1][0][0]
    upstream = {name: x.clone() for name, x in problem.upstream.items()}
    upstream["o"][:, last:] = 0
    upstream["final_state"][0] = 0  # its document ends before the last rank
    expected = run_whole(op_oracle, replace(problem, upstream=upstream))
    for name in ("q", "k", "v", "g", "beta"):
        assert relative_l2(context.unshard(leaves[name].grad), expected[f"d{name}"]) <= 1e-10, name
    assert relative_l2(add_up(leaves["initial_state"].grad), expected["dinitial_state"]) <= 1e-10


@pytest.mark.parametrize(
    ("states", "wanted"), [("in", "initial_state"), ("in", "v"), ("in", "initial_state and v"), ("out", "v")]
)
@pytest.mark.parametrize("exchange", STRATEGIES)
def test_states_on_one_side_only(
    exchange: str, states: str, wanted: str, make_context, add_up, device, op_under_test, monkeypatch
) -> None:
    """One value head, so that with headwise exchange some ranks have none; gradients of some arguments only."""
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    case = Case(id="", cu_seqlens=(0, 100, 230), num_v_heads=1, states=True, gates="weak", exchange=exchange)
    problem, context = op_problem(case, device=device), make_context(case)
    if states == "in":
        problem = replace(problem, options={}, upstream={"o": problem.upstream["o"]})
    else:
        problem = replace(problem, shared={})
    expected = run_whole(op_oracle, problem)
    local = shard_problem(problem, context)
    leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in {**local.tokens, **local.shared}.items()}
    outputs = op_under_test(**leaves, **local.options, cp_context=context)[: len(local.upstream)]
    torch.autograd.backward(outputs, [local.upstream[name] for name in ("o", "final_state")[: len(outputs)]])
    assert relative_l2(context.unshard(outputs[0].detach()), expected["o"]) <= 1e-10
    for name in wanted.split(" and "):
        whole = add_up(leaves[name].grad) if name in problem.shared else context.unshard(leaves[name].grad)
        assert relative_l2(whole, expected[f"d{name}"]) <= 1e-10, name


@pytest.mark.parametrize("exchange", STRATEGIES)
def test_ranks_may_want_different_things(exchange: str, make_context, device, op_under_test, all_ranks) -> None:
    """A gradient of the initial state, or the final state, on one rank only changes no collective."""
    case = Case(id="", cu_seqlens=(0, 100, 230), states=True, gates="weak", exchange=exchange)
    context = make_context(case)
    local = shard_problem(op_problem(case, device=device), context)
    leaves = {name: x.clone().requires_grad_() for name, x in {**local.tokens, **local.shared}.items()}
    leaves["initial_state"].requires_grad_(context.rank == 0)
    o, final_state = op_under_test(**leaves, output_final_state=context.rank == 1, cp_context=context)
    (o * local.upstream["o"]).sum().backward()
    assert all_ranks(final_state is not None) == [rank == 1 for rank in range(context.world_size)]
    assert all_ranks(leaves["initial_state"].grad is not None)[0]
