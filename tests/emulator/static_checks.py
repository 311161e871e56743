"""Checks of a compiled kernel that need no run: resources from the cubin, barrier ids and budgets from the source.

Each function takes a CompiledKernel and returns the list of what is wrong, empty when nothing is.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flashqla_cp.kernels.build import CompiledKernel
from flashqla_cp.kernels.cubin import extract_cubins

MOST_THREADS = 1024
_REDUCTION_BARRIERS = {1, 2}  # ids that the device library's reductions take whenever they use named barriers


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a __global__ function."""

    name: str
    type: str


def resource_faults(kernel: CompiledKernel, most_registers: int | None = None) -> list[str]:
    """Spills, shared memory, threads and registers against the architecture's limits."""
    arch, faults = kernel.spec.target, []
    for info in kernel.info()["kernels"]:
        name, registers = info["name"], info["registers"]
        shared = info["static_shared_bytes"] + info["dynamic_shared_bytes"]
        spills = info["spill_store_bytes"] + info["spill_load_bytes"]
        limit = most_registers or arch.max_registers_per_thread
        for what, got, allowed in (
            ("spilled bytes", spills, 0),
            ("registers per thread", registers, limit),
            ("shared bytes", shared, arch.shared_memory_bytes),
            ("threads", info["threads"], MOST_THREADS),
            ("registers per block", -(-registers // 8) * 8 * info["threads"], arch.registers),
        ):
            if got > allowed:
                faults.append(f"{name}: {got} {what}, allowed {allowed}")
    return faults


def barrier_ids(source: str) -> set[int]:
    """Named-barrier ids in emitted source: constants, and both values of `base + (x & 1)` or `base + x % 2`."""
    ids = set()
    for text in re.findall(r"__(?:sync_thread_partial|named_barrier_arrive)\(([^;]*?), \d+\);", source):
        constant = re.fullmatch(r"\(?(\d+)\)?", text.strip())
        either = re.fullmatch(r"\(?\(.*(?:& 1|% 2)\) \+ (\d+)\)?", text.strip())
        if constant:
            ids.add(int(constant.group(1)))
        elif either:
            ids |= {int(either.group(1)), int(either.group(1)) + 1}
        else:
            raise ValueError(f"barrier id {text!r}: expected a constant or a constant plus one bit")
    if re.search(r"tl::NamedBarrier<\d+>", source):
        ids |= _REDUCTION_BARRIERS
    return ids


def barrier_faults(kernel: CompiledKernel) -> list[str]:
    """Named barriers beyond the hardware's, and ids that collide with those of reductions."""
    source, faults = kernel.device_source(), []
    ids = barrier_ids(source)
    beyond = sorted(i for i in ids if i >= kernel.spec.target.named_barriers)
    if beyond:
        faults.append(f"barrier ids {beyond}: there are {kernel.spec.target.named_barriers}")
    explicit = barrier_ids(re.sub(r"tl::NamedBarrier<\d+>", "", source))
    if explicit & _REDUCTION_BARRIERS and "tl::NamedBarrier<" in source:
        faults.append(f"barrier ids {sorted(explicit & _REDUCTION_BARRIERS)} are those of cross-warp reductions")
    return faults


def tensor_memory_columns(source: str) -> int:
    """Columns that the kernel allocates in all."""
    return sum(map(int, re.findall(r"tmem_allocate(?:<\w+>)?\(.*?, (\d+)\)", source)))


def tensor_memory_faults(kernel: CompiledKernel) -> list[str]:
    """Columns beyond the architecture's, and allocations that are not freed."""
    source, arch = kernel.device_source(), kernel.spec.target
    columns, faults = tensor_memory_columns(source), []
    freed = sum(map(int, re.findall(r"tmem_deallocate(?:<\w+>)?\(.*?, (\d+)\)", source)))
    if columns > arch.tensor_memory_columns:
        faults.append(f"{columns} tensor-memory columns, {arch.name} has {arch.tensor_memory_columns}")
    if columns != freed:
        faults.append(f"{columns} tensor-memory columns are allocated and {freed} freed")
    return faults


def register_budget(source: str, threads: int) -> int | None:
    """Registers of a block after setmaxnreg, summed over thread ranges; None without setmaxnreg.

    Follows the branches on threadIdx.x that TileLang emits for roles: `if (threadIdx.x < N) {` and `} else {`.
    """
    ranges = [(0, threads)]  # of each open brace
    closed = (0, threads)  # of the block closed last, with what its parent leaves for an else
    total, found = 0, 0
    for line in source.splitlines():
        text = line.strip()
        bound = re.match(r"(?:\} else )?if \(\(*int\)threadIdx\.x\) < (\d+)\) \{$", text)
        if text.startswith("}") and len(ranges) > 1:
            closed = ranges.pop()
        if bound:
            low, high = ranges[-1]
            ranges.append((low, min(high, int(bound.group(1)))))
        elif text == "} else {":
            ranges.append((closed[1], ranges[-1][1]))
        elif text.endswith("{"):
            ranges.append(ranges[-1])
        change = re.search(r"warpgroup_reg_(?:de)?alloc<(\d+)>", text)
        if change:
            low, high = ranges[-1]
            total += (high - low) * int(change.group(1))
            found += high - low
    if not found:
        return None
    if found != threads:
        raise ValueError(f"setmaxnreg covers {found} of {threads} threads")
    return total


def register_budget_faults(kernel: CompiledKernel) -> list[str]:
    """Register budgets of the roles that together exceed the register file."""
    faults = []
    for info in kernel.info()["kernels"]:
        try:
            budget = register_budget(kernel.device_source(), info["threads"])
        except ValueError as error:
            faults.append(f"{info['name']}: {error}")
            continue
        if budget is not None and budget > kernel.spec.target.registers:
            faults.append(f"{info['name']}: roles take {budget} registers, the file has {kernel.spec.target.registers}")
    return faults


def parameters(kernel: CompiledKernel) -> list[Parameter]:
    """Parameters of the kernel's (first) __global__ function, in order."""
    match = re.search(r'extern "C" __global__ void [^{;]*?\(([^()]*)\);', kernel.device_source())
    if not match:
        raise ValueError("the source declares no __global__ function")
    found = []
    for text in filter(None, (p.strip() for p in match.group(1).split(","))):
        kind, _, name = re.sub(r"__restrict__|__grid_constant__", "", text).strip().rpartition(" ")
        found.append(Parameter(name=name, type=kind.strip()))
    return found


def find_disassembler() -> str | None:
    """nvdisasm on PATH or from the package nvidia-cuda-nvdisasm."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((str(p) for f in folders for p in sorted(Path(f).glob("*/bin/nvdisasm"))), None)


def opcodes(kernel: CompiledKernel) -> set[str]:
    """Opcodes with their modifiers, and every prefix of them: HGMMA.64x64x16.F32 counts as HGMMA too."""
    disassembler = find_disassembler()
    if disassembler is None:
        raise RuntimeError("nvdisasm was not found; install it with: pip install nvidia-cuda-nvdisasm")
    found: set[str] = set()
    for cubin in extract_cubins(kernel.library().read_bytes()):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            text = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
        for opcode in re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, flags=re.M):
            parts = opcode.split(".")
            found |= {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return found


def all_faults(kernel: CompiledKernel) -> list[str]:
    """Everything above that can be wrong."""
    checks = (resource_faults, barrier_faults, tensor_memory_faults, register_budget_faults)
    return [fault for check in checks for fault in check(kernel)]
