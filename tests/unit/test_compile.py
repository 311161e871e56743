"""torch.compile takes the op, the convolution and the layer into one graph, with the results of eager calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flashqla_cp import GatedDeltaNet, build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.parallel import context as contexts
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.spawn import run_ranks

OFFSETS = [0, 30, 30, 41, 64]
TOKENS = 70


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def compiled(function: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def op_step(
    run: Callable[..., Any], tokens: int = TOKENS, states: bool = True, gates: bool = False, **options: Any
) -> Any:
    """Results and gradients of the op in fp32."""
    x: dict[str, Any] = {
        n: t.detach().requires_grad_() for n, t in make_inputs(tokens, 1, 2, 8, 6, dtype=torch.float32).items()
    }
    if states:
        number = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else len(OFFSETS) - 1
        x["initial_state"] = torch.linspace(-1, 1, number * 96).view(number, 2, 8, 6).requires_grad_()
    if gates:
        x |= {"A_log": torch.zeros(2, requires_grad=True), "dt_bias": torch.ones(2, requires_grad=True)}
        options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    o, final = run(**x, output_final_state=states, use_qk_l2norm_in_kernel=True, backend="torch", **options)
    loss = (o * torch.arange(1.0, 7)).square().sum()
    (loss if final is None else loss + (final * torch.arange(6)).sum()).backward()
    return [t for t in (o, final) if t is not None] + [t.grad for t in x.values()]


def layer_step(layer: GatedDeltaNet, run: Callable[..., Any], x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Output and gradients of a layer."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x, **options)
    (y * torch.arange(1.0, 1 + y.shape[1])[:, None]).square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def make_layer(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(16, head_dim=8, num_heads=2, num_v_heads=4, backend="torch", conv_bias=True, **options)


@pytest.mark.parametrize(
    "options",
    (
        {"cu_seqlens": torch.tensor(OFFSETS)},
        {"cu_seqlens_cpu": torch.tensor([0, TOKENS], dtype=torch.int32), "states": False},
        {"states": False, "recompute": "forward"},
        {"cu_seqlens": torch.tensor(OFFSETS), "gates": True},
    ),
    ids=("packed", "cpu-offsets", "batch", "gates"),
)
def test_the_op(options: dict[str, Any]) -> None:
    assert all(
        map(
            torch.equal,
            op_step(compiled(chunk_gated_delta_rule), **options),
            op_step(chunk_gated_delta_rule, **options),
        )
    )


@pytest.mark.parametrize("activation", ("silu", None))
def test_the_convolution(activation: str | None) -> None:
    results = []
    for run in (causal_conv1d, compiled(causal_conv1d)):
        leaves = [
            torch.randn(*s, generator=torch.Generator().manual_seed(2)).requires_grad_()
            for s in ((1, TOKENS, 6), (6, 4), (6,))
        ]
        y, nothing = run(*leaves, activation, torch.tensor(OFFSETS))
        y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
        assert nothing is None
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("recompute", ("none", "solve"))
@pytest.mark.parametrize("offsets", (None, OFFSETS))
def test_the_layer(offsets: list[int] | None, recompute: str) -> None:
    layer, x = make_layer(recompute=recompute), torch.randn(1, TOKENS, 16)
    cu = None if offsets is None else torch.tensor(offsets)
    assert all(
        map(
            torch.equal,
            layer_step(layer, layer, x, cu_seqlens=cu),
            layer_step(layer, compiled(layer), x, cu_seqlens=cu),
        )
    )


@pytest.mark.slow
def test_the_layer_in_inductor() -> None:
    layer, cu = make_layer(dtype=torch.float64), torch.tensor(OFFSETS)
    x = torch.randn(1, TOKENS, 16, dtype=torch.float64)
    found = layer_step(layer, compiled(layer, "inductor"), x, cu_seqlens=cu)
    for a, b in zip(found, layer_step(layer, layer, x, cu_seqlens=cu), strict=True):
        assert relative_l2(a, b) <= 1e-10


def test_without_gradients() -> None:
    layer, x = make_layer(), torch.randn(2, TOKENS, 16)
    with torch.no_grad():
        assert torch.equal(compiled(layer)(x), layer(x))


def test_offsets_rewritten_before_the_backward() -> None:
    x = make_inputs(TOKENS, 1, 2, 8, 6, dtype=torch.float32)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    o, _ = compiled(chunk_gated_delta_rule)(**x, cu_seqlens=offsets)
    offsets.zero_()
    o.square().sum().backward()
    again = make_inputs(TOKENS, 1, 2, 8, 6, dtype=torch.float32)
    chunk_gated_delta_rule(**again, cu_seqlens=torch.tensor(OFFSETS))[0].square().sum().backward()
    assert all(torch.equal(x[name].grad, again[name].grad) for name in x)


def test_contexts_do_not_recompile_and_do_not_leak(group: dist.ProcessGroup) -> None:
    layer, x = make_layer(), torch.randn(1, TOKENS, 16)
    counter = CompileCounterWithBackend("aot_eager")
    run, before = compiled(layer, counter), len(contexts._contexts)

    def context(offsets: list[int]) -> CPContext:
        return build_cp_context(torch.tensor(offsets), group, num_tokens=TOKENS)

    for offsets in (OFFSETS, [0, 1, 2, 69], [0, TOKENS]):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        layer(leaves[0], cp_context=context(offsets)).square().sum().backward()
        y = run(leaves[1], cp_context=context(offsets))
        gc.collect()
        assert len(contexts._contexts) == before + 1  # nothing but the graph holds it
        y.square().sum().backward()
        assert leaves[1].grad is not None and torch.equal(leaves[0].grad, leaves[1].grad)
        del y
    assert counter.frame_count == 1
    gc.collect()
    assert len(contexts._contexts) == before


def test_two_micro_batches_in_flight(group: dist.ProcessGroup) -> None:
    layer, run = make_layer(), compiled(make_layer())
    both = [build_cp_context(torch.tensor(o), group, num_tokens=TOKENS) for o in (OFFSETS, [0, 11, 70])]
    x = [torch.randn(1, TOKENS, 16).requires_grad_() for _ in both]
    first, second = (run(a, cp_context=c) for a, c in zip(x, both, strict=True))
    torch.autograd.backward((second.square().sum(), first.square().sum()))
    for a, c in zip(x, both, strict=True):
        b = a.detach().requires_grad_()
        layer(b, cp_context=c).square().sum().backward()
        assert torch.equal(a.grad, b.grad)


def test_other_lengths_share_a_dynamic_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(chunk_gated_delta_rule, counter, dynamic=True)
    for tokens in (70, 90, 150):
        offsets = {"cu_seqlens": torch.tensor([0, 30, tokens])}
        assert all(
            map(torch.equal, op_step(run, tokens, **offsets), op_step(chunk_gated_delta_rule, tokens, **offsets))
        )
    assert counter.frame_count == 1


def test_without_fullgraph(group: dist.ProcessGroup) -> None:
    layer, x = make_layer(), torch.randn(1, TOKENS, 16)
    context = build_cp_context(torch.tensor(OFFSETS), group, num_tokens=TOKENS)
    run = torch.compile(layer, backend="aot_eager")
    assert all(
        map(torch.equal, layer_step(layer, run, x, cp_context=context), layer_step(layer, layer, x, cp_context=context))
    )


def test_the_rules_of_operators() -> None:
    x = make_inputs(TOKENS, 1, 2, 8, 6, dtype=torch.float32)
    extra = (
        torch.zeros(2, requires_grad=True),
        torch.ones(2, requires_grad=True),
        torch.zeros(4, 2, 8, 6, requires_grad=True),
    )
    options = (0.3, True, True, False, True, False, "torch", "none", 2.0**-24, True)
    torch.library.opcheck(
        torch.ops.flashqla_cp.gated_delta_rule.default, (*x.values(), *extra, torch.tensor(OFFSETS), None, *options)
    )
    conv = [torch.randn(*shape, requires_grad=True) for shape in ((1, TOKENS, 6), (6, 4), (6,))]
    torch.library.opcheck(
        torch.ops.flashqla_cp.causal_conv1d.default, (*conv, torch.tensor(OFFSETS), None, True, "torch", True)
    )


def test_what_is_refused() -> None:
    x = make_inputs(TOKENS, 1, 2, 8, 6, dtype=torch.float32)
    run = compiled(chunk_gated_delta_rule)
    with pytest.raises(Exception, match="cu_seqlens: ends at 99, past the 70 tokens there are"):
        run(**x, cu_seqlens=torch.tensor([0, 99]))
    with pytest.raises(Exception, match="recompute: got 'all'"):
        run(**x, recompute="all")
    with pytest.raises(Exception, match="v: expected \\[B, T\\] = \\[1, 70\\] in front"):
        run(**{**x, "v": x["v"][:, 1:]})


def _on_rank(rank: int, exchange: str) -> list[bool]:
    torch.set_num_threads(1)
    layer, counter = make_layer(), CompileCounterWithBackend("aot_eager")
    run, found = compiled(layer, counter), []
    for offsets in (OFFSETS, [0, 20, TOKENS]):
        whole = torch.randn(1, TOKENS, 16, generator=torch.Generator().manual_seed(1))
        context = build_cp_context(
            torch.tensor(offsets), dist.group.WORLD, num_tokens=TOKENS, layout="zigzag", exchange=exchange
        )
        x = context.shard(whole)
        eager = layer_step(layer, layer, x, cp_context=context)
        found += map(torch.equal, layer_step(layer, run, x, cp_context=context), eager)
    return [*found, counter.frame_count == 1]


@pytest.mark.parametrize("exchange", ("sharded", "headwise"))
def test_two_ranks(exchange: str) -> None:
    assert all(all(found) for found in run_ranks(_on_rank, 2, exchange, timeout=300.0))


def test_checkpointing_inside_a_graph(group: dist.ProcessGroup) -> None:
    """The forward runs again in the backward, when the graph alone holds the context."""
    layer, x = make_layer(), torch.randn(1, TOKENS, 16)

    def run(x: torch.Tensor, context: CPContext) -> torch.Tensor:
        return checkpoint(layer, x, cp_context=context, use_reentrant=False)

    results = []
    for function in (run, compiled(run)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = function(leaf, build_cp_context(torch.tensor(OFFSETS), group, num_tokens=TOKENS))
        gc.collect()
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    assert all(map(torch.equal, *results))
