"""The training program's options, schedule, groups, log and plot."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.launch import report, settings, train
from flashqla_cp.launch.model import ByteModel, ModelShape, decay_groups
from flashqla_cp.launch.parity import group_of
from flashqla_cp.launch.ranks import Ranks, choose_device
from flashqla_cp.launch.step import learning_rate, loss_sum


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return parser.parse_args(list(options))


def test_resume_from_an_empty_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """What an unset variable gives; --resume alone means the newest checkpoint, or a new run."""
    assert parse("--resume").resume == Path() and parse("--resume", "runs/x").resume == Path("runs/x")
    with pytest.raises(SystemExit):
        parse("--resume", "")
    assert "--resume: expected a folder, got nothing" in capsys.readouterr().err


def test_learning_rate_rises_then_falls_along_a_cosine() -> None:
    rates = [learning_rate(step, steps=21, peak=1.0, warmup=4, final_ratio=0.1) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and math.isclose(rates[12], 0.55) and math.isclose(rates[20], 0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(0, steps=1, peak=1.0, warmup=0, final_ratio=0.1) == 1.0


@pytest.mark.parametrize(
    ("options", "processes", "text"),
    [
        (["--cp", "3"], 4, "--cp: got 3 with 4 process"),
        (["--cp", "2"], 1, "torchrun --nproc-per-node 2"),
        (["--cp", "0"], 1, "--cp: got 0, expected at least 1"),
        (["--batch-size", "3"], 2, "--batch-size: got 3, expected a multiple of the 2 data-parallel groups"),
        (["--seq-len", "1"], 1, "--seq-len: got 1, expected at least 2"),
        (["--micro-batch", "0"], 1, "--micro-batch: got 0"),
        (["--steps", "-1"], 1, "--steps: got -1"),
        (["--keep", "0"], 1, "--keep: got 0"),
        (["--lr", "nan"], 1, "--lr: got nan"),
        (["--clip", "-1"], 1, "--clip: got -1"),
        (["--expand-v", "inf"], 1, "--expand-v: got inf, expected a number above 0"),
        (["--expand-v", "nan"], 1, "--expand-v: got nan"),
        (["--expand-v", "0"], 1, "--expand-v: got 0"),
        (["--expand-v", "1e300"], 1, "--num-v-heads x --head-dim x --expand-v: got 1.28e"),
        (["--seed", "99999999999999999999"], 1, "--seed: got 99999999999999999999, expected at most 92233"),
        (["--seq-len", "99999999999999999999"], 1, "--seq-len: got 99999999999999999999, expected at most 92233"),
        (["--hidden-size", "9999999999"], 1, "--hidden-size: got 9999999999, expected at most 2147483647"),
        (["--head-dim", "0"], 1, "--head-dim: got 0, expected at least 1"),
    ],
)
def test_settings_that_cannot_work(options: list[str], processes: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings.check_settings(parse(*options), processes)


def test_settings_that_work() -> None:
    settings.check_settings(parse("--cp", "4", "--batch-size", "6"), 8)


@pytest.mark.parametrize(
    "options",
    [
        ["--cp", "2"],
        ["--data", "/no/such/folder"],
        ["--num-heads", "3"],
        ["--backend", "tilelang", "--device", "cpu"],
        ["--resume", "/no/such/folder"],
        ["--resume", "x" * 5000],
        ["--data", "x" * 5000],
        ["--expand-v", "inf"],
        ["--seed", "99999999999999999999"],
    ],
)
def test_errors_come_before_any_communication(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(*_: object) -> None:
        raise AssertionError("the ranks were joined")

    monkeypatch.setattr(train, "join_ranks", joined)
    assert train.main([*options, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train: error: ") and error.count("\n") == 1
    assert not dist.is_initialized() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [Path.touch, lambda out: (out / "log.jsonl").mkdir(parents=True)])
def test_results_that_cannot_be_written_are_told_before_the_first_step(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*_: object) -> None:
        raise AssertionError("a step was done")

    make(tmp_path / "out")
    monkeypatch.setattr(train, "train_step", trained)
    for out in (tmp_path / "out", Path("/dev/null/out"), Path("x" * 5000)):
        assert train.main(["--no-plot", "--backend", "torch", "--device", "cpu", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("train: error: --out: got ") and error.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("cannot allocate"), MemoryError()])
def test_a_model_without_memory_for_it_is_an_error_in_settings(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(settings, "ByteModel", build)
    assert train.main(["--no-plot", "--backend", "torch", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("train: error: no memory for a model of this size: ModelShape(")


def test_a_missing_matplotlib_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install matplotlib .* --no-plot"):
        settings.check_settings(parse(), 1)
    settings.check_settings(parse("--no-plot"), 1)


def test_a_gpu_for_each_process_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"--device: got auto with 1 GPU\(s\) for local rank 1"):
        choose_device("auto")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert choose_device("auto") == torch.device("cuda", 0)


def test_only_matrices_decay() -> None:
    shape = ModelShape(hidden_size=8, num_layers=1, num_heads=1, num_v_heads=2, head_dim=4, expand_v=1.0, tied=False)
    model = ByteModel(shape, backend="torch")
    decayed, others = decay_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".")[-1] for p in others["params"]} == {"weight", "dt_bias", "A_log"}
    assert all("norm" in name for p in others["params"] if (name := names[id(p)]).endswith("weight"))
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_tied_head_is_one_parameter() -> None:
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "num_v_heads": 1, "head_dim": 4, "expand_v": 1.0}
    tied, untied = (ByteModel(ModelShape(**sizes, tied=tied)) for tied in (True, False))
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_loss_without_labels_is_zero_with_a_graph() -> None:
    for length in (0, 3):
        logits = torch.randn(1, length, 256, requires_grad=True)
        loss = loss_sum(logits, torch.full((1, length), -100))
        loss.backward()
        assert loss == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_groups_of_the_parity_table() -> None:
    assert group_of("blocks.11.mixer.in_proj_qkvz.weight") == "blocks.mixer.in_proj_qkvz"
    assert group_of("blocks.3.mixer.A_log") == "blocks.mixer.A_log"


def test_sums_keep_every_tensor_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashqla_cp.launch.ranks.BUCKET_BYTES", 24)
    sizes: list[int] = []

    def double(flat: torch.Tensor) -> None:
        sizes.append(flat.numel())
        flat.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", double)
    ranks = Ranks(rank=0, world_size=2, data_rank=0, data_size=2, cp_group=None, device=torch.device("cpu"))
    tensors = [torch.rand(shape) for shape in ((2, 2), (3,), (), (5, 1), (2,))] + [torch.rand(2).double()]
    before = [tensor.clone() for tensor in tensors]
    ranks.sum_in_place(tensors)
    assert all(torch.equal(tensor, 2 * old) for tensor, old in zip(tensors, before, strict=True))
    assert sizes == [7, 6, 2, 2]


def test_log_is_one_json_object_a_line_and_resumes(tmp_path: Path) -> None:
    log = report.Report(tmp_path, 0, 4, 100, silent=False)
    for step in range(3):
        log.step(step, loss=5.0 - step, learning_rate=1e-3, gradient_norm=1.0)
    log.end_of_steps()
    rows = [json.loads(line) for line in log.log_path.read_text().splitlines()]
    assert [(row["step"], row["loss"], row["tokens"]) for row in rows] == [(0, 5.0, 100), (1, 4.0, 200), (2, 3.0, 300)]
    with open(log.log_path, "a") as file:
        file.write('{"step": 3, "lo')  # a kill while writing
    again = report.Report(tmp_path, 2, 4, 100, silent=False)
    again.step(2, loss=2.5, learning_rate=1e-3, gradient_norm=1.0)
    again.end_of_steps()
    assert [(row["step"], row["loss"]) for row in report.read_log(log.log_path)] == [(0, 5.0), (1, 4.0), (2, 2.5)]


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = report.Report(tmp_path / "out", 0, 1, 10, silent=True)
    silent.step(0, 1.0, 1.0, 1.0)
    silent.say("text")
    silent.end_of_steps()
    silent.summarise(plot=True)
    assert not (tmp_path / "out").exists() and capsys.readouterr() == ("", "")


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [{"step": step, "loss": 5 - step / 10, "learning_rate": 1e-3, "tokens": step} for step in range(20)]
    report.draw(rows, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_running_mean_starts_at_the_first_value() -> None:
    means = report.running_mean([4.0, 4.0, 2.0], weight=0.5)
    assert means[:2] == [4.0, 4.0] and math.isclose(means[2], (0.25 * 4 + 0.125 * 4 + 0.5 * 2) / 0.875)
