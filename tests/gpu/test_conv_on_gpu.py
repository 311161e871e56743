"""The convolution on TileLang kernels, on the device: numbers, bits, memory, graphs, ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import GatedDeltaNet, build_cp_context, causal_conv1d
from flashqla_cp.kernels.host.launcher import machine_of
from flashqla_cp.testing.metrics import relative_l2, worst_after_cuts
from flashqla_cp.testing.oracle import causal_conv1d_oracle
from flashqla_cp.testing.spawn import run_ranks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BARS = {B16: 5e-3, F16: 1e-3, F32: 1e-5}
OFFSETS = [0, 900, 900, 901, 903, 1500, 1990]
TOKENS = 2000


@pytest.fixture(autouse=True)
def _needs_kernels():
    if machine_of(torch.device(DEVICE))[0] is None:
        pytest.skip("no kernels for this device")


def draw(tokens=TOKENS, channels=1024, width=4, dtype=B16, wide=None, bias=True):
    """x, weight, bias or None, and the gradient of y."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape, dtype):
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    x, dy = (normal(1, tokens, channels, dtype=dtype) for _ in range(2))
    parameters = [normal(channels, width, dtype=wide or dtype), normal(channels, dtype=wide or dtype) if bias else None]
    return x, *parameters, dy


def on_device(offsets):
    return torch.tensor(offsets, dtype=torch.int32, device=DEVICE)


def step(x, weight, bias, dy, offsets=None, function=causal_conv1d, activation="silu", **options):
    """y and the gradients of x, weight and, if there is one, bias."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    result = function(leaves[0], leaves[1], leaves[2] if bias is not None else None, activation, offsets, **options)
    y = result[0] if isinstance(result, tuple) else result
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def expected_of(tensors, offsets, activation):
    wide = [None if t is None else t.double() for t in tensors]
    return step(*wide, offsets, causal_conv1d_oracle, activation)


def hold(found, expected, dtype, wide=None):
    errors = [relative_l2(x, exact) for x, exact in zip(found, expected, strict=True)]
    assert max(errors[:2]) <= BARS[dtype] and max(errors[2:]) <= BARS[wide or dtype], errors


@pytest.mark.parametrize("activation", ("silu", None))
@pytest.mark.parametrize("width", (2, 3, 4))
@pytest.mark.parametrize(("dtype", "wide"), ((B16, None), (B16, F32), (F16, None), (F32, None)))
def test_against_fp64(dtype, wide, width, activation):
    tensors = draw(width=width, dtype=dtype, wide=wide)
    found = step(*tensors, on_device(OFFSETS), activation=activation, backend="tilelang")
    hold(found, expected_of(tensors, OFFSETS, activation), dtype, wide)
    assert all(torch.all(x[:, OFFSETS[-1] :] == 0) for x in found[:2])


@pytest.mark.parametrize("channels", (1, 37, 264, 8192))
def test_any_number_of_channels(channels):
    tensors = draw(channels=channels, bias=channels % 2 == 0)
    hold(step(*tensors, OFFSETS, backend="tilelang"), expected_of(tensors, OFFSETS, "silu"), B16)


def test_rows_of_a_batch():
    tensors = [t if t.ndim < 3 else t.view(4, TOKENS // 4, -1) for t in draw()]
    hold(step(*tensors, backend="tilelang"), expected_of(tensors, None, "silu"), B16)


def test_views_are_read_in_place():
    x, weight, bias, dy = draw()
    wide = torch.full((1, TOKENS, 3072), torch.nan, device=DEVICE, dtype=B16)
    wide[..., 512:1536] = x
    plain = step(x, weight, bias, dy, backend="tilelang")
    view = wide[..., 512:1536]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        causal_conv1d(view, weight, bias, backend="tilelang")
    used = torch.cuda.max_memory_allocated() - before
    assert used < x.numel() * 2 + 2**17, "more than y and a table of places was allocated"
    assert all(map(torch.equal, plain, step(view, weight, bias, dy, backend="tilelang")))
    both = torch.cat([dy, dy], -1)[..., 1024:]
    assert all(map(torch.equal, plain, step(x, weight, bias, both, backend="tilelang")))


def test_tensors_at_odd_addresses():
    tensors = draw()
    plain = step(*tensors, backend="tilelang")
    shifted = [torch.cat([t.new_zeros(3), t.flatten()])[3:].view(t.shape) for t in tensors]
    assert all(map(torch.equal, plain, step(*shifted, backend="tilelang")))


def test_documents_do_not_see_each_other():
    x, weight, bias, dy = draw()
    spoiled, spoiled_dy = x.clone(), dy.clone()
    for t in (spoiled, spoiled_dy):
        t[:, 901:903] = float("nan")
        t[:, 1500:1990] = float("inf")
        t[:, 1990:] = float("nan")
    kept = torch.cat([torch.arange(901), torch.arange(903, 1500)]).to(DEVICE)
    before = step(x, weight, bias, dy, on_device(OFFSETS), backend="tilelang")
    after = step(spoiled, weight, bias, spoiled_dy, on_device(OFFSETS), backend="tilelang")
    for one, other in zip(before[:2], after[:2], strict=True):
        assert torch.equal(one[:, kept], other[:, kept])
        assert torch.all(other[:, 1990:] == 0)


def test_ghost_documents_change_no_bit():
    tensors = draw()
    plain = step(*tensors, on_device(OFFSETS), backend="tilelang")
    padded = step(*tensors, on_device([*OFFSETS, *[OFFSETS[-1]] * 120]), backend="tilelang")
    assert all(map(torch.equal, plain, padded))


def test_repeats_bitwise():
    tensors = draw(8192, 2048)
    first = step(*tensors, backend="tilelang")
    for _ in range(4):
        assert all(map(torch.equal, first, step(*tensors, backend="tilelang")))


def test_nothing_is_read_back_from_the_device():
    tensors, offsets = draw(), on_device(OFFSETS)
    step(*tensors, offsets, backend="tilelang")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for cu in (offsets, None):
            step(*tensors, cu, backend="tilelang")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_graph_of_a_step_serves_all_offsets_of_its_capacity():
    tensors, offsets = draw(), on_device([0, 400, 2000, 2000])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*tensors, offsets, backend="tilelang")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*tensors, offsets, backend="tilelang")
    for ends in ([0, 400, 2000, 2000], [0, 1, 500, 1990], [0, 0, 0, 77]):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        assert all(map(torch.equal, captured, step(*tensors, on_device(ends), backend="tilelang")))


def test_more_numbers_than_32_bits_count():
    tokens, channels, end = 2**18 + 300, 8192, 500
    x, weight, bias, _ = draw(1, channels)
    x = torch.zeros(1, tokens, channels, device=DEVICE, dtype=B16)
    x[:, -end:] = torch.randn(end, channels, device=DEVICE, dtype=B16)
    short = x[:, -end:].contiguous()
    dy, short_dy = torch.zeros_like(x), torch.randn_like(short)
    dy[:, -end:] = short_dy
    found = step(x, weight, bias, dy, backend="tilelang")
    expected = step(short, weight, bias, short_dy, backend="tilelang")
    for whole, part in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(whole[:, -end:], part)
    for whole, part in zip(found[2:], expected[2:], strict=True):
        assert relative_l2(whole, part.double()) <= BARS[B16], "added up in another order"


def test_auto_takes_the_kernels_and_says_where_there_are_none():
    tensors = draw()
    assert all(map(torch.equal, step(*tensors), step(*tensors, backend="tilelang")))
    with pytest.raises(RuntimeError, match="weight: got 5 taps"):
        step(*draw(width=5))
    with pytest.raises(ValueError, match="weight: got 5 taps"):
        step(*draw(width=5), backend="tilelang")
    step(*draw(width=5), backend="torch")
    step(*(t.double() for t in tensors))


def test_the_layer_uses_them():
    torch.manual_seed(0)
    layer = GatedDeltaNet(256, head_dim=64, num_heads=2, num_v_heads=4, conv_bias=True, device=DEVICE, dtype=B16)
    x = torch.randn(1, 500, 256, device=DEVICE, dtype=B16)
    offsets = on_device([0, 200, 490])
    y = layer(x, offsets)
    layer.backend = "torch"
    assert relative_l2(y, layer(x, offsets)) <= 2e-2


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_it_gives_the_bits_of_an_eager_call(backend):
    torch._dynamo.reset()
    run = torch.compile(causal_conv1d, fullgraph=True, backend=backend)
    tensors, offsets = draw(), on_device(OFFSETS)
    plain = step(*tensors, offsets, backend="tilelang")
    assert all(map(torch.equal, plain, step(*tensors, offsets, run, backend="tilelang")))


def test_flas_convolution_runs_on_them():
    conv = pytest.importorskip("fla.modules.convolution").causal_conv1d
    from flashqla_cp.integrations.fla import register_fla_backend, unregister_fla_backend

    x, weight, bias, dy = draw()
    offsets = on_device(OFFSETS)
    plain = step(x, weight, bias, dy, offsets, backend="tilelang")
    register_fla_backend()
    try:
        flas = lambda x, weight, bias, activation, offsets: conv(
            x=x, weight=weight, bias=bias, activation=activation, cu_seqlens=offsets
        )
        assert all(map(torch.equal, plain, step(x, weight, bias, dy, offsets, flas)))
    finally:
        unregister_fla_backend()


def _sharded(rank, offsets, layout, tokens):
    torch.cuda.set_device(0)
    tensors = draw(tokens, 256, wide=F32)
    context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, 4, layout=layout, num_tokens=tokens)
    shards = [context.shard(t) if t.ndim == 3 else t for t in tensors]
    y, dx, *parameters = step(*shards, cp_context=context, backend="tilelang")
    cuts = [start for owned in context.plan.ranges for start, _ in owned]
    expected = [t.cpu() for t in expected_of(tensors, offsets, "silu")] if rank == 0 else None
    return [context.unshard(t).cpu() for t in (y, dx)] + [t.cpu() for t in parameters], expected, cuts


@pytest.mark.parametrize(
    ("ranks", "layout", "offsets", "tokens"),
    (
        (2, "contiguous", [0, 700, 700, 1901], 2000),
        (3, "zigzag", [0, 2, 900, 901, 2000], 2000),
        (3, "zigzag_per_document", [0, 5, 1000], 1000),
        (3, "contiguous", [0, 4], 4),
    ),
)
def test_ranks_against_fp64(ranks, layout, offsets, tokens):
    results = run_ranks(_sharded, ranks, offsets, layout, tokens, timeout=300.0)
    (y, dx, *_), expected, cuts = results[0]
    parameters = [sum(shares) for shares in zip(*(result[0][2:] for result in results), strict=True)]
    hold([y, dx, *parameters], expected, B16, F32)
    for x, exact in zip((y, dx), expected, strict=False):
        assert worst_after_cuts(x, exact, cuts, window=4) <= BARS[B16]
