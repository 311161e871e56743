"""launch/train_deepspeed.py, one process and two ranks: the same loss curve under each launcher and ZeRO stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashqla_cp.launch.train_deepspeed import main

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("deepspeed", reason="deepspeed is not installed")

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
PROGRAM = str(LAUNCH / "train_deepspeed.py")
SMALL = "--steps 3 --seq-len 128 --hidden-size 64 --no-plot".split()
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2"],
}


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # The deepspeed launcher looks for its Python on the path.
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def curve(command: list[str], folder: Path, *options: str) -> list[dict[str, float]]:
    """The log's rows: loss, gradient norm and learning rate of each step."""
    ran = start([*command, PROGRAM, *SMALL, "--out", "out", *options], folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return curve([sys.executable], tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("launcher", "zero"), [("torchrun", 3), ("deepspeed", 1)])
def test_two_ranks_train_like_one(launcher: str, zero: int, alone: list[dict[str, float]], tmp_path: Path) -> None:
    config = json.loads((LAUNCH / "deepspeed.json").read_text()) | {"zero_optimization": {"stage": zero}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = curve(LAUNCHERS[launcher], tmp_path, "--sp", "2", "--config", "config.json")
    assert len(rows) == len(alone) == 3
    assert rows[2]["loss"] != rows[0]["loss"]
    for row, wanted in zip(rows, alone, strict=True):
        for name in ("loss", "gradient_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--sp", "2"], "--sp: got 2 with 1 process(es), expected a divisor of their number"),
        (["--seq-len", "1"], "--seq-len: got 1, expected a multiple of --sp 1 of at least 2"),
        (["--config", "config.json"], "train_batch_size: got None in config.json"),
        (["--config", "absent.json"], "absent.json"),
        (["--data", "absent"], "--data: got 'absent', which does not exist"),
    ],
)
def test_settings_that_cannot_work(
    options: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    Path("config.json").write_text("{}")
    assert main(options) == 2
    told = capsys.readouterr().err
    assert text in told
    assert len(told.splitlines()) == 1
