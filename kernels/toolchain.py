"""What must be installed to load and to compile kernels, and how to install what is not."""

from __future__ import annotations

import importlib.metadata
import os
import warnings

from flashqla_cp.kernels import settings

TESTED_VERSIONS = {"tilelang": "0.1.15", "apache-tvm-ffi": "0.1.12"}
CUDA_PACKAGES = "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"  # nvcc alone lacks headers, or gets those of another version
_warned: set[tuple[str, str]] = set()


def installed_version(package: str) -> str:
    """Version of one of TESTED_VERSIONS that is installed here.

    Raises:
        RuntimeError: none is; the text says how to install it.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        tested = TESTED_VERSIONS[package]
        raise RuntimeError(f"{package} is not installed; install it with: pip install {package}=={tested}") from None


def check_versions() -> None:
    """Warn, once per process, of installed versions that the kernels were not tested with.

    Raises:
        RuntimeError: tilelang or apache-tvm-ffi is missing; the text says how to install it.
    """
    for package, tested in TESTED_VERSIONS.items():
        installed = installed_version(package)
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
