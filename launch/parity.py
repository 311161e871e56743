"""Parity: one step's loss and gradients by all ranks together and by rank 0 alone, on the same data and weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from flashqla_cp.launch.packing import PackedDocuments
from flashqla_cp.launch.ranks import Ranks
from flashqla_cp.launch.step import Sharding, accumulate, gradients
from flashqla_cp.testing.metrics import relative_l2

# Relative L2 error that is allowed: rounding of the sums over tokens, which the ranks add in another order.
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
        errors = {
            name: relative_l2(together[name], p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
        bar = BARS[autocast]
        failed.fill_(float(not _print_table(relative_l2(loss, loss_alone), errors, bar, ranks.world_size)))
    ranks.sum_in_place([failed])
    model.zero_grad(set_to_none=True)
    return not failed.item()


def group_of(name: str) -> str:
    """The parameter's name without the number of its block: parameters of the same kind form a group."""
    return ".".join(part for part in name.split(".") if not part.isdecimal()).removesuffix(".weight")


def _print_table(loss_error: float, errors: dict[str, float], bar: float, world_size: int) -> bool:
    """One line for the loss and for each group's worst parameter; True if all are within the bar."""
    worst: dict[str, list[float]] = {}
    for name, error in errors.items():
        worst.setdefault(group_of(name), []).append(error)
    rows = [("loss", 1, loss_error), *((name, len(found), max(found)) for name, found in worst.items())]
    width = max(len(name) for name, _, _ in rows)
    print(f"parity: one step on {world_size} rank(s) against rank 0 alone, relative difference, bar {bar:g}")
    for name, count, error in rows:
        tensors = f"{count} tensor{'s' if count > 1 else ''}"
        print(f"  {name:<{width}}  {tensors:>10}  {error:9.2e}  {'ok' if error <= bar else 'ABOVE THE BAR'}")
    good = all(error <= bar for _, _, error in rows)
    print(f"parity: {'passed' if good else 'FAILED'}", flush=True)
    return good
