"""One training step's arithmetic: this rank's part of the global batch, its gradients, the learning rate.

The loss is the mean over all tokens of the global batch that have a next token. Each rank back-propagates the sum over
its own tokens divided by that global number, so the sum of the ranks' gradients is the gradient, with no further
factor: nothing is averaged, whatever the sizes of the shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from flashqla_cp.launch.packing import IGNORED_LABEL, Batch, PackedDocuments
from flashqla_cp.launch.ranks import Ranks
from flashqla_cp.parallel.context import CPContext, build_cp_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a step's rows are cut: rows_per_step of all ranks together, micro_batch rows in one forward pass."""

    rows_per_step: int
    micro_batch: int
    layout: str
    exchange: str
    conv_size: int


def accumulate(
    model: nn.Module,
    data: PackedDocuments,
    step: int,
    sharding: Sharding,
    ranks: Ranks,
    autocast: torch.dtype | None,
    check_plan: bool = False,
) -> torch.Tensor:
    """Add this rank's part of the gradients of step number `step` to the parameters.

    Args:
        autocast: type of the forward pass, None for the parameters' own.
        check_plan: let the ranks of a context compare their plans, for every micro-batch.

    Returns:
        This rank's part of the loss: the loss is the sum over all ranks.
    """
    first = step * sharding.rows_per_step
    num_labels = data.num_labels(first, sharding.rows_per_step)
    mine = sharding.rows_per_step // ranks.data_size
    begin = first + ranks.data_rank * mine
    total = torch.zeros((), device=ranks.device)
    for row in range(begin, begin + mine, sharding.micro_batch):
        batch = data.batch(row, min(sharding.micro_batch, begin + mine - row))
        tokens, labels, cu_seqlens, context = shard(batch, sharding, ranks, check_plan)
        with torch.autocast(ranks.device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(tokens, cu_seqlens=cu_seqlens, cp_context=context)
        loss = loss_sum(logits, labels) / num_labels
        loss.backward()
        total += loss.detach()
    return total


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropy over the labelled tokens, in fp32; 0 with a graph where there are none."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def shard(
    batch: Batch, sharding: Sharding, ranks: Ranks, check_plan: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, CPContext | None]:
    """Tokens, labels, cu_seqlens and context of this rank's part of a batch; one of the last two is None."""
    offsets = torch.tensor(batch.offsets, dtype=torch.int32)
    tokens, labels, cu_seqlens = (x.to(ranks.device) for x in (batch.tokens, batch.labels, offsets))
    if ranks.cp_group is None:
        return tokens, labels, cu_seqlens, None
    context = build_cp_context(
        cu_seqlens,
        ranks.cp_group,
        conv1d_kernel_size=sharding.conv_size,
        cu_seqlens_cpu=offsets,
        layout=sharding.layout,
        exchange=sharding.exchange,
        check_plan=check_plan,
    )
    return context.shard(tokens), context.shard(labels), None, context


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of every parameter, zeros made where this rank's tokens reached none, so that all ranks agree."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def learning_rate(step: int, steps: int, peak: float, warmup: int, final_ratio: float) -> float:
    """Linear rise over `warmup` steps, then half a cosine down to peak * final_ratio at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * (final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The type of the forward pass: bf16, or None for fp32; "auto" is bf16 on GPUs."""
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if bf16 else None
