"""The commands for several GPUs on ranks that share one: real kernels and stand-ins, the wire is gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashqla_cp.cli.main import main
from flashqla_cp.launch import endurance

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


def test_bench_on_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--group", "gloo", "--tokens", "1024", "--gates", "mixed", "zero", "--peers", "none"]
    assert main(["bench", "--nproc", "3", *options, "--json", str(tmp_path / "x.json")]) == 0, capsys.readouterr()
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["head"]["backend"].startswith("tilelang")
    field = [row for row in report["rows"] if row["kind"] == "op"]
    assert len(field) == 2 * 5 and all(row["o_error"] < 5e-3 for row in field if row["ranks"] == 3)


def test_steps_under_skew() -> None:
    assert endurance.main(["skew", "--nproc", "2", "--backend", "gloo", "--steps", "60", "--limit", "400"]) == 0


def test_the_death_of_a_rank() -> None:
    assert endurance.main(["death", "--nproc", "2", "--backend", "gloo"]) == 0
