"""States under sharding: who reads an initial state, who fills a final state, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.testing.cases import Case
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
