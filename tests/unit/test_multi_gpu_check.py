"""launch/multi_gpu_check.sh on two CPU ranks, and what its steps on endurance see."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.launch import endurance
from flashqla_cp.op import chunk_gated_delta_rule

ROOT = Path(__file__).resolve().parents[2]
Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """check(options...) runs the script with this Python; results go to tmp_path."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "launch/multi_gpu_check.sh"), "--nproc", "2", "--out", str(tmp_path), *options]
        environment = os.environ | {"NO_VENV": "1", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)

    return run


def test_every_step_on_two_cpu_ranks(check: Check, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = check("--backend", "gloo", "--quick", "--skip", "tests", "--skip", "peers")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    _, _, summary = ran.stdout.rpartition("== summary\n")
    outcomes = [line.split()[:2] for line in summary.splitlines()]
    names = {"warm-up:": "skipped", "verify,": "ok", "kernels:": "skipped", "bench,": "ok", "costs,": "ok"}
    assert outcomes == [[outcome, name] for name, outcome in (names | {"skew,": "ok", "death,": "ok"}).items()]
    results = ran.stdout.partition("== results in ")[2]
    assert "verify: every error is within its bar" in results and "sharded is cheaper from" in results
    for row in (
        "weak scaling",
        "the op on all ranks",
        "skew: 0 steps differ",
        "death: rank 1 of 2 over gloo was killed",
    ):
        assert row in results
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("bench", "costs", "skew", "death")}
    assert found["skew"]["ranks"][0]["steps"] == 50 and found["death"]["ranks"][0]["exit_code"] != 0
    assert (tmp_path / "bench.png").exists()


def test_a_step_that_fails_is_named(check: Check, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    ran = check("--backend", "gloo", "--only", "costs")
    assert ran.returncode == 1
    assert "FAILED   costs" in ran.stdout and "exit code 2" in ran.stdout and "verify" not in ran.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--only", "nonsense"], "no step 'nonsense'; there are: warm-up verify"),
        (["--backend", "mpi"], "--backend: got 'mpi', expected nccl or gloo"),
        ([], "--nproc: got 2 with 0 GPU(s), expected one for each rank"),
        (["--backend", "gloo", "--nproc", "1"], "--nproc: got '1', expected at least 2 ranks"),
    ],
)
def test_options_that_cannot_work(
    check: Check, options: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")  # a host without a GPU
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ran = check(*options)
    assert ran.returncode == 2 and text in ran.stderr


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "rdzv").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_step_that_differs_is_counted(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endurance, "NAP", 0.0)
    monkeypatch.setattr(endurance, "LONG_SHARE", 0.0)
    calls = []

    def op(*tensors: torch.Tensor, **options: Any) -> Any:
        calls.append(None)
        o, state = chunk_gated_delta_rule(*tensors, **options)
        return (o * (1 + 1e-6) if len(calls) == 7 else o), state

    assert endurance.steps_under_skew(0, 10, "cpu")["different"] == 0
    monkeypatch.setattr(endurance, "chunk_gated_delta_rule", op)
    assert endurance.steps_under_skew(0, 10, "cpu")["different"] == 1


@pytest.mark.parametrize(
    ("survivor", "outcome", "text"),
    [
        ("import time; time.sleep(60)", 1, "rank 0 had to be killed, exit code -9: no clear error"),
        ("raise SystemExit(3)", 1, "exit code 3: no clear error"),
        ("print('done')", 1, "exit code 0: no clear error"),
        ("raise RuntimeError('Connection closed by peer')", 0, "exit code 1: RuntimeError: Connection closed by peer"),
    ],
)
def test_how_the_others_must_end(
    survivor: str, outcome: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The victim is rank 1 of 2."""
    real = subprocess.Popen

    def started(command: list[str], env: dict[str, str], **options: Any) -> Any:
        code = "import os; os.kill(os.getpid(), 9)" if env["RANK"] == env["VICTIM"] else survivor
        return real([sys.executable, "-c", code], env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(endurance, "GRACE", 3.0)
    began = time.monotonic()
    args = argparse.Namespace(nproc=2, backend="gloo", timeout=0.5, limit=20.0, json=None)
    assert endurance.run_death(args) == outcome
    assert text in capsys.readouterr().out and time.monotonic() - began < 15


def test_a_victim_that_never_got_that_far_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = subprocess.Popen
    code = "raise RuntimeError('the port is taken, timed out')"
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: real([sys.executable, "-c", code], **options))
    args = argparse.Namespace(nproc=2, backend="gloo", timeout=0.5, limit=20.0, json=None)
    assert endurance.run_death(args) == 1
    assert "did not get that far" in capsys.readouterr().out
