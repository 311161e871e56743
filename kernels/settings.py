"""The environment variables that the kernels obey; nothing else in this folder reads the environment.

FLASHQLA_CP_CACHE       folder of compiled kernels; default: $XDG_CACHE_HOME/flashqla_cp, else ~/.cache/flashqla_cp
FLASHQLA_CP_BUILD_JOBS  processes that compile at the same time; default: the number of CPUs, at most 16
CUDA_HOME               where to look for nvcc when it is not on PATH
CXX, CC                 the host's C++ compiler; default: g++, clang++ or c++ on PATH
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

MOST_DEFAULT_JOBS = 16


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of compiled kernels; it need not exist yet."""
    env = os.environ if environ is None else environ
    if env.get("FLASHQLA_CP_CACHE"):
        return Path(env["FLASHQLA_CP_CACHE"]).expanduser().absolute()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flashqla_cp"


def build_jobs(environ: Mapping[str, str] | None = None) -> int:
    """Number of compiler processes.

    Raises:
        ValueError: FLASHQLA_CP_BUILD_JOBS is not a positive integer.
    """
    env = os.environ if environ is None else environ
    text = env.get("FLASHQLA_CP_BUILD_JOBS", "")
    if not text:
        return min(os.cpu_count() or 1, MOST_DEFAULT_JOBS)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"FLASHQLA_CP_BUILD_JOBS: got {text!r}, expected a positive integer")
    return int(text)


def find_nvcc(environ: Mapping[str, str] | None = None) -> str | None:
    """Path of nvcc, or None: PATH first, then CUDA_HOME, then (without `environ`) the packages installed here."""
    env = os.environ if environ is None else environ
    found = shutil.which("nvcc", path=env.get("PATH", ""))
    if not found and env.get("CUDA_HOME"):
        found = shutil.which("nvcc", path=str(Path(env["CUDA_HOME"]) / "bin"))
    if not found and environ is None:
        found = shutil.which("nvcc", path=os.pathsep.join(map(str, installed_cuda_folders())))
    return found


def installed_cuda_folders() -> list[Path]:
    """The nvidia/*/bin folders of installed packages; CUDA's from 13 on put nvcc into one."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations if spec else None) or ()
    return [folder for place in places for folder in sorted(Path(place).glob("*/bin"))]


def find_host_compiler(environ: Mapping[str, str] | None = None) -> str | None:
    """Path of the C++ compiler that TileLang gives to nvcc and builds the host stub with, or None."""
    env = os.environ if environ is None else environ
    chosen = env.get("CXX") or env.get("CC")
    names = [chosen] if chosen else ["g++", "clang++", "c++"]
    return next(filter(None, (shutil.which(name, path=env.get("PATH", "")) for name in names)), None)
