"""`flashqla-cp bench --nproc N`: what context parallelism costs on real ranks.

Starts N ranks, NCCL with a GPU for each or gloo, lets them measure (bench_on_rank.py), and puts their numbers together:
of a call that is made N times, each time the slowest rank, and of these the median. The exit code is 0 if all of this
library's rows were timed and sent the bytes that the formula says, 1 if not, and 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashqla_cp.cli import bench_ranks_report, bench_report
from flashqla_cp.cli.bench_contenders import OURS
from flashqla_cp.cli.bench_on_rank import DIRECTIONS, RankRequest, Row, measure_on_this_rank
from flashqla_cp.testing.spawn import run_ranks
from flashqla_cp.testing.workload import Workload

STRATEGIES = ("allgather", "sharded", "hierarchical", "headwise")
CALLS = {"cuda": 20, "cpu": 3}
HEADS = {"cuda": (8, 16, 32, 64), "cpu": (2, 4)}  # value heads of the exchanges that are timed alone
ONE_HOST = 1024  # ranks; more is a slip of the finger

# What is run unless options say otherwise, on GPUs and on CPUs, and with --quick.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"tokens": [8192, 32768], "gates": ["init", "mixed", "zero"]},
    "cpu": {"tokens": [256, 512], "gates": ["mixed"]},
}
QUICK: dict[str, dict[str, Any]] = {
    "cuda": {"tokens": [8192], "gates": ["mixed"]},
    "cpu": {"tokens": [128], "gates": ["mixed"]},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run on several ranks."""
    add = parser.add_argument_group("on real ranks").add_argument
    add("--nproc", type=int, metavar="N", help="start N ranks, T tokens each: forward and backward against one device")
    add("--group", choices=("nccl", "gloo"), help="default: nccl with a GPU for each rank, else gloo")
    add("--exchange", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="how states travel (default: each)")
    add("--timeout", type=float, default=600.0, help="seconds after which the ranks are killed (default 600)")


def group_of(args: argparse.Namespace) -> str:
    """The backend of the process group. Raises ValueError for options that do not fit."""
    if not 1 < args.nproc <= ONE_HOST:
        raise ValueError(f"--nproc: got {args.nproc}, expected at least 2 ranks, at most {ONE_HOST}")
    for option, given in (("--middle-rank", args.middle_rank is not None), ("--documents", args.documents != 1)):
        if given:
            raise ValueError(f"{option}: does not go with --nproc, whose ranks share one document")
    if not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout: got {args.timeout:g}, expected a number above 0")
    gpus = torch.cuda.device_count()
    if args.group == "nccl" and gpus < args.nproc:
        raise ValueError(f"--group: got nccl with {gpus} GPU(s) for {args.nproc} rank(s), expected one for each")
    return args.group or ("nccl" if gpus >= args.nproc else "gloo")


def run(
    args: argparse.Namespace,
    options: dict[str, Any],
    work_of: Callable[[int, str], Workload],
    device: torch.device,
    backend: str,
    group: str,
    peers: tuple[dict[str, Any], dict[str, str]],
) -> int:
    """Measure and print it. options: with every default filled in. backend: the op's that runs, and why. peers: those
    that run, by name, and for each other one the reason why not."""
    present, absent = peers
    options |= {"nproc": args.nproc, "group": group, "exchange": list(args.exchange), "direction": "both ways"}
    notes = ["no GPU: the torch backend at small sizes, which tests this command"] if device.type == "cpu" else []
    if device.type == "cuda" and group == "gloo":
        notes.append("the ranks share a GPU over gloo, which tests this command; its times mean nothing")
    request = RankRequest(
        works=tuple(work_of(tokens, gates) for gates in options["gates"] for tokens in options["tokens"]),
        exchanges=tuple(args.exchange),
        backend=args.backend,
        peers=tuple(present),
        heads=HEADS[device.type],
        calls=CALLS[device.type],
    )
    report: dict[str, Any] = {"head": bench_report.head(options, device, backend, absent, notes)}
    print(bench_ranks_report.format_head(report), flush=True)
    try:
        found = run_ranks(measure_on_this_rank, args.nproc, request, backend=group, timeout=args.timeout)
    except (RuntimeError, TimeoutError) as error:  # the text of a rank that failed holds its traceback
        print(f"bench: error: {error}", file=sys.stderr, flush=True)
        return 2
    report["rows"] = joined(found)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot is not None:
        bench_ranks_report.draw_plot(report, args.plot)
    print(f"\n{bench_ranks_report.format_tables(report)}", flush=True)
    return 1 if any(map(fault, report["rows"])) else 0


def joined(by_rank: Sequence[Sequence[Row | None]]) -> list[Row]:
    """The rows of all ranks as one list: numbers of the ranks that were in a row's group put together."""
    rows = []
    for parts in zip(*by_rank, strict=True):
        present = [part for part in parts if part is not None]
        row = {key: value for key, value in present[0].items() if key not in DIRECTIONS}
        for key in ("o_error", "gradient_errors"):
            errors = [part[key] for part in present if part.get(key) is not None]
            if errors and key == "gradient_errors":
                row[key] = {name: max(found[name] for found in errors) for name in errors[0]}
            elif errors:
                row[key] = max(errors)
        failed = [(rank, part["failed"]) for rank, part in enumerate(present) if "failed" in part]
        if failed:  # what a rank found itself says more than that it heard of it
            rank, text = min(failed, key=lambda said: said[1].startswith("not timed: see"))
            row["failed"] = f"rank {rank}: {text}"
        else:
            row |= {direction: _joined([part[direction] for part in present]) for direction in DIRECTIONS}
        rows.append(row)
    return with_alone(rows)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One direction: whole_ms, stand_in_ms, exchange_ms, the ranks' own medians, and what follows from them."""
    found: dict[str, Any] = {}
    names = [name for name in ("whole", "stand_in", "exchange") if name in parts[0]]
    way = "graph" if all("graph" in parts[0][name] for name in names) else "eager"
    for name in names:
        calls = [part[name][way] for part in parts]
        found[f"{name}_ms"] = statistics.median(max(call) for call in zip(*calls, strict=True))
        found[f"{name}_ms_of_ranks"] = [statistics.median(times) for times in calls]
        if way == "graph":
            eager = [part[name]["eager"] for part in parts]
            found[f"{name}_eager_ms"] = statistics.median(max(call) for call in zip(*eager, strict=True))
    found["way"] = way
    if "stand_in" in names:
        found["exposed_ms"] = found["whole_ms"] - found["stand_in_ms"]
        if "exchange" in names:
            found["hidden_ms"] = max(0.0, found["exchange_ms"] - max(0.0, found["exposed_ms"]))
    for counted in ("sent", "bytes"):
        if counted in parts[0]:
            found[f"{counted}_by_ranks"] = [part[counted] for part in parts]
    return found


def with_alone(rows: list[Row]) -> list[Row]:
    """Rows of the op on ranks with over_alone: how many times as long as the same op on one device, per direction; and
    loss: the share of speed of a step that is lost to weak scaling."""
    alone = {(row["name"], row["gates"], row["tokens"]): row for row in rows if row.get("ranks") == 1}
    for row in rows:
        own = alone.get((row.get("name"), row.get("gates"), row.get("tokens")))
        if own is None or row is own or "failed" in row or "failed" in own:
            continue
        times = [(row[way]["whole_ms"], own[way]["whole_ms"]) for way in DIRECTIONS]
        row["over_alone"] = {way: here / there for way, (here, there) in zip(DIRECTIONS, times, strict=True)}
        row["loss"] = 1.0 - sum(there for _, there in times) / sum(here for here, _ in times)
    return rows


def fault(row: Row) -> bool:
    """Whether a row of this library was not timed, or sent other bytes than the formula says."""
    if row["kind"] == "exchange" or row["name"] != OURS:
        return False
    if "failed" in row:
        return True
    return any(row[way].get("sent_by_ranks") != row[way].get("bytes_by_ranks") for way in DIRECTIONS)
