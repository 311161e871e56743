"""run_ranks: results in rank order, failures with the rank's traceback, and no hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from flashqla_cp.testing.spawn import run_ranks


def _sum_of_ranks(rank: int, offset: torch.Tensor) -> tuple[int, torch.Tensor, str, str]:
    total = offset + rank
    dist.all_reduce(total)
    return rank, total, os.environ["WORLD_SIZE"], os.environ["SPAWN_TEST_VARIABLE"]


def _fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the fault of this rank")
    dist.all_reduce(torch.zeros(1))


def _die_on_rank_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def _sleep_on_rank_one(rank: int) -> None:
    time.sleep(60 * rank)


def test_returns_each_rank_s_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):  # the second run meets a fork server that is older than the variable
        monkeypatch.setenv("SPAWN_TEST_VARIABLE", value)
        results = run_ranks(_sum_of_ranks, 3, torch.ones(2))
        assert [rank for rank, *_ in results] == [0, 1, 2]
        for _, total, world_size, variable in results:
            assert torch.equal(total, torch.full((2,), 6.0))
            assert (world_size, variable) == ("3", value)


@pytest.mark.parametrize(
    ("worker", "error", "text"),
    [
        (
            _fail_on_rank_one,
            RuntimeError,
            r"rank 1 of 2 failed:[\s\S]*_fail_on_rank_one[\s\S]*the fault of this rank",
        ),
        (_die_on_rank_one, RuntimeError, "rank 1 died with exit code 7"),
        (_sleep_on_rank_one, TimeoutError, r"no result from rank\(s\) 1 after 3 s"),
    ],
)
def test_a_rank_s_failure_ends_the_run(worker, error, text) -> None:  # type: ignore[no-untyped-def]
    start = time.monotonic()
    with pytest.raises(error, match=text):
        run_ranks(worker, 2, timeout=3.0)
    assert time.monotonic() - start < 20


def test_rejects_an_empty_group() -> None:
    with pytest.raises(ValueError, match="world_size: got 0, expected at least 1"):
        run_ranks(_sum_of_ranks, 0)
