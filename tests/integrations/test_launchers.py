"""launch/single_node.sh and launch/slurm.sbatch start the training program on two ranks, which learn like one; what it
takes on a GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashqla_cp.kernels import backend
from flashqla_cp.kernels.arch import ARCHES
from flashqla_cp.launch import ranks, settings

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SMALL = "--device cpu --steps 3 --seq-len 128 --hidden-size 32 --num-layers 2 --head-dim 16 --no-plot".split()
# What Slurm's own commands do here: name the nodes of the job, and start one task on each, with its number.
SLURM = {
    "scontrol": '[ "$*" = "show hostnames first,second" ] && printf "%s\\n" 127.0.0.1 second',
    "srun": """
        [ "$1" = --kill-on-bad-exit=1 ] && shift
        SLURM_NODEID=1 "$@" & second=$!
        SLURM_NODEID=0 "$@" && wait $second
    """,
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell that finds this Python's programs, and the above for Slurm's."""
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(command: list[str], out: Path, environment: dict[str, str]) -> list[float]:
    """The losses that the program logs."""
    command = [*command, *SMALL, "--out", str(out)]
    ran = subprocess.run(command, cwd=LAUNCH.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (out / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_two_ranks_train_like_one(environment: dict[str, str], tmp_path: Path) -> None:
    alone = train([sys.executable, "launch/train.py"], tmp_path / "alone", environment)
    two = ["--cp", "2"]
    node = train(["bash", "launch/single_node.sh", *two], tmp_path / "node", environment | {"RANKS": "2"})
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "first,second", "SLURM_NNODES": "2"}
    slurm = train(["bash", "launch/slurm.sbatch", *two], tmp_path / "slurm", environment | job)
    assert len(alone) == 3 and alone[2] != alone[0]
    assert node == pytest.approx(alone, rel=1e-5)
    assert slurm == pytest.approx(alone, rel=1e-5)


def test_programs_on_gpus_have_sizes_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(settings, "choose_device", lambda kind: torch.device("cuda", 0))
    monkeypatch.setattr(backend, "machine_of", lambda device: (ARCHES["sm_90a"], 132))
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    small = ["--num-layers", "1", "--no-plot", "--data", str(LAUNCH)]
    prepared = settings.prepare(parser.parse_args(small))
    assert prepared.shape.head_dim == ranks.default_head_dim() == 64
    assert prepared.autocast == torch.bfloat16
    for options, text in (
        (["--head-dim", "32"], "head sizes: got K = 32, V = 32, there are kernels for K = V = 64 and 128"),
        (["--expand-v", "2"], "head sizes: got K = 64, V = 128"),
        (["--dtype", "fp32"], "dtype: got torch.float32"),
    ):
        with pytest.raises(ValueError, match=f'--backend: {text}.*; pass backend="torch"'):
            settings.prepare(parser.parse_args(small + options))


def test_a_failure_of_the_program_is_one_of_the_job(environment: dict[str, str]) -> None:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "first,second", "SLURM_NNODES": "2"}
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "--cp", "3"]
    ran = subprocess.run(command, cwd=LAUNCH.parent, env=environment | job, capture_output=True, text=True, timeout=300)
    assert ran.returncode != 0
    assert "--cp: got 3" in ran.stderr


@pytest.mark.parametrize("options", [["--steps", "1", "--cp", "3"], ["--sp=3"]])
def test_ranks_of_a_sequence_that_do_not_divide_are_refused_at_once(options: list[str], environment) -> None:
    command = ["bash", str(LAUNCH / "single_node.sh"), *options]
    ran = subprocess.run(command, env=environment | {"RANKS": "4"}, capture_output=True, text=True, timeout=30)
    assert ran.returncode == 2
    assert " 3 does not divide the 4 ranks" in ran.stderr and ran.stderr.count("\n") == 1
