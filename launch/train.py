"""Train a byte-level Gated DeltaNet language model on any files, with its sequences sharded over ranks.

    python launch/train.py                                              one process
    torchrun --nproc-per-node 2 launch/train.py --cp 2                  every sequence on two ranks
    torchrun --nproc-per-node 8 launch/train.py --cp 4                  two data-parallel groups of four
    torchrun --nproc-per-node 2 launch/train.py --cp 2 --resume         go on after a stop or a kill

`flashqla-cp train` is the same program. A step's data and its loss curve depend on the settings, not on the number of
ranks. Here is the loop; its parts are the neighbours in this folder: settings, packing, model, step, checkpoints,
ranks, report, parity.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

try:
    from flashqla_cp.launch import checkpoints
except ModuleNotFoundError as error:
    if error.name != "flashqla_cp":
        raise
    raise SystemExit("flashqla_cp is not installed: run 'pip install -e .' in the repository's folder first") from None
from flashqla_cp.launch.model import ByteModel, decay_groups
from flashqla_cp.launch.parity import parity_check
from flashqla_cp.launch.ranks import Ranks, join_ranks
from flashqla_cp.launch.report import Report, require_folder
from flashqla_cp.launch.settings import Prepared, add_arguments, prepare
from flashqla_cp.launch.step import accumulate, gradients, learning_rate

BETAS = (0.9, 0.95)


def run(args: argparse.Namespace) -> int:
    """Train as the parsed options say and return the exit code: 0, 1 for a failed parity check, 2 for bad settings."""
    try:
        prepared = prepare(args)
    except (ValueError, OSError) as error:  # OSError: of a path that no system call takes
        return refuse(error)
    with join_ranks(args.cp, prepared.device) as ranks:
        try:
            ranks.require_equal(f"{prepared.data.digest()} {settings_of(args, prepared)} {prepared.resume}")
            model, optimizer, start = begin(args, prepared, ranks)
            ranks.together(lambda: require_folder(args.out) if ranks.rank == 0 else None)
        except ValueError as error:
            return refuse(error)
        return train(args, prepared, ranks, model, optimizer, start)


def refuse(error: ValueError | OSError) -> int:
    """Print a settings error as one line and return its exit code."""
    rank = int(os.environ.get("RANK", "0"))
    print(f"train: error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr, flush=True)
    return 2


def settings_of(args: argparse.Namespace, prepared: Prepared) -> dict[str, Any]:
    """What a checkpoint remembers: the model's shape, and what decides the curve."""
    names = (
        "seq_len",
        "batch_size",
        "seed",
        "steps",
        "lr",
        "final_lr_ratio",
        "warmup",
        "weight_decay",
        "clip",
        "dtype",
    )
    curve = {name: getattr(args, name) for name in names}
    return {"model": asdict(prepared.shape), "curve": curve | {"data": prepared.data.digest()}}


def begin(args: argparse.Namespace, prepared: Prepared, ranks: Ranks) -> tuple[ByteModel, torch.optim.AdamW, int]:
    """The model and optimizer on their device, equal on all ranks, and the first step: new ones or a checkpoint's."""
    model = prepared.model.to(ranks.device)
    optimizer = torch.optim.AdamW(decay_groups(model, args.weight_decay), lr=args.lr, betas=BETAS)
    if prepared.resume is not None:
        return model, optimizer, checkpoints.load(prepared.resume, model, optimizer, ranks)
    ranks.copy_from_first(p.detach() for p in model.parameters())
    return model, optimizer, 0


def train(
    args: argparse.Namespace,
    prepared: Prepared,
    ranks: Ranks,
    model: ByteModel,
    optimizer: torch.optim.AdamW,
    start: int,
) -> int:
    """The training loop; returns the exit code."""
    if ranks.rank == 0:
        if checkpoints.start_from(args.out, prepared.resume):
            print(f"{args.out} holds an earlier run, which this one replaces (--resume would continue it)")
        print(describe(args, prepared, ranks, start), flush=True)
    report = Report(args.out, start, args.steps, args.batch_size * args.seq_len, silent=ranks.rank != 0)
    for step in range(start, args.steps):
        loss, norm, rate = train_step(model, optimizer, args, prepared, ranks, step, check_plan=step == start)
        report.step(step, loss, rate, norm)
        if args.save_every and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            folder = checkpoints.save(args.out, step + 1, model, optimizer, settings_of(args, prepared), ranks)
            if ranks.rank == 0:
                checkpoints.prune(args.out, args.keep)
            report.say(f"saved {folder}")
            report.restart_clock()
    report.end_of_steps()
    good = True
    if args.parity_check:
        good = parity_check(model, prepared.data, args.steps, prepared.sharding, ranks, prepared.autocast)
    report.summarise(plot=not args.no_plot)
    return 0 if good else 1


def train_step(
    model: ByteModel,
    optimizer: torch.optim.AdamW,
    args: argparse.Namespace,
    prepared: Prepared,
    ranks: Ranks,
    step: int,
    check_plan: bool,
) -> tuple[float, float, float]:
    """One optimizer step on the global batch. Returns its loss, the gradient norm before clipping, the learning rate.

    Raises:
        RuntimeError: a loss that is not finite, on every rank alike.
    """
    rate = learning_rate(step, args.steps, args.lr, args.warmup, args.final_lr_ratio)
    for group in optimizer.param_groups:
        group["lr"] = rate
    model.zero_grad(set_to_none=True)
    loss = accumulate(model, prepared.data, step, prepared.sharding, ranks, prepared.autocast, check_plan)
    ranks.sum_in_place([loss, *gradients(model)])
    # The gradients are summed and so equal on all ranks: the norm of one rank's copy is the norm over all ranks.
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or float("inf"))
    if not torch.isfinite(loss):
        raise RuntimeError(f"step {step}: the loss is {loss.item()}; try a lower --lr, or --dtype fp32")
    optimizer.step()
    return loss.item(), norm.item(), rate


def describe(args: argparse.Namespace, prepared: Prepared, ranks: Ranks, start: int) -> str:
    """The first lines of a run."""
    data, precision = prepared.data, "bf16" if prepared.autocast else "fp32"
    num_parameters = sum(p.numel() for p in prepared.model.parameters())
    lines = [
        f"data: {len(data.documents):,} documents, {data.num_bytes:,} bytes",
        f"model: {num_parameters:,} parameters, {precision} on {ranks.device.type}, backend {args.backend}",
        f"ranks: {ranks.world_size} = {ranks.data_size} data x {args.cp} context, "
        f"{args.layout}, exchange {args.exchange}",
        f"step: {args.batch_size} rows of {args.seq_len:,} bytes, activation checkpointing: {args.checkpoint}",
    ]
    if prepared.resume is not None:
        lines.append(f"resuming after step {start} from {prepared.resume}")
        if start >= args.steps:
            lines.append(f"nothing left to train: --steps is {args.steps}, those before the resume included")
        saved, now = checkpoints.read_settings(prepared.resume)["curve"], settings_of(args, prepared)["curve"]
        changed = [name for name in now if saved.get(name) != now[name]]
        if changed and start < args.steps:
            lines.append(f"warning: changed since that checkpoint, so the curve will differ: {', '.join(changed)}")
    elif args.resume is not None:
        lines.append(f"no checkpoint in {args.out} yet, starting from the beginning")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's arguments), train, return the exit code."""
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="train.py", description=description)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
