"""launch/train_megatron.py trains alike on one rank, on two that share a sequence, and on two that do not."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.integrations.refusals import need
from flashqla_cp.kernels import backend
from flashqla_cp.kernels.arch import ARCHES
from flashqla_cp.launch import train_megatron
from flashqla_cp.launch.ranks import join_ranks
from flashqla_cp.testing.spawn import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
STEPS = 6


def losses(rank: int, *options: str) -> list[float]:
    torch._dynamo.config.disable = True
    parser = argparse.ArgumentParser()
    train_megatron.add_arguments(parser)
    args = parser.parse_args(["--steps", str(STEPS), "--rows", "2", "--row-tokens", "96", "--device", "cpu", *options])
    with join_ranks(args.cp, torch.device("cpu")) as ranks:
        return train_megatron.train(args, ranks)


def test_loss_does_not_depend_on_the_ranks() -> None:
    (alone,) = run_ranks(losses, 1, timeout=200.0)
    assert len(alone) == STEPS
    assert alone[-1] < alone[0] - 0.3
    for options in (("--cp", "2"), ("--cp", "1")):
        for shared in run_ranks(losses, 2, *options, timeout=200.0):
            assert shared == pytest.approx(alone, rel=1e-4)


def test_the_launcher_shows_nothing_but_the_training() -> None:
    """Megatron warns a dozen times on every rank that it was installed without its GPU packages."""
    launch = Path(train_megatron.__file__).resolve().parent
    command = ["bash", str(launch / "megatron.sh"), "--steps", "1", "--rows", "2", "--row-tokens", "64"]
    environment = os.environ | {"NO_VENV": "1", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "step 1/1  loss" in ran.stdout
    assert "Warning" not in ran.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron itself, and kernels for what the program computes in; before any rank waits for another."""
    for name, value, text in (
        ("choose_device", lambda kind: torch.device("cuda", 0), 'dtype: got torch.float32.*pass backend="torch"'),
        (
            "need",
            lambda framework, extra: need("nowhere." + framework, extra),
            "nowhere.megatron.core is not installed",
        ),
    ):
        monkeypatch.setattr(backend, "machine_of", lambda device: (ARCHES["sm_90a"], 132))
        monkeypatch.setattr(train_megatron, "SIZES", train_megatron.SIZES._replace(head_k_dim=64, head_v_dim=64))
        monkeypatch.setattr(train_megatron, name, value)
        assert train_megatron.main([]) == 2
        assert re.search(text, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--cp", "2"], "expected processes divisible by cp"),
        (["--rows", "0"], "expected numbers above 0"),
        (["--cp", "0"], "expected numbers above 0"),
        (["--cp", "-1"], "expected numbers above 0"),
    ],
)
def test_options_that_cannot_work(options: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_megatron.main([*options, "--device", "cpu"]) == 2
    assert word in capsys.readouterr().err
    assert not dist.is_initialized()
