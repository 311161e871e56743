"""The public calls on a GPU: torch backend against the oracle, alone and on ranks that share the device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.parallel.affine import ChainFold, Link, affine
from flashqla_cp.parallel.exchange.base import unpack
from flashqla_cp.testing.cases import Case
from flashqla_cp.testing.inputs import GATES, make_inputs
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.parity import (
    Problem,
    conv_oracle,
    conv_problem,
    op_oracle,
    op_problem,
    run_sharded,
    run_whole,
    score,
)
from flashqla_cp.testing.spawn import run_ranks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BARS = {"o": 5e-3, "final_state": 5e-3, "dg": 2e-2}
CASE = Case(
    id="packed-empty-padded-states",
    cu_seqlens=(0, 0, 37, 90, 90, 200, 260, 260),
    num_tokens=300,
    num_heads=2,
    num_v_heads=6,
    head_k_dim=16,
    head_v_dim=24,
    gates="weak",
    states=True,
)
op = functools.partial(chunk_gated_delta_rule, backend="torch")


def worst(scores: list[Any]) -> float:
    return max(entry.worst for entry in scores)


def check(problem: Problem, function: Any, oracle: Any) -> None:
    scores = score(run_whole(function, problem), run_whole(oracle, problem), [])
    assert worst(scores) <= 1e-10, scores


def test_op_in_fp64():
    check(op_problem(CASE, device=DEVICE), op, op_oracle)


def test_convolution_in_fp64():
    check(conv_problem(CASE, device=DEVICE), causal_conv1d, conv_oracle)


@pytest.mark.parametrize("gates", GATES)
def test_op_in_bf16(gates):
    case = Case(
        id=gates, cu_seqlens=(0, 700, 1000), num_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=64, gates=gates
    )
    problem = op_problem(case, dtype=torch.bfloat16, device=DEVICE)
    exact = Problem(
        tokens={name: x.double() for name, x in problem.tokens.items()},
        upstream={name: x.double() for name, x in problem.upstream.items()},
        cu_seqlens=problem.cu_seqlens,
        shared=problem.shared,
        options=problem.options,
    )
    scores = score(run_whole(op, problem), run_whole(op_oracle, exact), [])
    assert all(entry.worst <= BARS.get(entry.name, 1e-2) for entry in scores), scores


def test_repeats_bitwise():
    problem = op_problem(CASE, dtype=torch.float32, device=DEVICE)
    first, second = run_whole(op, problem), run_whole(op, problem)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_auto_refuses_to_train_and_infers_with_a_word(caplog):
    inputs = make_inputs(70, 1, 2, 8, 8, dtype=torch.float32, device=DEVICE)
    with pytest.raises(RuntimeError, match='backend="torch"'):
        chunk_gated_delta_rule(**inputs)
    with torch.no_grad():
        o, _ = chunk_gated_delta_rule(**inputs)
    expected, _ = op(**inputs)
    assert torch.equal(o, expected)


def test_fold_stays_fp32_where_tf32_is_allowed(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    generator = torch.Generator().manual_seed(0)
    matrix, state, boundary = (torch.randn(4, 128, 128, generator=generator, dtype=torch.float64) for _ in range(3))
    got = affine(*(x.float().to(DEVICE) for x in (matrix, state, boundary)))
    assert relative_l2(got.cpu().double(), boundary + state @ matrix) < 1e-6


@pytest.mark.parametrize("adjoint", [False, True])
def test_fold_on_its_kernel(adjoint):
    generator = torch.Generator().manual_seed(0)
    sent = [torch.randn(4, 2 * 128 * 128, generator=generator) / 11 for _ in range(8)]
    maps = unpack(torch.stack(sent), 1, 1, torch.Size((128, 128)))
    order = range(7, -1, -1) if adjoint else range(8)
    fold = ChainFold.of([[Link(row, row, row) for row in order]], 8)
    expected = fold(*(x.double() for x in maps), adjoint=adjoint)
    on_gpu = ChainFold.of([[Link(row, row, row) for row in order]], 8, DEVICE)
    message = torch.stack(sent).to(DEVICE)

    def on_kernel():
        return on_gpu(*unpack(message, 1, 1, torch.Size((128, 128))), adjoint=adjoint)

    assert relative_l2(on_kernel().cpu().double(), expected) < 1e-6  # fresh memory is filled with NaN by the tests
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        on_kernel()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in names if "FillFunctor" not in name] == ["fold_kernel"], "one launch, no copies"


def test_no_synchronisation_once_the_context_is_built(tmp_path):
    dist.init_process_group("gloo", init_method=(tmp_path / "rdzv").as_uri(), rank=0, world_size=1)
    try:
        offsets = torch.tensor(CASE.cu_seqlens, device=DEVICE)
        # Two pieces stored against stream order: states travel from one to the other on this rank.
        context = build_cp_context(
            offsets, None, 4, layout="custom", token_ranges=[[(150, 300), (0, 150)]], num_tokens=CASE.num_tokens
        )
        problem = op_problem(CASE, dtype=torch.float32, device=DEVICE)
        inputs = {name: context.shard(x.detach()).requires_grad_() for name, x in problem.tokens.items()}
        weight = torch.randn(inputs["v"].shape[2], 4, device=DEVICE, requires_grad=True)

        def step() -> torch.Tensor:
            v, _ = causal_conv1d(inputs["v"].flatten(2)[..., : len(weight)], weight, cp_context=context)
            o, state = op(
                **inputs, **problem.options, initial_state=problem.shared["initial_state"], cp_context=context
            )
            return o.square().sum() + state.square().sum() + v.sum()

        step().backward()  # tables go to the device on first use
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "headwise"])
def test_ranks_that_share_the_device(exchange):
    assert max(run_ranks(_on_rank, 2, exchange, timeout=120)) <= 1e-10


def _on_rank(rank: int, exchange: str) -> float:
    """gloo carries CUDA tensors, so that several ranks can meet on one GPU, where NCCL refuses."""

    def add_up(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    worst_error = 0.0
    for problem, function, oracle in (
        (op_problem(CASE, device=DEVICE), op, op_oracle),
        (conv_problem(CASE, device=DEVICE), causal_conv1d, conv_oracle),
    ):
        offsets = torch.tensor(CASE.cu_seqlens, device=DEVICE)
        context = build_cp_context(offsets, None, layout="zigzag", num_tokens=CASE.num_tokens, exchange=exchange)
        cuts = [start for owned in context.plan.ranges for start, _ in owned]
        scores = score(run_sharded(function, problem, context, add_up), run_whole(oracle, problem), cuts)
        worst_error = max(worst_error, worst(scores))
    return worst_error
