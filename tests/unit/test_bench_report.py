"""The head, the table and the plot of `flashqla-cp bench`, from canned numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqla_cp.cli import bench_report


def result(name: str, middle: bool, eager: float | None, graph: float | None, **more: Any) -> dict[str, Any]:
    numbers = {"name": name, "middle_rank": middle, "eager_ms": eager, "graph_ms": graph, "host_us": 140.4}
    return numbers | {"peak_mib": 793.6, "o_error": 4e-3, "ratios": {}, "over_alone": {}} | more


OPTIONS = {
    "tokens": [65536],
    "gates": ["init", "zero"],
    "heads": 16,
    "v_heads": 32,
    "head_dim": 128,
    "draws": 3,
    "documents": 1,
    "middle_rank": 8,
    "direction": "forward",
    "dtype": "bf16",
}
REPORT: dict[str, Any] = {
    "head": bench_report.head(OPTIONS, torch.device("cpu"), "tilelang: kernels", {"fla": "broken"}, ["take care"]),
    "ceilings": {"copy_gb_per_s": 4240.4, "product_tflop_per_s": 716.0, "product_dtype": "bfloat16"},
    "cases": [
        {
            "tokens": 65536,
            "gates": "init",
            "documents": 1,
            "floor_ms": 0.44,
            "results": [
                result("flashqla_cp", False, 1.2, 1.0, ratios={"flash_qla": {"eager": 2.0, "graph": 1.5}}),
                result("flash_qla", False, 2.4, 1.5),
                result("flashqla_cp", True, 1.5, 1.1, over_alone={"eager": 1.25, "graph": 1.1}, o_error=None),
                result("flash_qla", True, None, None, host_us=None, peak_mib=None, failed="RuntimeError: no room"),
            ],
        }
    ],
}


def test_head_says_what_was_run() -> None:
    text = bench_report.format_head(REPORT)
    for words in (
        "tilelang: kernels",
        f"torch {torch.__version__}",
        "forward, bf16, H = 16, HV = 32, d = 128, 1 document(s), 3 draw(s)",
        "init: g = -A softplus",
        "zero: g = 0",
        "rank       4 of 8",
        "absent     fla: broken",
        "note       take care",
        "copy 4240 GB/s, bfloat16 product 716 TFLOP/s",
    ):
        assert words in text
    assert "weak" not in text


def test_table_has_a_line_for_each_op() -> None:
    lines = bench_report.format_table(REPORT).splitlines()
    assert [line.split() for line in lines[1:]] == [
        "65536 init flashqla_cp 1.200 1.000 140 794 4.0e-03 0.440 44% flash_qla takes 1.50x".split(),
        "65536 init flash_qla 2.400 1.500 140 794 4.0e-03 0.440 29%".split(),
        "65536 init flashqla_cp rank 1.500 1.100 140 794 - 0.440 40% 1.10x of flashqla_cp".split(),
        "65536 init flash_qla rank - - - - 4.0e-03 0.440 RuntimeError: no room".split(),
    ]
    ends = [line.index(cell) + len(cell) for line, cell in zip(lines, ("floor ms", *["0.440"] * 4), strict=True)]
    assert len(set(ends)) == 1  # the columns stand below their headings


def test_gradients_have_a_column_where_there_is_a_backward() -> None:
    report = copy.deepcopy(REPORT)
    report["head"]["options"]["direction"] = "step"
    for row in report["cases"][0]["results"]:
        row["gradient_errors"] = None
    first = report["cases"][0]["results"][0]
    first |= {
        "gradient_errors": {"dq": 1e-3, "dg": 4e-3},
        "graph_ms": None,
        "graph_failed": "RuntimeError: no",
        "ratios": {},
    }
    report["cases"][0]["results"][1]["gradient_errors"] = {"dq": float("nan"), "dg": 4e-3}
    lines = [line.split() for line in bench_report.format_table(report).splitlines()]
    assert (
        lines[1]
        == "65536 init flashqla_cp 1.200 - 140 794 4.0e-03 dg 4.0e-03 0.440 37% no graph: RuntimeError: no".split()
    )
    assert lines[2][8:10] == ["dq", "nan"] and lines[3][9] == "-"
    assert bench_report.format_head(report).count("step, bf16") == 1


def test_commit_is_that_of_a_checkout_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = bench_report.commit()
    assert found is None or 12 <= len(found.rstrip("+")) <= 40
    monkeypatch.setattr(bench_report, "__file__", str(tmp_path / "flashqla_cp" / "cli" / "bench_report.py"))
    assert bench_report.commit() is None


@pytest.mark.parametrize(("slowest", "scale"), [(3.0, "linear"), (90.0, "log")])
def test_plot_has_a_bar_for_each_time(slowest: float, scale: str, tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    report = copy.deepcopy(REPORT)
    report["cases"][0]["results"][1]["graph_ms"] = slowest
    labels = ["flashqla_cp", "flash_qla", "flashqla_cp, middle rank", "flash_qla, middle rank"]
    axis = figure.subplots()
    bench_report._draw_axis(axis, report["cases"], labels)
    assert [bar.get_height() for bar in axis.patches] == [1.0, slowest, 1.1] and axis.get_yscale() == scale
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["init"]
    report["cases"] += [copy.deepcopy(report["cases"][0]) | {"tokens": tokens} for tokens in (8192, 32768)]
    bench_report.draw_plot(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
