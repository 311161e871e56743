"""Faults by the dozen: one changed line of emitted source each, run in the emulator, caught or not.

    python tests/emulator/mutation.py [proof name ...]      prints every mutant with its fate, and the score

A mutant is caught when the emulator reports something, the run does not finish, or an output is wrong. One that is
listed as equivalent changes nothing that the hardware promises; it counts neither way, and must not be caught.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE / "kernels")]

import torch  # noqa: E402
from cta_emulator.launch import load_sources  # noqa: E402
from proof_table import Proof, proofs  # noqa: E402

from flashqla_cp.kernels.build import CompiledKernel, build_all  # noqa: E402

DEFAULT_KERNELS = ("proof_product_ss-sm_90a", "proof_product_ss-sm_100a", "proof_tma_tail-swizzle128-sm_90a")
SCHEDULES = (("eager", 1), ("lazy", 1), ("random", 1), ("random", 2))
MOST_SWITCHES = 2_000_000
LONGEST_SECONDS = 60


# A server that has imported torch and run nothing: its forks start fast, and no thread of this process is lost in them.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "numpy"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One changed line. line: its number. before, after: its text."""

    line: int
    what: str
    before: str
    after: str


_SYNCHRONISING = (
    r"\.wait\(|\.arrive\(|expect_transaction|arrive_and_expect_tx|__syncthreads|__syncwarp|fence_proxy_async|"
    r"fence_barrier_init|thread_sync\(|warpgroup_(?:arrive|commit_batch|wait)|tma_store_(?:arrive|wait)|"
    r"tcgen05_mma_arrive|tmem_(?:de)?allocate|__sync_thread_partial|__named_barrier_arrive|cp_async_(?:commit|wait)"
)


def _replace(pattern: str, change: Callable[[re.Match[str]], str]) -> Callable[[str], str]:
    return lambda line: re.sub(pattern, change, line, count=1)


_LOOP = r"for \(int \w+ = 0; \w+ < \d+; \+\+"
# (what, where it applies, how the line changes)
_CHANGES: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("deleted", _SYNCHRONISING, _replace(r"\S.*", lambda m: ";")),
    ("parity swapped", r"\.wait\(", _replace(r"\.wait\((.*)\);", lambda m: f".wait(({m[1]}) ^ 1);")),
    ("count + 1", r"\.init\(\d+\)", _replace(r"init\((\d+)\)", lambda m: f"init({int(m[1]) + 1})")),
    ("count halved", r"\.init\(\d{2,}\)", _replace(r"init\((\d+)\)", lambda m: f"init({int(m[1]) // 2})")),
    ("bytes halved", r"(?:transaction|_tx)\(\d+\)", _replace(r"\((\d+)\);", lambda m: f"({int(m[1]) // 2});")),
    ("one step more", _LOOP, _replace(r"< (\d+);", lambda m: f"< {int(m[1]) + 1};")),
    ("one step less", _LOOP, _replace(r"< (\d+);", lambda m: f"< {int(m[1]) - 1};")),
    ("other stage", r"tma_load\(.*\(\(\w+ & 1\) \*", _replace(r"\(\((\w+) & 1\) \*", lambda m: f"((~{m[1]} & 1) *")),
    ("other place", r"tma_(?:load|store)\(.*\* 64\)", _replace(r"\* 64\)", lambda m: "* 64) + 1")),
    ("few waited", r"_wait<0>", _replace(r"_wait<0>", lambda m: "_wait<1>")),
    ("columns halved", r"tmem_allocate\(.*, 64\)", _replace(r", 64\)", lambda m: ", 32)")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """A deletion that changes nothing the hardware promises: which occurrences of a line, and why."""

    line: str
    occurrences: tuple[int, ...]
    why: str


EQUIVALENT: dict[str, tuple[Equivalent, ...]] = {
    "proof_tma_tail-swizzle128-sm_90a": (
        Equivalent(
            line="__syncthreads();", occurrences=(1,), why="each thread waited for the load and rewrites what it read"
        ),
    ),
    "proof_product_ss-sm_100a": (
        Equivalent(
            line="__syncthreads();", occurrences=(0, 1), why="of two in a row, with an mbarrier behind, one is enough"
        ),
        Equivalent(
            line="tl::tcgen05_before_thread_sync();", occurrences=(0, 1), why="tensor memory is untouched so far"
        ),
        Equivalent(
            line="tl::tcgen05_after_thread_sync();", occurrences=(0, 1, 2), why="tensor memory is untouched so far"
        ),
        Equivalent(
            line="tl::tcgen05_after_thread_sync();", occurrences=(4,), why="a free is ordered by the barrier alone"
        ),
        Equivalent(line="tl::fence_proxy_async();", occurrences=(0,), why="the copy engine alone wrote the operands"),
    ),
}


def mutants(source: str) -> list[Mutant]:
    """Every change that applies, in source order."""
    found = []
    start = source.index("__launch_bounds__")
    first = source[:start].count("\n")
    for number, line in enumerate(source.splitlines()[first:], first + 1):
        for what, where, change in _CHANGES:
            if re.search(where, line) and change(line) != line:
                found.append(Mutant(line=number, what=what, before=line.strip(), after=change(line).strip()))
    return found


def apply(mutant: Mutant, source: str) -> str:
    """The source with the mutant's line."""
    lines = source.splitlines()
    lines[mutant.line - 1] = mutant.after
    return "\n".join(lines) + "\n"


def equivalent(name: str, mutant: Mutant, source: str) -> str:
    """Why a mutant of this proof kernel is equivalent, or an empty text."""
    if mutant.what != "deleted":
        return ""
    occurrence = [line.strip() for line in source.splitlines()[: mutant.line - 1]].count(mutant.before)
    table = EQUIVALENT.get(name, ())
    return next((e.why for e in table if e.line == mutant.before and occurrence in e.occurrences), "")


def _run(name: str, source: str, host: str, queue: Any) -> None:
    """Fate of one source, put on the queue: how it was caught, or "survived"."""
    proof = next(p for p in proofs() if p.name == name)
    kernel = load_sources(proof.spec.stage, source, host)
    for schedule, seed in SCHEDULES:
        inputs, outputs = proof.make(torch.Generator().manual_seed(0))
        report = kernel(*inputs, *outputs, schedule=schedule, seed=seed, max_switches=MOST_SWITCHES)
        if report.findings or not report.finished:
            queue.put("reported: " + ", ".join(sorted(report.rules())))
            return
        for got, want in zip(outputs, proof.expect(*inputs), strict=True):
            error = float((got.double() - want.double()).norm() / want.double().norm())
            if not error <= max(proof.tolerance, 1e-12):
                queue.put("wrong result")
                return
    queue.put("survived")


def fate(proof: Proof, source: str, host: str) -> str:
    """Run one source in a process of its own: a mutant may loop for ever or crash."""
    queue = _PROCESSES.SimpleQueue()
    process = _PROCESSES.Process(target=_run, args=(proof.name, source, host, queue), daemon=True)
    process.start()
    process.join(LONGEST_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return "did not end"
    if process.exitcode:
        return f"crashed ({process.exitcode})"
    return queue.get()


def score(proof: Proof, kernel: CompiledKernel, show: Callable[[str], None] = print) -> tuple[int, int, list[str]]:
    """Mutants caught, mutants that change behaviour, and complaints about the table of equivalent ones."""
    source, host = kernel.device_source(), kernel.host_source()
    table = mutants(source)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        fates = list(pool.map(lambda mutant: fate(proof, apply(mutant, source), host), table))
    caught = changing = 0
    complaints = []
    for mutant, how in zip(table, fates, strict=True):
        reason = equivalent(proof.name, mutant, source)
        if reason and how != "survived":
            complaints.append(f"{proof.name} line {mutant.line} ({mutant.what}) counts as equivalent but is {how}")
        caught += how != "survived" and not reason
        changing += not reason
        because = f" (equivalent: {reason})" if reason else ""
        show(f"{proof.name}:{mutant.line}: {mutant.what}: {mutant.before}\n    {how}{because}")
    show(f"{proof.name}: {caught} of {changing} mutants caught, {len(table) - changing} equivalent")
    return caught, changing, complaints


def main(names: list[str]) -> int:
    """Score the named proof kernels."""
    chosen = [proof for proof in proofs() if proof.name in (names or DEFAULT_KERNELS)]
    results = [score(p, r.kernel) for p, r in zip(chosen, build_all([p.spec for p in chosen]), strict=True) if r.kernel]
    caught, changing = sum(r[0] for r in results), sum(r[1] for r in results)
    print(f"in all: {caught} of {changing} mutants caught ({100 * caught / changing:.1f} %)")
    return 0 if caught >= 0.9 * changing else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
