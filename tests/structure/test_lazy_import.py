"""Importing the package touches no GPU and needs nothing optional. Each check runs in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sources import ROOT, product_files

OPTIONAL = ("tilelang", "tvm", "transformers", "deepspeed", "megatron", "fla", "mpi4py", "matplotlib")
TRACED = ("build", "blocks", "portable", "sm90", "sm100")
HIDE_OPTIONAL = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
CHECK = f"""
import torch
assert not torch.cuda.is_initialized(), "CUDA was initialised"
loaded = sorted(set({OPTIONAL!r}) & set(sys.modules))
assert not loaded, loaded
"""


def run_python(code: str, cwd, **env: str) -> str:
    """Run `code` in a new interpreter and return what it prints; a failure shows its traceback."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    ran = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_import_loads_no_torch(tmp_path):
    code = "import sys, flashqla_cp; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert run_python(code, tmp_path) == "[]"


def test_names_resolve_without_gpu_or_optional_packages(tmp_path):
    code = HIDE_OPTIONAL + "import flashqla_cp\nfor name in flashqla_cp.__all__: getattr(flashqla_cp, name)\n" + CHECK
    run_python(code, tmp_path)


def test_every_module_imports_without_gpu_or_optional_packages(tmp_path):
    kernels = tuple(f"flashqla_cp.kernels.{room}" for room in TRACED)
    modules = [name for name in product_files() if not name.startswith(kernels)]
    code = HIDE_OPTIONAL + f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n" + CHECK
    run_python(code, tmp_path)


def test_optional_packages_are_not_loaded_where_present(tmp_path):
    for name in OPTIONAL:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('an optional package was imported')")
    code = "import sys, flashqla_cp\nfor name in flashqla_cp.__all__: getattr(flashqla_cp, name)\n" + CHECK
    run_python(code, tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")


def test_root_folder_does_not_hide_the_kernels_distribution(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("owner = 'another distribution'")
    # With -c the current folder, here the repository root, comes first on the path.
    assert run_python("import kernels; print(kernels.owner)", ROOT, PYTHONPATH=str(tmp_path)) == "another distribution"


def test_unknown_name_is_an_attribute_error():
    import flashqla_cp

    with pytest.raises(AttributeError, match="no_such_name"):
        flashqla_cp.no_such_name  # noqa: B018
