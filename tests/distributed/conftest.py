"""What the tests on several ranks share: a context for a case, sums over ranks, and the three-way comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import CPContext, build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.testing.cases import Case
from flashqla_cp.testing.parity import Problem, Results, conv_oracle, op_oracle, run_sharded, run_whole, score

BAR = 1e-10


def op(*args: Any, **kwargs: Any) -> Any:
    """The public op on the torch backend, which has fp64 on every device."""
    return chunk_gated_delta_rule(*args, backend="torch", **kwargs)


@pytest.fixture
def op_under_test() -> Callable[..., Any]:
    return op


@pytest.fixture
def make_context(pg: dist.ProcessGroup, device: torch.device) -> Callable[..., CPContext]:
    """make_context(case, group=all ranks, **overrides) -> the context of a case, ready for a convolution of 4 taps."""

    def make(case: Case, group: Any = None, **overrides: Any) -> CPContext:
        group = pg if group is None else group
        options = {"conv1d_kernel_size": 4, **case.context_options(group.size()), **overrides}
        return build_cp_context(torch.tensor(case.cu_seqlens, device=device), group, **options)

    return make


@pytest.fixture
def add_up(pg: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sum of a tensor over all ranks."""

    def add(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=pg)
        return total

    return add


def range_starts(context: CPContext) -> list[int]:
    """Tokens of the stream at which some rank's range starts."""
    return [start for owned in context.plan.ranges for start, _ in owned]


@pytest.fixture
def compare(
    make_context: Callable[..., CPContext], add_up: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Results]:
    """compare(case, problem, **context options): sharded against one rank and the oracle, whole and behind cuts."""

    def run(case: Case, problem: Problem, **overrides: Any) -> Results:
        function, oracle = (causal_conv1d, conv_oracle) if "x" in problem.tokens else (op, op_oracle)
        context = make_context(case, **overrides)
        sharded = run_sharded(function, problem, context, add_up)
        if dist.get_rank() == 0:  # the others hold the same gathered tensors
            for against, other in (("one rank", function), ("the oracle", oracle)):
                scores = score(sharded, run_whole(other, problem), range_starts(context))
                bad = [s for s in scores if not s.worst <= BAR]
                assert not bad, f"against {against}: {bad}"
        return sharded

    return run
