"""Files and functions stay short, and nothing is written twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from sources import ROOT, product_files

LONGEST_FILE = 300
LONGEST_KERNEL_FILE = 500  # a stage's mathematics stays in one file
LONGEST_FUNCTION = 80
COPIED_RUN = 12
SCHEDULES = ("flashqla_cp.kernels.sm90", "flashqla_cp.kernels.sm100", "flashqla_cp.kernels.portable")


def is_schedule(module: str) -> bool:
    return module.startswith(SCHEDULES)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines without its docstring: a public one describes every argument."""
    length = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        length -= (first.end_lineno or 0) - first.lineno + 1
    return length


def copied_runs(texts: dict[str, str], run: int = COPIED_RUN) -> list[str]:
    """Return the places where `run` or more consecutive lines, blank and import lines aside, stand a second time."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, text in texts.items():
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        lines = [(n, line) for n, line in lines if line and not line.startswith(("import ", "from "))]
        for start in range(len(lines) - run + 1):
            places[tuple(line for _, line in lines[start : start + run])].append((name, lines[start][0]))
    return [", ".join(f"{name}:{line}" for name, line in found) for found in places.values() if len(found) > 1]


@pytest.mark.parametrize("module", product_files())
def test_file_and_function_length(module):
    text = product_files()[module].read_text()
    limit = LONGEST_KERNEL_FILE if module.startswith("flashqla_cp.kernels.") else LONGEST_FILE
    assert len(text.splitlines()) <= limit
    if is_schedule(module):
        return  # a traced kernel holds all its roles in one function
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert body_lines(node) <= LONGEST_FUNCTION, f"{module}:{node.lineno}: {node.name}"


def test_nothing_is_copied():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in product_files().values()}
    texts |= {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert not copied_runs(texts)


def test_copies_are_found():
    run = "\n".join(f"x{i} = {i}" for i in range(COPIED_RUN))
    assert copied_runs({"a.py": run, "b.py": f"import os\n\n{run}"}) == ["a.py:1, b.py:3"]
    assert not copied_runs({"a.py": run, "b.py": run.replace("x3 = 3", "x3 = 4")})


def test_no_init_in_linked_folders():
    """With one, `import kernels` from the repository root would find ours instead of another distribution's."""
    for name in ("kernels", "parallel", "launch"):
        assert not (ROOT / name / "__init__.py").exists()
        link = ROOT / "flashqla_cp" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
