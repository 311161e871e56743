"""`flashqla-cp bench`: options, what is written, what is refused, the stand-ins for peers."""

from __future__ import annotations

import copy
import json
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench_contenders import workload
from test_bench_report import REPORT

from flashqla_cp.cli import bench, bench_contenders, bench_draws, bench_report, bench_timing
from flashqla_cp.cli.bench_contenders import contenders, find_peers
from flashqla_cp.cli.main import build_parser, main
from flashqla_cp.kernels.arch import arch_by_name
from flashqla_cp.kernels.host import launcher
from flashqla_cp.op import chunk_gated_delta_rule

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_timing, "CPU_SECONDS", 0.0)


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_peers", lambda *_: ({}, {"fla": "ModuleNotFoundError: No module named 'fla'"}))


def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_peers: None) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png")]
    assert main(["bench", "--quick", "--draws", "2", "--middle-rank", "3", *files]) == 0
    out, error = capsys.readouterr()
    for words in (
        "flashqla-cp bench, 20",
        "torch 2.",
        "gates      mixed: every fourth head",
        "rank       1 of 3",
        "no GPU",
    ):
        assert words in out
    assert "absent     fla: ModuleNotFoundError" in out and "128 mixed flashqla_cp" in error
    rows = [line.split()[1:3] for line in out.splitlines()[-4:]]
    assert rows == [[gates, "flashqla_cp"] for gates in ("init", "init", "mixed", "mixed")]
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["head"]["options"]["tokens"] == [128] and report["head"]["backend"].startswith("torch: ")
    assert report["ceilings"]["product_dtype"] == "float32" and report["ceilings"]["copy_gb_per_s"] > 0
    assert [case["gates"] for case in report["cases"]] == ["init", "mixed"]
    for case in report["cases"]:
        assert case["floor_ms"] > 0 and [r["middle_rank"] for r in case["results"]] == [False, True]
        for result in case["results"]:
            assert 0 < result["o_error"] < bench_draws.BAR and len(result["draws"]) == 2
            assert result["eager_ms"] == pytest.approx(sum(draw["eager_ms"] for draw in result["draws"]) / 2)
        alone, middle = case["results"]
        assert middle["over_alone"] == {"eager": pytest.approx(middle["eager_ms"] / alone["eager_ms"])}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


def be_terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("stop", [press_ctrl_c, be_terminated])
@pytest.mark.parametrize("finished", [0, 1])
def test_what_was_finished_is_printed_when_it_is_stopped(
    finished: int,
    stop: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_peers: None,
) -> None:
    timed, calls = bench.time_draw, []

    def time_draw(*args: Any) -> dict[str, Any]:
        calls.append(args)
        if len(calls) > finished:
            stop()
        return timed(*args)

    monkeypatch.setattr(bench, "time_draw", time_draw)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["bench", "--quick", "--draws", "1"]) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    out, error = capsys.readouterr()
    assert f"stopped; {finished} cases were finished" in error
    rows = [line.split()[1:3] for line in out.splitlines() if line.split()[2:3] == ["flashqla_cp"]]
    assert rows == [["init", "flashqla_cp"]] * finished


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--tokens 0", "--tokens: got 0, expected a positive integer"),
        ("--draws -1", "--draws: got -1"),
        ("--head-dim 0", "--head-dim: got 0"),
        ("--heads 2 3", "--heads: got 2 3, expected HV a multiple of H"),
        ("--documents 3 --tokens 128", "--documents: got 3 for 128 tokens, expected a divisor"),
        ("--middle-rank 2", "--middle-rank: got 2, expected at least 3"),
        ("--middle-rank 8 --documents 2", "--documents: got 2 with --middle-rank"),
        ("--json no/such/folder/x.json", "--json: got 'no/such/folder/x.json', expected a file in a folder"),
        ("--backend tilelang", 'backend: "tilelang" cannot run here'),
    ],
)
def test_options_that_cannot_work_are_one_line_and_exit_code_2(
    options: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options.split()]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith(f"bench: error: {text}") and error.count("\n") == 1


@pytest.mark.parametrize("fault", ["wrong", "nan", "raises"])
def test_a_wrong_result_is_not_timed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_peers: None
) -> None:
    def op(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        if fault == "raises":
            raise RuntimeError("no such kernel\nand more")
        o, _ = chunk_gated_delta_rule(*tensors, **options)
        return (o * 1.02 if fault == "wrong" else o.fill_(float("nan"))), None

    def timed(*_: object) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(bench_contenders, "chunk_gated_delta_rule", op)
    monkeypatch.setattr(bench_draws, "measure", timed)
    assert main(["bench", "--quick", "--gates", "weak", "--draws", "2", "--json", str(tmp_path / "x.json")]) == 1
    row = capsys.readouterr().out.splitlines()[-1]
    said = {"wrong": "not timed: o is off by 2.0e-02, allowed are 5e-03", "nan": "not timed: o is off by nan"}
    assert said.get(fault, "RuntimeError: no such kernel") in row and "and more" not in row
    (result,) = json.loads((tmp_path / "x.json").read_text())["cases"][0]["results"]
    assert len(result["draws"]) == 1 and result["eager_ms"] is None


@pytest.mark.parametrize("direction", ["backward", "step"])
def test_gradients_are_scored_and_timed(
    direction: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_peers: None
) -> None:
    options = ["--gates", "mixed", "--middle-rank", "3", "--direction", direction, "--json", str(tmp_path / "x.json")]
    assert main(["bench", "--quick", *options]) == 0
    out = capsys.readouterr().out
    assert f"work       {direction}" in out and "RuntimeError" not in out and "worst gradient" in out
    (case,) = json.loads((tmp_path / "x.json").read_text())["cases"]
    assert case["direction"] == direction and [r["middle_rank"] for r in case["results"]] == [False, True]
    for result in case["results"]:
        assert result["eager_ms"] > 0 and list(result["gradient_errors"]) == ["dq", "dk", "dv", "dg", "dbeta"]
        assert all(0 < error < bench_draws.GRADIENT_BARS[name] for name, error in result["gradient_errors"].items())


def test_a_wrong_gradient_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_peers: None
) -> None:
    def op(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        q, k, v, g, beta = tensors
        skewed = v.detach() + 1.05 * (v - v.detach())  # the same values, another gradient
        return chunk_gated_delta_rule(q, k, skewed.to(v.dtype), g, beta, **options)[0], None

    monkeypatch.setattr(bench_contenders, "chunk_gated_delta_rule", op)
    options = ["--gates", "weak", "--direction", "backward", "--json", str(tmp_path / "x.json")]
    assert main(["bench", "--quick", *options]) == 1
    assert "not timed: dv is off by 5.0e-02, allowed are 1e-02" in capsys.readouterr().out.splitlines()[-1]
    (result,) = json.loads((tmp_path / "x.json").read_text())["cases"][0]["results"]
    assert result["eager_ms"] is None and result["gradient_errors"]["dv"] == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(("direction", "forwards", "backwards"), [("backward", 1, 5), ("step", 5, 5)])
def test_only_what_was_asked_for_is_inside_the_timed_call(direction: str, forwards: int, backwards: int) -> None:
    counts = {"forward": 0, "backward": 0}

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            counts["forward"] += 1
            return tensors[2].clone()

        @staticmethod
        def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
            counts["backward"] += 1
            return tuple(torch.zeros_like(x) for x in draw.tensors)

    contender = bench_contenders.Contender(name="x", middle=False, call=Counted.apply, check=None)
    draw = bench_draws.Draw.of(workload(), 0, direction, CPU)
    call = bench_draws.preparation(contender, draw, direction)()
    for _ in range(5):
        assert [x.shape for x in call()] == [x.shape for x in draw.tensors]
    assert counts == {"forward": forwards, "backward": backwards}


def test_backward_is_timed_on_kernels_too() -> None:
    args = build_parser("bench").parse_args(["bench", "--direction", "backward"])
    with launcher.machine(lambda spec: None, arch_by_name("sm_90a"), 4):
        request, _ = bench._read_options(args)
    assert request.direction == request.options["direction"] == "backward"
    assert request.workload(512, "init").heads == 2


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Fields:
    """A context of a peer: keeps what it is made of."""

    def __init__(self, **fields: Any):
        self.fields = fields


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """Both peers, made of our op: modules and names as bench_contenders imports them. Their exchange modules."""
    seen: dict[str, types.ModuleType] = {}

    def op_of(name: str) -> Any:
        def op(*tensors: torch.Tensor, cp_context: Any = None, **options: Any) -> Any:
            if cp_context is not None:
                gathered, _ = seen[name].all_gather_into_tensor(tensors[3], group=cp_context.fields["group"])
                ranks = cp_context.fields["pre_num_ranks"] + cp_context.fields["post_num_ranks"] + 1
                assert gathered.shape == (ranks, *tensors[3].shape) and seen[name].dist.get_rank() == ranks // 2
            return chunk_gated_delta_rule(*tensors, **options)

        return op

    chunk = "flash_qla.ops.gated_delta_rule.chunk"
    for parent in (
        "flash_qla.ops",
        "flash_qla.ops.gated_delta_rule",
        chunk,
        f"{chunk}.cp",
        "fla",
        "fla.ops",
        "fla.ops.cp",
    ):
        module(monkeypatch, parent)
    module(monkeypatch, "flash_qla", chunk_gated_delta_rule=op_of("flash_qla"))
    module(monkeypatch, f"{chunk}.cp.context", FlashQLACPContext=Fields)
    module(monkeypatch, "fla.ops.cp.context", FLACPContext=Fields)
    module(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=op_of("fla"))
    seen["flash_qla"] = module(monkeypatch, f"{chunk}.cp.preprocess")
    seen["fla"] = module(monkeypatch, "fla.ops.cp.chunk_delta_h")
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    return seen


@pytest.mark.parametrize("direction", ["forward", "backward", "step"])
def test_peers_stand_beside_ours(
    direction: str, exchanges: dict[str, types.ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--quick", "--gates", "init", "--middle-rank", "8", "--direction", direction]) == 0
    out = capsys.readouterr().out
    rows = [line.split(None, 2)[2] for line in out.splitlines()[-6:]]
    assert "absent" not in out and "Error" not in out
    assert all("flash_qla takes" in row and "fla takes" in row for row in (rows[0], rows[3])), rows
    assert rows[4].startswith("flash_qla rank") and "x of flash_qla" in rows[4] and "x of fla" in rows[5]
    context = find_peers()[0]["flash_qla"].middle_context(128, 8, CPU).fields
    assert (context["pre_num_ranks"], context["post_num_ranks"], context["is_inter"]) == (4, 3, True)
    assert context["cu_seqlens"].tolist() == [0, 128] and not context["is_first_rank"] and not context["is_last_rank"]


def test_one_peer_can_be_asked_for(exchanges: dict[str, types.ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--gates", "init", "--peers", "fla"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[-2:]] == ["flashqla_cp", "fla"]


def test_a_peer_that_fails_costs_only_its_own_line(
    exchanges: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def context(**_: object) -> None:
        raise TypeError("unexpected keyword argument 'is_inter'")

    monkeypatch.setattr(sys.modules["flash_qla.ops.gated_delta_rule.chunk.cp.context"], "FlashQLACPContext", context)
    assert main(["bench", "--quick", "--gates", "init", "--middle-rank", "3"]) == 0
    rows = capsys.readouterr().out.splitlines()[-6:]
    assert ["TypeError" in row for row in rows] == [False, False, False, False, True, False]


def test_a_call_that_a_graph_cannot_hold_keeps_its_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def graph_ms(*_: object) -> float:
        raise RuntimeError("operation not permitted when stream is capturing\n...")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name, value in {"eager_ms": lambda *_: 2.0, "peak_mib": lambda _: 3.0, "graph_ms": graph_ms}.items():
        monkeypatch.setattr(bench_timing, name, value)
    found = bench_timing.measure(lambda: lambda: None, torch.device("cuda"))
    assert (found["eager_ms"], found["graph_ms"], found["peak_mib"]) == (2.0, None, 3.0) and found["host_us"] > 0
    assert found["graph_failed"] == "RuntimeError: operation not permitted when stream is capturing"


def test_medians_worst_errors_and_comparisons() -> None:
    (case,) = copy.deepcopy(REPORT["cases"])
    ours, theirs, rank, their_rank = case["results"]
    assert bench_report.comparisons(ours, case["results"]) == (
        {"flash_qla": {"eager": pytest.approx(2.0), "graph": pytest.approx(1.5)}},
        {},
    )
    ratios, over_alone = bench_report.comparisons(rank, case["results"])
    assert ratios == {} and over_alone == {"eager": pytest.approx(1.25), "graph": pytest.approx(1.1)}
    assert bench_report.comparisons(their_rank, case["results"]) == ({}, {})  # it failed
    assert bench_report.comparisons(theirs, case["results"]) == ({}, {})
    numbers = [{"eager_ms": t, "graph_ms": None, "host_us": 9, "peak_mib": 1, "o_error": e, "first_call_s": 0.5}
               for t, e in ((3.0, 1e-3), (1.0, 4e-3), (2.0, None))]  # fmt: skip
    field = contenders(workload(), None, "torch", {}, CPU)
    ceilings = bench_timing.Ceilings(copy_bytes=1e9, operations=1e9, dtype=torch.float32)
    (result,) = bench._case(workload(), field, [numbers], ceilings, "forward")["results"]
    assert (result["eager_ms"], result["graph_ms"], result["o_error"]) == (2.0, None, 4e-3)
