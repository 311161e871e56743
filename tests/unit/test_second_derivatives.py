"""A gradient of which a gradient is wanted is refused: one without a graph would make a penalty on it vanish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from flashqla_cp import GatedDeltaNet, build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.oracle import gated_delta_rule_oracle
from flashqla_cp.testing.spawn import run_ranks

TOKENS = 40


def _op(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = make_inputs(TOKENS, 1, 2, 8, 6)
    return x["k"], chunk_gated_delta_rule(**x, **options)[0]


def _op_as_operator() -> tuple[torch.Tensor, torch.Tensor]:
    x = make_inputs(TOKENS, 1, 2, 8, 6)
    options = (0.3, False, False, False, False, False, "torch", "none", 0.0, True)
    return x["k"], torch.ops.flashqla_cp.gated_delta_rule(*x.values(), *[None] * 5, *options)[0]


def _conv() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(6, 4, requires_grad=True)
    return weight, causal_conv1d(torch.randn(1, TOKENS, 6), weight, activation=None)[0]


def _conv_as_operator() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(6, 4, requires_grad=True)
    arguments = (torch.randn(1, TOKENS, 6), weight, None, None, None, False, "torch", True)
    return weight, torch.ops.flashqla_cp.causal_conv1d(*arguments)[0]


def _layer(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    layer, x = GatedDeltaNet(16, head_dim=8, num_heads=2, **options), torch.randn(1, TOKENS, 16, requires_grad=True)
    return x, layer(x)


def _checkpointed_layer() -> tuple[torch.Tensor, torch.Tensor]:
    layer, x = GatedDeltaNet(16, head_dim=8, num_heads=2), torch.randn(1, TOKENS, 16, requires_grad=True)
    return x, checkpoint(layer, x, use_reentrant=False)


OP, CONV = "chunk_gated_delta_rule", "causal_conv1d"
CALLS: dict[str, tuple[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "op": (OP, _op),
    "op_keeping_nothing": (OP, lambda: _op(recompute="forward")),
    "op_as_an_operator": (OP, _op_as_operator),
    "convolution": (CONV, _conv),
    "convolution_as_an_operator": (CONV, _conv_as_operator),
    "layer": (OP, _layer),
    "layer_without_convolution": (OP, lambda: _layer(use_short_conv=False)),
    "checkpointed_layer": (OP, _checkpointed_layer),
}


@pytest.mark.parametrize("loss", (torch.sum, lambda o: o.square().sum()), ids=("linear", "square"))
@pytest.mark.parametrize("call", CALLS)
def test_is_refused(call: str, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    name, run = CALLS[call]
    leaf, o = run()
    with pytest.raises(RuntimeError, match=f"^{name}: is differentiable once, and create_graph=True asks"):
        torch.autograd.grad(loss(o), leaf, create_graph=True)


@pytest.mark.parametrize("call", CALLS)
def test_first_derivatives_are_given_as_often_as_wanted(call: str) -> None:
    leaf, o = CALLS[call][1]()
    both = [torch.autograd.grad(o.sum(), leaf, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*both) and not both[0].requires_grad


@pytest.mark.parametrize("reentrant", (False, True))
def test_both_kinds_of_checkpointing_go_on(reentrant: bool) -> None:
    """A backward inside a backward, and a forward in grad mode inside one."""
    gradients = []
    for kept in (True, False):
        torch.manual_seed(0)
        layer, x = GatedDeltaNet(16, head_dim=8, num_heads=2), torch.randn(1, TOKENS, 16, requires_grad=True)
        y = layer(x) if kept else checkpoint(layer, x, use_reentrant=reentrant)
        (y.sum() + y.square().sum()).backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(map(torch.equal, *gradients))


def test_a_compiled_penalty_is_not_dropped() -> None:
    x = make_inputs(TOKENS, 1, 2, 8, 6)
    o, _ = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")(**x)
    (dk,) = torch.autograd.grad(o.sum(), x["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dk.square().sum().backward()


def test_a_call_kept_out_of_that_loss_goes_on() -> None:
    """What the message advises: another part's penalty, and the formula that can be differentiated again."""
    k, o = _op()
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    (dw,) = torch.autograd.grad((o.detach() * w.square()).sum(), w, create_graph=True)
    (dw.square() + o.sum()).backward()
    assert w.grad is not None and w.grad != 0 and k.grad is not None
    x = make_inputs(6, 1, 2, 8, 6)
    (dk,) = torch.autograd.grad(gated_delta_rule_oracle(**x)[0].sum(), x["k"], create_graph=True)
    dk.square().sum().backward()
    assert torch.count_nonzero(x["k"].grad)


def _on_rank(rank: int, exchange: str) -> list[str]:
    torch.set_num_threads(1)
    context = build_cp_context(torch.tensor([0, 11, TOKENS]), dist.group.WORLD, exchange=exchange)
    x = {name: context.shard(t.detach()).requires_grad_() for name, t in make_inputs(TOKENS, 1, 2, 8, 6).items()}
    texts = []
    for results in (chunk_gated_delta_rule(**x, cp_context=context)[0], context.unshard(x["k"])):
        try:
            torch.autograd.grad(results.sum(), x["k"], create_graph=True)
            texts.append("given")
        except RuntimeError as error:
            texts.append(str(error).split(",")[0])
    return texts


@pytest.mark.parametrize("exchange", ("sharded", "headwise"))
def test_every_rank_refuses(exchange: str) -> None:
    expected = [f"{OP}: is differentiable once", "CPContext.unshard: is differentiable once"]
    assert run_ranks(_on_rank, 2, exchange) == [expected] * 2
