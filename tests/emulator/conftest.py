"""Paths and the kernels that these tests share: compiled once a session, in parallel, kept in the cache."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE / "kernels"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

MISSING = [name for name in ("tilelang", "tvm_ffi") if importlib.util.find_spec(name) is None]
MISSING += [name for name in ("g++", "nvcc") if shutil.which(name) is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    """Say so when this folder cannot run."""
    return f"tests/emulator is left out: {', '.join(MISSING)} not found (pip install -e '.[gpu]')" if MISSING else None


def pytest_configure(config: pytest.Config) -> None:
    """Markers used here, known also when only this folder is run."""
    config.addinivalue_line("markers", "slow: takes minutes")


@pytest.fixture(scope="session")
def compiled():
    """Compiled proof kernels by proof name."""
    from proof_table import proofs

    from flashqla_cp.kernels.build import build_all

    table = proofs()
    results = build_all([proof.spec for proof in table])
    failed = [f"{r.spec.label()}: {r.error}" for r in results if r.kernel is None]
    assert not failed, "\n".join(failed)
    return {proof.name: result.kernel for proof, result in zip(table, results, strict=True)}


@pytest.fixture(scope="session")
def emulated(compiled):
    """Function from proof name to emulated kernel, loaded once."""
    from cta_emulator import load

    loaded = {}

    def get(name: str):
        if name not in loaded:
            loaded[name] = load(compiled[name])
        return loaded[name]

    return get
