"""Compiles the runtime (once) and each rewritten kernel (once per content) with the host's g++ and gcc."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cta_emulator.source import UnsupportedSourceError
from flashqla_cp.kernels import settings
from flashqla_cp.kernels.cache import Cache, content_key

HERE = Path(__file__).parent
RUNTIME_FLAGS = ["-std=c++17", "-O2", "-ftree-vectorize", "-g1", "-fPIC", "-march=native", "-fno-math-errno"]
# The hooks of -fsanitize=thread report every access, signed-integer-overflow every overflow, object-size what leaves a
# local array. No sanitizer's library is linked: the runtime defines what they call. Locals start as a pattern. No
# contraction, so that a product and a sum round as the source says. Calls keep their own return addresses.
KERNEL_FLAGS = [
    "-std=c++17", "-O2", "-g1", "-w", "-fPIC", "-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern",
    "-ffp-contract=off", "-fno-optimize-sibling-calls", "-fno-crossjumping", "-fno-tree-tail-merge",
    "-fsanitize=thread,signed-integer-overflow,object-size", "-fsanitize-recover=all",
    "--param=tsan-instrument-func-entry-exit=0", "-fno-exceptions",
]  # fmt: skip


def _compiler(name: str) -> str:
    found = shutil.which(name)
    if not found:
        raise RuntimeError(f"{name} was not found; the emulator needs the GNU compilers (package g++)")
    return found


def _cuda_include() -> Path:
    nvcc = settings.find_nvcc()
    candidates = [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda_bf16.h").exists():
            return folder
    raise RuntimeError("cuda_bf16.h was not found; the emulator needs the headers of the CUDA toolkit")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{name} is not installed; the emulator needs its headers")
    return Path(spec.origin).parent


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _texts(*folders: str) -> dict[str, str]:
    files = sorted(f for folder in folders for f in (HERE / folder).iterdir() if f.suffix in (".h", ".cpp"))
    return {f.name: f.read_text() for f in files}


def _cpu_flags() -> str:
    match = re.search(r"^flags.*$", Path("/proc/cpuinfo").read_text(), flags=re.M)
    return match.group(0) if match else ""


def _cache() -> Cache:
    return Cache(settings.cache_folder() / "emulator")


def runtime_objects() -> Path:
    """Folder with the runtime's object files, compiled if needed."""
    key = content_key({"texts": _texts("device", "runtime"), "flags": RUNTIME_FLAGS, "cpu": _cpu_flags()})

    def make(folder: Path) -> None:
        def compile_one(file: Path) -> None:
            _run(
                [
                    _compiler("g++"),
                    *RUNTIME_FLAGS,
                    f"-I{_cuda_include()}",
                    "-c",
                    str(file),
                    "-o",
                    str(folder / f"{file.stem}.o"),
                ]
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sorted((HERE / "runtime").glob("*.cpp"))))

    return _cache().get_or_make(key, make)[0]


def _name_what_is_missing(stderr: str) -> str:
    """The identifier g++ complains about: an intrinsic the emulator does not have."""
    patterns = (
        r"error: '([\w:]+)' is not a member of 'tl'",
        r"error: '([\w:]+)' is not a member of",
        r"error: '([\w:]+)' was not declared",
        r"error: '.*?' has no member named '(\w+)'",
        r"error: static assertion failed: (.*)",
        r"no matching function for call to '([^']*)'",
        r"error: (.*)",
    )
    for pattern in patterns:
        match = re.search(pattern, stderr)
        if match:
            line = re.search(r"kernel\.cu:(\d+)", stderr)
            return match.group(1) + (f" (kernel.cu line {line.group(1)})" if line else "")
    return stderr[:500]


def kernel_library(rewritten: str, host_source: str) -> Path:
    """Shared library of one kernel: rewritten device source, host stub and runtime.

    Raises:
        UnsupportedSourceError: the source uses an intrinsic that the emulator does not have.
    """
    runtime = runtime_objects()
    key = content_key({"device": rewritten, "host": host_source, "flags": KERNEL_FLAGS, "runtime": runtime.name})

    def make(folder: Path) -> None:
        (folder / "kernel.cpp").write_text(rewritten)
        (folder / "host.c").write_text(host_source)
        device = subprocess.Popen(
            [
                _compiler("g++"), *KERNEL_FLAGS, f"-I{HERE / 'device'}", f"-I{_cuda_include()}",
                "-c", str(folder / "kernel.cpp"), "-o", str(folder / "kernel.o"),
            ],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        includes = [f"-I{_package('tilelang') / '3rdparty/tvm/include'}", f"-I{_package('tvm_ffi') / 'include'}"]
        _run(
            [
                _compiler("gcc"),
                "-O1",
                "-w",
                "-fPIC",
                *includes,
                "-c",
                str(folder / "host.c"),
                "-o",
                str(folder / "host.o"),
            ]
        )
        errors = device.communicate()[1]
        if device.returncode:
            raise UnsupportedSourceError(f"the emulator does not have: {_name_what_is_missing(errors)}")
        objects = [str(folder / "kernel.o"), str(folder / "host.o"), *map(str, sorted(runtime.glob("*.o")))]
        _run([_compiler("g++"), "-shared", "-Wl,-Bsymbolic", "-o", str(folder / "library.so"), *objects])
        (folder / "kernel.o").unlink()
        (folder / "host.o").unlink()

    return _cache().get_or_make(key, make)[0] / "library.so"
