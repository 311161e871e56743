"""What a wheel and a source distribution hold: the package flashqla_cp with its linked folders, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from sources import ROOT, product_files
from test_lazy_import import run_python

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools")
TREES = ("flashqla_cp", "kernels", "parallel", "launch")
FILES = ("pyproject.toml", "README.md", "LICENSE")
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


def build(hook: str, source, out):
    """Build in the folder `source` with this interpreter's setuptools, without a network; return the one result."""
    out.mkdir()
    command = [sys.executable, "-c", BUILD, hook, str(out)]
    ran = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (result,) = out.iterdir()
    return result


def expected_modules() -> set[str]:
    packages = {name for name, path in product_files().items() if path.name == "__init__.py"}
    return {name.replace(".", "/") + ("/__init__.py" if name in packages else ".py") for name in product_files()}


def python_files(names) -> set[str]:
    return {name for name in names if name.endswith(".py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built the long way: tree -> source distribution -> wheel, so that both are checked."""
    folder = tmp_path_factory.mktemp("distribution")
    tree = folder / "tree"
    tree.mkdir()
    for name in TREES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    sdist = build("build_sdist", tree, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("build_wheel", unpacked, folder / "wheel")


def test_wheel_content(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"flashqla_cp"}
    assert python_files(names) == expected_modules()
    assert "flashqla_cp/py.typed" in names


def test_wheel_works_from_the_repository_root(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import sys; sys.path.pop(0); import flashqla_cp; print(flashqla_cp.chunk_gated_delta_rule.__module__)"
    assert run_python(code, ROOT, PYTHONPATH=str(tmp_path)) == "flashqla_cp.op"


def test_console_script(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "flashqla-cp = flashqla_cp.cli.main:main" in archive.read(name).decode()
