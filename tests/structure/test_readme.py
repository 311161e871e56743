"""What the README tells a reader to type exists, and its Python examples run."""

from __future__ import annotations

import re
import shlex

import pytest
from sources import ROOT
from test_lazy_import import run_python

from flashqla_cp.cli.main import build_parser

README = (ROOT / "README.md").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Return the words of each command line in the README's bash blocks, comments and continuations resolved."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def test_the_two_commands_are_there():
    assert ["bash", "launch/test.sh"] in commands()
    assert ["bash", "launch/quickstart.sh"] in commands()


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_command_exists(words):
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]  # variables set for one command
    files = [word for word in words if word.endswith((".sh", ".py"))]
    assert all((ROOT / name).is_file() for name in files), files
    if words[0] == "flashqla-cp":
        build_parser(words[1]).parse_args(words[1:])  # exits on an option that does not exist
    extras = re.findall(r"\[([a-z,]+)\]", " ".join(words)) if "pip" in words else []
    for extra in ",".join(extras).split(",") if extras else []:
        assert re.search(rf"^{extra} = \[", PYPROJECT, flags=re.MULTILINE), extra


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w./-]+\.(?:py|sh|md|toml|yaml))`", README))))
def test_named_file_exists(path):
    assert any((ROOT / folder / path).is_file() for folder in ("", "flashqla_cp"))


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_example_runs(number, tmp_path):
    example = blocks("python")[number]
    if "init_process_group" not in example:
        run_python(example, tmp_path)
        return
    (tmp_path / "example.py").write_text(example)
    torchrun = "from torch.distributed.run import main; main(['--standalone', '--nproc-per-node', '2', 'example.py'])"
    run_python(torchrun, tmp_path, OMP_NUM_THREADS="1")
