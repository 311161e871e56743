"""The backward on TileLang kernels, on the device: numbers, bits, memory, machinery of torch."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from flashqla_cp import build_cp_context, chunk_gated_delta_rule
from flashqla_cp.kernels.host import backward
from flashqla_cp.kernels.host.launcher import machine_of
from flashqla_cp.testing.inputs import GATES, make_inputs
from flashqla_cp.testing.metrics import relative_l2, worst_after_cuts
from flashqla_cp.testing.spawn import run_ranks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BARS = {"q": 1e-2, "k": 1e-2, "v": 1e-2, "g": 2e-2, "beta": 1e-2, "initial_state": 1e-2, "A_log": 2e-2, "dt_bias": 2e-2}
op = functools.partial(chunk_gated_delta_rule, backend="tilelang")


@pytest.fixture(autouse=True)
def _needs_kernels():
    if machine_of(torch.device(DEVICE))[0] is None:
        pytest.skip("no kernels for this device")


def draw(tokens, heads, v_heads, dim, gates="mixed", dtype=torch.bfloat16, seed=0):
    """q, k, v, g, beta on the device, without gradients."""
    x = make_inputs(tokens, heads, v_heads, dim, dim, gates=gates, dtype=dtype, device=DEVICE, seed=seed)
    return {name: x[name].detach() for name in ("q", "k", "v", "g", "beta")}


def leaves(tensors, wide=False):
    """Fresh leaves, in fp64 if `wide`."""
    return {name: (x.double() if wide else x.clone()).requires_grad_() for name, x in tensors.items()}


def gradients(run, tensors, do, dfinal=None, **options):
    """Gradients of o . do (+ final . dfinal) in all tensors."""
    o, final = run(**tensors, output_final_state=dfinal is not None, **options)
    loss = (o * do.to(o.dtype)).sum()
    if dfinal is not None:
        loss = loss + (final * dfinal.to(final.dtype)).sum()
    return dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))


def check(tensors, offsets=None, final=False, **options):
    """Compare with the torch backend in fp64, which itself is held to the per-token oracle elsewhere."""
    cu = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(7)
    do = torch.randn(tensors["v"].shape, device=DEVICE, generator=generator).to(tensors["v"].dtype)
    v = tensors["v"]
    number = v.shape[0] if offsets is None else len(offsets) - 1
    dfinal = torch.randn(number, v.shape[2], v.shape[3], v.shape[3], device=DEVICE, generator=generator)
    dfinal = dfinal if final else None
    found = gradients(op, leaves(tensors), do, dfinal, cu_seqlens=cu, **options)
    torch_op = functools.partial(chunk_gated_delta_rule, backend="torch")
    expected = gradients(torch_op, leaves(tensors, wide=True), do.double(), dfinal, cu_seqlens=cu, **options)
    errors = {name: relative_l2(found[name], expected[name]) for name in found}
    assert all(errors[name] <= BARS[name] for name in errors), errors
    end = tensors["q"].shape[1] if offsets is None else offsets[-1]
    assert all(torch.all(found[name][:, end:] == 0) for name in ("q", "k", "v", "g", "beta"))
    return found


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dim", (64, 128))
def test_against_fp64(gates, dim):
    check(draw(900, 1, 2, dim, gates), [0, 500, 500, 563, 870])


@pytest.mark.parametrize("ratio", (1, 2, 3, 4, 8))
def test_groups_of_value_heads(ratio):
    check(draw(300, 2, 2 * ratio, 64))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_states_norms_and_dtypes(dtype):
    tensors = draw(700, 2, 4, 128, "weak", dtype)
    tensors |= {"q": tensors["q"] * 0.3, "k": tensors["k"] * 2.5}
    tensors["initial_state"] = torch.randn(3, 4, 128, 128, device=DEVICE)
    check(tensors, [0, 650, 650, 700], final=True, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_long_keys_beside_large_values(dtype):
    tensors = draw(700, 2, 4, 128, "weak", dtype)
    tensors["k"][:, 5::7] *= 1e4
    tensors["v"] *= 60
    check(tensors, [0, 650, 650, 700], use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("gates", ("weak", "mixed"))
def test_long_documents_that_are_cut_inside_the_card_and_in_slabs(gates):
    check(draw(6000, 1, 2, 128, gates), final=True)


def test_slabs_change_no_bit(monkeypatch):
    tensors = draw(3000, 3, 6, 128)
    do = torch.randn_like(tensors["v"])
    whole = gradients(op, leaves(tensors), do)
    monkeypatch.setattr(backward, "SCRATCH_BUDGET", 1)  # a slab a group
    parts = gradients(op, leaves(tensors), do)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_tensors_at_odd_addresses():
    tensors = draw(200, 1, 2, 64)
    do = torch.randn_like(tensors["v"])
    plain = gradients(op, leaves(tensors), do)
    shifted = {name: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape) for name, x in tensors.items()}
    odd = torch.cat([do.new_zeros(3), do.flatten()])[3:].view(do.shape)
    given = {name: x.detach().requires_grad_() for name, x in shifted.items()}
    o, _ = op(**given)
    found = torch.autograd.grad(o, list(given.values()), odd)
    assert all(map(torch.equal, found, plain.values()))


def test_a_scale_below_zero_and_numbers_that_are_none():
    tensors = draw(300, 1, 2, 64)
    check(tensors, scale=-0.2)
    spoiled = {name: x.clone() for name, x in tensors.items()}
    spoiled["beta"][0, 10] = float("nan")
    assert op(**spoiled)[0].isnan().any(), "a NaN was hidden"


@pytest.mark.parametrize("strong", (False, True))
def test_gates_made_inside(strong):
    tensors = draw(1500, 1, 4, 128)
    tensors["g"] = torch.randn_like(tensors["g"]) + (2 if strong else -4)
    tensors["beta"] = torch.randn_like(tensors["beta"])
    tensors["A_log"] = torch.rand(4, device=DEVICE) * 2.7
    tensors["dt_bias"] = torch.randn(4, device=DEVICE)
    check(tensors, [0, 700, 1490], use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


@pytest.mark.parametrize("fill", (-20.0, -90.0, 0.0))
def test_extreme_gates(fill):
    tensors = draw(400, 1, 2, 128, "weak")
    tensors["g"] = tensors["g"].clone()
    tensors["g"][:, 100 if fill < -80 else slice(None)] = fill
    check(tensors)


def test_tokens_that_write_nothing():
    tensors = draw(300, 1, 2, 128)
    tensors["beta"] = tensors["beta"].clone()
    tensors["beta"][:, ::3] = 0
    check(tensors)


def test_gates_that_scale_no_state_have_no_gradient():
    tensors, offsets = draw(700, 2, 4, 128, "weak"), [0, 130, 500, 700]
    do = torch.randn_like(tensors["v"])
    found = gradients(op, leaves(tensors), do, cu_seqlens=torch.tensor(offsets, device=DEVICE))
    assert torch.all(found["g"][0, offsets[:-1]] == 0) and torch.all(found["g"][0, 1:130] != 0)


def test_documents_do_not_see_each_other():
    tensors, offsets = draw(800, 1, 2, 128, "weak"), torch.tensor([0, 300, 333, 700], device=DEVICE)
    do = torch.randn_like(tensors["v"])
    spoiled, spoiled_do = {name: x.clone() for name, x in tensors.items()}, do.clone()
    for x in (*spoiled.values(), spoiled_do):
        x[:, 300:333] = float("nan")
        x[:, 700:] = float("inf")
    found = []
    for given, dout in ((tensors, do), (spoiled, spoiled_do)):
        given = leaves(given)
        o, _ = op(**given, cu_seqlens=offsets)
        found.append(torch.autograd.grad(o, list(given.values()), dout))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before[:, :300], after[:, :300]) and torch.equal(before[:, 333:700], after[:, 333:700])
        assert torch.all(after[:, 700:] == 0)


def test_ghost_documents_change_no_bit():
    tensors = draw(2000, 1, 2, 128)
    do = torch.randn_like(tensors["v"])
    plain = torch.tensor([0, 900, 1984], device=DEVICE)
    padded = torch.cat([plain, plain[-1:].expand(120)])
    one, other = (gradients(op, leaves(tensors), do, cu_seqlens=x) for x in (plain, padded))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("gates", ("mixed", "zero"))
def test_repeats_bitwise(gates):
    tensors = draw(5000, 1, 4, 128, gates)
    do = torch.randn_like(tensors["v"])
    first = gradients(op, leaves(tensors), do)
    for _ in range(4):
        again = gradients(op, leaves(tensors), do)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_nothing_is_read_back_from_the_device():
    tensors, do = leaves(draw(700, 1, 2, 64)), torch.randn(1, 700, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 300, 700], device=DEVICE, dtype=torch.int32)
    gradients(op, tensors, do, cu_seqlens=offsets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for cu in (offsets, None):
            o, _ = op(**tensors, cu_seqlens=cu)
            torch.autograd.grad(o, list(tensors.values()), do)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_graph_of_a_step_serves_all_offsets_of_its_capacity():
    tensors, do = leaves(draw(1000, 1, 2, 128)), torch.randn(1, 1000, 2, 128, device=DEVICE, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 400, 1000, 1000], device=DEVICE, dtype=torch.int32)

    def step(cu):
        o, _ = op(**tensors, cu_seqlens=cu)
        return torch.autograd.grad(o, list(tensors.values()), do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(offsets)
    for ends in ([0, 400, 1000, 1000], [0, 1, 500, 990], [0, 0, 0, 77]):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        assert all(map(torch.equal, captured, step(torch.tensor(ends, device=DEVICE))))


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing(reentrant):
    tensors = draw(500, 1, 2, 64)
    do = torch.randn_like(tensors["v"])
    plain = gradients(op, leaves(tensors), do)

    def run(**given):
        names = list(given)
        return checkpoint(lambda *x: op(**dict(zip(names, x, strict=True))), *given.values(), use_reentrant=reentrant)

    given = leaves(tensors)
    o, _ = run(**given)
    found = torch.autograd.grad(o, list(given.values()), do) if not reentrant else None
    if reentrant:
        o.backward(do)
        found = [x.grad for x in given.values()]
    assert all(map(torch.equal, found, plain.values()))


def test_autocast_and_a_side_stream():
    tensors = draw(500, 1, 2, 64)
    do = torch.randn_like(tensors["v"])
    plain = gradients(op, leaves(tensors), do)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.autocast("cuda", torch.float16):
        found = gradients(op, leaves(tensors), do)
    torch.cuda.synchronize()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def _sharded(rank, offsets, layout, gates, exchange):
    tensors = draw(offsets[-1], 1, 2, 128, gates)
    tensors["initial_state"] = torch.randn(
        len(offsets) - 1, 2, 128, 128, generator=torch.Generator().manual_seed(1)
    ).to(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(7)
    do = torch.randn(tensors["v"].shape, device=DEVICE, generator=generator).to(torch.bfloat16)
    dfinal = torch.randn(tensors["initial_state"].shape, device=DEVICE, generator=generator)
    context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, layout=layout, exchange=exchange)
    given = {name: x if name == "initial_state" else context.shard(x) for name, x in tensors.items()}
    given = leaves(given)
    o, final = op(**given, output_final_state=True, cp_context=context)
    loss = (o * context.shard(do)).float().sum() + (final * dfinal).sum()
    found = torch.autograd.grad(loss, list(given.values()))
    whole = {n: (context.unshard(x) if n != "initial_state" else x).cpu() for n, x in zip(given, found, strict=True)}
    torch_op = functools.partial(chunk_gated_delta_rule, backend="torch")
    expected = gradients(torch_op, leaves(tensors, wide=True), do.double(), dfinal, cu_seqlens=torch.tensor(offsets))
    cuts = [start for owned in context.plan.ranges for start, _ in owned]
    return whole, {name: x.cpu() for name, x in expected.items()}, cuts


@pytest.mark.parametrize(
    ("layout", "gates", "exchange"),
    (
        ("contiguous", "zero", "allgather"),
        ("contiguous", "zero", "sharded"),
        ("zigzag", "mixed", "hierarchical"),
        ("zigzag_per_document", "weak", "sharded"),
        ("zigzag", "zero", "headwise"),
    ),
)
def test_ranks_and_the_tokens_beside_cuts_against_fp64(layout, gates, exchange):
    offsets = [0, 2200, 2200, 2600, 4001]
    results = run_ranks(_sharded, 3, offsets, layout, gates, exchange, timeout=300.0)
    found, expected, cuts = results[0]
    found["initial_state"] = sum(r[0]["initial_state"] for r in results)
    errors = {name: relative_l2(found[name], expected[name]) for name in found}
    assert all(errors[name] <= BARS[name] for name in errors), errors
    for name in ("q", "k", "v", "g", "beta"):
        assert worst_after_cuts(found[name], expected[name], cuts) <= BARS[name], name
        # In front of cuts a gradient of g, which changes slowly, may pass through 0: there beside its usual size.
        usual = expected[name].norm() / expected[name].shape[1] ** 0.5
        for start in (cut - 32 for cut in cuts if cut > 0):
            exact = expected[name][:, start : start + 32]
            error = (found[name][:, start : start + 32] - exact).norm()
            assert error <= BARS[name] * max(exact.norm(), usual * 32**0.5), (name, start)
