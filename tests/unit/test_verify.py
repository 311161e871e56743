"""`flashqla-cp verify`: what it prints, its exit code, and that it sees an error."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flashqla_cp.cli import verify
from flashqla_cp.cli.main import build_parser, main
from flashqla_cp.cli.verify_layer import functional, layer_oracle, layer_problem
from flashqla_cp.testing.cases import BY_ID, STRATEGIES, VERIFY
from flashqla_cp.testing.parity import Score, run_whole, score


def test_agreement_is_printed_and_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--nproc", "2", "--backend", "gloo", "--layout", "zigzag", "--exchange", "sharded"]) == 0
    text = capsys.readouterr().out
    assert "2 ranks, gloo, float64, torch backend on cpu" in text and "zigzag, sharded" in text
    for row in ("op     o ", "op     dbeta ", "conv   dweight ", "layer  dhidden_states ", "layer  dA_log "):
        assert text.count(row) == 2  # against one rank and against the oracle
    assert text.count("1e-10") == 42 and "every error is within its bar" in text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_narrow_types_stay_within_their_bars(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--nproc", "3", "--backend", "gloo", "--dtype", dtype]) == 0, capsys.readouterr().out


def test_a_cut_in_front_of_the_worst_window_stays_within_the_bars_of_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layout", "zigzag", "--dtype", "float32"]  # of two ranks: a cut at token 300
    assert main(["verify", "--nproc", "2", "--backend", "gloo", *options]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["verify", "padded_tail_over_whole_ranks"])
def test_bars_of_the_layer_in_fp32_are_what_one_process_errs_by(name: str) -> None:
    """Without ranks: neither less than its error, nor so much more that an error of theirs could hide."""
    case = BY_ID[name]
    layer, problem = layer_problem(case, torch.float32, torch.device("cpu"), "torch")
    exact = run_whole(layer_oracle(layer), verify._widened(problem))
    scores = score(run_whole(functional(layer), problem), exact, range(1, case.stream_length))
    worst = max(entry.worst for entry in scores)
    assert all(worst < bar < 4 * worst for bar in verify.LAYER_BARS["float32"].values()), scores


def test_an_error_is_named_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong window behind one cut is enough; NaN is no agreement either."""
    scores = {
        ("op", "one rank"): [Score(name="o", whole=1e-16, behind_cuts=(1e-16, 1e-3))],
        ("op", "oracle"): [Score(name="dg", whole=float("inf"), behind_cuts=(0.0, 0.0))],
    }
    report = verify.Report(case=VERIFY, context="CPContext(...)", cuts=(10, 20), scores=scores)
    monkeypatch.setattr(verify, "run_ranks", lambda *args, **kwargs: [[report], [report]])
    assert main(["verify"]) == 1
    text = capsys.readouterr().out
    assert "too large: op o against one rank; op dg against the oracle" in text
    assert "within its bar" not in text
    assert main(["verify", "--all"]) == 1
    row, _, closing = capsys.readouterr().out.splitlines()[-3:]
    assert row.split() == "contiguous auto inf too large: op o against one rank; op dg against the oracle".split()
    assert closing == "1 of 1 have errors that are too large"


def test_every_layout_with_every_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    cases = verify._chosen_cases(build_parser("verify").parse_args(["verify", "--all"]))
    ways = {(case.custom or case.layout, case.exchange) for case in cases}
    assert len(ways) == len(cases) == len(verify.LAYOUTS) * len(STRATEGIES) and {way[1] for way in ways} == {
        *STRATEGIES
    }
    options = ["--all", "--exchange", "sharded"]
    assert main(["verify", "--nproc", "2", "--backend", "gloo", *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-2]]
    assert [row[:2] for row in rows] == [[layout, "sharded"] for layout in verify.LAYOUTS]
    assert all(0 < float(error) < 1e-10 for row in rows for error in row[2:]) and len(rows[0]) == 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--nproc 0", "--nproc: got 0, expected at least 1"),
        ("--nproc -2", "--nproc: got -2"),
        ("--backend nccl", "--backend: got nccl with 0 GPU(s) for 2 rank(s)"),
        ("--timeout -1", "--timeout: got -1, expected a number above 0"),
        ("--timeout nan", "--timeout: got nan"),
        ("--timeout inf", "--timeout: got inf"),
        ("--op-backend tilelang --backend gloo", 'backend: "tilelang" cannot run here'),
    ],
)
def test_options_that_cannot_work_are_one_line_and_exit_code_2(
    options: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(verify, "run_ranks", started)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["verify", *options.split()]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith(f"verify: error: {text}") and error.count("\n") == 1


def test_ranks_that_run_out_of_time_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--backend", "gloo", "--timeout", "0.001"]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("verify: error: no result from rank(s) 0, 1 after 0.001 s")


def test_names_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--list"]) == 0
    assert capsys.readouterr().out.split() == list(BY_ID)
    with pytest.raises(SystemExit):
        build_parser("verify").parse_args(["verify", "--case", "nonsense"])


def test_a_case_keeps_its_own_layout() -> None:
    parser = build_parser("verify")
    (case,) = verify._chosen_cases(parser.parse_args(["verify", "--case", "interleaved_one_document"]))
    assert (case.layout, case.custom) == ("custom", "interleaved")
    (case,) = verify._chosen_cases(parser.parse_args(["verify", "--case", "zigzag_padded", "--layout", "backwards"]))
    assert (case.layout, case.custom, case.num_tokens) == ("custom", "backwards", 203)


def test_uses_the_ranks_of_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "flashqla_cp.cli.main", "verify", "--backend", "gloo"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks, gloo, float64") == 1
