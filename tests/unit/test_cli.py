"""The command line: subcommands load lazily, and doctor reports what is true and judges it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest
import torch

from flashqla_cp.cli import doctor, main


def test_help_lists_every_subcommand_and_imports_none():
    code = """
import sys
from flashqla_cp.cli.main import main
try:
    main(["--help"])
finally:
    print("torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert all(name in ran.stdout for name in main.SUBCOMMANDS)
    assert ran.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", main.SUBCOMMANDS)
def test_every_subcommand_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([name, "--help"])
    assert stop.value.code == 0
    assert f"flashqla-cp {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_bad_arguments_exit_with_two(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(argv)
    assert stop.value.code == 2
    assert "usage: flashqla-cp" in capsys.readouterr().err


def test_doctor_prints_the_same_facts_as_json_and_as_table(capsys):
    codes = [main.main(["doctor", "--json"])]
    report = json.loads(capsys.readouterr().out)
    codes.append(main.main(["doctor"]))
    table = capsys.readouterr().out
    assert codes == [1 if report["problems"] else 0] * 2
    assert report["versions"]["python"] == platform.python_version()
    assert report["versions"]["torch"] == torch.__version__
    assert [row["device"] for row in report["backends"]] == [row["device"] for row in report["devices"]]
    assert len(report["devices"]) == 1 + torch.cuda.device_count()
    for row in report["backends"]:
        assert row["reason"]
        assert f"{row['backend']}: {row['reason']}" in table
    assert all(name in table for name in report["versions"])


def test_cpu_runs_the_torch_backend():
    (row,) = doctor.backends([{"device": "cpu", "capability": None}])
    assert row["backend"] == "torch"


def healthy() -> dict:
    traffic = {"torch.distributed": True, "gloo": True, "nccl": False, "nccl_version": None, "mpirun": None}
    return {
        "versions": {"torch": "2.13.0+cpu"},
        "devices": [{"device": "cpu"}],
        "communication": traffic,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": {"torch": "2.7.1"}}, "2.7.1 is too old"),
        ({"versions": {"torch": None}}, "version is unknown"),
        ({"communication": {"torch.distributed": False, "gloo": False, "nccl": False}}, "no torch.distributed"),
        ({"communication": {"torch.distributed": True, "gloo": False, "nccl": False}}, "neither gloo nor NCCL"),
    ],
)
def test_doctor_names_each_problem(change, words, monkeypatch):
    monkeypatch.setattr(doctor, "_driver_lists_gpu", lambda: False)
    assert doctor.problems(healthy()) == []
    (problem,) = doctor.problems(healthy() | change)
    assert words in problem


def test_doctor_notices_a_gpu_that_torch_cannot_use(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: something'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (problem,) = doctor.problems(healthy())
    assert "torch sees none" in problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.problems(healthy()) == []


def test_exit_code_follows_the_problems(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "problems", lambda report: ["something is wrong"])
    assert main.main(["doctor"]) == 1
    assert "something is wrong" in capsys.readouterr().out
