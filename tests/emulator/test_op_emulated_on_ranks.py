"""The public op on emulated kernels and several ranks: maps of fragments, exchanged over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_op_emulated import emulation, inputs_of

from flashqla_cp import build_cp_context, chunk_gated_delta_rule
from flashqla_cp.testing.metrics import relative_l2, worst_after_cuts
from flashqla_cp.testing.oracle import gated_delta_rule_oracle
from flashqla_cp.testing.spawn import run_ranks

STATES = torch.randn(5, 2, 128, 128, generator=torch.Generator().manual_seed(1))


def _sharded(rank, arch, offsets, layout, gates, exchange):
    torch.set_num_threads(1)
    context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, layout=layout, exchange=exchange)
    local = [context.shard(x) for x in inputs_of(offsets[-1], 1, 2, 128, gates)]
    with emulation(arch, races=False) as launched, torch.no_grad():
        o, states = chunk_gated_delta_rule(
            *local,
            initial_state=STATES[: len(offsets) - 1],
            output_final_state=True,
            cp_context=context,
            backend="tilelang",
        )
    cuts = [start for owned in context.plan.ranges for start, _ in owned]
    return context.unshard(o), states, cuts, [spec.stage for spec, _ in launched].count("forward")


@pytest.mark.parametrize(
    ("arch", "offsets", "layout", "gates", "exchange"),
    (
        pytest.param("sm_90a", [0, 130, 130, 600], "zigzag", "mixed", "sharded"),
        pytest.param("sm_90a", [0, 700], "contiguous", "zero", "allgather", marks=pytest.mark.slow),
        pytest.param("sm_100a", [0, 700], "contiguous", "zero", "allgather", marks=pytest.mark.slow),
        pytest.param("sm_100a", [0, 130, 130, 600], "zigzag", "mixed", "sharded", marks=pytest.mark.slow),
    ),
)
def test_three_ranks_against_the_oracle(arch, offsets, layout, gates, exchange):
    results = run_ranks(_sharded, 3, arch, offsets, layout, gates, exchange, timeout=600.0)
    o, _, cuts, _ = results[0]
    expected, states = gated_delta_rule_oracle(
        *(x.double() for x in inputs_of(offsets[-1], 1, 2, 128, gates)),
        initial_state=STATES[: len(offsets) - 1].double(),
        cu_seqlens=torch.tensor(offsets),
    )
    assert relative_l2(o, expected) <= 5e-3
    assert worst_after_cuts(o, expected, cuts) <= 5e-3
    assert relative_l2(sum(result[1] for result in results), states) <= 5e-3
    # What receives no state runs behind the exchange, in a launch of its own: of rank 1 the second of three fragments.
    assert [result[3] for result in results] == ([2, 2, 1] if layout == "zigzag" else [1, 1, 1])
