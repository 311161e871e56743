"""The product's source files, once each: the root folders, not the links to them inside flashqla_cp."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "parallel", "launch")


def product_files() -> dict[str, Path]:
    """Return {module name: file} of everything that is imported as flashqla_cp or below it."""
    face = [path for path in (ROOT / "flashqla_cp").rglob("*.py") if not _through_link(path)]
    rest = [path for name in LINKED for path in (ROOT / name).rglob("*.py")]
    return {module_name(path): path for path in sorted(face + rest)}


def module_name(path: Path) -> str:
    """Return the dotted name under which a product file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in LINKED:
        parts = ("flashqla_cp", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST) -> list[tuple[int, str, bool]]:
    """Return (line, dotted name, inside a function) of every import; `from a import b` counts as a.b."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}", id(node) in inside) for alias in node.names]
    return found


def _through_link(path: Path) -> bool:
    return path.relative_to(ROOT / "flashqla_cp").parts[0] in LINKED
