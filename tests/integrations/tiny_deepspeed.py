"""A step of a tiny model inside a DeepSpeed engine on some ranks, against the same step of one unpatched process."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_transformers import LINEAR, make_batch, make_model, num_targets

from flashqla_cp import build_cp_context
from flashqla_cp.integrations.deepspeed import (
    count_targets,
    enable_context_parallel,
    init_distributed,
    init_sequence_parallel,
    scale_loss,
    use_context,
)
from flashqla_cp.testing.metrics import relative_l2

ONE_DOCUMENT, PACKED, OTHER = (0, 96), (0, 7, 30, 96), (0, 50, 64, 96)
Stream = tuple[tuple[int, ...], int]  # offsets and seed
Expected = tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]
RATE = 0.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """streams: of one step, micro-batch by micro-batch, each with one stream for every data-parallel replica."""

    zero: int = 2
    layers: tuple[str, ...] = LINEAR
    streams: tuple[Stream, ...] = ((PACKED, 1),)
    micro_batches: int = 1
    layout: str = "contiguous"
    source: str = "context"
    optimizer: str = "SGD"
    clip: float = 0.0
    dtype: str = "fp32"
    checkpoint: bool = False
    zero_init: bool = False
    late: bool = False
    sum_over_ranks: bool = False
    family: str = "qwen3_next"
    broken: str = ""

    def __str__(self) -> str:
        words = [f"zero{self.zero}", "linear" if self.layers == LINEAR else "hybrid"]
        for name, default in Case.__dataclass_fields__.items():
            value = getattr(self, name)
            if name not in ("zero", "layers") and value != default.default:
                words.append(
                    name
                    if value is True
                    else f"{len(value)}x{len(value[0][0]) - 1}"
                    if name == "streams"
                    else str(value)
                )
        return "-".join(words)


def make_optimizer(name: str, model: Any) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=RATE)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


@functools.cache
def expected(case: Case, attention: str) -> Expected:
    """(loss, gradients before clipping, weights after the step) of one process, one document at a time."""
    register_documents_attention()
    model = make_model(case.family, case.layers, attention)
    if case.dtype == "bf16 alone":
        enable_context_parallel(model.to(torch.bfloat16), None)
    optimizer = make_optimizer(case.optimizer, model)
    targets = sum(num_targets(make_batch(*stream)) for stream in case.streams)
    total = 0.0
    for offsets, seed in case.streams:
        batch = make_batch(offsets, seed)
        for start, end in pairwise(offsets):
            row = {name: x[:, start:end] for name, x in batch.items()}
            logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits
            loss = token_loss_sum(logits, row["labels"]) / targets
            loss.backward()
            total += loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if case.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    return total, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def noise(case: Case, attention: str) -> tuple[float, float]:
    """What this library in one bf16 process loses against fp32: relative errors of the loss and the worst gradient."""
    exact = expected(case, attention)
    rounded = expected(replace(case, dtype="bf16 alone"), attention)
    errors = [relative_l2(rounded[1][name].float(), gradient) for name, gradient in exact[1].items()]
    return abs(rounded[0] - exact[0]) / exact[0], max(errors)


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def configuration(case: Case, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.zero}
    if case.zero == 3:
        zero["stage3_param_persistence_threshold"] = 0  # so that small parameters are sharded too
    return (
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case.micro_batches,
            "gradient_clipping": case.clip,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": case.dtype == "bf16"},
        }
        | ({"gradient_allreduce_op": "sum"} if case.sum_over_ranks else {})
        | more
    )


def start(size: int, attention: str, layers: tuple[str, ...]) -> Any:
    """DeepSpeed's communication and groups, once per process; what to pass as mpu."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    init_distributed()
    if layers == LINEAR:
        return init_sequence_parallel(size)
    register_documents_attention()
    model = make_model("qwen3_next", layers, attention)
    return UlyssesSPAttentionHF.register_with_transformers(model, attention, size, micro_batch_size=1)


def run_case(case: Case, mpu: Any, attention: str, wanted: Expected) -> dict[str, float]:
    """Errors of loss, gradients and weights of one step of an engine."""
    import deepspeed

    config = configuration(case)
    model = make_model(case.family, case.layers, attention)
    if case.zero_init:
        model = make_sharded(model, case, config, mpu, attention)
    if case.broken != "not enabled" and not case.late:
        assert enable_context_parallel(model, mpu, layout=case.layout) == case.layers.count("linear_attention")
    if case.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(case.optimizer, model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    if case.late:
        enable_context_parallel(engine.module, mpu, layout=case.layout)
    try:
        return step(engine, case, mpu, wanted)
    finally:
        engine.destroy()


def make_sharded(filled: Any, case: Case, config: dict[str, Any], mpu: Any, attention: str) -> Any:
    """The same model, whose parameters were sharded as they were made."""
    import deepspeed
    from transformers import PreTrainedModel

    # Some releases of transformers cannot initialise shards.
    with mock.patch.object(PreTrainedModel, "init_weights", lambda self: None):  # noqa: SIM117
        with deepspeed.zero.Init(config_dict_or_path=config, mpu=mpu):
            model = make_model(case.family, case.layers, attention)
    for mine, theirs in zip(model.parameters(), filled.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(mine, modifier_rank=0), torch.no_grad():
            mine.copy_(theirs)
    return model


def step(engine: Any, case: Case, mpu: Any, wanted: Expected) -> dict[str, float]:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    group = dist.new_group([dist.get_rank()]) if mpu is None else mpu.get_sequence_parallel_group()
    size = dist.get_world_size(group)
    mine = case.streams[dist.get_rank() // size :: dist.get_world_size() // size]
    told: dict[str, Any] = {"group": group, "conv1d_kernel_size": 4, "layout": case.layout}
    contexts = [build_cp_context(torch.tensor(offsets), **told) for offsets, _ in mine]
    batches = [
        {name: context.shard(x) for name, x in make_batch(*stream).items()}
        for context, stream in zip(contexts, mine, strict=True)
    ]
    targets = count_targets(engine, *(batch["labels"] for batch in batches))
    total, gradients = torch.zeros(()), {}
    for context, batch in zip(contexts, batches, strict=True):
        with use_context(context) if case.source == "context" else contextlib.nullcontext():
            logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        loss = token_loss_sum(logits, batch["labels"])
        total += loss.detach() / targets
        scaled = scale_loss(engine, loss, targets)
        engine.backward(loss * engine.gradient_accumulation_steps() / targets if case.broken == "scale" else scaled)
        if batch is batches[-1]:  # before, DeepSpeed has only a part of them
            gradients = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
        engine.step()
    dist.all_reduce(total)
    found = {"loss": abs(total.item() - wanted[0]) / wanted[0]}
    found |= {f"d {name}": relative_l2(gradients[name], gradient) for name, gradient in wanted[1].items()}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, enabled=case.zero == 3):
            found[name] = relative_l2(parameter.detach().float(), wanted[2][name])
    return found


def documents_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention that tells documents by position_ids of the whole stream, as flash attention does on a GPU."""
    document = (kwargs["position_ids"][0] == 0).cumsum(0)
    inside = (document[:, None] == document).tril()
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=inside, scale=kwargs["scaling"], enable_gqa=True
    )
    return output.transpose(1, 2), None


def register_documents_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("documents", documents_attention)
