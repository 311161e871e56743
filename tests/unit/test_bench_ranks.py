"""`flashqla-cp bench --nproc`: real ranks at small sizes, numbers of ranks put together, what is an error."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.cli import bench_contenders, bench_on_rank, bench_ranks
from flashqla_cp.cli.bench_contenders import LocalCopies, Peer
from flashqla_cp.cli.bench_ranks_report import format_tables
from flashqla_cp.cli.main import main
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.context import build_cp_context
from flashqla_cp.testing.spawn import run_ranks
from flashqla_cp.testing.workload import Workload

WORK = Workload(tokens=70, documents=1, heads=1, v_heads=2, head_dim=16, gates="mixed", dtype=torch.bfloat16)
REQUEST = bench_on_rank.RankRequest(
    works=(WORK,), exchanges=("sharded",), backend="torch", peers=(), heads=(2,), calls=2
)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_two_ranks_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "ranks.json"), "--plot", str(tmp_path / "ranks.png")]
    options = ["--group", "gloo", "--quick", "--peers", "none", "--exchange", "allgather", "headwise"]
    assert main(["bench", "--nproc", "2", *options, *files]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for words in ("bench --nproc 2", "2 over gloo", "weak scaling", "exchanges of maps alone", "the op on all ranks"):
        assert words in out
    assert "formula" not in out and (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    alone, gathered, headwise = (row for row in rows if row["kind"] == "op")
    assert (alone["exchange"], alone["ranks"], "over_alone" in alone) == ("none", 1, False)
    for row in (gathered, headwise):
        assert 0 < row["o_error"] < 5e-3 and all(0 < error < 2e-2 for error in row["gradient_errors"].values())
        for way in ("forward", "backward"):
            found, ratio = row[way], row["over_alone"][way]
            assert found["sent_by_ranks"] == found["bytes_by_ranks"] and max(found["sent_by_ranks"]) > 0
            assert ratio == pytest.approx(found["whole_ms"] / alone[way]["whole_ms"])
            assert found["exposed_ms"] == pytest.approx(found["whole_ms"] - found["stand_in_ms"])
            assert len(found["whole_ms_of_ranks"]) == 2
    assert gathered["forward"]["exchange_ms"] > 0 and "exchange_ms" not in headwise["forward"]
    exchanges = {(row["exchange"], row["v_heads"]) for row in rows if row["kind"] == "exchange"}
    assert len(exchanges) == 6
    assert main(["bench", "--costs", str(tmp_path / "ranks.json"), "--json", str(tmp_path / "costs.json")]) == 0
    assert "us a collective" in capsys.readouterr().out and "terms" in json.loads((tmp_path / "costs.json").read_text())


def _measure(rank: int, fault: str) -> list[Any]:
    def op(*tensors: torch.Tensor, **options: Any) -> Any:
        o, state = chunk_gated_delta_rule(*tensors, **options)
        if options["cp_context"] is not None and dist.get_rank() == 1:
            if fault == "raises":
                raise RuntimeError("no such kernel\nand more")
            return o + 0.02 * o.detach(), state  # with the right gradients, which the other ranks would feel
        return o, state

    bench_on_rank.chunk_gated_delta_rule = op  # type: ignore[assignment]
    return bench_on_rank.measure_on_this_rank(rank, REQUEST)


@pytest.mark.parametrize(
    ("fault", "text"),
    [("wrong", "rank 1: not timed: o is off by 2.0e-02"), ("raises", "rank 1: RuntimeError: no such")],
)
def test_what_one_rank_has_wrong_is_timed_on_none(fault: str, text: str) -> None:
    rows = bench_ranks.joined(run_ranks(_measure, 3, fault, timeout=120.0))
    alone, sharded = (row for row in rows if row["kind"] == "op")
    assert sharded["failed"].startswith(text) and "forward" not in sharded and not bench_ranks.fault(alone)
    assert bench_ranks.fault(sharded) and text in format_tables({"rows": rows})


def _measure_peer(rank: int) -> list[Any]:
    """A peer made of our op, whose context is one of ours; a second one that rank 1 does not have."""

    def context(tokens: int, group: Any, device: torch.device) -> Any:
        return build_cp_context([0, tokens * group.size()], group)

    def load() -> Peer:
        return Peer(op=chunk_gated_delta_rule, middle_context=lambda *_: None, rank_context=context)

    bench_contenders.LOADERS.clear()
    bench_contenders.LOADERS.update({"peer": load} | ({"rare": load} if rank == 0 else {}))
    return bench_on_rank.measure_on_this_rank(rank, replace(REQUEST, peers=("rare", "peer"), exchanges=("allgather",)))


def test_a_peer_stands_beside_ours_on_ranks() -> None:
    rows = [row for row in bench_ranks.joined(run_ranks(_measure_peer, 2, timeout=120.0)) if row["kind"] == "op"]
    assert [(row["name"], row["exchange"], row["ranks"]) for row in rows] == [
        ("flashqla_cp", "none", 1),
        ("flashqla_cp", "allgather", 2),
        ("peer", "none", 1),
        ("peer", "its own", 2),
    ]
    assert all(0 < row["o_error"] < 5e-3 and "over_alone" in row for row in rows if row["ranks"] == 2)
    assert "peer  " in format_tables({"rows": rows}) and not any(map(bench_ranks.fault, rows))


def part(whole: list[float], **more: Any) -> dict[str, Any]:
    return {"whole": {"eager": whole}, "sent": 8, "bytes": 8} | {key: {"eager": value} for key, value in more.items()}


def row(forward: dict[str, Any], backward: dict[str, Any], **more: Any) -> dict[str, Any]:
    names = {"kind": "op", "name": "flashqla_cp", "exchange": "sharded", "ranks": 2, "gates": "init", "tokens": 64}
    return names | {"forward": forward, "backward": backward} | more


def test_the_slowest_rank_of_each_call_counts() -> None:
    alone = [row(part([1.0]), part([3.0]), ranks=1, exchange="none") for _ in range(2)]
    first = row(part([1.0, 5.0, 2.0], stand_in=[1.0], exchange=[0.4]), part([4.0]), o_error=1e-3)
    second = row(part([3.0, 1.0, 2.5], stand_in=[2.5], exchange=[0.6]), part([3.0]), o_error=float("2e-3"))
    _, found = bench_ranks.joined([[alone[0], first], [alone[1], second]])
    forward = found["forward"]
    assert (forward["whole_ms"], forward["whole_ms_of_ranks"]) == (3.0, [2.0, 2.5]) and found["o_error"] == 2e-3
    assert (forward["exposed_ms"], forward["exchange_ms"]) == (0.5, 0.6)
    assert forward["hidden_ms"] == pytest.approx(0.1) and forward["sent_by_ranks"] == [8, 8]
    assert found["over_alone"] == {"forward": 3.0, "backward": pytest.approx(4 / 3)}
    assert found["loss"] == pytest.approx(1 - 4 / 7) and not bench_ranks.fault(found)


def test_graph_times_count_where_all_have_them() -> None:
    both = {"whole": {"eager": [9.0], "graph": [2.0]}, "stand_in": {"eager": [8.0], "graph": [1.5]}}
    one = both | {"stand_in": {"eager": [8.0]}}
    (found,) = bench_ranks.joined([[row(both, one)], [row(both, one)]])
    assert (found["forward"]["way"], found["forward"]["whole_ms"], found["forward"]["exposed_ms"]) == (
        "graph",
        2.0,
        0.5,
    )
    assert (found["backward"]["way"], found["backward"]["whole_ms"], found["backward"]["exposed_ms"]) == ("eager", 9, 1)


def test_other_bytes_than_the_formula_says_are_a_fault() -> None:
    (found,) = bench_ranks.joined([[row(part([1.0]), part([1.0]) | {"sent": 9})]])
    assert bench_ranks.fault(found)
    assert "backward: not what the formula says" in format_tables({"rows": [found]})


def test_ranks_outside_of_a_group_have_no_part() -> None:
    (found,) = bench_ranks.joined([[row(part([1.0]), part([1.0]))], [None]])
    assert found["forward"]["whole_ms_of_ranks"] == [1.0]


def test_nodes_are_imagined_for_the_hierarchy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bench_on_rank.PER_NODE, raising=False)
    for exchange, size, expected in (("hierarchical", 8, 4), ("hierarchical", 5, 5), ("sharded", 8, 8)):
        with bench_on_rank.nodes_of(exchange, size) as per_node:
            assert per_node == expected == LocalCopies(0, size, per_node).ranks_per_node()
    assert bench_on_rank.PER_NODE not in os.environ
    monkeypatch.setenv(bench_on_rank.PER_NODE, "2")
    with bench_on_rank.nodes_of("hierarchical", 8) as per_node:
        assert per_node == 2
    assert os.environ[bench_on_rank.PER_NODE] == "2" and bench_on_rank.group_sizes(6) == [2, 4, 6]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--nproc 1", "--nproc: got 1, expected at least 2"),
        ("--nproc 2 --middle-rank 8", "--middle-rank: does not go with --nproc"),
        ("--nproc 2 --documents 2", "--documents: does not go with --nproc"),
        ("--nproc 2 --group nccl", "--group: got nccl with 0 GPU(s) for 2 rank(s)"),
        ("--nproc 2 --timeout 0", "--timeout: got 0"),
        ("--costs no-such.json", "--costs: got 'no-such.json', expected a file that --nproc wrote"),
    ],
)
def test_options_that_cannot_work(
    options: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["bench", *options.split()]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith(f"bench: error: {text}")
