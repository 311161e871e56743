"""`flashqla-cp bench --op conv`: what it times, what it counts, what it refuses."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqla_cp.cli import bench_timing
from flashqla_cp.cli.main import main
from flashqla_cp.conv import causal_conv1d
from flashqla_cp.testing.conv_workload import SLICE, TAPS, ConvWorkload

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_timing, "CPU_SECONDS", 0.0)


def _install_fla(monkeypatch: pytest.MonkeyPatch, conv: Any) -> None:
    for name in ("fla", "fla.modules", "fla.modules.convolution"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fla.modules.convolution"].causal_conv1d = conv  # type: ignore[attr-defined]


@pytest.mark.parametrize("direction", ["forward", "backward", "step"])
def test_ours_and_flas(direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_fla(monkeypatch, lambda x, weight, **options: causal_conv1d(x, weight, backend="torch", **options))
    options = ["--quick", "--documents", "2", "--direction", direction, "--json", str(tmp_path / "x.json")]
    assert main(["bench", "--op", "conv", *options]) == 0
    (case,) = json.loads((tmp_path / "x.json").read_text())["cases"]
    assert [result["name"] for result in case["results"]] == ["flashqla_cp", "fla"]
    passes = {"forward": 2, "backward": 3, "step": 5}[direction]
    assert case["bytes"] == passes * 128 * (2 * 2 + 4) * 64 * 2 and case["tokens"] == 128
    for result in case["results"]:
        assert result["eager_ms"] > 0 and 0 < result["o_error"] <= 5e-3
        gradients = result["gradient_errors"]
        assert gradients is None if direction == "forward" else list(gradients) == ["dx", "dweight"]
    assert case["results"][0]["ratios"]["fla"]["eager"] > 0


def test_a_wrong_convolution_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that looks across documents, say."""

    def conv(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: Any, **options: Any) -> Any:
        return causal_conv1d(x, weight, **options)

    _install_fla(monkeypatch, conv)
    assert main(["bench", "--op", "conv", "--quick", "--documents", "8"]) == 0
    assert "not timed: o is off by" in capsys.readouterr().out


def test_expected_results_of_many_channels_are_those_of_the_whole() -> None:
    work = ConvWorkload(tokens=6, documents=2, channels=SLICE + 8, dtype=torch.float32)
    (x, weight), dy = work.draw(0, CPU), work.upstream(0, CPU)
    assert weight.shape == (SLICE + 8, TAPS)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    y, _ = causal_conv1d(*leaves, cu_seqlens=torch.tensor(work.offsets()))
    torch.testing.assert_close(work.expected((x, weight)), y.float())
    found = work.expected_gradients((x, weight), dy)
    for grad, exact in zip(found, torch.autograd.grad(y, leaves, dy.double()), strict=True):
        torch.testing.assert_close(grad, exact.float())


@pytest.mark.parametrize(("option", "value"), [("--middle-rank", "8"), ("--gates", "weak")])
def test_options_of_the_other_op_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--op", "conv", option, value]) == 2
    assert f"{option}: got" in capsys.readouterr().err
