"""The convolution on several ranks, on emulated kernels: rows and gradients that cross cuts, over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conv_cases import F32, Conv
from test_op_emulated import emulation

from flashqla_cp import build_cp_context
from flashqla_cp.testing.metrics import worst_after_cuts
from flashqla_cp.testing.spawn import run_ranks


def _sharded(rank, case, layout, arch):
    """Results for the whole stream, those of parameters for this rank's part; the stages that ran; where cuts are."""
    torch.set_num_threads(1)
    options = {"token_ranges": layout, "layout": "custom"} if isinstance(layout, list) else {"layout": layout}
    context = build_cp_context(
        torch.tensor(case.offsets), dist.group.WORLD, case.width, num_tokens=case.tokens, **options
    )
    (x, *parameters), dy = case.draw()
    with emulation(arch, races=False) as launched:
        found = case.run([context.shard(x), *parameters], context.shard(dy), cp_context=context)
    whole = {name: context.unshard(found[name]) for name in ("y", "x")}
    cuts = [start for owned in context.plan.ranges for start, _ in owned]
    return found | whole, [spec.stage for spec, _ in launched], cuts


def check(ranks, layout, case, arch="sm_90a"):
    results = run_ranks(_sharded, ranks, case, layout, arch, timeout=600.0)
    found, _, cuts = results[0]
    for name in ("weight", "bias"):
        found[name] = sum(result[0][name].double() for result in results)
    given, dy = case.draw()
    expected = case.expected(given, dy)
    case.hold(found, expected)
    for name in ("y", "x"):
        assert worst_after_cuts(found[name], expected[name], cuts, window=4) <= 5e-3, name
        reached = [case.tokens - cut for cut in cuts]
        assert worst_after_cuts(found[name].flip(1), expected[name].flip(1), reached, window=4) <= 5e-3, name
    return [stages for _, stages, _ in results]


WIDE = {"channels": 16, "wide": F32}
CASES = {
    "contiguous": (3, "contiguous", Conv(**WIDE)),
    "contiguous_sm_100": (2, "contiguous", Conv(**WIDE), "sm_100a"),
    "zigzag": (3, "zigzag", Conv(**WIDE, offsets=(0, 5, 40, 41, 130), tokens=130)),
    "zigzag_per_document": (2, "zigzag_per_document", Conv(**WIDE, offsets=(0, 9, 9, 90), tokens=90)),
    "shards_shorter_than_the_taps": (4, "contiguous", Conv(**WIDE, offsets=(0, 6), tokens=6)),
    "three_taps": (2, "contiguous", Conv(channels=5, width=3, dtype=F32, silu=False)),
}


def test_rows_cross_cuts_in_any_order_on_one_rank_or_several():
    """Ranges out of order, some of them neighbours on one rank, some shorter than the taps."""
    layout = [[(40, 60), (0, 20), (21, 22)], [(20, 21), (22, 40)]]
    stages = check(2, layout, Conv(**WIDE, offsets=(0, 60), tokens=60))
    assert stages == [["causal_conv", "causal_conv_grad", "conv_halo_grad"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layouts(name):
    check(*CASES[name])


def test_a_rank_whose_documents_begin_there_reads_no_other_rows():
    """It still takes part in the exchange, and its kernels know of none."""
    stages = check(2, "contiguous", Conv(**WIDE, offsets=(0, 10, 60), tokens=60))
    assert stages == [["causal_conv", "causal_conv_grad"], ["causal_conv", "causal_conv_grad", "conv_halo_grad"]]
