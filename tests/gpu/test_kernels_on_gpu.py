"""The public op on TileLang kernels, on the device: numbers, isolation, offsets, views, replay, memory."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import build_cp_context, chunk_gated_delta_rule
from flashqla_cp.kernels.host.launcher import machine_of
from flashqla_cp.testing.inputs import GATES, make_inputs
from flashqla_cp.testing.metrics import relative_l2, worst_after_cuts
from flashqla_cp.testing.oracle import gated_delta_rule_oracle
from flashqla_cp.testing.spawn import run_ranks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BAR, BATCH_BAR = 5e-3, 3e-3
op = functools.partial(chunk_gated_delta_rule, backend="tilelang")


@pytest.fixture(autouse=True)
def _needs_kernels():
    if machine_of(torch.device(DEVICE))[0] is None:
        pytest.skip("no kernels for this device")
    with torch.no_grad():
        yield


def draw(tokens, heads, v_heads, dim, gates="mixed", dtype=torch.bfloat16, seed=0):
    """q, k, v, g, beta on the device."""
    x = make_inputs(tokens, heads, v_heads, dim, dim, gates=gates, dtype=dtype, device=DEVICE, seed=seed)
    return tuple(x[name].detach() for name in ("q", "k", "v", "g", "beta"))


def check(tensors, offsets=None, **options):
    """Compare with the fp64 oracle; returns what the kernels gave."""
    cu = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    o, state = op(*tensors, cu_seqlens=cu, output_final_state=True, **options)
    known = {k: v for k, v in options.items() if k in ("initial_state", "scale")}
    if "use_qk_l2norm_in_kernel" in options:
        known["use_qk_l2norm"] = True
    wide = {k: v.double().cpu() if isinstance(v, torch.Tensor) else v for k, v in known.items()}
    cuts = None if offsets is None else torch.tensor(offsets)
    expected, states = gated_delta_rule_oracle(*(x.double().cpu() for x in tensors), cu_seqlens=cuts, **wide)
    end = tensors[0].shape[1] if offsets is None else offsets[-1]
    assert relative_l2(o[:, :end].cpu(), expected[:, :end]) <= BAR
    assert relative_l2(state.cpu(), states) <= BAR
    assert torch.all(o[:, end:] == 0)
    return o, state


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dim", (64, 128))
def test_against_the_oracle(gates, dim):
    check(draw(900, 1, 2, dim, gates), [0, 500, 500, 563, 870])


@pytest.mark.parametrize("ratio", (1, 2, 3, 4, 8))
def test_groups_of_value_heads(ratio):
    check(draw(300, 2, 2 * ratio, 64))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_states_norms_and_dtypes(dtype):
    tensors = draw(700, 2, 4, 128, "weak", dtype)
    tensors = (tensors[0] * 0.3, tensors[1] * 2.5, *tensors[2:])
    initial = torch.randn(3, 4, 128, 128, device=DEVICE)
    check(tensors, [0, 650, 650, 700], initial_state=initial, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_keys_of_any_length_beside_large_values(dtype):
    q, k, v, g, beta = draw(700, 2, 4, 128, "weak", dtype)
    k = k.clone()
    k[:, ::7] = 0
    k[:, 3::7] *= 1e-5
    k[:, 5::7] *= 1e4
    check((q, k, v * 60, g, beta), [0, 650, 650, 700], use_qk_l2norm_in_kernel=True)


def test_batches_and_long_documents_that_are_cut_inside_the_card():
    check(draw(6000, 1, 2, 128, "weak"))
    q, k, v, g, beta = draw(1200, 1, 2, 64)
    rows = [x.unflatten(1, (3, 400)).squeeze(0) for x in (q, k, v, g, beta)]
    o, state = op(*rows, output_final_state=True)
    for row in range(3):
        alone, end = op(*(x[row : row + 1] for x in rows), output_final_state=True)
        assert relative_l2(o[row], alone[0]) <= BATCH_BAR and relative_l2(state[row], end[0]) <= BATCH_BAR


def test_gates_made_inside():
    q, k, v, g, beta = draw(500, 1, 4, 128)
    a, b = torch.randn_like(g), torch.randn_like(beta).bfloat16()
    A_log, dt_bias = torch.randn(4, device=DEVICE), torch.randn(4, device=DEVICE)
    inside, _ = op(
        q, k, v, a.bfloat16(), b, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True
    )
    gate = -A_log.double().exp() * torch.nn.functional.softplus(a.bfloat16().double() + dt_bias)
    expected, _ = gated_delta_rule_oracle(*(x.double().cpu() for x in (q, k, v, gate, b.double().sigmoid())))
    assert relative_l2(inside.cpu(), expected) <= BAR


@pytest.mark.parametrize("fill", (-20.0, -90.0, 0.0, float("-inf")))
def test_extreme_gates(fill):
    q, k, v, g, beta = draw(400, 1, 2, 128, "weak")
    g = g.clone()
    g[:, 100 if fill < -80 else slice(None)] = fill
    o, _ = op(q, k, v, g, beta)
    expected, _ = gated_delta_rule_oracle(*(x.double().cpu() for x in (q, k, v, g.clamp(min=-700), beta)))
    assert relative_l2(o.cpu(), expected) <= BAR


def test_a_segment_hides_no_nan():
    """GPUs make NaN as 0x7fffffff, which must live through the products that chain the segments' maps."""
    q, k, v, g, beta = draw(6000, 1, 2, 128, "zero")
    beta = beta.clone()
    beta[0, 700, 1] = float("nan")
    o, state = op(q, k, v, g, beta, output_final_state=True)
    assert o[0, 700:, 1].isnan().all() and state[0, 1].isnan().all()
    assert o[0, :640, 1].isfinite().all() and o[0, :, 0].isfinite().all() and state[0, 0].isfinite().all()


def test_documents_do_not_see_each_other():
    tensors, offsets = draw(800, 1, 2, 128, "weak"), torch.tensor([0, 300, 333, 700], device=DEVICE)
    before, _ = op(*tensors, cu_seqlens=offsets)
    spoiled = [x.clone() for x in tensors]
    for x in spoiled:
        x[:, 300:333] = float("nan")
        x[:, 700:] = float("inf")
    after, _ = op(*spoiled, cu_seqlens=offsets)
    assert torch.equal(before[:, :300], after[:, :300]) and torch.equal(before[:, 333:], after[:, 333:])


def test_ghost_documents_change_no_bit():
    tensors = draw(2000, 1, 2, 128)
    plain = torch.tensor([0, 900, 1984], device=DEVICE)
    padded = torch.cat([plain, plain[-1:].expand(120)])
    (o, state), (same, states) = (op(*tensors, cu_seqlens=x, output_final_state=True) for x in (plain, padded))
    assert torch.equal(o, same) and torch.equal(state, states[:2]) and torch.all(states[2:] == 0)


def test_fresh_and_rewritten_offsets_are_never_stale():
    tensors = draw(640, 1, 2, 64)
    cuts = [int(x) for x in torch.randint(1, 639, (8,), generator=torch.Generator().manual_seed(0))]
    expected = {cut: op(*tensors, cu_seqlens=torch.tensor([0, cut, 640]))[0] for cut in cuts}
    kept = torch.tensor([0, 1, 640], device=DEVICE)
    for turn in range(1000):
        cut = cuts[turn % 8]
        if turn % 2:
            kept[1] = cut
            offsets = kept
        else:
            offsets = torch.tensor([0, cut, 640], device=DEVICE, dtype=torch.int32)
        assert torch.equal(op(*tensors, cu_seqlens=offsets)[0], expected[cut])


def test_wrong_offsets_on_the_device_stay_inside_the_tensors():
    tensors = draw(256, 1, 2, 64)
    for offsets in ([0, 100, 5000], [-70, 100, 256], [0, 200, 100, 256]):
        op(*tensors, cu_seqlens=torch.tensor(offsets, device=DEVICE))
    torch.cuda.synchronize()


def test_views_of_one_projection_are_read_in_place():
    q, k, v, g, beta = draw(520, 2, 4, 128)
    packed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    views = [x.unflatten(-1, (-1, 128)) for x in packed.split([256, 256, 512], -1)]
    torch.cuda.synchronize()
    expected = op(q, k, v, g, beta)[0]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = op(*views, g, beta)[0]
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op(q, k, v, g, beta)
    assert torch.equal(o, expected)
    assert peak <= torch.cuda.max_memory_allocated() - before, "a copy was made"


def test_repeats_bitwise():
    tensors = draw(5000, 1, 4, 128, "mixed")
    first = op(*tensors, output_final_state=True)
    for _ in range(5):
        assert all(map(torch.equal, first, op(*tensors, output_final_state=True)))


def test_one_graph_serves_all_offsets_of_its_capacity():
    tensors = draw(1000, 1, 2, 128)
    offsets = torch.tensor([0, 400, 1000, 1000], device=DEVICE, dtype=torch.int32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op(*tensors, cu_seqlens=offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = op(*tensors, cu_seqlens=offsets)
    for ends in ([0, 400, 1000, 1000], [0, 1, 500, 990], [0, 0, 0, 77]):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        assert torch.equal(o, op(*tensors, cu_seqlens=torch.tensor(ends))[0])


def test_tables_made_in_a_capture_are_not_kept():
    op(*draw(640, 1, 2, 128))  # loads the kernels
    tensors = draw(704, 1, 2, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed, _ = op(*tensors)
    eager, _ = op(*tensors)
    graph.replay()
    assert torch.equal(replayed, eager)


def test_nothing_is_read_back_from_the_device():
    tensors = draw(700, 1, 2, 64)
    offsets = torch.tensor([0, 300, 700], device=DEVICE, dtype=torch.int32)
    op(*tensors, cu_seqlens=offsets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(*tensors, cu_seqlens=offsets)
        op(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _capsule_without_strides(x: torch.Tensor):
    """A DLPack capsule of x whose strides are NULL: a compact tensor."""
    capsule = torch.utils.dlpack.to_dlpack(x.contiguous())
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    strides_at = 8 + 8 + 4 + 4 + 8  # data, device, ndim, dtype, shape
    ctypes.c_void_p.from_address(get(capsule, b"dltensor") + strides_at).value = None
    return capsule


def test_capsules_without_strides():
    q, k, v, g, beta = draw(200, 1, 2, 64)
    expected = op(q, k, v, g, beta)[0]
    assert torch.equal(op(_capsule_without_strides(q), k, _capsule_without_strides(v), g, beta)[0], expected)


def _sharded(rank, offsets, layout, gates, exchange):
    tensors = draw(offsets[-1], 1, 2, 128, gates)
    initial = torch.randn(len(offsets) - 1, 2, 128, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, layout=layout, exchange=exchange)
    local = [context.shard(x) for x in tensors]
    with torch.no_grad():
        o, state = op(*local, initial_state=initial, output_final_state=True, cp_context=context)
        whole, ends = op(
            *tensors, initial_state=initial, output_final_state=True, cu_seqlens=torch.tensor(offsets).to(DEVICE)
        )
    return (
        context.unshard(o).cpu(),
        state.cpu(),
        whole.cpu(),
        ends.cpu(),
        [r for own in context.plan.ranges for r in own],
    )


def _expected(offsets, gates):
    tensors = draw(offsets[-1], 1, 2, 128, gates)
    initial = torch.randn(len(offsets) - 1, 2, 128, 128, generator=torch.Generator().manual_seed(1))
    return gated_delta_rule_oracle(
        *(x.double().cpu() for x in tensors), initial_state=initial.double(), cu_seqlens=torch.tensor(offsets)
    )


LAYOUTS = pytest.mark.parametrize(
    ("layout", "gates"), (("contiguous", "zero"), ("zigzag", "mixed"), ("zigzag_per_document", "weak"))
)


@LAYOUTS
@pytest.mark.parametrize("exchange", ("allgather", "sharded", "hierarchical"))
def test_ranks_are_as_exact_as_one(layout, gates, exchange):
    """Other segments than on one rank, so other roundings of bf16 operands: compared through the oracle."""
    offsets = [0, 2304, 2304, 3456]
    results = run_ranks(_sharded, 3, offsets, layout, gates, exchange, timeout=300.0)
    o, _, whole, ends, ranges = results[0]
    expected, states = _expected(offsets, gates)
    cuts = [start for start, _ in ranges]
    pairs = (
        (relative_l2(o, expected), relative_l2(whole, expected)),
        (worst_after_cuts(o, expected, cuts), worst_after_cuts(whole, expected, cuts)),
        (relative_l2(sum(r[1] for r in results), states), relative_l2(ends, states)),
    )
    assert all(sharded <= BAR and sharded <= 1.15 * alone for sharded, alone in pairs), pairs


@LAYOUTS
def test_ranks_with_cuts_inside_chunks_against_the_oracle(layout, gates):
    """Other chunks than on one rank, so other roundings of the operands: held to the oracle, like one rank."""
    offsets = [0, 2200, 2200, 2600, 4001]
    results = run_ranks(_sharded, 3, offsets, layout, gates, "allgather", timeout=300.0)
    expected, states = _expected(offsets, gates)
    assert relative_l2(results[0][0], expected) <= BAR
    assert worst_after_cuts(results[0][0], expected, [start for start, _ in results[0][4]]) <= BAR
    assert relative_l2(sum(r[1] for r in results), states) <= BAR
