"""`flashqla-cp doctor`: what this machine has, and which backend the op would run on each device and why.

Versions come from package metadata, so that no framework is imported. The exit code is 1 if something is wrong
that would stop the package from working, and 0 otherwise; a missing optional package is not wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from flashqla_cp.kernels.settings import find_host_compiler, find_nvcc

OLDEST_TORCH = (2, 8)
DISTRIBUTIONS = (
    "torch",
    "numpy",
    "triton",
    "tilelang",
    "apache-tvm-ffi",
    "deepspeed",
    "transformers",
    "megatron-core",
    "fla-core",
    "flash-linear-attention",
    "jax",
    "mpi4py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options to `parser`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the report and return 0, or 1 if it lists a problem."""
    report = collect()
    print(json.dumps(report, indent=2) if args.json else format_report(report))
    return 1 if report["problems"] else 0


def collect() -> dict[str, Any]:
    """Return the whole report as plain values: versions, devices, compilers, communication, backends, problems."""
    report: dict[str, Any] = {
        "versions": versions(),
        "devices": devices(),
        "compilers": compilers(),
        "communication": communication(),
    }
    report["backends"] = backends(report["devices"])
    report["problems"] = problems(report)
    return report


def versions() -> dict[str, str | None]:
    """Return the version of the interpreter, of this package and of each known distribution, None if absent."""
    import flashqla_cp

    found: dict[str, str | None] = {"python": platform.python_version(), "flashqla-cp": flashqla_cp.__version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices() -> list[dict[str, Any]]:
    """Return one entry for the CPU and one for each CUDA device that torch can use."""
    import torch

    cpu = {
        "device": "cpu",
        "name": platform.processor() or platform.machine(),
        "capability": None,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
    }
    found: list[dict[str, Any]] = [cpu]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": facts.name,
                "capability": [facts.major, facts.minor],
                "architecture": f"sm_{facts.major}{facts.minor}",
                "cores": facts.multi_processor_count,
                "memory_gib": round(facts.total_memory / 2**30, 1),
            }
        )
    return found


def compilers() -> dict[str, dict[str, str] | None]:
    """Return path and version line of the C++ and CUDA compilers that kernels are built with, None for one that is
    absent."""
    return {"c++": _compiler(find_host_compiler()), "nvcc": _compiler(find_nvcc())}


def _compiler(path: str | None) -> dict[str, str] | None:
    if path is None:
        return None
    try:
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in ran.stdout.splitlines() if line.strip()]
    release = next((line for line in lines if "release" in line), lines[0] if lines else "")
    return {"path": path, "version": release}


def communication() -> dict[str, Any]:
    """Return which process-group backends this torch build has, NCCL's version and where mpirun is."""
    import torch.distributed as dist

    if not dist.is_available():
        return {"torch.distributed": False, "gloo": False, "nccl": False, "nccl_version": None, "mpirun": None}
    nccl = dist.is_nccl_available()
    return {
        "torch.distributed": True,
        "gloo": dist.is_gloo_available(),
        "nccl": nccl,
        "nccl_version": _nccl_version() if nccl else None,
        "mpirun": _mpirun(),
    }


def _mpirun() -> str | None:
    # A wheel puts it beside the interpreter, which is on PATH only where the environment is activated.
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))


def _nccl_version() -> str | None:
    import torch.cuda.nccl

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None


def backends(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return, for each device of `devices()`, the op backend that "auto" means there and the reason."""
    from flashqla_cp.kernels.backend import explain

    chosen = []
    for device in found:
        capability = device["capability"]
        name, reason = explain(device["device"].split(":")[0], tuple(capability) if capability else None)
        chosen.append({"device": device["device"], "backend": name, "reason": reason})
    return chosen


def problems(report: dict[str, Any]) -> list[str]:
    """Return one sentence for each thing that would stop the package from working."""
    found = []
    torch_version = report["versions"]["torch"]
    if torch_version is None:
        found.append("torch is importable but has no package metadata, so its version is unknown")
    elif _release(torch_version) < OLDEST_TORCH:
        found.append(f"torch {torch_version} is too old; 2.8 or newer is needed")
    traffic = report["communication"]
    if not traffic["torch.distributed"]:
        found.append("this torch build has no torch.distributed, so context parallelism cannot run")
    elif not (traffic["gloo"] or traffic["nccl"]):
        found.append("this torch build has neither gloo nor NCCL, so context parallelism cannot run")
    has_gpu = any(device["device"].startswith("cuda") for device in report["devices"])
    if not has_gpu and _driver_lists_gpu():
        found.append("nvidia-smi lists a GPU but torch sees none: install a torch build with CUDA, or check the driver")
    return found


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _driver_lists_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return False
    try:
        ran = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ran.returncode == 0 and "GPU" in ran.stdout


def format_report(report: dict[str, Any]) -> str:
    """Return the report as a table for people: one section per key, problems last."""
    rows: list[tuple[str, list[tuple[str, str]]]] = [
        ("versions", [(name, version or "not installed") for name, version in report["versions"].items()]),
        ("devices", [(device["device"], _describe_device(device)) for device in report["devices"]]),
        ("compilers", [(name, _describe_compiler(found)) for name, found in report["compilers"].items()]),
        ("communication", [(name, _describe_value(value)) for name, value in report["communication"].items()]),
        ("backend of the op", [(row["device"], f"{row['backend']}: {row['reason']}") for row in report["backends"]]),
    ]
    width = max(len(name) for _, entries in rows for name, _ in entries)
    lines = []
    for title, entries in rows:
        lines += [title, *(f"  {name:<{width}}  {text}" for name, text in entries)]
    lines += ["problems", *(f"  {text}" for text in report["problems"] or ["none"])]
    return "\n".join(lines)


def _describe_device(device: dict[str, Any]) -> str:
    if device["capability"] is None:
        return f"{device['name']}, {device['cores']} cores"
    return f"{device['name']}, {device['architecture']}, {device['cores']} SMs, {device['memory_gib']} GiB"


def _describe_compiler(found: dict[str, str] | None) -> str:
    return f"{found['version']} ({found['path']})" if found else "not found"


def _describe_value(value: Any) -> str:
    if value is None:
        return "not found"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
