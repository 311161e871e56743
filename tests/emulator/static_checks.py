"""Checks of a compiled kernel that need no run: resources from the cubin, barrier ids and budgets from the source.

Each function takes a CompiledKernel and returns the list of what is wrong, empty when nothing is.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
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


def resource_faults(kernel: CompiledKernel, most_registers: int | None = None, most_spilled: int = 0) -> list[str]:
    """Spills, shared memory, threads and registers against the architecture's limits.

    Spilled bytes are those of the stack, each slot once however often it is used; without a stack, what is moved.
    """
    arch, faults = kernel.spec.target, []
    for info in kernel.info()["kernels"]:
        name, registers = info["name"], info["registers"]
        shared = info["static_shared_bytes"] + info["dynamic_shared_bytes"]
        spills = info.get("stack_bytes") or max(info["spill_store_bytes"], info["spill_load_bytes"])
        limit = most_registers or arch.max_registers_per_thread
        for what, got, allowed in (
            ("spilled bytes", spills, most_spilled),
            ("registers per thread", registers, limit),
            ("shared bytes", shared, arch.shared_memory_bytes),
            ("threads", info["threads"], MOST_THREADS),
            ("registers per block", -(-registers // 8) * 8 * info["threads"], arch.registers),
        ):
            if got > allowed:
                faults.append(f"{name}: {got} {what}, allowed {allowed}")
    return faults


def _arguments(source: str, start: int) -> list[str]:
    """Arguments of the call whose opening parenthesis is at `start`."""
    depth, begin, found = 0, start + 1, []
    for i in range(start, len(source)):
        depth += (source[i] in "([{") - (source[i] in ")]}")
        if depth == 0 or (depth == 1 and source[i] == ","):
            found.append(source[begin:i].strip())
            begin = i + 1
        if depth == 0:
            return found if found != [""] else []
    raise ValueError(f"call without an end: {source[start : start + 60]!r}")


def _calls(source: str, names: str) -> list[tuple[int, list[str]]]:
    """Position and arguments of every call of a function that the pattern `names` matches; any other use raises."""
    found = []
    for match in re.finditer(rf"\b(?:{names})\b\s*(?:<[^<>;()]*>)?\s*(\()?", source):
        if match.group(1) is None:
            raise ValueError(f"{match.group(0).strip()!r} is used otherwise than in a call")
        found.append((match.start(), _arguments(source, match.end() - 1)))
    return found


def _bare(text: str) -> str:
    """Text without the parentheses that enclose all of it."""
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and _arguments(text + ";", 0) == [text[1:-1].strip()]:
        inner = text[1:-1]
        depths = [inner[: i + 1].count("(") - inner[: i + 1].count(")") for i in range(len(inner))]
        if min(depths, default=0) < 0:
            break
        text = inner.strip()
    return text


def _barrier_values(text: str) -> set[int]:
    """Values of a barrier id: a constant, or a constant plus one bit, `x & 1` or `x % 2`."""
    bare = _bare(text)
    if re.fullmatch(r"\d+", bare):
        return {int(bare)}
    either = re.fullmatch(r"(\(.*\)) \+ (\d+)", bare)
    if either and "?" not in bare and re.fullmatch(r"[^&%|^]+ (?:& 1|% 2)", _bare(either.group(1))):
        return {int(either.group(2)), int(either.group(2)) + 1}
    raise ValueError(f"barrier id {text!r}: expected a constant or a constant plus one bit")


def barrier_ids(source: str) -> set[int]:
    """Named-barrier ids in emitted source: constants, and both values of `base + (x & 1)` or `base + x % 2`.

    Raises:
        ValueError: an id that cannot be read.
    """
    ids = set()
    for _, arguments in _calls(source, "__sync_thread_partial|__named_barrier_arrive"):
        ids |= _barrier_values(arguments[0]) if arguments else {0}
    if re.search(r"\basm\b[^;]*\b(?:bar|barrier)\.", source):
        raise ValueError("a named barrier in inline assembly: its id cannot be read")
    if re.search(r"tl::NamedBarrier<", source):
        ids |= _REDUCTION_BARRIERS
    return ids


def barrier_faults(kernel: CompiledKernel) -> list[str]:
    """Named barriers beyond the hardware's, and ids that collide with those of reductions."""
    source, faults = kernel.device_source(), []
    try:
        ids = barrier_ids(source)
    except ValueError as error:
        return [str(error)]
    beyond = sorted(i for i in ids if i >= kernel.spec.target.named_barriers)
    if beyond:
        faults.append(f"barrier ids {beyond}: there are {kernel.spec.target.named_barriers}")
    explicit = barrier_ids(source.replace("tl::NamedBarrier<", ""))
    if explicit & _REDUCTION_BARRIERS and "tl::NamedBarrier<" in source:
        faults.append(f"barrier ids {sorted(explicit & _REDUCTION_BARRIERS)} are those of cross-warp reductions")
    return faults


def _columns(source: str, function: str) -> int:
    total = 0
    for position, arguments in _calls(source, function):
        if len(arguments) != 2 or not re.fullmatch(r"\d+", _bare(arguments[1])):
            raise ValueError(
                f"{function}({', '.join(arguments)}): expected an address and a constant number of columns"
            )
        if any(re.search(r"\b(?:for|while|do)\b", header) for header in _headers(source, position)):
            raise ValueError(f"{function}({', '.join(arguments)}): in a loop, its columns cannot be counted")
        total += int(_bare(arguments[1]))
    return total


def _headers(source: str, position: int) -> list[str]:
    """Text before the opening brace of every block around `position`, and before it on its own line."""
    opened: list[int] = []
    for match in re.finditer(r"[{}]", source[:position]):
        if match.group() == "{":
            opened.append(match.start())
        elif opened:
            opened.pop()
    ends = [*opened, position]
    return [source[source.rfind("\n", 0, end) + 1 : end] for end in ends]


def tensor_memory_columns(source: str) -> int:
    """Columns that the kernel allocates in all.

    Raises:
        ValueError: an allocation of no constant size, or in a loop.
    """
    return _columns(source, "tmem_allocate")


def tensor_memory_faults(kernel: CompiledKernel) -> list[str]:
    """Columns beyond the architecture's, and allocations that are not freed."""
    source, arch, faults = kernel.device_source(), kernel.spec.target, []
    try:
        columns, freed = tensor_memory_columns(source), _columns(source, "tmem_deallocate")
    except ValueError as error:
        return [str(error)]
    if columns > arch.tensor_memory_columns:
        faults.append(f"{columns} tensor-memory columns, {arch.name} has {arch.tensor_memory_columns}")
    if columns != freed:
        faults.append(f"{columns} tensor-memory columns are allocated and {freed} freed")
    return faults


_Threads = frozenset[int]


def _threads_where(condition: str) -> Callable[[int], bool] | None:
    """Test of a thread for `threadIdx.x < N` and the like, in either order; None for another condition."""
    mirrored = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
    thread = r"(?:\(int\))?threadIdx\.x"
    text = re.sub(rf"\(({thread})\)", r"\1", _bare(condition))
    match = re.fullmatch(rf"{thread} (<=?|>=?|==|!=) (\d+)", text)
    sign = match.group(1) if match else ""
    if not match:
        match = re.fullmatch(rf"(\d+) (<=?|>=?|==|!=) {thread}", text)
        if not match:
            return None
        sign = mirrored[match.group(2)]
    compare = {"<": lt, "<=": le, ">": gt, ">=": ge, "==": eq, "!=": ne}[sign]
    bound = int(match.group(2 if text[0] in "(t" else 1))
    return lambda thread: compare(thread, bound)


def _enter(text: str, outer: _Threads | None, rest: _Threads | None) -> tuple[_Threads | None, _Threads | None]:
    """Threads in the block that the line `text` opens, and those left for its else; None for what cannot be read."""
    base = rest if text.startswith("} else") else outer
    branch = re.fullmatch(r"(?:\} else )?if \((.*)\) \{", text)
    if branch:
        test = _threads_where(branch.group(1))
        if base is None or test is None:
            return None, None
        inside = frozenset(t for t in base if test(t))
        return inside, base - inside
    known = text in ("{", "} else {") or "__global__" in text or re.fullmatch(r'extern "C" \{', text)
    return (base if known else None), None


def register_budget(source: str, threads: int) -> int | None:
    """Registers of a block after setmaxnreg, summed over thread ranges; None without setmaxnreg.

    Follows the branches on threadIdx.x that TileLang emits for roles, in either order, with their else branches.

    Raises:
        ValueError: setmaxnreg under a condition or in a loop that cannot be read, in a part of a warpgroup, or not in
            every thread exactly once.
    """
    stack: list[tuple[_Threads | None, _Threads | None]] = [(frozenset(range(threads)), None)]
    rest: _Threads | None = None  # of the block closed last: the threads its else would get
    total, found = 0, []
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text.startswith("}") and len(stack) > 1:
            rest = stack.pop()[1]
        if text.endswith("{"):
            stack.append(_enter(text, stack[-1][0], rest))
        if not re.search(r"\bwarpgroup_reg_(?:de)?alloc\b", text):
            continue
        change = re.fullmatch(r"tl::warpgroup_reg_(?:de)?alloc<(\d+)>\(\);", text)
        inside = stack[-1][0]
        if not change or inside is None:
            raise ValueError(f"setmaxnreg in line {number}: cannot read which threads run it, or how many registers")
        if any(len(inside & set(range(first, first + 128))) not in (0, 128) for first in range(0, threads, 128)):
            raise ValueError(f"setmaxnreg in line {number} is run by a part of a warpgroup")
        total += len(inside) * int(change.group(1))
        found += inside
    if not found:
        return None
    if len(found) != threads or len(set(found)) != threads:
        raise ValueError(f"setmaxnreg covers {len(set(found))} of {threads} threads, {len(found)} times in all")
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


def all_faults(kernel: CompiledKernel, most_spilled: int = 0) -> list[str]:
    """Everything above that can be wrong."""
    checks = (barrier_faults, tensor_memory_faults, register_budget_faults)
    found = resource_faults(kernel, most_spilled=most_spilled)
    return found + [fault for check in checks for fault in check(kernel)]
