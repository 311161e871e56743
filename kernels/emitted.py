"""Reads what the compiler left: launch sizes from the host stub, spills from the log of ptxas, the rest from cubins."""

from __future__ import annotations

import re
from typing import Any

from flashqla_cp.kernels.cubin import extract_cubins, read_resources

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")


def describe_kernels(library: bytes, device: str, host: str, log: str) -> list[dict[str, Any]]:
    """Resources and launch sizes of every kernel in a compiled library.

    Args:
        library: bytes of the shared library. device, host: emitted sources. log: output of ptxas --verbose.

    Raises:
        RuntimeError: the library holds no cubin, or the log or the stub lacks a kernel.
    """
    cubins = extract_cubins(library)
    if not cubins:
        raise RuntimeError("the compiled library holds no cubin")
    spills = _spills_by_kernel(log)
    kernels = []
    for resources in (r for cubin in cubins for r in read_resources(cubin)):
        if resources.kernel not in spills:
            raise RuntimeError(f"ptxas did not report kernel {resources.kernel}; its output was:\n{log[-2000:]}")
        stores, loads = spills[resources.kernel]
        threads, dynamic = launch_sizes(host, resources.kernel, device)
        kernels.append(
            {
                "name": resources.kernel,
                "registers": resources.registers,
                "stack_bytes": resources.stack_bytes,
                "spill_store_bytes": stores,
                "spill_load_bytes": loads,
                "static_shared_bytes": resources.static_shared_bytes,
                "dynamic_shared_bytes": dynamic,
                "threads": threads,
            }
        )
    return kernels


def _spills_by_kernel(log: str) -> dict[str, tuple[int, int]]:
    found, kernel = {}, ""
    for line in log.splitlines():
        entry, spill = _ENTRY.search(line), _SPILLS.search(line)
        if entry:
            kernel = entry.group(1)
        if spill and kernel:
            found[kernel] = (int(spill.group(2)), int(spill.group(3)))
    return found


def launch_sizes(host: str, kernel: str, device: str) -> tuple[int, int]:
    """Threads of a block and dynamic shared bytes, read from the host stub that launches `kernel`.

    The stub stores the launch arguments one by one: parameters, grid, block (three), then dynamic shared memory if any.
    """
    call = re.search(rf"TVMFFIFunctionCall\({kernel}_packed, \(TVMFFIAny\*\) stack_ffi_any, (\d+),", host)
    if not call:
        raise RuntimeError(f"the host stub does not launch {kernel}")
    count, before = int(call.group(1)), host[: call.start()]

    def argument(index: int) -> int:
        stored = re.findall(
            rf"\(\(\(TVMFFIAny\*\)stack_ffi_any\)\[{index}\]\.v_int64\) = \(\(int64_t\)(\d+)\);", before
        )
        if not stored:
            raise RuntimeError(f"launch argument {index} of {kernel} is not a constant in the host stub")
        return int(stored[-1])

    uses_dynamic = "extern __shared__" in device
    last_block = count - (1 if uses_dynamic else 0)
    x, y, z = (argument(last_block - 3 + i) for i in range(3))
    return x * y * z, argument(count - 1) if uses_dynamic else 0
