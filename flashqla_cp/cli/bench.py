"""`flashqla-cp bench`: times of the op beside those of its peers, and beside what the device allows.

On a GPU it runs the kernels; on a CPU the torch backend at small sizes, which tests the command and says nothing about
kernels. An op whose o, or whose gradients, are further from an fp64 result than their bars is not timed. --nproc starts
ranks and measures context parallelism on them instead (bench_ranks.py). The exit code is 0 if every case of this
library was timed, 1 if one was refused or failed, and 2 if none could be timed: options that cannot work here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flashqla_cp.cli import bench_costs, bench_ranks, bench_report
from flashqla_cp.cli.bench_contenders import LOADERS, OURS, Contender, Peer, contenders, conv_contenders, find_peers
from flashqla_cp.cli.bench_draws import DIRECTIONS, TIMES, Draw, time_draw
from flashqla_cp.cli.bench_report import Report, format_head, format_table
from flashqla_cp.cli.bench_timing import Ceilings, cost
from flashqla_cp.kernels.backend import ConvSizes, Sizes, explain, select
from flashqla_cp.testing.conv_workload import TAPS, ConvWorkload
from flashqla_cp.testing.workload import REGIMES, Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPS = ("gdn", "conv")
WORST = ("o_error", "first_call_s")
SCORED = 8192  # tokens up to which every draw is compared with fp64; of longer cases the first one is

# What is run unless options say otherwise, on a GPU and on a CPU, and with --quick.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"tokens": [8192, 32768, 65536], "heads": [16, 32], "head_dim": 128, "draws": 3},
    "cpu": {"tokens": [512, 1024], "heads": [2, 4], "head_dim": 64, "draws": 1},
}
GATES = ["init", "mixed", "weak"]
QUICK: dict[str, dict[str, Any]] = {
    "cuda": {"tokens": [8192], "draws": 1, "gates": ["init", "mixed"]},
    "cpu": {"tokens": [128], "draws": 1, "gates": ["init", "mixed"]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to run and where: options with every default filled in; backend: which one runs, and why."""

    options: dict[str, Any]
    device: torch.device
    direction: str
    backend: str

    def workload(self, tokens: int, gates: str) -> Workload | ConvWorkload:
        return self.conv_workload(tokens) if self.options["op"] == "conv" else self.rule_workload(tokens, gates)

    def conv_workload(self, tokens: int) -> ConvWorkload:
        heads, v_heads, head_dim = (self.options[name] for name in ("heads", "v_heads", "head_dim"))
        channels = (2 * heads + v_heads) * head_dim  # of q, k and v
        dtype = DTYPES[self.options["dtype"]]
        return ConvWorkload(tokens=tokens, documents=self.options["documents"], channels=channels, dtype=dtype)

    def rule_workload(self, tokens: int, gates: str) -> Workload:
        sizes = {name: self.options[name] for name in ("documents", "heads", "v_heads", "head_dim")}
        return Workload(tokens=tokens, gates=gates, dtype=DTYPES[self.options["dtype"]], **sizes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options to `parser`."""
    cuda, cpu = SIZES["cuda"], SIZES["cpu"]

    def default(name: str) -> str:
        return f"(default {' '.join(map(str, _list(cuda[name])))}; on a CPU {' '.join(map(str, _list(cpu[name])))})"

    add = parser.add_argument
    add("--op", choices=OPS, default="gdn", help="the gated delta rule (default), or the convolution of q, k, v")
    add("--tokens", type=int, nargs="+", metavar="T", help=f"lengths of the stream {default('tokens')}")
    add("--gates", nargs="+", choices=tuple(REGIMES), help=f"regimes of the gates (default {' '.join(GATES)})")
    add("--heads", type=int, nargs=2, metavar=("H", "HV"), help=f"key and value heads {default('heads')}")
    add("--head-dim", type=int, metavar="D", help=f"size of a head {default('head_dim')}")
    add("--draws", type=int, metavar="N", help=f"seeds of a case; medians are reported {default('draws')}")
    add("--documents", type=int, default=1, metavar="N", help="documents of equal length in the stream (default 1)")
    add("--middle-rank", type=int, metavar="P", help="also a middle rank of P that holds T tokens, without the others")
    add("--direction", choices=DIRECTIONS, default="forward", help="what is timed (default forward); step: both")
    add("--peers", choices=("auto", "none", *LOADERS), default="auto", help="auto: all that can be imported")
    add("--dtype", choices=tuple(DTYPES), default="bf16", help="of q, k and v (default bf16)")
    add("--backend", choices=("auto", "tilelang", "torch"), default="auto", help="the op's argument (default auto)")
    add("--json", type=Path, metavar="PATH", help="file for everything that was measured, kept up to date")
    add("--plot", type=Path, metavar="PATH", help="file for a picture of the times, .png or another ending")
    add("--quick", action="store_true", help="one short case for each of two gates, where options do not say more")
    bench_ranks.add_arguments(parser)
    add("--costs", type=Path, metavar="PATH", help="fit the cost of exchanges to the file of an earlier --nproc run")


def run(args: argparse.Namespace) -> int:
    """Time what was asked for and print it, or what was finished at Ctrl-C or SIGTERM, which `timeout` sends.

    Returns 0, 1 if a case of this library has no times, 2 if none could run, 130 if it was stopped.
    """
    try:
        if args.costs is not None:
            _check_files(args)
            return bench_costs.run(args.costs, args.json)
        group = bench_ranks.group_of(args) if args.nproc is not None else None
        request, notes = _read_options(args)
        peers, absent = find_peers(args.op) if args.peers != "none" else ({}, {})
        if args.peers in LOADERS:
            peers = {name: peer for name, peer in peers.items() if name == args.peers}
            absent = {name: reason for name, reason in absent.items() if name == args.peers}
    except (ValueError, RuntimeError) as error:
        print(f"bench: error: {error}", file=sys.stderr, flush=True)
        return 2
    if group is not None:
        found = (peers, absent)
        work_of, device = request.rule_workload, request.device
        return bench_ranks.run(args, request.options, work_of, device, request.backend, group, found)
    ceilings = Ceilings.of(request.device)
    report: Report = {
        "head": bench_report.head(request.options, request.device, request.backend, absent, notes),
        "ceilings": ceilings.described(),
        "cases": [],
    }
    print(format_head(report), flush=True)
    stopped = False
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_cases(request, peers, ceilings, report, lambda: _write(args.json, report))
    except KeyboardInterrupt:
        stopped = True
        print(f"bench: stopped; {len(report['cases'])} cases were finished", file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGTERM, terminated)
    if report["cases"]:
        if args.plot is not None:
            bench_report.draw_plot(report, args.plot)
        print(f"\n{format_table(report)}", flush=True)
    if stopped:
        return 130
    ours = [result for case in report["cases"] for result in case["results"] if result["name"] == OURS]
    return 1 if any(result["eager_ms"] is None for result in ours) else 0


def run_cases(
    request: Request, peers: dict[str, Peer], ceilings: Ceilings, report: Report, keep: Callable[[], None]
) -> None:
    """Add the cases to the report, one by one, and call `keep` after each."""
    from tqdm import tqdm

    options = request.options
    works = [request.workload(tokens, gates) for gates in options["gates"] for tokens in options["tokens"]]
    ops = (1 + len(peers)) * (2 if options["middle_rank"] else 1)
    total = len(works) * options["draws"] * ops
    with tqdm(total=total, unit="op", file=sys.stderr, dynamic_ncols=True, leave=False) as bar:
        for work in works:
            if isinstance(work, ConvWorkload):
                field = conv_contenders(work, options["backend"], peers, request.device)
            else:
                field = contenders(work, options["middle_rank"], options["backend"], peers, request.device)
            draws: list[list[dict[str, Any]]] = [[] for _ in field]
            for seed in range(options["draws"]):
                draw = Draw.of(work, seed, request.direction, request.device)
                scored = seed == 0 or work.tokens <= SCORED
                for ranks in (None, options["middle_rank"]) if options["middle_rank"] else (None,):
                    expected = draw.expected(work, ranks) if scored else None
                    for contender, rows in zip(field, draws, strict=True):
                        if contender.middle != (ranks is not None):
                            continue
                        bar.set_description(f"{work.tokens} {work.gates} {contender.name}")
                        if _trouble(rows) is None:  # what was wrong once need not be timed
                            rows.append(time_draw(contender, draw, expected, request.direction, request.device))
                            if request.device.type == "cuda":
                                torch.cuda.empty_cache()
                        bar.update()
            report["cases"].append(_case(work, field, draws, ceilings, request.direction))
            keep()


def _trouble(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The draw that was refused or failed, if one was."""
    return next((row for row in rows if "refused" in row or "failed" in row), None)


def _case(
    work: Workload | ConvWorkload,
    field: list[Contender],
    draws: list[list[dict[str, Any]]],
    ceilings: Ceilings,
    direction: str,
) -> dict[str, Any]:
    """A case of the report from the numbers of its draws, one list for each contender."""
    traffic, operations = cost(work, direction)
    results = []
    for contender, rows in zip(field, draws, strict=True):
        result: dict[str, Any] = {"name": contender.name, "middle_rank": contender.middle, "draws": rows}
        troubled = _trouble(rows)
        reasons = [row for row in rows if "graph_failed" in row] if troubled is None else [troubled]
        result |= {key: row[key] for row in reasons for key in ("refused", "failed", "graph_failed") if key in row}
        for name in TIMES:
            values = [row[name] for row in rows]
            result[name] = None if troubled or None in values else statistics.median(values)
        for name in WORST:
            result[name] = max((row[name] for row in rows if row[name] is not None), default=None)
        errors = [row["gradient_errors"] for row in rows if row.get("gradient_errors")]
        result["gradient_errors"] = (
            {name: max(found[name] for found in errors) for name in errors[0]} if errors else None
        )
        results.append(result)
    for result in results:
        result["ratios"], result["over_alone"] = bench_report.comparisons(result, results)
    return {
        "direction": direction,
        "tokens": work.tokens,
        "gates": work.gates,
        "documents": work.documents,
        "floor_ms": ceilings.floor_ms(work, direction),
        "bytes": traffic,
        "operations": operations,
        "results": results,
    }


def _read_options(args: argparse.Namespace) -> tuple[Request, list[str]]:
    """Fill in defaults and refuse what cannot work: ValueError, or what select raises. Also notes for the reader."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    defaults = {"gates": GATES} | SIZES[device.type] | (QUICK[device.type] if args.quick else {})
    if args.nproc is not None:
        on_ranks = bench_ranks.QUICK if args.quick else bench_ranks.SIZES
        defaults |= on_ranks[device.type] | {"draws": 1}
    given = {name: value if (value := getattr(args, name)) is not None else defaults[name] for name in defaults}
    heads, v_heads = given.pop("heads")
    middle_rank, documents = args.middle_rank, args.documents
    numbers = {"--tokens": given["tokens"], "--heads": [heads, v_heads], "--head-dim": [given["head_dim"]]}
    for option, values in (numbers | {"--draws": [given["draws"]], "--documents": [documents]}).items():
        for value in values:
            if value < 1:
                raise ValueError(f"{option}: got {value}, expected a positive integer")
    if v_heads % heads:
        raise ValueError(f"--heads: got {heads} {v_heads}, expected HV a multiple of H")
    for tokens in given["tokens"]:
        if tokens % documents:
            raise ValueError(f"--documents: got {documents} for {tokens} tokens, expected a divisor")
    if middle_rank is not None and middle_rank < 3:
        raise ValueError(f"--middle-rank: got {middle_rank}, expected at least 3 ranks, so that one has two neighbours")
    if middle_rank is not None and documents > 1:
        raise ValueError(f"--documents: got {documents} with --middle-rank, expected 1: a rank inside one document")
    if args.op == "conv":
        for option, value in (("--middle-rank", middle_rank), ("--gates", args.gates), ("--nproc", args.nproc)):
            if value is not None:
                raise ValueError(f"{option}: got {value} with --op conv, which has none")
        given["gates"] = ["conv"]
    _check_files(args)
    dims = dict.fromkeys(("head_k_dim", "head_v_dim"), given["head_dim"])
    sizes: Sizes | ConvSizes = Sizes(dtype=DTYPES[args.dtype], num_heads=heads, num_v_heads=v_heads, **dims)
    if args.op == "conv":
        sizes = ConvSizes(dtype=DTYPES[args.dtype], width=TAPS)
    needs_grad = args.direction != "forward" or args.nproc is not None
    kernels = select(args.backend, device, needs_grad=needs_grad, sizes=sizes)
    notes = []
    if device.type == "cpu":
        notes.append("no GPU: the torch backend at small sizes, which tests this command and says nothing of kernels")
    options = given | {"heads": heads, "v_heads": v_heads, "documents": documents, "middle_rank": middle_rank}
    options |= {name: getattr(args, name) for name in ("op", "direction", "dtype", "backend", "peers")}
    backend = _backend_text(args.backend, device, kernels is not None, sizes)
    return Request(options=options, device=device, direction=args.direction, backend=backend), notes


def _check_files(args: argparse.Namespace) -> None:
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and (path.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
            raise ValueError(f"{option}: got {str(path)!r}, expected a file in a folder that can be written to")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot: needs matplotlib, which is not installed: pip install 'flashqla-cp[train]'")


def _backend_text(asked: str, device: torch.device, has_kernels: bool, sizes: Sizes | ConvSizes) -> str:
    """The backend that runs, and the reason."""
    runs = "tilelang" if has_kernels else "torch"
    if asked != "auto":
        return f"{runs}, as asked for"
    name, reason = explain(device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    return f"{runs}: {reason if name == runs else sizes.refusal()}"


def _write(path: Path | None, report: Report) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
