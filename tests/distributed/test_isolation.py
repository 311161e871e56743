"""Documents and padding never touch other documents, not in one bit, whatever stands in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashqla_cp import causal_conv1d
from flashqla_cp.testing.cases import STRATEGIES, Case
from flashqla_cp.testing.parity import TOKEN_RESULTS, Problem, Results, conv_problem, op_problem, run_sharded

pytestmark = pytest.mark.mpi(min_size=2)

# The middle document spans several ranks whatever their number; its neighbours share ranks with it.
OFFSETS, DOCUMENT = (0, 30, 50, 190, 215, 230), 2
CUTS = {
    "contiguous": {},
    "zigzag": {"layout": "zigzag"},
    "interleaved": {"layout": "custom", "custom": "interleaved"},
    "per_document": {"layout": "zigzag_per_document"},
}
PADDED = Case(
    id="",
    cu_seqlens=(0, 30, 50, 150),
    num_tokens=203,
    states=True,
    use_qk_l2norm_in_kernel=True,
    use_gate_in_kernel=True,
    use_beta_sigmoid_in_kernel=True,
)
CONTENTS = {"other": 0.25, "nan": float("nan"), "inf": float("inf")}


def _fill(problem: Problem, rows: slice, document: int | None, content: float) -> Problem:
    """Put a value into a document's, or the tail's, inputs, states and upstream gradients."""

    def filled(x: torch.Tensor, where: tuple[slice, ...] | int) -> torch.Tensor:
        x = x.clone()
        x[where] = content
        return x

    tokens = {name: filled(x, (slice(None), rows)) for name, x in problem.tokens.items()}
    shared, upstream = dict(problem.shared), dict(problem.upstream)
    upstream["o"] = filled(upstream["o"], (slice(None), rows))
    if document is not None and "initial_state" in shared:
        shared["initial_state"] = filled(shared["initial_state"], document)
        upstream["final_state"] = filled(upstream["final_state"], document)
    return replace(problem, tokens=tokens, shared=shared, upstream=upstream)


def _others(results: Results, rows: slice, document: int) -> Results:
    """What belongs to the other documents."""
    kept = {}
    for name, x in results.items():
        x = x.clone()
        if name in TOKEN_RESULTS:
            x[:, rows] = 0
        elif name in ("final_state", "dinitial_state"):
            x[document] = 0
        else:
            continue  # parameters' gradients sum over all documents
        kept[name] = x
    return kept


def _assert_same(first: Results, second: Results) -> None:
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert torch.isfinite(x).all(), name
        assert torch.equal(x, second[name]), f"{name} differs by {(x - second[name]).abs().max():.1e}"


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("cut", CUTS)
def test_other_documents_keep_every_bit(cut: str, content: str, make_context, add_up, device, op_under_test) -> None:
    case = Case(id="", cu_seqlens=OFFSETS, gates="weak", states=True, **CUTS[cut])
    problem, context = op_problem(case, device=device), make_context(case)
    rows = slice(OFFSETS[DOCUMENT], OFFSETS[DOCUMENT + 1])
    changed = _fill(problem, rows, DOCUMENT, CONTENTS[content])
    before, after = (run_sharded(op_under_test, x, context, add_up) for x in (problem, changed))
    assert not torch.equal(before["o"][:, rows], after["o"][:, rows])
    _assert_same(_others(before, rows, DOCUMENT), _others(after, rows, DOCUMENT))


@pytest.mark.parametrize("exchange", STRATEGIES)
def test_every_exchange_keeps_documents_apart(
    exchange: str, make_context, add_up, device, op_under_test, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    case = Case(id="", cu_seqlens=OFFSETS, gates="weak", states=True, exchange=exchange)
    problem, context = op_problem(case, device=device), make_context(case)
    rows = slice(OFFSETS[DOCUMENT], OFFSETS[DOCUMENT + 1])
    changed = _fill(problem, rows, DOCUMENT, float("nan"))
    before, after = (run_sharded(op_under_test, x, context, add_up) for x in (problem, changed))
    _assert_same(_others(before, rows, DOCUMENT), _others(after, rows, DOCUMENT))


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("cut", CUTS)
def test_the_convolution_keeps_documents_apart(cut: str, content: str, make_context, add_up, device) -> None:
    case = Case(id="", cu_seqlens=OFFSETS, **CUTS[cut])
    problem, context = conv_problem(case, device=device), make_context(case)
    rows = slice(OFFSETS[DOCUMENT], OFFSETS[DOCUMENT + 1])
    changed = _fill(problem, rows, None, CONTENTS[content])
    before, after = (run_sharded(causal_conv1d, x, context, add_up) for x in (problem, changed))
    _assert_same(_others(before, rows, DOCUMENT), _others(after, rows, DOCUMENT))


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("what", ["op", "conv"])
def test_the_padded_tail_is_exactly_zero(
    what: str, cut: str, content: str, make_context, add_up, device, op_under_test
) -> None:
    """Outputs and gradients of the tail are 0 and nothing else changes, parameters' gradients included."""
    case = replace(PADDED, **CUTS[cut])
    function, make = (op_under_test, op_problem) if what == "op" else (causal_conv1d, conv_problem)
    problem, context = make(case, device=device), make_context(case)
    changed = _fill(problem, slice(150, 203), None, CONTENTS[content])
    before, after = (run_sharded(function, x, context, add_up) for x in (problem, changed))
    _assert_same(before, after)
    for name in TOKEN_RESULTS & after.keys():
        assert torch.count_nonzero(after[name][:, 150:]) == 0, name


@pytest.mark.parametrize("exchange", STRATEGIES)
def test_every_exchange_leaves_the_tail_out(
    exchange: str, make_context, add_up, device, op_under_test, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    problem, context = op_problem(PADDED, device=device), make_context(PADDED, exchange=exchange)
    changed = _fill(problem, slice(150, 203), None, float("nan"))
    before, after = (run_sharded(op_under_test, x, context, add_up) for x in (problem, changed))
    _assert_same(before, after)
    assert all(torch.count_nonzero(after[name][:, 150:]) == 0 for name in TOKEN_RESULTS & after.keys())
