"""fla's functions with contexts of fla's build_cp_context on 2 and 4 ranks, against the fp64 recurrence."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.parallel.comm import record_collectives
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import causal_conv1d_oracle, gated_delta_rule_oracle
from flashqla_cp.testing.spawn import run_ranks

pytest.importorskip("fla", reason="flash-linear-attention is not installed")
pytest.importorskip("fla.backends", reason="flash-linear-attention before 0.6 has no way to register a backend")

BAR = 1e-10
TOKENS, H, HV, K, V, WIDTH = 96, 2, 4, 16, 8, 4
DOCUMENTS = ((0, 96), (0, 7, 30, 96), (0, 24, 48, 49, 96))


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: str = "contiguous"
    offsets: tuple[int, ...] = DOCUMENTS[1]
    exchange: str = "auto"
    context: str = "fla"
    broken: str = ""

    def __str__(self) -> str:
        words = [self.layout, "-".join(map(str, self.offsets)), self.exchange, self.context, self.broken]
        return " ".join(word for word in words if word and word not in ("auto", "fla"))


CASES = [
    *(Case(layout=layout, offsets=offsets) for layout in ("contiguous", "zigzag") for offsets in DOCUMENTS),
    *(Case(layout="zigzag", exchange=exchange) for exchange in ("sharded", "headwise")),
    Case(context="ours", layout="zigzag"),
    *(Case(layout=layout, broken="sharding") for layout in ("contiguous", "zigzag")),
]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", [case for case in CASES if not case.broken], ids=str)
def test_values_and_gradients(case: Case, world_size: int) -> None:
    for found in results(world_size)[str(case)]:
        worst = max(found, key=lambda name: found[name])
        assert found[worst] < BAR, (worst, found[worst])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", [case for case in CASES if case.broken], ids=str)
def test_control_is_seen(case: Case, world_size: int) -> None:
    """Every rank on its own pieces: what a context that is dropped on the way would give."""
    scores = [found[name] for found in results(world_size)[str(case)] for name in ("o", "y")]
    assert max(scores[::2]) > 0.01
    assert max(scores[1::2]) > 0.01


def test_context_is_translated_once() -> None:
    for first, again, other_exchange, text in run_ranks(count_collectives, 2, timeout=200.0):
        assert first == ["all_gather"] * 2 + again
        assert again == ["all_gather"]
        assert other_exchange == ["all_to_all"] * 2
        assert text == "cp_context: its offsets were edited since its first use; build a new context instead"


@functools.cache
def results(world_size: int) -> dict[str, list[dict[str, float]]]:
    per_rank = run_ranks(run_cases, world_size, CASES, timeout=300.0)
    return {name: [dict(found[name]) for found in per_rank] for name in per_rank[0]}


def run_cases(rank: int, cases: list[Case]) -> dict[str, dict[str, float]]:
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from flashqla_cp.integrations.fla import register_fla_backend

    found = {}
    for case in cases:
        register_fla_backend(exchange=case.exchange)
        found[str(case)] = run_case(case, chunk_gated_delta_rule, causal_conv1d)
    return found


def make_context(case: Case) -> Any:
    import fla.ops.cp

    import flashqla_cp

    build = {"fla": fla.ops.cp.build_cp_context, "ours": flashqla_cp.build_cp_context}[case.context]
    return build(torch.tensor(case.offsets), dist.group.WORLD, conv1d_kernel_size=WIDTH, layout=case.layout)


def run_case(case: Case, op: Any, conv: Any) -> dict[str, float]:
    import flashqla_cp

    ours = flashqla_cp.build_cp_context(case.offsets, dist.group.WORLD, layout=case.layout)
    documents = torch.tensor(case.offsets)
    stream = make_inputs(TOKENS, H, HV, K, V) | {"x": torch.randn(1, TOKENS, 6, dtype=torch.float64)}
    shared = {"weight": torch.randn(6, WIDTH, dtype=torch.float64), "bias": torch.randn(6, dtype=torch.float64)}
    for name, tensor in [*stream.items(), *shared.items()]:
        dist.broadcast(tensor.data, 0)
        (stream if name in stream else shared)[name] = tensor.detach().requires_grad_()
    x, inputs = stream["x"], {name: stream[name] for name in ("q", "k", "v", "g", "beta")}
    wanted = {
        "o": gated_delta_rule_oracle(**inputs, cu_seqlens=documents)[0],
        "y": causal_conv1d_oracle(x, shared["weight"], shared["bias"], "silu", documents),
    }
    local = {name: ours.shard(tensor).detach().requires_grad_() for name, tensor in stream.items()}
    where: dict[str, Any] = {"cp_context": make_context(case)}
    if case.broken:
        where = {"cu_seqlens": where["cp_context"].cu_seqlens}
    o, state = op(*(local[name] for name in inputs), **where)
    y, _ = conv(local["x"], shared["weight"], shared["bias"], activation="silu", **where)
    assert state is None
    factors = {
        name: torch.linspace(-1, 1, tensor.numel()).view(tensor.shape).double() for name, tensor in wanted.items()
    }
    loss = (o * ours.shard(factors["o"])).sum() + (y * ours.shard(factors["y"])).sum()
    found = dict(zip([*local, *shared], torch.autograd.grad(loss, [*local.values(), *shared.values()]), strict=True))
    total = sum((wanted[name] * factors[name]).sum() for name in wanted)
    gradients = torch.autograd.grad(total, [*stream.values(), *shared.values()])
    scores = {"o": relative_l2(o, ours.shard(wanted["o"])), "y": relative_l2(y, ours.shard(wanted["y"]))}
    for (name, value), gradient in zip(found.items(), gradients, strict=True):
        if name in shared:
            dist.all_reduce(value)
        scores[f"d{name}"] = relative_l2(value, gradient if name in shared else ours.shard(gradient))
    return scores


def count_collectives(rank: int) -> tuple[list[str], list[str], list[str], str]:
    """Collectives of two calls with a context, of one with another exchange, and the error after an edit."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

    from flashqla_cp.integrations.fla import register_fla_backend

    context = make_context(Case(offsets=(0, 7, 96)))
    tensors = make_inputs(TOKENS // 2, H, HV, K, V)
    names = []
    for exchange in ("allgather", "allgather", "sharded"):
        register_fla_backend(exchange=exchange)
        with record_collectives() as log:
            op(**tensors, cp_context=context)
        names.append([record.name for record in log])
    context.cu_seqlens_cpu[1] += 1
    with pytest.raises(ValueError, match="cp_context") as caught:
        op(**tensors, cp_context=context)
    return names[0], names[1], names[2], str(caught.value)
