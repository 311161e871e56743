"""Plugins on a GPU, in bf16 on kernels: models of transformers and calls of fla, alone and on ranks that share the GPU.

The reference is the unpatched model in fp32, from the same numbers, one document at a time. Two ways to be narrow:

    op      everything in fp32 but the op, which gets q, k and v in bf16
    model   all of it in bf16, as it is trained

Rounding its inputs to bf16 alone takes a model further from the reference than an op may be off, so each error may be
twice that of the same model on the torch backend, and the op's own bar. Gradients of the gates' parameters are sums
that nearly cancel: equally good roundings of one batch leave 2 to 16 % of error. So several batches count as one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import build_cp_context
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import causal_conv1d_oracle, gated_delta_rule_oracle
from flashqla_cp.testing.spawn import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integrations"))

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

DEVICE, BACKEND = "cuda", "tilelang"
OFFSETS = (0, 130, 131, 600)
BATCHES = 6
SIZES = {"hidden_size": 128, "intermediate_size": 128, "mlp_only_layers": [0, 1, 2]}  # no routing, which may flip
Errors = dict[str, float]


def excess(found: tuple[Errors, Errors]) -> Errors:
    """How many times as large as it may be each error is, of the loss and of the gradients. found: on kernels, and on
    the torch backend."""
    kernels, plain = found
    bars = {name: 5e-3 if name == "loss" else 2e-2 if name.endswith(("A_log", "dt_bias")) else 1e-2 for name in kernels}
    return {name: error / (bars[name] + 2 * plain[name]) for name, error in kernels.items()}


def needs_transformers(release: int) -> Any:
    """Skips without transformers, or with one that is too old."""

    def reason() -> str | None:
        if find_spec("transformers") is None:
            return "transformers is not installed"
        from importlib import metadata

        found = metadata.version("transformers")
        return None if int(found.split(".")[0]) >= release else f"transformers {found} has no such model"

    why = reason()
    return pytest.mark.skipif(why is not None, reason=why or "")


FAMILIES = [
    pytest.param("qwen3_next", marks=needs_transformers(4)),
    pytest.param("qwen3_5", marks=needs_transformers(5)),
]


@pytest.mark.parametrize("narrow", ["op", "model"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_model_on_one_rank(family: str, dim: int, narrow: str) -> None:
    check(1, family, dim, narrow, "contiguous")


@pytest.mark.parametrize("narrow", ["op", "model"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (3, "contiguous")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_model_on_ranks(family: str, ranks: int, layout: str, narrow: str) -> None:
    check(ranks, family, 64, narrow, layout)


@needs_transformers(4)
@pytest.mark.parametrize("what", ["state", "halo"])
def test_what_does_not_travel_is_seen(what: str) -> None:
    found, *_ = run_ranks(hybrid, 2, "qwen3_next", 64, "op", "contiguous", DEVICE, BACKEND, what, timeout=300.0)
    assert max(excess(found).values()) > 5, excess(found)


def check(ranks: int, family: str, dim: int, narrow: str, layout: str) -> None:
    for found in run_ranks(hybrid, ranks, family, dim, narrow, layout, DEVICE, BACKEND, "", timeout=300.0):
        bad = {name: (times, found[0][name]) for name, times in excess(found).items() if not times <= 1}
        assert not bad and len(found[0]) > 20, bad


def hybrid(
    rank: int, family: str, dim: int, narrow: str, layout: str, device: str, backend: str, broken: str
) -> tuple[Errors, Errors]:
    """Errors of a step of a hybrid model, sharded over the ranks of the default group: with `backend` and something
    broken, and on the torch backend with nothing broken; the same on each rank."""
    for name in ("fla", "causal_conv1d"):  # transformers would let them compute the reference
        sys.modules[name] = None  # type: ignore[assignment]
    from test_transformers_on_ranks import register_gathered_attention
    from tiny_transformers import HYBRID, gradients, make_batch, num_targets, token_loss
    from tiny_transformers import broken as without
    from tiny_transformers import make_model as make

    from flashqla_cp.integrations.transformers import enable_context_parallel, use_context

    sizes = SIZES | {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    batches = [{name: x.to(device) for name, x in make_batch(OFFSETS, seed).items()} for seed in range(BATCHES)]
    targets = num_targets(batches[0])

    def model(attention: str, *dtypes: torch.dtype) -> Any:
        made = make(family, HYBRID, attention, std=0.09, **sizes).to(device)
        for dtype in dtypes:
            made = made.to(dtype)
        return made

    def loss_of(net: Any, part: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = net(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
        return token_loss(logits.float(), part["labels"], targets)

    def of_batches(net: Any, step: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The loss and each gradient, [BATCHES, ...]. step: backward of a batch; gives its loss."""
        found = []
        for batch in batches:
            net.zero_grad()
            found.append({"loss": step(batch).float()} | {name: x.float() for name, x in gradients(net).items()})
        return {name: torch.stack([of[name] for of in found]) for name in found[0]}

    def by_documents(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for start, end in pairwise(OFFSETS):
            loss = loss_of(plain, {name: x[:, start:end] for name, x in batch.items()})
            loss.backward()
            total += loss.detach()
        return total

    plain = model("sdpa", torch.bfloat16, torch.float32)
    exact = of_batches(plain, by_documents)
    register_gathered_attention()
    context = build_cp_context(torch.tensor(OFFSETS, device=device), dist.group.WORLD, 4, layout=layout)

    def sharded(backend: str, broken: str) -> Errors:
        ours = model("gathered", torch.bfloat16, *([torch.float32] if narrow == "op" else []))
        enable_context_parallel(ours, dist.group.WORLD, layout=layout, backend=backend)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            with without(broken), narrow_op() if narrow == "op" else contextlib.nullcontext():
                with use_context(context):
                    loss = loss_of(ours, {name: context.shard(x) for name, x in batch.items()})
                loss.backward()
            return loss.detach()

        found = of_batches(ours, step)
        for x in found.values():
            dist.all_reduce(x)
        assert set(found) == set(exact)
        return {name: relative_l2(x, exact[name]) for name, x in found.items()}

    return sharded(backend, broken), sharded("torch", "")


@contextlib.contextmanager
def narrow_op() -> Iterator[None]:
    """The op of the plugin gets bf16 and gives back fp32."""
    from flashqla_cp.integrations import transformers as plugin

    inner = plugin.chunk_gated_delta_rule

    def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> Any:
        o, state = inner(*(x.bfloat16() for x in (q, k, v)), *rest, **options)
        return o.to(q.dtype), state

    plugin.chunk_gated_delta_rule = op  # type: ignore[assignment]
    try:
        yield
    finally:
        plugin.chunk_gated_delta_rule = inner


TOKENS, H, HV, WIDTH = 320, 1, 2, 4
NAMES = ("q", "k", "v", "g", "beta")
OP_BARS = {"o": 5e-3, "g": 2e-2}


@pytest.mark.parametrize(("ranks", "layout"), [(1, "none"), (2, "contiguous"), (2, "zigzag")])
def test_calls_of_fla(ranks: int, layout: str) -> None:
    pytest.importorskip("fla.backends", reason="flash-linear-attention 0.6 is not installed")
    for found in run_ranks(fla_calls, ranks, layout, DEVICE, timeout=300.0):
        bad = {name: error for name, error in found.items() if not error <= OP_BARS.get(name, 1e-2)}
        assert not bad and set(found) == {"o", *NAMES, "y", "x", "weight"}, bad


def fla_calls(rank: int, layout: str, device: str) -> Errors:
    """Errors of fla's op and convolution, bf16, as this library runs them, against the fp64 recurrence."""
    import fla.ops.gated_delta_rule as target
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.cp import build_cp_context as build_fla_context

    from flashqla_cp.integrations.fla import calls, register_fla_backend

    ran: list[str] = []
    calls.chunk_gated_delta_rule = seen(calls.chunk_gated_delta_rule, "op", ran)  # type: ignore[assignment]
    calls.causal_conv1d = seen(calls.causal_conv1d, "conv", ran)  # type: ignore[assignment]
    register_fla_backend()
    ran.clear()
    offsets = torch.tensor([0, 100, TOKENS], device=device)
    where: dict[str, Any] = {"cu_seqlens": offsets}
    shard = gather = lambda x: x
    if layout != "none":
        where = {"cp_context": build_fla_context(offsets, dist.group.WORLD, conv1d_kernel_size=WIDTH, layout=layout)}
        context = build_cp_context(offsets, dist.group.WORLD, layout=layout)
        shard, gather = context.shard, context.unshard
    x = make_inputs(TOKENS, H, HV, 64, 64, gates="mixed", dtype=torch.bfloat16, device=device)
    rows, taps = x["v"].detach().flatten(2), torch.randn(HV * 64, WIDTH, generator=torch.Generator().manual_seed(3))
    taps = taps.to(device, torch.bfloat16)
    do = torch.randn(rows.shape, generator=torch.Generator().manual_seed(4)).to(device, torch.bfloat16)

    wide = [x[name].detach().double().requires_grad_() for name in NAMES]
    o, _ = gated_delta_rule_oracle(*wide, cu_seqlens=offsets)
    wide_rows = [y.double().requires_grad_() for y in (rows, taps)]
    y, _ = unpack(causal_conv1d_oracle(*wide_rows, None, "silu", offsets))
    exact = dict(zip(NAMES, torch.autograd.grad((o.flatten(2) * do).sum(), wide), strict=True)) | {"o": o, "y": y}
    exact |= dict(zip(("x", "weight"), torch.autograd.grad((y * do).sum(), wide_rows), strict=True))

    own = [shard(x[name].detach()).requires_grad_() for name in NAMES]
    o, _ = target.chunk_gated_delta_rule(*own, **where)
    found = dict(zip(NAMES, torch.autograd.grad((o.flatten(2) * shard(do)).sum(), own), strict=True)) | {"o": o}
    own = [shard(rows).clone().requires_grad_(), taps.clone().requires_grad_()]
    y, _ = unpack(causal_conv1d(own[0], own[1], activation="silu", **where))
    found |= {"y": y}
    dx, dweight = torch.autograd.grad((y * shard(do)).sum(), own)
    found = {name: gather(value.detach()) for name, value in (found | {"x": dx}).items()}
    total = dweight.float()
    dist.all_reduce(total)
    assert ran == ["op", "conv"], f"fla ran something itself: {ran}"
    return {name: relative_l2(value, exact[name]) for name, value in (found | {"weight": total}).items()}


def unpack(result: Any) -> tuple[Any, Any]:
    return result if isinstance(result, tuple) else (result, None)


def seen(function: Callable[..., Any], name: str, ran: list[str]) -> Callable[..., Any]:
    """The function, with its name noted when it is called."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        ran.append(name)
        return function(*args, **kwargs)

    return run
