"""From KernelSpec to a loaded kernel: the table of builders, the compiler processes, the cache on disk.

The only caller of the TileLang JIT. It does so in the processes of workers.py, so that a program that only loads
finished kernels never traces one, and kernels compile side by side. A cache entry is keyed by what decides the code
(the spec, the builder's sources, the versions of tilelang and apache-tvm-ffi) and not by the host, so that a cache
made on one machine serves another.

Entry: library.so (host stub and cubin), device.cu, host.c, kernel.json (resources, sizes, versions), manifest.json.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashqla_cp.kernels import settings
from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.cache import Cache, content_key
from flashqla_cp.kernels.emitted import describe_kernels
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.workers import run_requests, serve

FORMAT = 2  # of an entry; raise it when the files of an entry change
TESTED_VERSIONS = {"tilelang": "0.1.15", "apache-tvm-ffi": "0.1.12"}
CUDA_PACKAGES = "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"  # nvcc alone lacks headers, or gets those of another version


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Where the text of a kernel is: "module:function", and the files besides that module that decide its code.

    The function takes a KernelSpec and returns a TileLang PrimFunc. pass_configs: TileLang pass options, sorted pairs.
    rows: "module:function" that lists what to compile ahead, from an Arch and choices such as {"heads": [16, 32]}.
    """

    function: str
    sources: tuple[str, ...] = ()
    pass_configs: tuple[tuple[str, Any], ...] = ()
    rows: str = ""


_BUILDERS: dict[tuple[str, str], Builder] = {}


def register_builder(
    stage: str,
    family: str,
    function: str,
    sources: Iterable[str | Path] = (),
    pass_configs: dict[str, Any] | None = None,
    rows: str = "",
) -> None:
    """Enter the builder of a stage for a family of architectures.

    Raises:
        ValueError: another builder is registered for them.
    """
    builder = Builder(
        function=function,
        sources=tuple(str(s) for s in sources),
        pass_configs=tuple(sorted((pass_configs or {}).items())),
        rows=rows,
    )
    if _BUILDERS.setdefault((stage, family), builder) != builder:
        raise ValueError(
            f"stage: got {stage!r} for {family!r} twice, expected one builder ({_BUILDERS[stage, family].function})"
        )


def registered() -> list[tuple[str, str]]:
    """Every (stage, family) that has a builder, sorted."""
    return sorted(_BUILDERS)


def rows_to_compile(arch: Arch, choices: Mapping[str, Sequence[int]]) -> list[KernelSpec]:
    """Every spec that the registered stages want compiled ahead for an architecture, without repeats."""
    found: dict[KernelSpec, None] = {}
    for (_, family), builder in sorted(_BUILDERS.items()):
        if family == arch.family and builder.rows:
            module, _, function = builder.rows.partition(":")
            found |= dict.fromkeys(getattr(importlib.import_module(module), function)(arch, choices))
    return list(found)


def find_builder(spec: KernelSpec) -> Builder:
    """The builder of a spec.

    Raises:
        NotImplementedError: the stage has no kernel for this architecture.
    """
    family = spec.target.family
    if (spec.stage, family) not in _BUILDERS:
        others = sorted(f for s, f in _BUILDERS if s == spec.stage)
        raise NotImplementedError(
            f"stage {spec.stage!r} has no kernel for {spec.arch}; it has for: {', '.join(others) or 'none'}"
        )
    return _BUILDERS[spec.stage, family]


def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _source_files(builder: Builder) -> list[str]:
    module = builder.function.partition(":")[0]
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ValueError(f"function: got {builder.function!r}, but there is no module {module!r}")
    own = Path(__file__).parent
    shared = [own / "tuning.py", own / "arch.py", own / "spec.py"]
    folders = [Path(s) for s in builder.sources]
    listed = [f for folder in folders for f in (sorted(folder.rglob("*.py")) if folder.is_dir() else [folder])]
    return [found.origin, *map(str, shared), *map(str, listed)]


def cache_key(spec: KernelSpec) -> str:
    """Key of the entry that a spec has with the sources and versions installed here."""
    builder = find_builder(spec)
    return content_key(
        {
            "format": FORMAT,
            "spec": spec.to_dict(),
            "function": builder.function,
            "pass_configs": dict(builder.pass_configs),
            "sources": [_file_digest(path) for path in _source_files(builder)],
            "versions": {name: _installed(name) for name in TESTED_VERSIONS},
        }
    )


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        tested = TESTED_VERSIONS[package]
        raise RuntimeError(f"{package} is not installed; install it with: pip install {package}=={tested}") from None


_warned: set[tuple[str, str]] = set()


def check_versions() -> None:
    """Warn, once per process, of installed versions that the kernels were not tested with.

    Raises:
        RuntimeError: tilelang or apache-tvm-ffi is missing; the text says how to install it.
    """
    for package, tested in TESTED_VERSIONS.items():
        installed = _installed(package)
        if installed != tested and (package, installed) not in _warned:
            _warned.add((package, installed))
            warnings.warn(
                f"{package} {installed} is installed, but the kernels were tested with {tested} only; to have that: "
                f"pip install {package}=={tested}",
                stacklevel=3,
            )


def check_toolchain() -> None:
    """Refuse early when a kernel could not be compiled here.

    Raises:
        RuntimeError: tilelang, apache-tvm-ffi, nvcc or the host's C++ compiler is missing; the text names the package.
    """
    check_versions()
    if settings.find_nvcc() is None:
        raise RuntimeError(
            "nvcc was not found on PATH, in CUDA_HOME/bin nor among the installed packages; install the CUDA toolkit "
            f"12.8 or newer (pip install '{CUDA_PACKAGES}', or your system's cuda-toolkit package), or copy a "
            "cache made elsewhere"
        )
    if settings.find_host_compiler() is None:
        chosen = os.environ.get("CXX") or os.environ.get("CC")
        what = f"the C++ compiler {chosen!r} of CXX or CC was not found" if chosen else "g++ was not found on PATH"
        raise RuntimeError(
            f"{what}, and nvcc cannot work without it; install the GNU C++ compiler (package g++ on Debian and Ubuntu, "
            "gcc-c++ on Fedora and Red Hat), or copy a cache made elsewhere"
        )


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
        "versions": {name: _installed(name) for name in TESTED_VERSIONS} | {"nvcc": _nvcc_version()},
    }
    (folder / "kernel.json").write_text(json.dumps(info, indent=1))


def _nvcc_version() -> str:
    nvcc = settings.find_nvcc()
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    return text.strip().splitlines()[-1]
