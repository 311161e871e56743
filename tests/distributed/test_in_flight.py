"""Several micro-batches in flight, activation checkpointing, views as inputs: results do not change in one bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashqla_cp.testing.cases import STRATEGIES, Case
from flashqla_cp.testing.parity import Results, differentiate, op_problem, shard_problem

pytestmark = pytest.mark.mpi(min_size=2)

FIRST = Case(id="first", cu_seqlens=(0, 30, 230), gates="weak", states=True)
SECOND = Case(id="second", cu_seqlens=(0, 121, 121, 170), gates="weak", states=True, layout="zigzag")


def _assert_equal(results: Results, expected: Results) -> None:
    assert results.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(results[name], x), name


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["backward_in_order", "backward_in_reverse"])
@pytest.mark.parametrize("exchange", STRATEGIES)
def test_two_micro_batches_in_flight(exchange: str, order, make_context, device, op_under_test, monkeypatch) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    cases = [replace(case, exchange=exchange) for case in (FIRST, SECOND)]
    contexts = [make_context(case) for case in cases]
    problems = [shard_problem(op_problem(c, device=device), x) for c, x in zip(cases, contexts, strict=True)]
    expected = [differentiate(op_under_test, p, cp_context=x) for p, x in zip(problems, contexts, strict=True)]
    leaves = [{n: x.clone().requires_grad_() for n, x in {**p.tokens, **p.shared}.items()} for p in problems]
    outputs = [
        op_under_test(**tensors, **problem.options, cp_context=context)
        for tensors, problem, context in zip(leaves, problems, contexts, strict=True)
    ]
    for i in order:
        torch.autograd.backward(outputs[i], [problems[i].upstream["o"], problems[i].upstream["final_state"]])
    for i in order:
        results = {"o": outputs[i][0].detach(), "final_state": outputs[i][1].detach()}
        results.update({f"d{name}": x.grad for name, x in leaves[i].items()})
        _assert_equal(results, expected[i])


def test_one_context_serves_several_calls(make_context, device, op_under_test) -> None:
    """Two layers share the context of a micro-batch; the second reads what the first wrote."""
    context = make_context(FIRST)
    problem = shard_problem(op_problem(replace(FIRST, head_v_dim=8, states=False), device=device), context)

    def twice(q, k, v, g, beta, cp_context):  # type: ignore[no-untyped-def]
        o, _ = op_under_test(q, k, v, g, beta, cp_context=cp_context)
        return op_under_test(q, k, o, g, beta, cp_context=cp_context)

    first = differentiate(twice, problem, cp_context=context)
    _assert_equal(differentiate(twice, problem, cp_context=context), first)
    _assert_equal(differentiate(twice, problem, cp_context=make_context(FIRST)), first)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("exchange", STRATEGIES)
def test_activation_checkpointing(exchange, use_reentrant, make_context, device, op_under_test, monkeypatch) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    case = replace(FIRST, exchange=exchange)
    context = make_context(case)
    problem = shard_problem(op_problem(case, device=device), context)

    def recomputed(cp_context, output_final_state, **tensors):  # type: ignore[no-untyped-def]
        def call(*values: torch.Tensor):  # type: ignore[no-untyped-def]
            named = dict(zip(tensors, values, strict=True))
            return op_under_test(**named, output_final_state=output_final_state, cp_context=cp_context)

        return checkpoint(call, *tensors.values(), use_reentrant=use_reentrant)

    expected = differentiate(op_under_test, problem, cp_context=context)
    _assert_equal(differentiate(recomputed, problem, cp_context=context), expected)


def test_views_as_inputs_and_upstream_gradients(make_context, device, op_under_test) -> None:
    """q, k, v cut from one projection; heads before tokens; a gradient that is one number seen everywhere."""
    case = replace(FIRST, head_v_dim=8, states=False)
    context = make_context(case)
    problem = shard_problem(op_problem(case, device=device), context)
    ones = replace(problem, upstream={"o": torch.ones_like(problem.upstream["o"])})
    expected = differentiate(op_under_test, ones, cp_context=context)

    fused = torch.cat([problem.tokens[name] for name in ("q", "k", "v")], dim=2).requires_grad_()
    gates = torch.stack([problem.tokens["g"], problem.tokens["beta"]], dim=1).requires_grad_()
    q, k, v = fused.split([1, 1, 2], dim=2)
    g, beta = gates.unbind(1)
    o, _ = op_under_test(q, k, v, g, beta, cp_context=context)
    o.sum().backward()
    results = dict(zip(("dq", "dk", "dv"), fused.grad.split([1, 1, 2], dim=2), strict=True))
    results.update(zip(("dg", "dbeta"), gates.grad.unbind(1), strict=True), o=o.detach())
    _assert_equal(results, expected)

    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in problem.tokens.items()}
    upstream = problem.upstream["o"].transpose(1, 3).contiguous().transpose(1, 3)
    _assert_equal(
        differentiate(op_under_test, replace(problem, tokens=turned, upstream={"o": upstream}), cp_context=context),
        differentiate(op_under_test, problem, cp_context=context),
    )


def test_repeats_bitwise(make_context, device, op_under_test) -> None:
    context = make_context(SECOND)
    problem = shard_problem(op_problem(SECOND, device=device), context)
    first = differentiate(op_under_test, problem, cp_context=context)
    for _ in range(3):
        _assert_equal(differentiate(op_under_test, problem, cp_context=context), first)


def test_only_some_inputs_require_gradients(make_context, device, op_under_test) -> None:
    """What a frozen projection leaves out differs per tensor, never per rank; the rest is unchanged."""
    context = make_context(FIRST)
    problem = shard_problem(op_problem(FIRST, device=device), context)
    expected = differentiate(op_under_test, problem, cp_context=context)
    for wanted in ("q", "k", "v", "g", "beta", "initial_state"):
        tensors = {**problem.tokens, **problem.shared}
        leaf = tensors[wanted].clone().requires_grad_()
        o, final_state = op_under_test(**{**tensors, wanted: leaf}, output_final_state=True, cp_context=context)
        outputs = [(x, problem.upstream[n]) for n, x in (("o", o), ("final_state", final_state)) if x.requires_grad]
        torch.autograd.backward([x for x, _ in outputs], [dx for _, dx in outputs])
        assert torch.equal(leaf.grad, expected[f"d{wanted}"]), wanted


def test_no_grad_gives_the_same_outputs(make_context, device, op_under_test) -> None:
    context = make_context(FIRST)
    problem = shard_problem(op_problem(FIRST, device=device), context)
    expected = differentiate(op_under_test, problem, cp_context=context)
    with torch.no_grad():
        o, final_state = op_under_test(**problem.tokens, **problem.shared, **problem.options, cp_context=context)
    assert torch.equal(o, expected["o"]) and torch.equal(final_state, expected["final_state"])
