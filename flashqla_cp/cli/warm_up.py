"""`flashqla-cp warm-up`: compile kernels ahead of time, in parallel, into a cache that can be copied to other hosts.

Needs no GPU: the architecture is named. Exit code 0 if every kernel is there at the end, 1 if one failed, 2 if nothing
could be started: an option cannot work, the cache or the toolchain cannot be used, or no kernel is registered.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from flashqla_cp.kernels import settings
from flashqla_cp.kernels.arch import ARCHES, arch_by_name
from flashqla_cp.kernels.build import BuildResult, build_all
from flashqla_cp.kernels.builders import rows_to_compile
from flashqla_cp.kernels.cache import Cache
from flashqla_cp.kernels.stages import CONV_WIDTHS, HEAD_DIMS, RATIOS

_COLUMNS = "{:<{width}} {:>9} {:>9} {:>8} {:>8}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--arch", nargs="+", choices=sorted(ARCHES), required=True, help="architectures to compile for")
    parser.add_argument("--ratio", nargs="+", type=int, default=[2], choices=RATIOS, help="HV / H (default: 2)")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=("bfloat16", "float16"), help="of q, k, v")
    parser.add_argument(
        "--head-dim", nargs="+", type=int, default=[128], choices=HEAD_DIMS, help="head sizes (default: 128)"
    )
    parser.add_argument(
        "--conv-width",
        nargs="+",
        type=int,
        default=[4],
        choices=CONV_WIDTHS,
        help="taps of the convolution (default: 4)",
    )
    parser.add_argument("--cache", type=Path, default=None, help="folder to fill (default: FLASHQLA_CP_CACHE)")
    parser.add_argument("--jobs", type=int, default=None, help="compiler processes (default: FLASHQLA_CP_BUILD_JOBS)")


def run(args: argparse.Namespace) -> int:
    """Compile what is missing and print one line for each kernel."""
    try:
        return _warm_up(args)
    except (RuntimeError, ValueError) as error:  # options, cache or toolchain: nothing was started
        print(f"warm-up: {error}", file=sys.stderr)
        return 2


def _refuse_bad_numbers(args: argparse.Namespace) -> None:
    jobs = [] if args.jobs is None else [args.jobs]
    for number in jobs:
        if number < 1:
            raise ValueError(f"--jobs: got {number}, expected a positive integer")


def _warm_up(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    _refuse_bad_numbers(args)
    jobs = settings.build_jobs() if args.jobs is None else args.jobs
    choices = {"head_dim": args.head_dim, "ratio": args.ratio, "dtype": args.dtype, "conv_width": args.conv_width}
    specs = [spec for name in args.arch for spec in rows_to_compile(arch_by_name(name), choices)]
    if not specs:
        raise ValueError(f"no kernels are registered for {', '.join(args.arch)}")
    folder = _open_cache(args.cache)
    width = max(len(spec.label()) for spec in specs)
    print(_COLUMNS.format("kernel", "seconds", "registers", "shared", "spills", width=width))
    started = time.monotonic()
    with tqdm(total=len(specs), unit="kernel", file=sys.stderr, dynamic_ncols=True, delay=0.5) as bar:

        def on_done(result: BuildResult) -> None:
            bar.write(_line(result, width), file=sys.stdout)
            bar.update()

        results = build_all(specs, jobs=jobs, cache_folder=folder, on_done=on_done)
    failed = [result for result in results if result.kernel is None]
    for result in failed:
        print(f"\n{result.spec.label()} failed:\n{result.error}", file=sys.stderr)
    compiled = sum(result.compiled for result in results)
    seconds = time.monotonic() - started
    print(
        f"{len(results) - len(failed)} of {len(results)} kernels in {folder}, {compiled} compiled now, {seconds:.1f} s"
    )
    return 1 if failed else 0


def _open_cache(given: Path | None) -> Path:
    if given is None:
        return Cache(settings.cache_folder()).folder
    try:
        return Cache(given.expanduser()).folder
    except RuntimeError as error:
        raise RuntimeError(f"--cache: {error}") from error


def _line(result: BuildResult, width: int) -> str:
    label = result.spec.label()
    if result.kernel is None:
        return _COLUMNS.format(label, "failed", "", "", "", width=width)
    info = result.kernel.info()
    kernels = info["kernels"]
    seconds = f"{info['seconds']:.1f}" if result.compiled else "cached"
    registers = max(k["registers"] for k in kernels)
    shared = max(k["static_shared_bytes"] + k["dynamic_shared_bytes"] for k in kernels)
    spills = sum(k["spill_store_bytes"] + k["spill_load_bytes"] for k in kernels)
    return _COLUMNS.format(label, seconds, registers, shared, spills, width=width)
