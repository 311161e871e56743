"""From KernelSpec to a loaded kernel: the builder's text through the compiler processes into the cache on disk.

The only caller of the TileLang JIT. It does so in the processes of workers.py, so that a program that only loads
finished kernels never traces one, and kernels compile side by side. builders.py says what builds a spec and what its
entry in the cache is called.

Entry: library.so (host stub and cubin), device.cu, host.c, kernel.json (resources, sizes, versions), manifest.json.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashqla_cp.kernels import settings
from flashqla_cp.kernels.builders import cache_key, find_builder
from flashqla_cp.kernels.cache import Cache
from flashqla_cp.kernels.emitted import describe_kernels
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.toolchain import TESTED_VERSIONS, check_toolchain, check_versions, installed_version
from flashqla_cp.kernels.workers import run_requests, serve


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A finished build. Call `load()` for the function that launches it."""

    spec: KernelSpec
    folder: Path

    def info(self) -> dict[str, Any]:
        """Resources, launch sizes and versions, as recorded at the build."""
        return json.loads((self.folder / "kernel.json").read_text())

    def device_source(self) -> str:
        """CUDA source as TileLang emitted it."""
        return (self.folder / "device.cu").read_text()

    def host_source(self) -> str:
        """C source of the host stub."""
        return (self.folder / "host.c").read_text()

    def library(self) -> Path:
        """Shared library with the host stub and the cubin."""
        return self.folder / "library.so"

    def load(self) -> Callable[..., Any]:
        """Function that takes the kernel's arguments (CUDA tensors and numbers) and launches it on the current stream.

        Raises:
            RuntimeError: tilelang, whose runtime loads the cubin, is not installed.
        """
        check_versions()
        import tilelang  # noqa: F401  registers the loader of CUDA modules
        import tvm_ffi

        return tvm_ffi.load_module(str(self.library()))[self.info()["function"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """Outcome for one spec: a kernel, or the text of what went wrong. `compiled`: it was not in the cache before."""

    spec: KernelSpec
    kernel: CompiledKernel | None
    compiled: bool
    error: str = ""


def build(spec: KernelSpec, cache_folder: Path | None = None) -> CompiledKernel:
    """Compiled kernel of a spec, from the cache or by compiling it now.

    Raises:
        NotImplementedError: the stage has no kernel for this architecture.
        RuntimeError: the toolchain is incomplete, the cache is not private, or the compiler failed.
    """
    (result,) = build_all([spec], jobs=1, cache_folder=cache_folder)
    if result.kernel is None:
        raise RuntimeError(f"building {spec.label()} failed:\n{result.error}")
    return result.kernel


def build_all(
    specs: Sequence[KernelSpec],
    jobs: int | None = None,
    cache_folder: Path | None = None,
    on_done: Callable[[BuildResult], None] | None = None,
) -> list[BuildResult]:
    """Compile what is missing in `jobs` processes; results come in the order of `specs`.

    A kernel is compiled once per host however many processes ask for it. on_done is called as each result arrives.

    Raises:
        NotImplementedError: a stage has no kernel for its architecture.
        RuntimeError: the cache is not private, or something must be compiled and the toolchain is incomplete or the
            cache cannot be written.
        ValueError: `jobs` or FLASHQLA_CP_BUILD_JOBS is not a positive integer.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs: got {jobs}, expected a positive integer")
    processes = settings.build_jobs() if jobs is None else jobs
    cache = Cache(settings.cache_folder() if cache_folder is None else cache_folder)
    keys = [cache_key(spec) for spec in specs]
    results: dict[int, BuildResult] = {}
    lock = threading.Lock()

    def finish(index: int, compiled: bool, error: str) -> None:
        kernel = None if error else CompiledKernel(spec=specs[index], folder=cache.entry(keys[index]))
        with lock:
            results[index] = BuildResult(spec=specs[index], kernel=kernel, compiled=compiled, error=error)
            if on_done:
                on_done(results[index])

    missing = {}
    for index, (spec, key) in enumerate(zip(specs, keys, strict=True)):
        if cache.find(key):
            finish(index, False, "")
        else:
            missing[index] = {
                "key": key,
                "folder": str(cache.folder),
                "spec": spec.to_dict(),
                **asdict(find_builder(spec)),
            }
    if missing:
        check_toolchain()
        if not os.access(cache.folder, os.W_OK | os.X_OK):
            raise RuntimeError(f"kernel cache {cache.folder} cannot be written, and {len(missing)} kernels are missing")
        run_requests(
            missing,
            processes,
            "flashqla_cp.kernels.build:serve_requests",
            lambda index, reply: finish(index, reply["compiled"], reply["error"]),
        )
    return [results[index] for index in range(len(specs))]


def serve_requests() -> None:
    """Main function of a compiler process."""
    with tempfile.TemporaryDirectory() as unused:
        # The JIT's own caches are off: this one replaces them, and theirs would hide a change of the installed headers.
        os.environ["TILELANG_DISABLE_CACHE"] = "1"
        os.environ["TILELANG_CACHE_DIR"] = unused
        os.environ["TILELANG_VERBOSE"] = "1"  # the only way to the output of ptxas
        serve(compile_request)


def compile_request(request: dict[str, Any]) -> bool:
    """Compile one request of build_all unless another process has; whether it was compiled now. Runs in a worker."""
    cache = Cache(Path(request["folder"]))
    return cache.get_or_make(request["key"], lambda folder: _compile_into(folder, request))[1]


class _CompilerLog(logging.Handler):
    """Keeps what ptxas says about registers and spills."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def _compile_into(folder: Path, request: dict[str, Any]) -> None:
    """Trace, compile and write one entry."""
    started = time.monotonic()
    import tilelang

    spec = KernelSpec.from_dict(request["spec"])
    module, _, function = request["function"].partition(":")
    prim_func = getattr(importlib.import_module(module), function)(spec)
    logger, log = logging.getLogger("tilelang"), _CompilerLog()
    logger.handlers = [log]
    logger.propagate = False
    jit = tilelang.compile(
        prim_func,
        target=spec.target.target,
        execution_backend="tvm_ffi",
        pass_configs=dict(request["pass_configs"]) or None,
    )
    library = folder / "library.so"
    jit.adapter.get_exportable_executable().export_library(str(library))
    device, host = jit.adapter.get_kernel_source(kernel_only=True), jit.adapter.get_host_source()
    (folder / "device.cu").write_text(device)
    (folder / "host.c").write_text(host)
    info = {
        "function": str(prim_func.attrs["global_symbol"]),
        "spec": spec.to_dict(),
        "kernels": describe_kernels(library.read_bytes(), device, host, log.text),
        "seconds": round(time.monotonic() - started, 2),
        "versions": {name: installed_version(name) for name in TESTED_VERSIONS} | {"nvcc": _nvcc_version()},
    }
    (folder / "kernel.json").write_text(json.dumps(info, indent=1))


def _nvcc_version() -> str:
    nvcc = settings.find_nvcc()
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    return text.strip().splitlines()[-1]
