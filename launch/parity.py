"""Parity: one step's loss and gradients by all ranks together and by rank 0 alone, on the same data and weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from flashqla_cp.launch.packing import PackedDocuments
from flashqla_cp.launch.ranks import Ranks
from flashqla_cp.launch.step import Sharding, accumulate, gradients
from flashqla_cp.testing.metrics import relative_l2

# Relative L2 difference that is allowed: rounding, since the ranks add in another order and cut chunks elsewhere.
BARS = {None: 1e-4, torch.bfloat16: 2e-2}


def parity_check(
    model: nn.Module,
    data: PackedDocuments,
    step: int,
    sharding: Sharding,
    ranks: Ranks,
    autocast: torch.dtype | None,
) -> bool:
    """Compare and print a table on rank 0; returns the same verdict on every rank.

    Rank 0 computes the whole global batch of step `step` without a context, so it needs the memory for whole rows.
    """
    if ranks.world_size == 1:
        print("parity: there is only one rank, so there is nothing to compare", flush=True)
        return True
    model.zero_grad(set_to_none=True)
    loss = accumulate(model, data, step, sharding, ranks, autocast, check_plan=True)
    ranks.sum_in_place([loss, *gradients(model)])
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    failed = torch.zeros((), device=ranks.device)
    if ranks.rank == 0:
        model.zero_grad(set_to_none=True)
        alone = replace(ranks, world_size=1, data_rank=0, data_size=1, cp_group=None)
        loss_alone = accumulate(model, data, step, sharding, alone, autocast)
        reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        errors = {"loss": relative_l2(loss, loss_alone), **group_errors(together, reference)}
        failed.fill_(float(not _print_table(errors, BARS[autocast], ranks.world_size)))
    ranks.sum_in_place([failed])
    model.zero_grad(set_to_none=True)
    return not failed.item()


def group_of(name: str) -> str:
    """The parameter's name without the number of its block: parameters of the same kind form a group."""
    return ".".join(part for part in name.split(".") if not part.isdecimal()).removesuffix(".weight")


def group_errors(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative L2 difference of the gradients of each group, over all its tensors together."""
    groups: dict[str, list[str]] = {}
    for name in reference:
        groups.setdefault(group_of(name), []).append(name)
    return {
        group: relative_l2(*(torch.cat([side[name].flatten() for name in names]) for side in (gradients, reference)))
        for group, names in groups.items()
    }


def _print_table(errors: dict[str, float], bar: float, world_size: int) -> bool:
    """One line for the loss and for each group; True if all are within the bar."""
    width = max(map(len, errors))
    print(f"parity: one step on {world_size} ranks against rank 0 alone, relative difference, bar {bar:g}")
    for name, error in errors.items():
        print(f"  {name:<{width}}  {error:9.2e}  {'ok' if error <= bar else 'ABOVE THE BAR'}")
    good = all(error <= bar for error in errors.values())
    print(f"parity: {'passed' if good else 'FAILED'}", flush=True)
    return good
