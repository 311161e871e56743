"""Loads an emulated kernel and calls it with torch tensors."""

from __future__ import annotations

import ctypes
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from cta_emulator.arguments import Arguments, Value
from cta_emulator.report import Finding, Report
from cta_emulator.source import rewrite
from cta_emulator.toolchain import kernel_library

SCHEDULES = {"eager": 0, "lazy": 1, "random": 2}


class EmulatedKernel:
    """A kernel that runs on this CPU. Calls do not overlap: the runtime is one block machine per library."""

    def __init__(self, name: str, library: Path, source: str) -> None:
        self.name, self.library, self.source = name, library, source
        self._lib = ctypes.CDLL(str(library))
        self._lib.emu_tensor.restype = ctypes.c_void_p
        self._lib.emu_tensor.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        for function in ("emu_last_error", "emu_finding_rule", "emu_finding_text"):
            getattr(self._lib, function).restype = ctypes.c_char_p
        self._lib.emu_finding_site.restype = ctypes.c_uint
        self._lib.emu_statistic.restype = ctypes.c_long
        self._lib.emu_configure.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_int, ctypes.c_long]
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
        ).stdout
        entries = re.findall(r" T (__tvm_ffi_\w+)", symbols)
        self._entry = getattr(self._lib, next(e for e in entries if not e.startswith("__tvm_ffi__")))

    def __call__(
        self,
        *arguments: Any,
        schedule: str = "eager",
        seed: int = 1,
        races: bool = True,
        max_switches: int = 0,
    ) -> Report:
        """Run the kernel; tensors are changed in place.

        Args:
            arguments: torch CPU tensors of any strides (passed on as they are), Virtual tensors, numbers. Tensors that
                overlap share memory, as on a GPU.
            schedule: when asynchronous work runs: "eager" at issue, "lazy" as late as possible, "random" anywhere,
                with the threads in random order too. seed: of the random schedule.
            races: look for races and missing fences. Bounds and barriers are checked always.
            max_switches: stop after so many context switches, 0 for never.

        Raises:
            ValueError: an unknown schedule.
            TypeError: an argument that is no number and no strided CPU tensor of a known dtype.
        """
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule: got {schedule!r}, expected one of {', '.join(SCHEDULES)}")
        self._lib.emu_release_tensors()
        self._lib.emu_clear_error()
        self._lib.emu_configure(SCHEDULES[schedule], seed, int(races), max_switches)
        placed, result = Arguments(self._lib, arguments), Value()
        started = time.perf_counter()
        code = self._entry(None, placed.values, len(arguments), ctypes.byref(result))
        seconds = time.perf_counter() - started
        placed.copy_out()
        self._lib.emu_release_tensors()
        return self._report(code, seconds)

    def _report(self, code: int, seconds: float) -> Report:
        lib = self._lib
        raw = []
        for i in range(lib.emu_num_findings()):
            sites = [s for s in (lib.emu_finding_site(i, 0), lib.emu_finding_site(i, 1)) if s]
            text = lib.emu_finding_text(i).decode()
            sites += [int(s, 16) for s in re.findall(r"\(site ([0-9a-f]+)\)", text)]
            raw.append(
                (lib.emu_finding_is_error(i), lib.emu_finding_rule(i).decode(), text, sites, lib.emu_finding_line(i))
            )
        lines = self._lines({site for finding in raw for site in finding[3]})
        findings = []
        for is_error, rule, text, sites, line in raw:
            numbers = (line,) if line else tuple(lines[s] for s in sites if s in lines)
            text = re.sub(r"\(site ([0-9a-f]+)\)", lambda m: f"(line {lines.get(int(m.group(1), 16), '?')})", text)
            findings.append(Finding(severity="error" if is_error else "warning", rule=rule, text=text, lines=numbers))
        names = ("switches", "accesses", "mma", "bulk_copies", "blocks")
        return Report(
            kernel=self.name,
            finished=code == 0,
            error=lib.emu_last_error().decode(),
            findings=tuple(dict.fromkeys(findings)),
            source=self.source,
            seconds=seconds,
            **{name: lib.emu_statistic(i) for i, name in enumerate(names)},
        )

    def _lines(self, sites: set[int]) -> dict[int, int]:
        """Lines of the emitted source for code offsets: the innermost frame that lies in it."""
        if not sites:
            return {}
        addresses = [hex(site - 1) for site in sites]  # a return address belongs to the line before
        output = subprocess.run(
            ["addr2line", "-a", "-i", "-e", str(self.library), *addresses], capture_output=True, text=True, check=True
        ).stdout
        lines: dict[int, int] = {}
        site = 0
        for text in output.splitlines():
            if text.startswith("0x"):
                site = int(text, 16) + 1
            elif "kernel.cu:" in text and site not in lines:
                number = re.search(r"kernel\.cu:(\d+)", text)
                if number:
                    lines[site] = int(number.group(1))
        return lines


def load(kernel: Any) -> EmulatedKernel:
    """An emulated kernel from a compiled one.

    Args:
        kernel: a CompiledKernel of kernels/build.py, or a TileLang JITKernel.

    Raises:
        UnsupportedSourceError: the source uses something the emulator does not have; the text names it.
        TypeError: `kernel` is neither.
    """
    if hasattr(kernel, "device_source") and hasattr(kernel, "host_source"):
        name, device, host = kernel.info()["function"], kernel.device_source(), kernel.host_source()
    elif hasattr(kernel, "get_kernel_source"):
        device, host = kernel.get_kernel_source(kernel_only=True), kernel.get_host_source()
        name = str(kernel.prim_func.attrs["global_symbol"])
    else:
        raise TypeError(f"kernel: got {type(kernel).__name__}, expected a CompiledKernel or a TileLang JITKernel")
    return load_sources(name, device, host)


def load_sources(name: str, device: str, host: str) -> EmulatedKernel:
    """An emulated kernel from emitted device and host source."""
    rewritten, _ = rewrite(device)
    return EmulatedKernel(name, kernel_library(rewritten, host), device)
