"""The training program on several ranks: one loss curve whatever the ranks, through kills and resumes as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashqla_cp.launch import checkpoints, train
from flashqla_cp.launch.ranks import Ranks
from flashqla_cp.launch.report import read_log
from flashqla_cp.testing.spawn import run_ranks

PROGRAM = Path(__file__).resolve().parents[2] / "launch" / "train.py"
# Documents of 12 to 90 bytes in rows of 96: many boundaries, and documents that cross every cut.
SMALL = (
    "--seq-len 96 --batch-size 4 --hidden-size 16 --num-layers 2 --num-heads 2 --num-v-heads 4 --head-dim 4 --lr 2e-3 "
    "--warmup 2 --steps 6 --save-every 2 --backend torch --device cpu --no-plot"
).split()
# Of two curves in fp32 whose sums over tokens were added in another order.
ROUNDING = 2e-6


@pytest.fixture(scope="module", autouse=True)
def _no_launcher() -> Iterator[None]:
    """What an earlier test or mpirun has left in the environment is not this program's launcher."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("documents")
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"document {number} " * (1 + number % 7))
    return [*SMALL, "--data", str(folder)]


@pytest.fixture(scope="module")
def alone(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of one process without a process group."""
    out = tmp_path_factory.mktemp("alone")
    assert train.main([*options, "--keep", "9", "--out", str(out)]) == 0
    return out


@pytest.fixture
def shared(all_ranks: Callable[[Any], list[Any]], tmp_path: Path) -> Path:
    """One folder for all ranks of mpirun."""
    return all_ranks(tmp_path)[0]


def losses(out: Path) -> list[float]:
    rows = read_log(out / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


def steps_until(last: int, end: Callable[[], None]) -> Callable[..., tuple[float, float, float]]:
    """train.train_step, but at step `last` it calls `end` first."""
    step_of_the_loop = train.train_step

    def step_or_end(*args: Any, **kwargs: Any) -> tuple[float, float, float]:
        if last in args:
            end()
        return step_of_the_loop(*args, **kwargs)

    return step_or_end


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "sharing",
    [
        "--cp 1 --micro-batch 2 --checkpoint reentrant",
        "--cp 2 --layout zigzag --exchange sharded --checkpoint reentrant",
        "--cp 2 --layout zigzag_per_document --exchange headwise --micro-batch 3",
        "--cp 2 --exchange allgather --checkpoint non-reentrant",
        "--cp 4",
    ],
)
def test_one_curve_on_any_ranks(
    sharing: str, options: list[str], alone: Path, shared: Path, all_ranks: Callable[[Any], list[Any]]
) -> None:
    num_ranks = len(all_ranks(None))
    if num_ranks % int(sharing.split()[1]):
        pytest.skip(f"needs a multiple of {sharing.split()[1]} ranks")
    command = [*options, *sharing.split(), "--out", str(shared), "--parity-check"]
    assert all_ranks(train.main(command)) == [0] * num_ranks
    assert losses(shared) == pytest.approx(losses(alone), rel=ROUNDING)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cp", ["1", "2"])
def test_resume_from_one_process_on_several(
    cp: str, options: list[str], alone: Path, shared: Path, all_ranks: Callable[[Any], list[Any]]
) -> None:
    start = all_ranks(alone)[0] / "checkpoints" / "step-00000002"
    command = [*options, "--cp", cp, "--out", str(shared), "--resume", str(start)]
    assert set(all_ranks(train.main(command))) == {0}
    rows = read_log(shared / "log.jsonl")
    assert [row["step"] for row in rows] == [2, 3, 4, 5]
    assert [row["loss"] for row in rows] == pytest.approx(losses(alone)[2:], rel=ROUNDING)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_see_other_files_all_stop(
    tmp_path: Path, shared: Path, all_ranks: Callable[[Any], list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    length = 80 + (tmp_path != shared)
    (tmp_path / "a.txt").write_bytes(b"a" * length)
    command = [*SMALL, "--cp", "2", "--data", str(tmp_path / "a.txt"), "--out", str(shared / "out")]
    assert set(all_ranks(train.main(command))) == {2}
    assert "ranks disagree" in capsys.readouterr().err
    assert not (shared / "out").exists()


@pytest.mark.mpi(min_size=2)
def test_a_damaged_checkpoint_stops_all_ranks(
    options: list[str], alone: Path, shared: Path, all_ranks: Callable[[Any], list[Any]]
) -> None:
    start = all_ranks(alone)[0] / "checkpoints" / "step-00000004"
    index = (start / ".metadata").read_bytes()
    all_ranks(None)
    (start / ".metadata").write_bytes(index[:100])
    all_ranks(None)
    try:
        command = [*options, "--cp", "2", "--out", str(shared / "out"), "--resume", str(start)]
        assert set(all_ranks(train.main(command))) == {2}
        assert not (shared / "out").exists()
    finally:
        (start / ".metadata").write_bytes(index)


def load_on_rank(rank: int, folders: list[Path]) -> str:
    """The error of loading this rank's own folder; other ranks have others, as hosts without a shared folder do."""
    ranks = Ranks(rank=rank, world_size=2, data_rank=0, data_size=1, cp_group=None, device=torch.device("cpu"))
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError) as caught:
        checkpoints.load(folders[rank], model, torch.optim.AdamW(model.parameters()), ranks)
    return str(caught.value)


@pytest.mark.parametrize("name", [".metadata", "settings.json", "__0_0.distcp"])
def test_damage_that_one_rank_meets_is_an_error_of_all(name: str, tmp_path: Path) -> None:
    alone = Ranks(rank=0, world_size=1, data_rank=0, data_size=1, cp_group=None, device=torch.device("cpu"))
    model, settings = nn.Linear(2, 3), {"model": {}, "curve": {}}
    folders = [
        checkpoints.save(tmp_path / host, 1, model, torch.optim.AdamW(model.parameters()), settings, alone)
        for host in "ab"
    ]
    (folders[1] / name).write_bytes(b"{bad")
    errors = run_ranks(load_on_rank, 2, folders)
    assert all("on rank 1: " in error and "\n" not in error for error in errors)
    assert len({error.split("on rank 1: ")[1] for error in errors}) == 1


def test_an_out_that_cannot_be_made_stops_all_ranks(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    assert run_ranks(train_on_rank, 2, [*options, "--cp", "2", "--out", str(tmp_path / "out")]) == [2, 2]


def test_resume_continues_bitwise(options: list[str], alone: Path, tmp_path: Path) -> None:
    command, expected = [*options, "--out", str(tmp_path)], losses(alone)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "train_step", steps_until(5, interrupt))
        train.main(command)
    assert losses(tmp_path) == expected[:5]  # one step beyond the newest checkpoint
    assert train.main([*command, "--resume"]) == 0
    assert losses(tmp_path) == expected
    assert train.main([*command, "--resume", str(tmp_path / "checkpoints" / "step-00000004")]) == 0
    assert losses(tmp_path) == expected


def train_on_rank(rank: int, options: list[str]) -> int:
    return train.main(options)


def die_on_rank_one(rank: int, options: list[str], last: int) -> int:
    if rank == 1:
        train.train_step = steps_until(last, lambda: os._exit(9))
    return train.main(options)


def test_a_dead_rank_and_a_resume_in_another_shape(options: list[str], alone: Path, tmp_path: Path) -> None:
    command = [*options, "--out", str(tmp_path)]
    with pytest.raises(RuntimeError, match="rank 1 died with exit code 9"):
        run_ranks(die_on_rank_one, 2, [*command, "--cp", "2"], 3)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000002\n"
    assert run_ranks(train_on_rank, 2, [*command, "--cp", "1", "--resume"]) == [0, 0]
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=ROUNDING)


def test_a_killed_process_resumes(options: list[str], tmp_path: Path) -> None:
    command = [*options, "--steps", "1000", "--out", str(tmp_path)]
    latest = tmp_path / "checkpoints" / "latest"
    with subprocess.Popen([sys.executable, str(PROGRAM), *command], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not latest.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    done = int(latest.read_text().removeprefix("step-"))
    assert 0 < done < 900
    curves = []
    for more in (["--resume"], []):  # the second run starts anew and is not interrupted before the end
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(train, "train_step", steps_until(done + 3, interrupt))
            train.main([*command, *more])
        curves.append(losses(tmp_path))
    assert len(curves[0]) == done + 3
    assert curves[0] == curves[1]
