"""`flashqla-cp bench --costs`: terms are found again, and the number of ranks from which sharding pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashqla_cp.cli import bench_costs
from flashqla_cp.cli.main import main

TERMS = dict(zip(bench_costs.TERMS, (12.0, 1.5, 4.0, 0.75), strict=True))


def rows(terms: dict[str, float]) -> list[dict[str, Any]]:
    """Times that follow the model exactly."""
    found = []
    for name in bench_costs.NAMES:
        for ranks in (2, 4, 8):
            for heads in (8, 32):
                row: dict[str, Any] = {"kind": "exchange", "exchange": name, "ranks": ranks, "v_heads": heads}
                for way in bench_costs.DIRECTIONS:
                    factors = bench_costs.features(name, ranks, heads, 64, way)
                    us = sum(term * factor for term, factor in zip(terms.values(), factors, strict=True))
                    row[way] = {"exchange_ms": us / 1e3}
                found.append(row)
    return found


def test_terms_are_found_again() -> None:
    found = bench_costs.fit(rows(TERMS), 64)
    assert found["terms"] == pytest.approx(TERMS, rel=1e-6) and found["worst"] < 1e-9


def test_a_term_that_would_be_negative_is_left_out() -> None:
    factors = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    found = bench_costs.non_negative(factors, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    assert found.tolist() == pytest.approx([2.0, 0.0])


def test_factors_are_those_of_the_exchanges() -> None:
    """Eight ranks, four heads of 16: a state is 1 KiB a head, and so is a correction."""
    kib = 1024 / 1e6
    assert bench_costs.features("allgather", 8, 4, 16, "forward") == pytest.approx([1, 7, 56 * kib, 56 * kib])
    assert bench_costs.features("allgather", 8, 4, 16, "backward") == pytest.approx([1, 7, 28 * kib, 56 * kib])
    calls, messages, _, folded = bench_costs.features("sharded", 8, 4, 16, "forward")
    assert (calls, messages, folded) == (2, 14, pytest.approx(14 * kib))


def test_sharding_pays_where_bytes_cost_more_than_collectives() -> None:
    costly_calls = bench_costs.crossover(TERMS | {"call_us": 500.0}, 32, 128)
    cheap_calls = bench_costs.crossover(TERMS | {"call_us": 5.0}, 32, 128)
    assert cheap_calls is not None and costly_calls is not None and 2 < cheap_calls < costly_calls
    for ranks, cheaper in ((cheap_calls - 1, False), (cheap_calls, True)):
        costs = [bench_costs.cost_us(TERMS | {"call_us": 5.0}, name, ranks, 32, 128) for name in bench_costs.NAMES]
        assert (costs[1] < costs[0]) == cheaper
    only_calls = dict.fromkeys(bench_costs.TERMS, 0.0) | {"call_us": 5.0}
    assert bench_costs.crossover(only_calls, 32, 128) is None


def test_the_report_says_what_was_measured_and_what_auto_does() -> None:
    report = {"head": {"options": {"head_dim": 64}}, "rows": rows(TERMS)}
    found = bench_costs.summary(report)
    text = bench_costs.format_summary(found)
    gather, shard = found["heads"][1]["measured_us"][8]
    assert f"8: {gather:.0f} / {shard:.0f}" in text and "12.0 us a collective" in text
    assert found["heads"][1]["crossover"] == bench_costs.crossover(found["terms"], 32, 64)
    assert f"{found['heads'][1]['crossover']} ranks" in text and "gathers up to 4 ranks" in text
    with pytest.raises(ValueError, match="expected at least 4"):
        bench_costs.summary(report | {"rows": report["rows"][:1]})


def test_a_file_is_refused_by_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "bench.json"
    source.write_text("{}")
    assert main(["bench", "--costs", str(source)]) == 2
    assert "expected a file that --nproc wrote: it has no '" in capsys.readouterr().err
