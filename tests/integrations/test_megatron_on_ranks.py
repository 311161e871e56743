"""GPT models of megatron-core sharded over 2 and 4 ranks against the stock layers of Megatron in one process.

The batches are sliced by Megatron itself, in its zigzag layouts. Where the release has a context parallelism of its own
for these layers (an all-to-all of the heads, from 0.18), it is a second oracle. One start of the ranks runs all cases.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bars import hold, hold_control
from tiny_megatron import (
    cpu_as_gpu,
    fill,
    full_gradients,
    initialize,
    make_batch,
    make_block_spec,
    make_config,
    make_model,
    make_packed,
    release,
    slice_documents,
    slice_sequences,
    step,
    stock_on_cpu,
)

from flashqla_cp import build_cp_context, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.integrations.megatron import layer as layer_module
from flashqla_cp.integrations.megatron import with_context_parallel_gdn
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.spawn import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

PACKED = (0, 48, 72, 96, 96, 192)  # divisible by 8, one document without tokens
RAGGED = (0, 41, 48, 192)  # for layouts that cut the stream, not the documents
Result = tuple[float, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    layer: str = "ours"
    offsets: tuple[int, ...] | None = None
    packed_layout: str = "zigzag_per_document"
    exchange: str = "auto"
    tensor_parallel: int = 1
    dynamic_group: bool = False
    extra_prediction: bool = False
    oracle: str = "stock"
    broken: str = ""

    def __str__(self) -> str:
        words = [self.layer] * (self.layer != "ours") + [self.oracle] * (self.oracle != "stock")
        words += ["thd"] * (self.offsets is not None) + [self.packed_layout] * (
            self.packed_layout != "zigzag_per_document"
        )
        words += [self.exchange] * (self.exchange != "auto") + [f"tp{self.tensor_parallel}"] * (
            self.tensor_parallel > 1
        )
        words += ["dynamic-group"] * self.dynamic_group + ["mtp"] * self.extra_prediction + [self.broken]
        return "-".join([word for word in words if word]) or "sbhd"


CASES = [
    Case(),
    Case(offsets=PACKED),
    *(Case(offsets=RAGGED, packed_layout=layout) for layout in ("zigzag", "contiguous")),
    *(Case(exchange=exchange) for exchange in ("sharded", "hierarchical", "headwise")),
    Case(exchange="sharded", offsets=PACKED),
    *(Case(dynamic_group=True, offsets=offsets) for offsets in (None, PACKED)),
    Case(extra_prediction=True, oracle="ours alone"),
    Case(tensor_parallel=2),
    Case(tensor_parallel=2, offsets=PACKED),
    Case(layer="stock"),
    Case(oracle="stock on ranks"),
    *(Case(broken=what, offsets=offsets) for what in ("state", "halo") for offsets in (None, PACKED)),
]


def why_not(case: Case, world_size: int) -> str | None:
    """Why a case cannot run here."""
    on_ranks = case.layer == "stock" or case.oracle == "stock on ranks"
    if on_ranks and release() < (0, 19):
        return "this release has no context parallelism of its own that runs here"
    if on_ranks and world_size > 2:
        return "Megatron's own shards 2 key heads over at most 2 ranks"
    return None


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", [case for case in CASES if not case.broken], ids=str)
def test_loss_and_gradients(case: Case, world_size: int) -> None:
    reason = why_not(case, world_size)
    if reason:
        pytest.skip(reason)
    for found in results(world_size)[str(case)]:
        hold(found)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", [case for case in CASES if case.broken], ids=str)
def test_control_is_seen(case: Case, world_size: int) -> None:
    for found in results(world_size)[str(case)]:
        hold_control(found)


def test_bars_hold_on_one_rank() -> None:
    """The same model unsharded: what the two implementations differ by anyway."""
    (found,) = run_ranks(run_cases, 1, [Case(), Case(offsets=PACKED)], timeout=200.0)
    for scores in found.values():
        hold(scores)


@functools.cache
def results(world_size: int) -> dict[str, list[dict[str, float]]]:
    """Per case the errors on each rank."""
    assert len({str(case) for case in CASES}) == len(CASES)
    cases = [case for case in CASES if why_not(case, world_size) is None]
    per_rank = run_ranks(run_cases, world_size, cases, timeout=400.0)
    return {name: [dict(found[name]) for found in per_rank] for name in per_rank[0]}


def run_cases(rank: int, cases: list[Case]) -> dict[str, dict[str, float]]:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron fuses the gated norm with torch.compile, which takes a minute
    torch._dynamo.config.disable = True
    return {str(case): run_case(case) for case in cases}


def run_case(case: Case) -> dict[str, float]:
    loss, gradients = train(case)
    wanted_loss, wanted = expected(case)
    assert set(gradients) == set(wanted)
    scores = {name: relative_l2(gradients[name], wanted[name]) for name in wanted}
    return {"loss": abs(loss - wanted_loss) / wanted_loss} | scores


def train(case: Case) -> Result:
    """One step on this rank's part; the loss and the gradients, summed over the ranks."""
    from megatron.core import parallel_state

    world = dist.get_world_size()
    tensor_parallel = min(case.tensor_parallel, world)
    initialize(1 if case.dynamic_group else world // tensor_parallel, tensor_parallel)
    group = dist.group.WORLD if case.dynamic_group else parallel_state.get_context_parallel_group()
    model = build(case, group.size(), tensor_parallel)
    fill(model)
    batch = make_batch(case.offsets)
    with lent(case), broken(case.broken):
        part, packed = slice_batch(case, batch, group)
        loss = step(model, part, batch["loss_mask"].sum(), packed)
    total = loss.clone()
    dist.all_reduce(total, group=group)
    return total.item(), full_gradients(model, group)


def build(case: Case, size: int, tensor_parallel: int) -> Any:
    config = make_config(
        1 if case.dynamic_group else size,
        tensor_parallel,
        perform_initialization=case.layer == "ours",
        mtp_num_layers=1 if case.extra_prediction else None,
        calculate_per_token_loss=case.extra_prediction,
    )
    spec = make_block_spec(config)
    if case.layer == "stock":
        with stock_on_cpu():
            return make_model(config, spec)
    options = {"exchange": case.exchange, "packed_layout": case.packed_layout}
    extra = {}
    if case.extra_prediction:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        extra = {"mtp_block_spec": with_context_parallel_gdn(block, **options)}
    return make_model(config, with_context_parallel_gdn(spec, **options), **extra)


def lent(case: Case) -> Any:
    """What other parts of Megatron need on the CPU; our layer alone needs nothing."""
    if case.layer == "stock":
        return stock_on_cpu()
    return cpu_as_gpu() if case.extra_prediction or case.tensor_parallel > 1 else contextlib.nullcontext()


def slice_batch(case: Case, batch: dict[str, torch.Tensor], group: Any) -> tuple[dict[str, torch.Tensor], Any]:
    size, rank = group.size(), group.rank()
    dynamic = {"cp_group": group, "local_cp_size": size} if case.dynamic_group else {}
    if case.offsets is None:
        return slice_sequences(batch, group), make_packed((0, 96), "sbhd", **dynamic) if dynamic else None
    packed = make_packed(case.offsets, "thd", **dynamic)
    if case.packed_layout == "zigzag":
        return slice_sequences(batch, group), packed
    if case.packed_layout == "contiguous":
        context = build_cp_context(case.offsets, group)
        return {name: context.shard(x) for name, x in batch.items()}, packed
    return slice_documents(batch, case.offsets, rank, size), packed


def expected(case: Case) -> Result:
    if case.oracle == "stock on ranks":
        return train(Case(layer="stock", offsets=case.offsets))
    return alone(case.offsets, case.extra_prediction)


@functools.cache
def alone(offsets: tuple[int, ...] | None, extra_prediction: bool) -> Result:
    """The unsharded model, document by document: with the stock layer, unless Megatron refuses to build it."""
    initialize(1)
    case = Case(layer="ours" if extra_prediction else "stock", extra_prediction=extra_prediction)
    model = build(case, 1, 1)
    fill(model)
    batch, total = make_batch(offsets), 0.0
    bounds = [(None, None)] if offsets is None else list(pairwise(offsets))
    with lent(case):
        for start, end in bounds:
            if start is None or start < end:
                part = {name: x[:, start:end] for name, x in batch.items()}
                total += step(model, part, batch["loss_mask"].sum()).item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def broken(what: str) -> Any:
    """Run our layers without one of the two things that travel between ranks."""
    original = {"": None, "state": chunk_gated_delta_rule, "halo": causal_conv1d}[what]
    if original is None:
        yield
        return

    def alone(*args: Any, cu_seqlens: Any, cp_context: CPContext, **kwargs: Any) -> Any:
        return original(*args, cu_seqlens=cp_context.cu_seqlens_cpu, **kwargs)

    setattr(layer_module, original.__name__, alone)
    try:
        yield
    finally:
        setattr(layer_module, original.__name__, original)
