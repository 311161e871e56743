"""The public op in one process on the torch backend: values and gradients against the oracle, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashqla_cp import chunk_gated_delta_rule
from flashqla_cp.testing.cases import OPTIONS, STREAMS, Case
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.parity import differentiate, op_oracle, op_problem, run_whole, score

# Streams are about documents here; how they are cut comes with ranks.
DOCUMENTS = [case for case in STREAMS if case.layout == "contiguous"]


@pytest.mark.parametrize("case", [*DOCUMENTS, *OPTIONS], ids=str)
def test_against_the_oracle(case: Case) -> None:
    problem = op_problem(case)
    # Chunk ends are the cuts of a single device: what carries a state across them shows in the tokens behind.
    chunk_ends = [start + 64 * i for start in case.cu_seqlens for i in range(5)]
    scores = score(run_whole(chunk_gated_delta_rule, problem), run_whole(op_oracle, problem), chunk_ends)
    assert all(s.worst <= 1e-10 for s in scores), scores


BARS = {
    torch.float32: {"o": 1e-5, "final_state": 1e-5, "dg": 1e-5, "": 1e-5},
    # The narrow types are computed in fp32, so that what is left is the rounding of what comes out.
    torch.bfloat16: {"o": 5e-3, "final_state": 5e-3, "dg": 2e-2, "": 1e-2},
    torch.float16: {"o": 1e-3, "final_state": 1e-3, "dg": 1e-3, "": 1e-3},
}


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("case", [case for case in OPTIONS if case.cu_seqlens[-1] > 0], ids=str)
def test_narrow_types_against_the_oracle(case: Case, dtype: torch.dtype) -> None:
    problem = op_problem(case, dtype)
    scores = score(run_whole(chunk_gated_delta_rule, problem), run_whole(op_oracle, problem), [])
    assert all(s.whole <= BARS[dtype].get(s.name, BARS[dtype][""]) for s in scores), scores


def _results(inputs: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return chunk_gated_delta_rule(**inputs, **options)


def test_rows_of_a_batch_are_documents() -> None:
    rows = [make_inputs(70, 1, 2, 8, 6, seed=seed) for seed in range(3)]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    state = torch.randn(3, 2, 8, 6, dtype=torch.float64)
    o, final_state = _results(batch, initial_state=state, output_final_state=True)
    for i, row in enumerate(rows):
        o_i, final_i = op_oracle(**row, initial_state=state[i : i + 1], output_final_state=True)
        assert relative_l2(o[i : i + 1], o_i) <= 1e-10
        assert relative_l2(final_state[i : i + 1], final_i) <= 1e-10


def test_default_scale_and_a_given_one() -> None:
    x = make_inputs(20, 1, 1, 16, 6)
    assert torch.equal(_results(x)[0], _results(x, scale=0.25)[0])
    assert relative_l2(_results(x, scale=3.0)[0], op_oracle(**x, scale=3.0)[0]) <= 1e-10


def test_results_have_the_documented_types() -> None:
    x = make_inputs(20, 1, 2, 8, 6, dtype=torch.bfloat16)
    o, final_state = _results(x, output_final_state=True)
    assert o.dtype is torch.bfloat16 and o.shape == (1, 20, 2, 6)
    assert final_state is not None and final_state.dtype is torch.float32 and final_state.shape == (1, 2, 8, 6)
    assert _results(x)[1] is None
    o.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype is leaf.dtype for leaf in x.values())


def test_offsets_of_any_integer_type_on_a_fresh_tensor_each_time() -> None:
    """A thousand short-lived offset tensors, and one rewritten in place: the result is always the current one's."""
    x = {name: t.detach() for name, t in make_inputs(12, 1, 1, 4, 4, gates="weak").items()}
    expected = [_results(x, cu_seqlens=torch.tensor([0, cut, 12]))[0] for cut in range(13)]
    kept = torch.tensor([0, 0, 12])
    for i in range(1000):
        cut, dtype = i % 13, (torch.int32, torch.int64)[i % 2]
        kept[1] = cut
        assert torch.equal(_results(x, cu_seqlens=torch.tensor([0, cut, 12], dtype=dtype))[0], expected[cut])
        if i % 7 == 0:
            assert torch.equal(_results(x, cu_seqlens=kept)[0], expected[cut])


def test_trailing_ghosts_leave_every_bit() -> None:
    """A padded offsets tensor of fixed size is the normal way to keep shapes static."""
    problem = op_problem(Case(id="", cu_seqlens=(0, 37, 90), num_tokens=120))
    plain = run_whole(chunk_gated_delta_rule, problem)
    ghosts = replace(problem, cu_seqlens=torch.tensor([0, 37, 90] + [90] * 120))
    for name, x in run_whole(chunk_gated_delta_rule, ghosts).items():
        assert torch.equal(x, plain[name]), name


@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_documents_and_padding_are_apart(content: float) -> None:
    case = Case(id="", cu_seqlens=(0, 37, 90, 140), num_tokens=170, gates="weak", states=True)
    problem = op_problem(case)
    before = run_whole(chunk_gated_delta_rule, problem)
    spoiled = {name: x.clone() for name, x in {**problem.tokens, "o": problem.upstream["o"]}.items()}
    for x in spoiled.values():
        x[:, 37:90] = content
        x[:, 140:] = content
    upstream = {**problem.upstream, "o": spoiled.pop("o")}
    after = run_whole(chunk_gated_delta_rule, replace(problem, tokens=spoiled, upstream=upstream))
    kept = [*range(37), *range(90, 140)]
    for name, x in before.items():
        if name in ("final_state", "dinitial_state"):
            assert torch.equal(x[[0, 2]], after[name][[0, 2]]), name
        else:
            assert torch.equal(x[:, kept], after[name][:, kept]), name
            assert torch.count_nonzero(after[name][:, 140:]) == 0, name


def test_a_zero_row_has_a_finite_l2norm_gradient() -> None:
    problem = op_problem(Case(id="", cu_seqlens=(0, 40), use_qk_l2norm_in_kernel=True))
    for name in ("q", "k"):
        problem.tokens[name][:, 5] = 0
    results, reference = (run_whole(function, problem) for function in (chunk_gated_delta_rule, op_oracle))
    assert all(s.whole <= 1e-10 for s in score(results, reference, []))


def test_views_and_expanded_gradients() -> None:
    problem = op_problem(Case(id="", cu_seqlens=(0, 37, 100), head_v_dim=8))
    expected = run_whole(chunk_gated_delta_rule, problem)
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in problem.tokens.items()}
    upstream = {"o": problem.upstream["o"].mT.contiguous().mT}
    for name, x in run_whole(chunk_gated_delta_rule, replace(problem, tokens=turned, upstream=upstream)).items():
        assert torch.equal(x, expected[name]), name
    ones = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    wide = [
        run_whole(chunk_gated_delta_rule, replace(problem, upstream={"o": x}))
        for x in (ones.expand(1, 100, 2, 8), ones.repeat(1, 100, 2, 8))
    ]
    assert all(torch.equal(wide[0][name], wide[1][name]) for name in expected)


def test_inputs_are_left_as_they_were() -> None:
    problem = op_problem(next(case for case in OPTIONS if case.id == "everything_in_kernel"))
    before = {name: x.clone() for name, x in {**problem.tokens, **problem.shared, **problem.upstream}.items()}
    run_whole(chunk_gated_delta_rule, problem)
    for name, x in {**problem.tokens, **problem.shared, **problem.upstream}.items():
        assert torch.equal(x, before[name]), name


def test_autocast_leaves_the_gate_and_the_recurrence_alone() -> None:
    problem = op_problem(Case(id="", cu_seqlens=(0, 100), use_gate_in_kernel=True), torch.bfloat16)
    plain = run_whole(chunk_gated_delta_rule, problem)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run_whole(chunk_gated_delta_rule, problem)
    for name, x in plain.items():
        assert torch.equal(x, cast[name]), name


Change = Callable[[dict[str, torch.Tensor]], dict[str, Any]]
# Argument that the text names first, and what is passed instead of the good arguments.
REJECTIONS: dict[str, tuple[type[Exception], str, Change]] = {
    "heads": (ValueError, "v", lambda x: {n: torch.cat([x[n], x[n][:, :, :1]], 2) for n in ("v", "g", "beta")}),
    "heads_of_k": (ValueError, "k", lambda x: {"k": x["k"][:, :, :1]}),
    "heads_of_g": (ValueError, "g", lambda x: {"g": x["g"][..., :1]}),
    "heads_of_beta": (ValueError, "beta", lambda x: {"beta": x["beta"][..., :1]}),
    "width_of_k": (ValueError, "k", lambda x: {"k": x["k"][..., :-1]}),
    "length_of_v": (ValueError, "v", lambda x: {"v": x["v"][:, :-1]}),
    "dimensions_of_q": (ValueError, "q", lambda x: {"q": x["q"][0]}),
    "dimensions_of_g": (ValueError, "g", lambda x: {"g": x["g"][..., None]}),
    "integers": (TypeError, "q", lambda x: {n: x[n].long() for n in ("q", "k", "v")}),
    "mixed_types": (TypeError, "k", lambda x: {"k": x["k"].float()}),
    "not_a_tensor": (TypeError, "beta", lambda x: {"beta": 0.5}),
    "another_device": (ValueError, "v", lambda x: {"v": x["v"].to("meta")}),
    "backend": (ValueError, "backend", lambda x: {"backend": "cuda"}),
    "start": (ValueError, "cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([1, 30])}),
    "decrease": (ValueError, "cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0, 20, 10, 30])}),
    "past_the_end": (ValueError, "cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0, 31])}),
    "floating_offsets": (TypeError, "cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0.0, 30.0])}),
    "no_offsets": (ValueError, "cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([], dtype=torch.int64)}),
    "batch_with_offsets": (
        ValueError,
        "q",
        lambda x: {**{n: torch.cat([t, t]) for n, t in x.items()}, "cu_seqlens": torch.tensor([0, 30])},
    ),
    "rows_of_the_state": (ValueError, "initial_state", lambda x: {"initial_state": x["v"].new_zeros(2, 4, 8, 6)}),
    "order_of_the_state": (
        ValueError,
        "initial_state",
        lambda x: {"initial_state": x["v"].new_zeros(1, 4, 8, 6), "state_v_first": True},
    ),
    "gate_without_parameters": (ValueError, "A_log", lambda x: {"use_gate_in_kernel": True}),
    "size_of_A_log": (
        ValueError,
        "A_log",
        lambda x: {"use_gate_in_kernel": True, "A_log": x["g"].new_zeros(3), "dt_bias": x["g"].new_zeros(4)},
    ),
    "size_of_dt_bias": (
        ValueError,
        "dt_bias",
        lambda x: {"use_gate_in_kernel": True, "A_log": x["g"].new_zeros(4), "dt_bias": x["g"].new_zeros(3)},
    ),
    "not_a_context": (TypeError, "cp_context", lambda x: {"cp_context": "cp"}),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_refuses(name: str) -> None:
    error, argument, change = REJECTIONS[name]
    inputs = make_inputs(30, 2, 4, 8, 6)
    with pytest.raises(error) as caught:
        _results({**inputs, **change(inputs)})
    assert argument in str(caught.value).split(":")[0], caught.value
    assert len(str(caught.value)) > len(argument) + 10


def test_refuses_the_compiled_backend_on_the_cpu() -> None:
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="tilelang"):
        _results(make_inputs(30, 1, 1, 8, 6), backend="tilelang")


def test_results_of_two_calls_are_equal_bit_by_bit() -> None:
    problem = op_problem(Case(id="", states=True))
    arguments = {"cu_seqlens": problem.cu_seqlens}
    first, second = (differentiate(chunk_gated_delta_rule, problem, **arguments) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gate", [-float("inf"), -1e30, -200.0])
def test_a_gate_that_forgets_everything(gate: float, dtype: torch.dtype) -> None:
    inputs = make_inputs(100, 1, 2, 8, 8, gates="weak", dtype=dtype)
    with torch.no_grad():
        inputs["g"][:, [0, 30, 31, 64, 99]] = gate
    results, expected = [], []
    for function, out, cast in (
        (chunk_gated_delta_rule, results, dtype),
        (op_oracle, expected, torch.float64),
    ):
        leaves = {name: x.detach().to(cast).requires_grad_() for name, x in inputs.items()}
        o = function(**leaves)[0]
        o.square().sum().backward()
        out += [o.detach(), *(x.grad for name, x in leaves.items() if name != "g")]
        out.append(leaves["g"].grad.index_select(1, torch.tensor([29, 32, 70])))
    for got, reference in zip(results, expected, strict=True):
        # Sums of gates inside a chunk reach 4 * 128 in fp32, and the tokens behind feel their rounding.
        assert relative_l2(got, reference) <= (1e-10 if dtype == torch.float64 else 4 * 128 * 2.0**-24)


class _Sharded:
    """What a DTensor is recognised by."""

    device_mesh = None

    def to_local(self) -> None: ...


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"scale": "x"}, TypeError, "scale: expected a number"),
        ({"scale": torch.tensor(1.0)}, TypeError, "scale: expected a number"),
        ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
        ({"A_log": torch.zeros(2, dtype=torch.complex64)}, TypeError, "A_log: dtype"),
        ({"A_log": torch.zeros(2, dtype=torch.int64)}, TypeError, "A_log: dtype"),
        ({"A_log": torch.zeros(2, device="meta")}, ValueError, "A_log: is on meta"),
        ({"A_log": [0.0, 0.0]}, TypeError, "A_log: expected a tensor"),
        ({"A_log": _Sharded()}, TypeError, "A_log: DTensor is not supported"),
        ({"A_log": torch.zeros(2), "dt_bias": _Sharded()}, TypeError, "dt_bias: DTensor is not supported"),
        ({"initial_state": _Sharded()}, TypeError, "initial_state: DTensor is not supported"),
        ({"q": _Sharded()}, TypeError, "q: DTensor is not supported"),
        ({"forget_below": "x"}, TypeError, "forget_below: got str"),
        ({"forget_below": 1.0}, ValueError, "forget_below: got 1.0, expected a number from 0 on and below 1"),
        ({"forget_below": float("nan")}, ValueError, "forget_below: got nan"),
        ({"cu_seqlens": "abc"}, TypeError, "cu_seqlens: expected integer offsets"),
        ({"cu_seqlens": [0, 2**70]}, TypeError, "cu_seqlens: expected integer offsets"),
    ],
)
def test_refuses_what_is_no_tensor_or_number(changes: dict[str, object], kind: type[Exception], text: str) -> None:
    inputs = make_inputs(9, 1, 2, 4, 4, dtype=torch.float32)
    with pytest.raises(kind, match=text):
        chunk_gated_delta_rule(**{**inputs, "use_gate_in_kernel": "A_log" in changes, **changes})


def test_takes_arrays_and_refuses_negative_strides() -> None:
    inputs = {name: x.detach().numpy() for name, x in make_inputs(9, 1, 2, 4, 4, dtype=torch.float32).items()}
    o, _ = chunk_gated_delta_rule(**inputs)
    expected, _ = chunk_gated_delta_rule(**{name: torch.from_numpy(x) for name, x in inputs.items()})
    assert torch.equal(o, expected)
    with pytest.raises(ValueError, match="q: a view with negative strides"):
        chunk_gated_delta_rule(**{**inputs, "q": inputs["q"][:, ::-1]})
