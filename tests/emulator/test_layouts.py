"""The emulator's operand and accumulator addresses against CuTe's, and the headers it replaces against their hash."""

import hashlib
import importlib.util
import subprocess
from pathlib import Path

import pytest

from flashqla_cp.kernels import settings

HERE = Path(__file__).parent
TEMPLATES = Path(importlib.util.find_spec("tilelang").origin).parent / "src" / "tl_templates" / "cuda"
# Of tilelang 0.1.15. The emulator replaces these headers: read what changed, adapt cta_emulator/device, then update.
TEMPLATES_HASH = "cb3d70496f8d716eab13ae85a42d819297644ad73d647dc7e6aa0c08563052c7"


def folder_hash(folder: Path) -> str:
    """Hash of names and contents of every file below a folder."""
    total = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in (".h", ".cuh", ".hpp")):
        total.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def test_device_headers_are_those_the_emulator_replaces():
    assert folder_hash(TEMPLATES) == TEMPLATES_HASH


def test_a_changed_header_changes_the_hash(tmp_path):
    (tmp_path / "a.h").write_text("one")
    before = folder_hash(tmp_path)
    (tmp_path / "a.h").write_text("two")
    assert folder_hash(tmp_path) != before


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    program = tmp_path_factory.mktemp("layouts") / "umma_layouts"
    cutlass = TEMPLATES.parents[2] / "3rdparty" / "cutlass" / "include"
    includes = [f"-I{cutlass}", f"-I{HERE / 'cta_emulator' / 'runtime'}"]
    command = [settings.find_nvcc(), "-std=c++17", "-O1", "-arch=sm_100a", "-w", "--expt-relaxed-constexpr", *includes]
    subprocess.run([*command, str(HERE / "umma_layouts.cu"), "-o", str(program)], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True)


def test_addresses_agree_with_cute(comparison):
    lines = comparison.stdout.splitlines()
    assert comparison.returncode == 0, comparison.stdout
    assert len(lines) == 13 and all(line.endswith("differ") and " 0 of " in line for line in lines[:-1])
