"""What happens to ranks that come late, and to ranks whose neighbour dies; launch/multi_gpu_check.sh runs both.

    python -m flashqla_cp.launch.endurance skew --nproc 8           1000 steps, each rank asleep at random times
    python -m flashqla_cp.launch.endurance death --nproc 8          one rank is killed in the middle of a step

skew: layouts and exchanges take turns, in front of a forward and of a backward each rank sleeps on its own, on a GPU
the device does too, and every step must give what the first one of its kind gave, bit by bit.
death: the other ranks must end by themselves, with an error that says what happened, soon after the time limit of
their process group; --timeout is that limit. Nothing kills them before a minute and a half more has passed.

Ranks talk over NCCL with a GPU for each, else over gloo, where all share a GPU if one can be seen. The exit code is 0
if all went well, else 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.context import CPContext, build_cp_context
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.spawn import run_ranks

WAYS = (
    ("contiguous", "allgather"),
    ("contiguous", "sharded"),
    ("zigzag", "hierarchical"),
    ("zigzag_per_document", "sharded"),
    ("contiguous", "headwise"),
)
NAP, LONG_NAP, LONG_SHARE = 1e-3, 0.1, 0.01  # seconds; the share of naps that are long
FIRST_STEPS = 5  # before a rank dies
GRACE = 90.0  # seconds beyond the limit until ranks that have not ended are killed
ERRORS = re.compile(r"time[d ]*out|closed by peer|reset by peer|remote process|NCCL error|abort", re.IGNORECASE)


class Steps:
    """The op, forward and backward, on this rank's part of a stream, in one of several ways."""

    def __init__(self, device: torch.device):
        self.size, self.device = dist.get_world_size(), device
        self.on_kernels = device.type == "cuda"
        length = 96 * self.size
        self.offsets = torch.tensor([0, length // 3, length // 3, length], device=device)
        self.contexts: dict[tuple[str, str], CPContext] = {}
        dtype, dim = (torch.bfloat16, 64) if self.on_kernels else (torch.float32, 16)
        self.inputs = make_inputs(length, 1, 2, dim, dim, gates="mixed", dtype=dtype, device=device)

    def forward(self, way: tuple[str, str]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """o of this rank, and what it is differentiated by."""
        if way not in self.contexts:
            layout, exchange = way
            self.contexts[way] = build_cp_context(self.offsets, None, layout=layout, exchange=exchange)
        context = self.contexts[way]
        own = [context.shard(x.detach()).requires_grad_() for x in self.inputs.values()]
        backend = "auto" if self.on_kernels else "torch"
        q, k, v, g, beta = own
        return chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context, backend=backend)[0], own

    def backward(self, o: torch.Tensor, own: list[torch.Tensor]) -> list[torch.Tensor]:
        """o and its gradients."""
        return [o.detach(), *torch.autograd.grad(o.square().sum(), own)]


def steps_under_skew(rank: int, steps: int, device_type: str) -> dict[str, Any]:
    """Run the steps on this rank of the default group; how long they took, and how many were not as the first."""
    device = torch.device(device_type)
    work, naps = Steps(device), random.Random(rank)
    first: dict[tuple[str, str], list[torch.Tensor]] = {}
    different, longest, slept, began = 0, 0.0, 0.0, time.monotonic()
    for step in range(steps):
        way, start = WAYS[step % len(WAYS)], time.monotonic()
        slept += _nap(naps, device)
        o, own = work.forward(way)
        slept += _nap(naps, device)
        found = work.backward(o, own)
        same = all(map(torch.equal, found, first.setdefault(way, found)))
        different, longest = different + (not same), max(longest, time.monotonic() - start)
    seconds = time.monotonic() - began
    return {"steps": steps, "different": different, "seconds": seconds, "longest_s": longest, "slept_s": slept}


def _nap(naps: random.Random, device: torch.device) -> float:
    seconds = LONG_NAP if naps.random() < LONG_SHARE else naps.uniform(0.0, 2 * NAP)
    if device.type == "cuda" and naps.random() < 0.5:
        torch.cuda._sleep(int(seconds * 1e9))  # in cycles; the work behind it comes late, the host does not
    else:
        time.sleep(seconds)
    return seconds


def run_skew(args: argparse.Namespace) -> int:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    found = run_ranks(steps_under_skew, args.nproc, args.steps, device_type, backend=args.backend, timeout=args.limit)
    different, seconds = max(part["different"] for part in found), max(part["seconds"] for part in found)
    slept = ", ".join(f"{part['slept_s']:.1f}" for part in found)
    print(f"skew: {args.steps} steps on {args.nproc} ranks over {args.backend} in {seconds:.1f} s, no hang")
    print(f"skew: ranks slept for {slept} s; longest step {max(part['longest_s'] for part in found):.2f} s")
    print(f"skew: {different} steps differ from the first of their kind")
    _keep(args, {"ranks": found})
    return 1 if different else 0


def run_death(args: argparse.Namespace) -> int:
    """Start the ranks as processes of their own, which nobody but they themselves ends."""
    victim = args.nproc // 2
    with tempfile.TemporaryDirectory(prefix="flashqla-cp-") as folder:
        command = [sys.executable, "-m", "flashqla_cp.launch.endurance", "one-rank", "--nproc", str(args.nproc)]
        command += ["--backend", args.backend, "--timeout", str(args.timeout), "--folder", folder]
        logs = [Path(folder) / f"{rank}.log" for rank in range(args.nproc)]
        ranks = []
        for rank, log in enumerate(logs):
            environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "VICTIM": str(victim)}
            with log.open("w") as file:
                ranks.append(
                    subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=file, stderr=file)
                )
        ended = _watch(ranks, victim, args)
        texts = [log.read_text(errors="replace") for log in logs]
    found = [
        {"rank": rank, "exit_code": process.returncode, "seconds": ended.get(rank), "error": _error(text)}
        for rank, (process, text) in enumerate(zip(ranks, texts, strict=True))
    ]
    died = found[victim]["exit_code"] == -signal.SIGKILL
    print(
        f"death: rank {victim} of {args.nproc} over {args.backend} {'was killed' if died else 'did not get that far'}"
    )
    if not died:
        print(texts[victim][-2000:])
    fine = died
    for row in found:
        if row["rank"] != victim:
            well = row["seconds"] is not None and row["exit_code"] != 0 and row["error"] is not None
            fine = fine and well
            when = "had to be killed" if row["seconds"] is None else f"ended {row['seconds']:.1f} s later"
            print(f"death: rank {row['rank']} {when}, exit code {row['exit_code']}: {row['error'] or 'no clear error'}")
    print(f"death: {'every other rank ended with an error' if fine else 'FAILED'} (limit {args.timeout:g} s)")
    _keep(args, {"victim": victim, "limit_s": args.timeout, "ranks": found})
    return 0 if fine else 1


def _watch(ranks: list[subprocess.Popen[bytes]], victim: int, args: argparse.Namespace) -> dict[int, float]:
    """Seconds after the victim's death at which each rank ended by itself; the others are killed."""
    ended: dict[int, float] = {}
    try:
        ranks[victim].wait(args.limit)
        began = time.monotonic()
        while len(ended) < len(ranks) and time.monotonic() < began + args.timeout + GRACE:
            for rank, process in enumerate(ranks):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - began
            time.sleep(0.05)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
    return ended


def _error(text: str) -> str | None:
    """The first line that says what went wrong."""
    lines = (line.strip() for line in text.splitlines())
    return next((line[:200] for line in lines if ERRORS.search(line)), None)


def run_one_rank(args: argparse.Namespace) -> int:
    """A rank that goes on until it fails; the victim kills itself between a forward and its backward."""
    device, limit = torch.device("cpu"), datetime.timedelta(seconds=args.timeout)
    if torch.cuda.is_available():
        device = torch.device("cuda", args.rank if args.backend == "nccl" else 0)
        torch.cuda.set_device(device)
    rendezvous = (args.folder / "rendezvous").as_uri()
    dist.init_process_group(args.backend, rendezvous, timeout=limit, world_size=args.nproc, rank=args.rank)
    work = Steps(device)
    for step in range(10**9):
        o, own = work.forward(WAYS[step % len(WAYS)])
        if step == FIRST_STEPS and args.rank == int(os.environ["VICTIM"]):
            os.kill(os.getpid(), signal.SIGKILL)
        o.cpu(), [x.cpu() for x in work.backward(o, own)]  # as a training loop that reads its loss
    return 0


def _keep(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.json is not None:
        args.json.write_text(json.dumps({"nproc": args.nproc, "backend": args.backend, **found}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="endurance", description="Ranks that come late, and ranks that die.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("skew", run_skew), ("death", run_death), ("one-rank", run_one_rank)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--nproc", type=int, default=2, help="ranks (default 2)")
        command.add_argument("--backend", choices=("nccl", "gloo"), default=None)
        command.add_argument("--limit", type=float, default=120.0, help="seconds that a run may take")
        command.add_argument("--json", type=Path)
        command.add_argument("--steps", type=int, default=1000, help="of skew (default 1000)")
        command.add_argument("--timeout", type=float, default=20.0, help="of death: the process group's, in seconds")
        command.add_argument("--rank", type=int)
        command.add_argument("--folder", type=Path)
    args = parser.parse_args(argv)
    if args.nproc < 2:
        parser.error(f"--nproc: got {args.nproc}, expected at least 2")
    args.backend = args.backend or ("nccl" if torch.cuda.device_count() >= args.nproc else "gloo")
    try:
        return int(args.run(args))
    except (RuntimeError, TimeoutError) as error:
        if args.command == "one-rank":
            raise
        print(f"{args.command}: FAILED: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
