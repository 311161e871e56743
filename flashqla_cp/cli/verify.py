"""`flashqla-cp verify`: one step of the op, the convolution and the layer, sharded over ranks, compared twice.

Once with the same step on one rank and once with the fp64 per-token oracle: relative L2 error of every output and
gradient, over the whole tensor and over the 32 tokens behind each cut. --all does so for every layout with every
exchange, on the same ranks, a line each. Starts its own ranks; under torchrun it uses those that are there. The exit
code is 0 if every error is within its bar, 1 if one is above it, and 2 if there was
nothing to compare: options that cannot work here, or ranks that failed or ran out of time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from flashqla_cp.cli.verify_layer import CONV_TAPS, functional, layer_oracle, layer_problem
from flashqla_cp.conv import causal_conv1d
from flashqla_cp.kernels.backend import select
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.comm import Comm
from flashqla_cp.parallel.context import build_cp_context
from flashqla_cp.parallel.exchange.choose import EXCHANGES
from flashqla_cp.testing.cases import BY_ID, CUSTOM_RANGES, VERIFY, Case
from flashqla_cp.testing.parity import (
    TOKEN_RESULTS,
    Problem,
    Results,
    Score,
    conv_oracle,
    conv_problem,
    op_oracle,
    op_problem,
    run_sharded,
    run_whole,
    score,
)
from flashqla_cp.testing.spawn import run_ranks

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", *CUSTOM_RANGES)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LONGEST_TIMEOUT = 86400  # seconds

# Largest relative errors allowed, by dtype. Against one rank: rows and states, and parameters' gradients, of which each
# rank rounds its part before they are added up. Against the oracle: o and final_state, dg, the rest.
BARS = {
    "float64": {"rows": 1e-10, "parameters": 1e-10, "o": 1e-10, "dg": 1e-10, "rest": 1e-10},
    "float32": {"rows": 1e-5, "parameters": 1e-5, "o": 1e-5, "dg": 1e-5, "rest": 1e-5},
    "float16": {"rows": 3e-3, "parameters": 3e-3, "o": 5e-3, "dg": 2e-2, "rest": 1e-2},
    "bfloat16": {"rows": 3e-3, "parameters": 1e-2, "o": 5e-3, "dg": 2e-2, "rest": 1e-2},
}
# Of the layer, which rounds after every projection, forward and backward, where it is narrow: its parameters' gradients
# against one rank, and everything against the oracle. In fp32 one process alone errs by up to 1.7e-5, over all cases
# and windows. Its norm divides by the size of o: a token whose o is 1/30 of most sends back gradients 30 times as
# large, with the rounding of o in them. That is 1.5e-5 of dhidden_states in the windows around one token (1.4e-5 also
# with a recurrence token by token), and what is left of it in the dg of a chunk adds up in dA_log and ddt_bias. Ranks
# round in other places, by as much; the bar is twice that error, rounded up.
LAYER_BARS = {
    "float64": {"parameters": 1e-10, "all": 1e-10},
    "float32": {"parameters": 4e-5, "all": 4e-5},
    "float16": {"parameters": 3e-3, "all": 2e-2},
    "bfloat16": {"parameters": 1e-2, "all": 5e-2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the ranks are to run. cases: one stream, cut and exchanged in one or several ways. device_type: "cpu" or
    "cuda". op_backend: the op's argument `backend`."""

    cases: tuple[Case, ...]
    dtype: str
    device_type: str
    op_backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What rank 0 found. scores: (part, against) -> errors; cuts: tokens at which a rank's range starts."""

    case: Case
    context: str
    cuts: tuple[int, ...]
    scores: dict[tuple[str, str], list[Score]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options to `parser`."""
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks to start (default 2)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl with a GPU for each rank, else gloo")
    parser.add_argument("--layout", choices=LAYOUTS, help="how the stream is cut (default: the case's, contiguous)")
    parser.add_argument("--exchange", choices=EXCHANGES, default="auto", help="how states travel (default auto)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float64", help="of the inputs (default float64)")
    parser.add_argument("--op-backend", choices=("auto", "tilelang", "torch"), help="default: torch for float64 and 32")
    parser.add_argument(
        "--case", choices=tuple(BY_ID), default=VERIFY.id, metavar="CASE", help="a name that --list prints"
    )
    parser.add_argument("--all", action="store_true", help="every layout with every exchange, where none is named")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which the ranks are killed")


def run(args: argparse.Namespace) -> int:
    """Run the comparison and print it; return 0 if every error is within its bar, 1 if not, 2 if it could not run."""
    if args.list:
        print("\n".join(BY_ID))
        return 0
    inside = dist.is_torchelastic_launched()
    nproc = int(os.environ["WORLD_SIZE"]) if inside else args.nproc
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if inside else nproc
    backend = args.backend or ("nccl" if torch.cuda.device_count() >= here else "gloo")
    request = Request(
        cases=_chosen_cases(args),
        dtype=args.dtype,
        device_type="cuda" if backend == "nccl" else "cpu",
        op_backend=args.op_backend or ("torch" if args.dtype in ("float64", "float32") else "auto"),
    )
    speaks = os.environ["RANK"] == "0" if inside else True
    try:
        _check_options(args, here, request)
        if not inside:
            reports = run_ranks(verify_on_this_rank, nproc, request, backend=backend, timeout=args.timeout)[0]
    except (ValueError, RuntimeError, TimeoutError) as error:  # the text of a rank that failed holds its traceback
        if not inside or os.environ["LOCAL_RANK"] == "0":
            print(f"verify: error: {error}", file=sys.stderr, flush=True)
        return 2
    if inside:
        with _launched_ranks(backend):
            reports = verify_on_this_rank(dist.get_rank(), request)
    if speaks:
        kernels = select(request.op_backend, torch.device(request.device_type), needs_grad=True)
        runs = f"{'torch' if kernels is None else 'tilelang'} backend on {request.device_type}"
        print(f"flashqla-cp verify: {nproc} ranks, {backend}, {args.dtype}, {runs}, case {request.cases[0].id}")
        print(format_all(reports, args.dtype) if args.all else format_report(reports[0], args.dtype))
    return 1 if any(faults(report, args.dtype) for report in reports) else 0


def verify_on_this_rank(rank: int, request: Request) -> list[Report]:
    """Run the sharded steps on every rank of the default group and compare them; the same reports come out on all."""
    device = torch.device("cpu")
    if request.device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    dtype, stream = DTYPES[request.dtype], request.cases[0]
    comm = Comm(None)
    layer, problem_of_layer = layer_problem(stream, dtype, device, request.op_backend)
    steps: dict[str, tuple[Problem, Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
        "op": (op_problem(stream, dtype, device), chunk_gated_delta_rule, op_oracle, {"backend": request.op_backend}),
        "conv": (conv_problem(stream, dtype, device), causal_conv1d, conv_oracle, {}),
        "layer": (problem_of_layer, functional(layer), layer_oracle(layer), {}),
    }
    expected = {}
    for part, (problem, function, oracle, arguments) in steps.items():
        expected[part, "one rank"] = run_whole(function, problem, **arguments)
        expected[part, "oracle"] = run_whole(oracle, _widened(problem))
    reports = []
    for case in request.cases:
        offsets = torch.tensor(case.cu_seqlens, device=device)
        context = build_cp_context(offsets, comm.group, CONV_TAPS, **case.context_options(comm.world_size))
        cuts = sorted({start for owned in context.plan.ranges for start, _ in owned} - {0})
        scores = {}
        for part, (problem, function, _, arguments) in steps.items():
            sharded = run_sharded(
                function, problem, context, lambda x: comm.all_gather(x.double()).wait().sum(0), **arguments
            )
            for against in ("one rank", "oracle"):
                scores[part, against] = score(sharded, expected[part, against], cuts)
        reports.append(Report(case=case, context=repr(context), cuts=tuple(cuts), scores=scores))
    return reports


def bar_of(part: str, against: str, name: str, dtype: str) -> float:
    """Largest error that one tensor may have."""
    bars = BARS[dtype]
    if against == "one rank":
        if name in TOKEN_RESULTS | {"final_state", "dinitial_state"}:
            return bars["rows"]
        return (LAYER_BARS[dtype] if part == "layer" else bars)["parameters"]
    if part == "layer":
        return LAYER_BARS[dtype]["all"]
    return bars["o" if name in ("o", "final_state") else "dg" if name == "dg" else "rest"]


def faults(report: Report, dtype: str) -> list[str]:
    """The tensors whose error is above its bar."""
    return [
        f"{part} {s.name} against {'one rank' if against == 'one rank' else 'the oracle'}"
        for (part, against), scores in report.scores.items()
        for s in scores
        if not s.worst <= bar_of(part, against, s.name, dtype)
    ]


def format_report(report: Report, dtype: str) -> str:
    """Return the tables of errors, one against one rank and one against the oracle, and a closing line."""
    lines = [report.context]
    width = max(len(s.name) for scores in report.scores.values() for s in scores)
    for against in ("one rank", "oracle"):
        heads = "".join(f"{cut:>9}" for cut in report.cuts)
        lines += ["", f"{'against ' + against:<{width + 7}}{'whole':>9}{heads}      bar"]
        for (part, other), scores in report.scores.items():
            if other != against:
                continue
            for s in scores:
                bar = bar_of(part, against, s.name, dtype)
                errors = "".join(f"{error:>9.1e}" for error in (s.whole, *s.behind_cuts))
                blank = " " * 9 * (len(report.cuts) - len(s.behind_cuts))
                verdict = "" if s.worst <= bar else "  too large"
                lines.append(f"{part:<6} {s.name:<{width}}{errors}{blank}{bar:>9.0e}{verdict}")
    bad = faults(report, dtype)
    lines += ["", f"too large: {'; '.join(bad)}" if bad else "every error is within its bar"]
    return "\n".join(lines)


def format_all(reports: list[Report], dtype: str) -> str:
    """Return a line for each report, the largest error of each part and what is above its bar, and a closing line."""
    parts = tuple(dict.fromkeys(part for part, _ in reports[0].scores))
    lines = [f"{'layout':<22}{'exchange':<14}" + "".join(f"{part:>10}" for part in parts)]
    bad = 0
    for report in reports:
        case, found = report.case, faults(report, dtype)
        worst = (max(s.worst for (p, _), row in report.scores.items() if p == part for s in row) for part in parts)
        errors = "".join(f"{error:>10.1e}" for error in worst)
        verdict = f"  too large: {'; '.join(found)}" if found else ""
        lines.append(f"{case.custom or case.layout:<22}{case.exchange:<14}{errors}{verdict}")
        bad += bool(found)
    lines += ["", f"{bad} of {len(reports)} have errors that are too large" if bad else "every error is within its bar"]
    return "\n".join(lines)


def _check_options(args: argparse.Namespace, local_ranks: int, request: Request) -> None:
    """Raise ValueError, or what select raises, for options that cannot work here; no rank has been started yet."""
    if local_ranks < 1:
        raise ValueError(f"--nproc: got {local_ranks}, expected at least 1")
    if not 0 < args.timeout <= LONGEST_TIMEOUT:
        raise ValueError(f"--timeout: got {args.timeout:g}, expected a number above 0, at most {LONGEST_TIMEOUT}")
    if request.device_type == "cuda" and torch.cuda.device_count() < local_ranks:
        count = torch.cuda.device_count()
        raise ValueError(f"--backend: got nccl with {count} GPU(s) for {local_ranks} rank(s), expected one for each")
    select(request.op_backend, torch.device(request.device_type), needs_grad=True)


def _chosen_cases(args: argparse.Namespace) -> tuple[Case, ...]:
    """The named case, cut and exchanged as asked: in one way, or in all that --layout and --exchange leave open."""
    layouts = LAYOUTS if args.all and args.layout is None else (args.layout,)
    exchanges = EXCHANGES[1:] if args.all and args.exchange == "auto" else (args.exchange,)
    return tuple(_cut(replace(BY_ID[args.case], exchange=name), layout) for layout in layouts for name in exchanges)


def _cut(case: Case, layout: str | None) -> Case:
    if layout is None:
        return case
    custom = layout if layout in CUSTOM_RANGES else None
    return replace(case, layout="custom" if custom else layout, custom=custom)


def _widened(problem: Problem) -> Problem:
    """The same numbers in fp64: the oracle differentiates what it is given, and must not round on the way back."""

    def wide(tensors: Results) -> Results:
        return {name: x.double() for name, x in tensors.items()}

    return replace(problem, tokens=wide(problem.tokens), shared=wide(problem.shared), upstream=wide(problem.upstream))


@contextmanager
def _launched_ranks(backend: str) -> Iterator[None]:
    """The process group of the ranks that torchrun started."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()
