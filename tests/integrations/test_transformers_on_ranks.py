"""Models of transformers sharded over 2 and 4 ranks against the unpatched model in one process.

Linear-attention models, whose other layers work token by token; full attention under context parallelism is not this
library's, so the hybrid model's attention gathers the sequence here. One start of the ranks runs all cases.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bars import BAR, hold, hold_control
from tiny_transformers import (
    HYBRID,
    LINEAR,
    OFFSETS,
    broken,
    errors,
    expected,
    families,
    make_batch,
    make_model,
    num_targets,
    token_loss,
)

from flashqla_cp import build_cp_context
from flashqla_cp.active import active_context
from flashqla_cp.integrations.transformers import disable_context_parallel, enable_context_parallel, use_context
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.testing.spawn import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

OTHER_OFFSETS = (0, 50, 64, 96)


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str = "qwen3_next"
    layers: tuple[str, ...] = LINEAR
    layout: str = "contiguous"
    exchange: str = "auto"
    source: str = "context"
    checkpoint: str = ""
    backward: str = "outside"
    fsdp: str = ""
    broken: str = ""
    batches: tuple[tuple[tuple[int, ...], int], ...] = field(default=((tuple(OFFSETS), 1),))

    def __str__(self) -> str:
        changed = [getattr(self, name) for name in self.__dataclass_fields__ if name not in ("layers", "batches")]
        extra = ["hybrid"] * (self.layers == HYBRID) + ["in-flight"] * (len(self.batches) > 1)
        return "-".join([word for word in changed if word] + extra)


TWO_BATCHES = ((tuple(OFFSETS), 1), (OTHER_OFFSETS, 2))
CASES = [
    *(Case(family=family, layout=layout) for family in families() for layout in ("contiguous", "zigzag")),
    *(Case(source=source, layout="zigzag") for source in ("argument", "cu_seqlens", "positions")),
    *(Case(source=source) for source in ("argument", "cu_seqlens", "positions")),
    Case(layout="zigzag_per_document", source="cu_seqlens"),
    *(Case(exchange=exchange) for exchange in ("sharded", "hierarchical", "headwise")),
    *(Case(checkpoint=how, backward="thread") for how in ("own", "own-reentrant", "wrapper", "wrapper-reentrant")),
    *(Case(checkpoint=how, backward="other") for how in ("own", "wrapper")),
    *(Case(checkpoint=how, batches=TWO_BATCHES) for how in ("", "own", "wrapper")),
    *(Case(checkpoint=how, source="positions") for how in ("own", "wrapper")),
    *(Case(fsdp=mesh, checkpoint=how) for mesh in ("one rank", "all ranks") for how in ("", "own")),
    Case(layers=HYBRID, layout="zigzag"),
    *(Case(broken=what, layout=layout) for what in ("state", "halo") for layout in ("contiguous", "zigzag")),
]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", [case for case in CASES if not case.broken], ids=str)
def test_loss_and_gradients(case: Case, world_size: int) -> None:
    for found in results(world_size)[str(case)]:
        hold(found)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", [case for case in CASES if case.broken], ids=str)
def test_control_is_seen(case: Case, world_size: int) -> None:
    for found in results(world_size)[str(case)]:
        hold_control(found)


def test_labels_that_one_rank_would_shift_and_average() -> None:
    wanted, _ = expected("qwen3_next")
    for texts, loss, disabled in run_ranks(lose_targets, 2, timeout=200.0):
        assert "labels: got them without shift_labels and num_items_in_batch, with the sequence sharded" in texts[0]
        assert "labels: got them without num_items_in_batch, with" in texts[1]
        assert abs(loss - wanted) < BAR["loss"] * wanted
        assert disabled


def lose_targets(rank: int) -> tuple[list[str], float, bool]:
    """Errors for labels without what must come with them, the summed loss with it, and whether disabling ends that."""
    model, batch = make_model("qwen3_next"), make_batch()
    enable_context_parallel(model, dist.group.WORLD)
    context = build_cp_context(OFFSETS, dist.group.WORLD)
    mine = {name: context.shard(x) for name, x in batch.items()}
    given = {"input_ids": mine["input_ids"], "labels": mine["input_ids"]}
    shifted, texts = {"shift_labels": mine["labels"]}, []
    with use_context(context):
        for more in ({}, shifted):
            with pytest.raises(ValueError, match="labels") as caught:
                model(**given, **more)
            texts.append(str(caught.value))
        loss = model(**given, **shifted, num_items_in_batch=num_targets(batch)).loss.detach()
    dist.all_reduce(loss)
    disable_context_parallel(model.model)
    return texts, loss.item(), bool(model(**given).loss > 0)


@functools.cache
def results(world_size: int) -> dict[str, list[dict[str, float]]]:
    """Per case the errors on each rank."""
    assert len({str(case) for case in CASES}) == len(CASES)
    per_rank = run_ranks(run_cases, world_size, CASES, timeout=400.0)
    return {name: [dict(found[name]) for found in per_rank] for name in per_rank[0]}


def run_cases(rank: int, cases: list[Case]) -> dict[str, dict[str, float]]:
    return {str(case): run_case(case) for case in cases}


def run_case(case: Case) -> dict[str, float]:
    """Train one step on this rank's part; errors of the summed loss and gradients."""
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    group: Any = dist.group.WORLD
    if case.layers == HYBRID:
        register_gathered_attention()
    model = make_model(case.family, case.layers, attention="gathered" if case.layers == HYBRID else "sdpa")
    if case.fsdp:
        group = init_device_mesh("cpu", (world, 1), mesh_dim_names=("cp", "fsdp"))["cp"]
    enable_context_parallel(model, group, layout=case.layout, exchange=case.exchange)
    shard_parameters(model, case.fsdp)
    wrap_checkpoints(model, case.checkpoint)
    with broken(case.broken):
        losses = [forward(model, case, offsets, seed) for offsets, seed in case.batches]
        scale = world if case.fsdp == "all ranks" else 1  # there FSDP averages over the ranks
        for loss in reversed(losses):
            backward(loss * scale, case.backward)
    total = torch.stack([loss.detach() for loss in losses]).sum()
    dist.all_reduce(total)
    wanted = [expected(case.family, case.layers, offsets, seed) for offsets, seed in case.batches]
    summed = {name: sum(gradients[name] for _, gradients in wanted) for name in wanted[0][1]}
    return errors(total.item(), reduced_gradients(model, case.fsdp), (sum(loss for loss, _ in wanted), summed))


def forward(model: Any, case: Case, offsets: tuple[int, ...], seed: int) -> torch.Tensor:
    batch = make_batch(offsets, seed)
    told = {"cu_seqlens": torch.tensor(offsets), "group": dist.group.WORLD, "conv1d_kernel_size": 4}
    context = build_cp_context(**told, layout=case.layout, exchange=case.exchange)
    mine = {name: context.shard(x) for name, x in batch.items()}
    kwargs: dict[str, Any] = {"input_ids": mine["input_ids"], "position_ids": mine["position_ids"]}
    kwargs |= {"argument": {"cp_context": context}, "cu_seqlens": {"cu_seq_lens_q": told["cu_seqlens"]}}.get(
        case.source, {}
    )
    with use_context(context) if case.source == "context" else contextlib.nullcontext():
        logits = model(**kwargs).logits
    return token_loss(logits, mine["labels"], num_targets(batch))


def backward(loss: torch.Tensor, where: str) -> None:
    """Outside of any use_context; in a thread without one, as a GPU's; or inside that of another batch."""
    if where == "thread":
        faults: list[BaseException] = []

        def run() -> None:
            try:
                loss.backward()
            except BaseException as fault:
                faults.append(fault)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if faults:
            raise faults[0]
    elif where == "other":
        with use_context(build_cp_context([0, 40, 96], dist.group.WORLD)):
            loss.backward()
    else:
        loss.backward()


def wrap_checkpoints(model: Any, how: str) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper

    if how.startswith("own"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "own-reentrant"})
    elif how:
        kind = "REENTRANT" if how == "wrapper-reentrant" else "NO_REENTRANT"
        implementation = torch_wrapper.CheckpointImpl[kind]
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = torch_wrapper.checkpoint_wrapper(layer, checkpoint_impl=implementation)
    if "reentrant" in how:
        model.enable_input_require_grads()


def shard_parameters(model: Any, how: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not how:
        return
    shape = (dist.get_world_size(), 1) if how == "one rank" else (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", "fsdp"))["fsdp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def reduced_gradients(model: Any, fsdp: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if fsdp:
            gradient = gradient.full_tensor()
        if fsdp != "all ranks":
            dist.all_reduce(gradient)
        found[name.replace("_checkpoint_wrapped_module.", "")] = gradient
    return found


class GatherRows(torch.autograd.Function):
    """This rank's rows -> the whole stream; its gradient sums what every rank makes of these rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: CPContext) -> torch.Tensor:
        ctx.context = context
        return context.unshard(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return ctx.context.shard(total).to(gradient.dtype), None


def gathered_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention inside documents, heads in dim 1 as transformers hands them over, on this rank's rows of them."""
    context = active_context()
    assert context is not None
    whole = [GatherRows.apply(x.transpose(1, 2), context).transpose(1, 2) for x in (query, key, value)]
    offsets = torch.tensor(context.plan.cu_seqlens)
    document = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    inside = (document[:, None] == document).tril().to(query.device)
    output = F.scaled_dot_product_attention(*whole, attn_mask=inside, scale=kwargs["scaling"], enable_gqa=True)
    return context.shard(output.transpose(1, 2)), None


def register_gathered_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("gathered", gathered_attention)
