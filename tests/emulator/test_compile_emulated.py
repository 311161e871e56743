"""torch.compile on kernels: the operators keep for their backward what eager calls keep, and give the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conv_cases import OFFSETS as OFFSETS_OF_CONV
from conv_cases import Conv
from grad_cases import finely, leaves_of, upstream
from plain_stages import STAGES
from test_grad_host import DIM, packed, plain
from test_grad_on_ranks import CASES, STATES
from test_op_emulated import OFFSETS, emulation, inputs_of
from torch._dynamo.testing import CompileCounterWithBackend

from flashqla_cp import GatedDeltaNet, build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.kernels.host.memory import RECOMPUTE
from flashqla_cp.parallel.comm import record_collectives
from flashqla_cp.testing.spawn import run_ranks


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(backend="aot_eager", fullgraph=True, **options):
    return torch.compile(chunk_gated_delta_rule, fullgraph=fullgraph, backend=backend, **options)


def step(run, tensors, initial, **options):
    """Results and gradients, and the stages that ran."""
    leaves = leaves_of(tensors, initial)
    with plain() as launched:
        results = run(
            *leaves[:5],
            initial_state=leaves[5],
            output_final_state=initial is not None,
            use_qk_l2norm_in_kernel=True,
            backend="tilelang",
            **options,
        )
        results = [x for x in results if x is not None]
        given = upstream(results[0], results[1] if initial is not None else None)
        torch.autograd.backward(results, given[: len(results)])
    return [*results, *(x.grad for x in leaves if x is not None)], [spec.stage for spec, _ in launched]


@pytest.mark.parametrize("recompute", (RECOMPUTE[0], *(pytest.param(r, marks=pytest.mark.slow) for r in RECOMPUTE[1:])))
@pytest.mark.parametrize("states", (pytest.param(False, marks=pytest.mark.slow), True))
def test_bits_and_stages_are_those_of_an_eager_call(states, recompute):
    tensors, initial = packed()
    options = {"cu_seqlens": torch.tensor(OFFSETS), "recompute": recompute, "state_v_first": True}
    initial = initial if states else None
    eager, stages = step(chunk_gated_delta_rule, tensors, initial, **options)
    found, found_stages = step(compiled(), tensors, initial, **options)
    assert all(map(torch.equal, found, eager))
    assert sorted(found_stages) == sorted([*stages, "tables"])  # made again instead of kept


def test_batch_rows_and_a_call_without_gradients():
    tensors = [x.unflatten(1, (2, 150)).squeeze(0) for x in inputs_of(300, 1, 2, DIM, "weak")]
    run = compiled()
    assert all(map(torch.equal, step(run, tensors, None)[0], step(chunk_gated_delta_rule, tensors, None)[0]))
    with plain() as launched, torch.no_grad():
        o, _ = run(*tensors, backend="tilelang")
        assert torch.equal(o, chunk_gated_delta_rule(*tensors, backend="tilelang")[0])
    assert "replay" not in {spec.stage for spec, _ in launched}


def test_a_length_that_varies():
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(counter, dynamic=True)
    for tokens in (130, 300):
        tensors, options = inputs_of(tokens, 1, 2, DIM, "weak"), {"cu_seqlens": torch.tensor([0, 100, tokens])}
        eager, _ = step(chunk_gated_delta_rule, tensors, None, **options)
        assert all(map(torch.equal, step(run, tensors, None, **options)[0], eager))
    assert counter.frame_count == 1


# Without rows of tables that nobody fills, which would differ from run to run.
@pytest.mark.parametrize(("tokens", "initial"), ((63, False), pytest.param(191, True, marks=pytest.mark.slow)))
def test_the_rules_of_operators(tokens, initial):
    state = torch.randn(1, 2, DIM, DIM)
    leaves = leaves_of(inputs_of(tokens, 1, 2, DIM, "weak"), state)
    given = (*leaves[:5], None, None, leaves[5] if initial else None)
    options = (1.0, True, True, False, False, False, "tilelang", "none", 2.0**-24, True)
    with plain():
        torch.library.opcheck(
            torch.ops.flashqla_cp.gated_delta_rule.default, (*given, torch.tensor([0, tokens]), None, *options)
        )


def _on_rank(rank, offsets, layout, gates, exchange, fullgraph):
    torch.set_num_threads(1)
    options = {"token_ranges": layout, "layout": "custom"} if isinstance(layout, list) else {"layout": layout}
    whole, states = inputs_of(offsets[-1], 1, 2, DIM, gates), STATES[: len(offsets) - 1]
    do, dstates = upstream(whole[2], states)
    counter, same = CompileCounterWithBackend("aot_eager"), []
    run = compiled(counter, fullgraph)
    for _ in range(2):
        found, logs = [], []
        for function in (chunk_gated_delta_rule, run):
            context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, exchange=exchange, **options)
            leaves = leaves_of([context.shard(x) for x in whole], states)
            with finely(1), emulation("sm_90a", races=False, plain=STAGES), record_collectives() as log:
                results = function(
                    *leaves[:5],
                    initial_state=leaves[5],
                    output_final_state=True,
                    cp_context=context,
                    backend="tilelang",
                )
                given = context.shard(do), dstates
                del context  # the graph's alone from here on
                torch.autograd.backward(results, given)
            found.append([*results, *(x.grad for x in leaves)])
            logs.append([(record.name, record.bytes_sent) for record in log])
        same += [*map(torch.equal, *found), logs[0] == logs[1] or exchange == "headwise"]
    return [*same, counter.frame_count == 1 or not fullgraph]


@pytest.mark.parametrize(
    ("case", "fullgraph"),
    (
        ("zigzag-sharded", True),
        pytest.param("zigzag-sharded", False, marks=pytest.mark.slow),
        pytest.param("without-tokens", True, marks=pytest.mark.slow),
        pytest.param("headwise", True, marks=pytest.mark.slow),
    ),
)
def test_ranks(case, fullgraph):
    ranks, *arguments = CASES[case]
    for same in run_ranks(_on_rank, ranks, *arguments, fullgraph, timeout=600.0):
        assert all(same), same


@pytest.mark.parametrize("offsets", (OFFSETS_OF_CONV, None))
def test_the_convolution(offsets):
    case = Conv(channels=24, offsets=offsets)
    given, dy = case.draw()
    found, stages = [], []
    for run in (causal_conv1d, torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in given]
        cu = None if offsets is None else torch.tensor(offsets)
        with emulation("sm_90a", races=False) as launched:
            y, _ = run(*leaves, "silu", cu, None, "tilelang")
            found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
        stages.append({spec.stage for spec, _ in launched})
    assert all(map(torch.equal, *found))
    assert "causal_conv_grad" in stages[1] and stages[1] - stages[0] <= {"conv_places"}


@pytest.mark.slow
def test_the_layer():
    """Convolution and op on kernels, in one graph."""
    torch.manual_seed(0)
    layer = GatedDeltaNet(64, head_dim=DIM, num_heads=1, num_v_heads=2, backend="tilelang", dtype=torch.bfloat16)
    x, cu, found = torch.randn(1, 150, 64).bfloat16(), torch.tensor([0, 100, 140]), []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with plain():
            y = run(leaf, cu_seqlens=cu)
            y.float().square().sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters())])
    assert all(map(torch.equal, *found))


def _conv_on_rank(rank):
    torch.set_num_threads(1)
    case = Conv(channels=24)
    given, dy = case.draw()
    counter, same = CompileCounterWithBackend("aot_eager"), []
    run = torch.compile(causal_conv1d, fullgraph=True, backend=counter)
    for offsets in (case.offsets, (0, case.tokens)):
        found, logs = [], []
        for function in (causal_conv1d, run):
            context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, num_tokens=case.tokens, layout="zigzag")
            leaves = [x.detach().requires_grad_() for x in (context.shard(given[0]), *given[1:])]
            with emulation("sm_90a", races=False), record_collectives() as log:
                y, _ = function(*leaves, "silu", None, context, "tilelang")
                found.append([y.detach(), *torch.autograd.grad(y, leaves, context.shard(dy))])
            logs.append([(record.name, record.bytes_sent) for record in log])
        same += [*map(torch.equal, *found), logs[0] == logs[1]]
    return [*same, counter.frame_count == 1]


@pytest.mark.slow
def test_the_convolution_on_ranks():
    for same in run_ranks(_conv_on_rank, 2, timeout=600.0):
        assert all(same), same
