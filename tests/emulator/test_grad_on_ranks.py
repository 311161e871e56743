"""Gradients of the op on several ranks, on emulated kernels: gradient maps of fragments, exchanged over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from grad_cases import NAMES, expected_of, finely, hold, upstream
from plain_stages import STAGES
from test_op_emulated import emulation, inputs_of

from flashqla_cp import build_cp_context, chunk_gated_delta_rule
from flashqla_cp.testing.metrics import worst_after_cuts
from flashqla_cp.testing.spawn import run_ranks

DIM = 128
STATES = torch.randn(6, 2, DIM, DIM, generator=torch.Generator().manual_seed(1))


def _sharded(rank, offsets, layout, gates, exchange, states, plain):
    """Gradients of the whole stream, and the initial states' of the documents that begin here."""
    torch.set_num_threads(1)
    options = {"token_ranges": layout, "layout": "custom"} if isinstance(layout, list) else {"layout": layout}
    context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, exchange=exchange, **options)
    whole = inputs_of(offsets[-1], 1, 2, DIM, gates)
    leaves = [context.shard(x).requires_grad_() for x in whole]
    initial = STATES[: len(offsets) - 1].clone().requires_grad_() if states else None
    do, dstate = upstream(whole[2], STATES[: len(offsets) - 1])
    with finely(1), emulation("sm_90a", races=False, plain=STAGES if plain else None):
        o, state = chunk_gated_delta_rule(
            *leaves, initial_state=initial, output_final_state=states, cp_context=context, backend="tilelang"
        )
        outputs = [(o, context.shard(do)), *([(state, dstate)] if states else [])]
        torch.autograd.backward(*zip(*outputs, strict=True))
    found = dict(zip(NAMES, [context.unshard(x.grad) for x in leaves], strict=False))
    cuts = [start for owned in context.plan.ranges for start, _ in owned]
    return found, None if initial is None else initial.grad, cuts


def check(ranks, offsets, layout, gates, exchange, states=True, plain=False, after=3e-2):
    """All gradients against the oracle, the whole stream and the tokens on both sides of cuts."""
    results = run_ranks(_sharded, ranks, offsets, layout, gates, exchange, states, plain, timeout=600.0)
    found, _, cuts = results[0]
    if states:
        found["initial_state"] = sum(result[1] for result in results)
    initial = STATES[: len(offsets) - 1] if states else None
    expected = expected_of(inputs_of(offsets[-1], 1, 2, DIM, gates), initial, offsets)
    hold(found, expected)
    for name in NAMES[:5]:
        assert worst_after_cuts(found[name], expected[name], cuts) <= after, name
        reached = [offsets[-1] - cut for cut in cuts]
        assert worst_after_cuts(found[name].flip(1), expected[name].flip(1), reached) <= after, name


# Documents that begin and end inside ranks, one over all of them, an empty one.
PACKED = [0, 90, 90, 620, 700]
CASES = {
    "zigzag-sharded": (3, PACKED, "zigzag", "mixed", "sharded"),
    "contiguous-allgather": (3, [0, 700], "contiguous", "zero", "allgather"),
    "without-tokens": (3, [0, 300, 500], [[(0, 130), (260, 400)], [], [(130, 260), (400, 500)]], "weak", "allgather"),
    "headwise": (2, PACKED, "contiguous", "mixed", "headwise"),
}


def test_gradients_on_ranks():
    check(*CASES["zigzag-sharded"], plain=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_on_ranks_and_kernels(case):
    check(*CASES[case])


@pytest.mark.slow
def test_without_states():
    check(2, PACKED, "contiguous", "mixed", "sharded", states=False, plain=True)
