"""Every backward that is written by hand says that it has no derivative, in place of torch's once_differentiable."""

from __future__ import annotations

import ast

import pytest
from sources import product_files


def backward_passes(tree: ast.AST) -> list[ast.FunctionDef]:
    """The backward of each autograd function, and what is handed to register_autograd by its name."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith("autograd.Function") for b in node.bases):
            found += [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "backward"]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "register_autograd":
            found.append(functions[ast.unparse(node.args[0])])
    return found


def unmarked(text: str) -> list[str]:
    tree = ast.parse(text)
    decorated = {f: [ast.unparse(d) for d in f.decorator_list] for f in backward_passes(tree)}
    return [f"{f.lineno}: {f.name}" for f, marks in decorated.items() if "differentiable_once(" not in " ".join(marks)]


@pytest.mark.parametrize("module", product_files())
def test_each_is_marked(module):
    assert unmarked(product_files()[module].read_text()) == []


def test_they_are_found():
    modules = ("autograd", "fused_grad", "conv", "library", "parallel.context", "parallel.exchange.headwise")
    files = product_files()
    counts = [len(backward_passes(ast.parse(files[f"flashqla_cp.{name}"].read_text()))) for name in modules]
    assert counts == [1, 1, 1, 2, 1, 2]


def test_one_without_a_mark_is_told():
    own = "class F(torch.autograd.Function):\n    {}\n    def backward(ctx, dy):\n        return dy\n"
    assert unmarked(own.format("@torch.autograd.function.once_differentiable")) == ["3: backward"]
    assert unmarked(own.format('@differentiable_once("f")')) == []
    assert unmarked("def b(ctx, dy):\n    return dy\nenter(f).register_autograd(b, setup_context=s)\n") == ["1: b"]
