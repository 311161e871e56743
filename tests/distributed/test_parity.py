"""Every row of the case table: sharded equals one rank equals the oracle, outputs and all gradients, in fp64."""

from __future__ import annotations

import pytest
import torch

from flashqla_cp.testing.cases import EXCHANGES, OPTIONS, STREAMS, Case
from flashqla_cp.testing.parity import conv_problem, op_problem, run_sharded, run_whole, score

pytestmark = pytest.mark.mpi(min_size=2)

_SHORT = Case(id="", cu_seqlens=(0, 5, 11))


@pytest.mark.parametrize("case", STREAMS, ids=str)
def test_streams(case: Case, compare, device: torch.device) -> None:
    compare(case, op_problem(case, device=device))


@pytest.mark.parametrize("case", STREAMS, ids=str)
def test_streams_of_the_convolution(case: Case, compare, device: torch.device) -> None:
    compare(case, conv_problem(case, device=device))


@pytest.mark.parametrize(("num_taps", "activation"), [(1, None), (2, "silu"), (3, None), (4, None)])
def test_taps_of_the_convolution(num_taps: int, activation: str | None, compare, device: torch.device) -> None:
    case, problem = _SHORT, conv_problem(_SHORT, device=device, num_taps=num_taps, activation=activation)
    compare(case, problem, conv1d_kernel_size=num_taps)


def test_a_context_prepares_any_number_of_taps_when_asked(compare, device: torch.device) -> None:
    compare(_SHORT, conv_problem(_SHORT, device=device, num_taps=6), conv1d_kernel_size=None)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_options(case: Case, compare, device: torch.device) -> None:
    compare(case, op_problem(case, device=device))


@pytest.mark.parametrize("case", EXCHANGES, ids=str)
def test_exchanges(case: Case, compare, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.exchange == "hierarchical":
        monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    compare(case, op_problem(case, device=device))


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_nodes_of_any_size(ranks_per_node: int, compare, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", str(ranks_per_node))
    case = Case(id="", cu_seqlens=(0, 20, 260), gates="weak", num_v_heads=3, exchange="hierarchical", states=True)
    compare(case, op_problem(case, device=device))


@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_narrow_types_against_one_rank(dtype: torch.dtype, bar: float, make_context, add_up, device, op_under_test):
    """Sharding costs no accuracy: far below the type's own error for what is summed, one rounding for the rest."""
    case = Case(id="", cu_seqlens=(0, 30, 260), states=True)
    problem = op_problem(case, dtype, device)
    sharded = run_sharded(op_under_test, problem, make_context(case), add_up)
    scores = score(sharded, run_whole(op_under_test, problem), [])
    assert all(s.whole <= bar for s in scores), scores
