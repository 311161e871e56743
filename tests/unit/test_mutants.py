"""The comparison catches typical faults: each one is planted in the ranks' processes, and the scores must show it.

A suite that passes with a broken exchange is worse than none, and ordinary gates hide one: everything decays within a
shard. The faults are planted by replacing one function in a rank's process, where no other test runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.kernels.reference import chunked
from flashqla_cp.parallel import affine
from flashqla_cp.parallel.halo import Halo
from flashqla_cp.testing.cases import Case
from flashqla_cp.testing.parity import conv_oracle, conv_problem, op_oracle, op_problem, run_sharded, run_whole, score
from flashqla_cp.testing.spawn import run_ranks

WORLD_SIZE = 3  # the middle rank lies strictly inside the document, so that its final correction matters
CASE = Case(id="", cu_seqlens=(0, 200), gates="weak", states=True, exchange="allgather")


def _no_state_exchange() -> Any:
    original = affine.ChainFold.__call__
    return mock.patch.object(
        affine.ChainFold, "__call__", lambda *args, **kwargs: torch.zeros_like(original(*args, **kwargs))
    )


def _no_halo() -> Any:
    original = Halo.fetch
    return mock.patch.object(Halo, "fetch", lambda self, x: torch.zeros_like(original(self, x)))


def _no_halo_gradient() -> Any:
    original = Halo.return_gradient
    return mock.patch.object(
        Halo, "return_gradient", lambda self, dx, dhalo: original(self, dx, torch.zeros_like(dhalo))
    )


def _correction_dropped() -> Any:
    return mock.patch.object(affine, "affine", lambda correction, state, boundary, *, adjoint=False: boundary)


def _correction_not_transposed() -> Any:
    original = affine.affine
    return mock.patch.object(
        affine, "affine", lambda correction, state, boundary, *, adjoint=False: original(correction, state, boundary)
    )


def _decay_after_the_correction() -> Any:
    """A token's own decay reaches its successor only: the recurrence of gates that are late by one token."""
    original = chunked.gate_cumsum

    def late(g: torch.Tensor, table: Any, *, reverse: bool = False) -> torch.Tensor:
        return original(g if reverse else torch.cat([torch.zeros_like(g[:1]), g[:-1]]), table, reverse=reverse)

    return mock.patch.object(chunked, "gate_cumsum", late)


# Fault -> how it is planted, and results of the op or the convolution that it must ruin or must leave right.
FAULTS: dict[str, tuple[Callable[[], Any], set[str], set[str]]] = {
    "no_state_exchange": (_no_state_exchange, {"op o", "op final_state", "op dv", "op dk"}, {"conv o"}),
    "no_halo": (_no_halo, {"conv o", "conv dweight"}, {"op o"}),
    "no_halo_gradient": (_no_halo_gradient, {"conv dx"}, {"conv o"}),
    "correction_dropped": (_correction_dropped, {"op o", "op final_state", "op dv", "op dinitial_state"}, set()),
    "correction_not_transposed": (_correction_not_transposed, {"op dv", "op dinitial_state"}, {"op o"}),
    "decay_after_the_correction": (_decay_after_the_correction, {"op o", "op dv"}, {"conv o"}),
}


def _errors(rank: int, fault: str | None, gates: str) -> dict[str, float]:
    """Worst error of every result against the oracles, with a fault planted in this process."""
    case = Case(id="", cu_seqlens=CASE.cu_seqlens, gates=gates, states=True, exchange="allgather")
    context = build_cp_context(
        torch.tensor(case.cu_seqlens), dist.group.WORLD, conv1d_kernel_size=4, **case.context_options(WORLD_SIZE)
    )
    cuts = [start for owned in context.plan.ranges for start, _ in owned]

    def add_up(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    if fault is not None:
        FAULTS[fault][0]().start()
    errors = {}
    for name, function, oracle, problem in (
        ("op", chunk_gated_delta_rule, op_oracle, op_problem(case)),
        ("conv", causal_conv1d, conv_oracle, conv_problem(case)),
    ):
        results = run_sharded(function, problem, context, add_up)
        if rank == 0:
            errors.update({f"{name} {s.name}": s.worst for s in score(results, run_whole(oracle, problem), cuts)})
    return errors


def test_without_a_fault_everything_agrees() -> None:
    errors = run_ranks(_errors, WORLD_SIZE, None, "weak")[0]
    assert len(errors) == 12
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    _, ruined, right = FAULTS[fault]
    # With almost no decay its place in a step hardly matters, and with much the exchange does not.
    errors = run_ranks(_errors, WORLD_SIZE, fault, "init" if fault == "decay_after_the_correction" else "weak")[0]
    assert all(errors[name] > 1e-3 for name in ruined), errors
    assert all(errors[name] <= 1e-10 for name in right), errors
