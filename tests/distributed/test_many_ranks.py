"""Group sizes beyond those of mpirun: odd ones, several nodes of several ranks, the scan over many nodes.

These ranks come from run_ranks, so that plain pytest runs them; random streams and ranges fill what no table lists.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.testing.cases import STRATEGIES, Case
from flashqla_cp.testing.inputs import GATES
from flashqla_cp.testing.parity import conv_oracle, conv_problem, op_oracle, op_problem, run_sharded, run_whole, score
from flashqla_cp.testing.spawn import run_ranks


def _worst_errors(rank: int, jobs: list[tuple[Case, dict[str, Any], int]]) -> list[dict[str, float]]:
    """For each (case, context options, seed) the worst error of every result against the oracles, on rank 0."""

    def add_up(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    found = []
    for case, options, seed in jobs:
        context = build_cp_context(
            torch.tensor(case.cu_seqlens),
            dist.group.WORLD,
            4,
            **{**case.context_options(dist.get_world_size()), **options},
        )
        cuts = [start for owned in context.plan.ranges for start, _ in owned]
        errors = {}
        for name, function, oracle, problem in (
            ("op", chunk_gated_delta_rule, op_oracle, op_problem(case, seed=seed)),
            ("conv", causal_conv1d, conv_oracle, conv_problem(case, seed=seed)),
        ):
            results = run_sharded(function, problem, context, add_up)
            if rank == 0:
                errors.update({f"{name} {s.name}": s.worst for s in score(results, run_whole(oracle, problem), cuts)})
        found.append(errors)
    return found


def _check(world_size: int, jobs: list[tuple[Case, dict[str, Any], int]]) -> None:
    for job, errors in zip(jobs, run_ranks(_worst_errors, world_size, jobs, timeout=120.0)[0], strict=True):
        assert errors and max(errors.values()) <= 1e-10, (job, errors)


LONG = Case(id="long", cu_seqlens=(0, 11, 290), gates="weak", states=True, num_v_heads=3)
PACKED = Case(id="packed", cu_seqlens=(0, 40, 41, 41, 200, 260), gates="weak", states=True, num_v_heads=2)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"),
    [
        (3, 1),
        (5, 5),
        (6, 3),
        (9, 1),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(6, 2), (8, 4), (10, 1)]),
    ],
    ids=lambda n: str(n),
)
def test_nodes(world_size: int, ranks_per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine nodes and more exchange by a scan in log steps; below that they gather."""
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", str(ranks_per_node))
    jobs = [(LONG, {"exchange": "auto"}, 0), (PACKED, {"exchange": "hierarchical"}, 0)]
    jobs += [(case, {"exchange": "hierarchical", "layout": "zigzag"}, 0) for case in (LONG, PACKED)]
    _check(world_size, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_scan_over_nodes_of_two_ranks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "2")
    _check(18, [(case, {"exchange": "hierarchical", "layout": layout}, 0) for case in (LONG, PACKED)])


def _random_job(draw: random.Random, world_size: int) -> tuple[Case, dict[str, Any], int]:
    """A random stream with empty documents and a tail, random ranges in random order on random ranks."""
    num_documents, length = draw.randint(1, 7), draw.randint(0, 150)
    offsets = (0, *sorted(draw.randint(0, length) for _ in range(num_documents)))
    num_cuts = min(draw.randint(0, 3 * world_size), max(length - 1, 0))
    cuts = sorted({0, length, *draw.sample(range(1, max(length, 2)), num_cuts)})
    pairs = list(itertools.pairwise(cuts))
    draw.shuffle(pairs)
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for pair in pairs:
        ranges[draw.randrange(world_size)].append(pair)
    num_heads = draw.choice((1, 1, 2))
    case = Case(
        id="random",
        cu_seqlens=offsets,
        num_tokens=length,
        gates=draw.choice(GATES),
        num_heads=num_heads,
        num_v_heads=num_heads * draw.choice((1, 2, 3)),
        head_k_dim=draw.choice((4, 8)),
        head_v_dim=draw.choice((4, 12)),
        beta_max=draw.choice((1.0, 2.0)),
        states=draw.random() < 0.5,
    )
    custom = {"layout": "custom", "token_ranges": ranges}
    named = {"layout": draw.choice(("contiguous", "zigzag", "zigzag_per_document"))}
    options = {**(custom if draw.random() < 0.6 else named), "exchange": draw.choice(STRATEGIES)}
    return case, options, draw.randrange(1000)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_streams(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(world_size)
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", str({2: 1, 3: 3, 4: 2}[world_size]))
    _check(world_size, [_random_job(draw, world_size) for _ in range(12)])
