"""launch/train_megatron.py trains alike on one rank, on two that share a sequence, and on two that do not."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.launch import train_megatron
from flashqla_cp.launch.ranks import join_ranks
from flashqla_cp.testing.spawn import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
STEPS = 6


def losses(rank: int, *options: str) -> list[float]:
    torch._dynamo.config.disable = True
    parser = argparse.ArgumentParser()
    train_megatron.add_arguments(parser)
    args = parser.parse_args(["--steps", str(STEPS), "--rows", "2", "--row-tokens", "96", "--device", "cpu", *options])
    with join_ranks(args.cp, torch.device("cpu")) as ranks:
        return train_megatron.train(args, ranks)


def test_loss_does_not_depend_on_the_ranks() -> None:
    (alone,) = run_ranks(losses, 1, timeout=200.0)
    assert len(alone) == STEPS
    assert alone[-1] < alone[0] - 0.3
    for options in (("--cp", "2"), ("--cp", "1")):
        for shared in run_ranks(losses, 2, *options, timeout=200.0):
            assert shared == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--cp", "2"], "expected processes divisible by cp"),
        (["--rows", "0"], "expected numbers above 0"),
        (["--cp", "0"], "expected numbers above 0"),
        (["--cp", "-1"], "expected numbers above 0"),
    ],
)
def test_options_that_cannot_work(options: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_megatron.main([*options, "--device", "cpu"]) == 2
    assert word in capsys.readouterr().err
    assert not dist.is_initialized()
