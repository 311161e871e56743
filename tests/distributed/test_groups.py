"""Groups of every kind: subgroups that are not ranks 0..n-1, device meshes, a group of one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flashqla_cp import build_cp_context, causal_conv1d
from flashqla_cp.parallel.comm import record_collectives
from flashqla_cp.testing.cases import STRATEGIES, Case
from flashqla_cp.testing.parity import conv_problem, op_problem, run_sharded, run_whole, score


def _check(function, problem, context, group) -> None:
    def add_up(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    sharded = run_sharded(function, problem, context, add_up)
    scores = score(
        sharded, run_whole(function, problem), [start for owned in context.plan.ranges for start, _ in owned]
    )
    assert all(s.worst <= 1e-10 for s in scores), scores


def _own_group(members: Sequence[Sequence[int]]) -> tuple[int, dist.ProcessGroup]:
    """Create groups on every rank; return the number of this rank's and the group."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    number = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    return number, groups[number]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("exchange", STRATEGIES)
def test_two_subgroups_work_side_by_side(
    exchange: str, make_context, device, op_under_test, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 1 and 3 share one stream, the others another one of another length, at the same time."""
    monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", "1")
    number, group = _own_group([[r for r in range(dist.get_world_size()) if r not in (1, 3)], [1, 3]])
    case = Case(id="", cu_seqlens=[(0, 33, 150), (0, 121)][number], states=True, gates="weak", exchange=exchange)
    context = make_context(case, group)
    _check(op_under_test, op_problem(case, device=device, seed=number), context, group)
    _check(causal_conv1d, conv_problem(case, device=device, seed=number), context, group)


@pytest.mark.mpi(min_size=4)
def test_ranks_of_a_subgroup_count_from_zero(make_context) -> None:
    _, group = _own_group([[r for r in range(dist.get_world_size()) if r not in (1, 3)], [1, 3]])
    context = make_context(Case(id=""), group)
    assert (context.rank, context.world_size) == (dist.get_rank(group), group.size())
    assert context.local_tokens == sum(end - start for start, end in context.plan.ranges[context.rank])


@pytest.mark.mpi(min_size=2)
def test_a_rank_outside_the_group_is_told_so(pg: dist.ProcessGroup) -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        assert build_cp_context(torch.tensor([0, 8]), group).world_size == 1
    else:
        with pytest.raises(ValueError, match="group: this rank is not one of its members"):
            build_cp_context(torch.tensor([0, 8]), group)


@pytest.mark.mpi(min_size=4)
def test_an_axis_of_a_device_mesh_is_a_group(make_context, device, op_under_test) -> None:
    mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "cp"))
    case = Case(id="", gates="weak")
    context = make_context(case, mesh["cp"])
    assert context.world_size == dist.get_world_size() // 2
    problem = op_problem(case, device=device, seed=mesh["dp"].get_local_rank())
    _check(op_under_test, problem, context, mesh["cp"].get_group())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_group_of_one_communicates_nothing(layout: str, make_context, device, op_under_test) -> None:
    _, group = _own_group([[rank] for rank in range(dist.get_world_size())])
    case = Case(id="", cu_seqlens=(0, 90, 90, 150), num_tokens=203, layout=layout, states=True)
    with record_collectives() as log:
        context = make_context(case, group)
        sharded = run_sharded(op_under_test, op_problem(case, device=device), context, lambda x: x)
        conv = run_sharded(causal_conv1d, conv_problem(case, device=device), context, lambda x: x)
    assert log == []
    for name, x in run_whole(op_under_test, op_problem(case, device=device)).items():
        assert torch.equal(x, sharded[name]), name
    for name, x in run_whole(causal_conv1d, conv_problem(case, device=device)).items():
        assert torch.equal(x, conv[name]), name
