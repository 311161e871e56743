"""Ranks that disagree on the plan raise, all of them, instead of hanging."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import build_cp_context

pytestmark = pytest.mark.mpi(min_size=2)

AGREED = {"cu_seqlens": [0, 50, 120], "layout": "contiguous", "exchange": "allgather", "conv1d_kernel_size": 4}
DIFFERENCES = [
    {"cu_seqlens": [0, 51, 120]},
    {"cu_seqlens": [0, 50, 121]},
    {"cu_seqlens": [0, 50, 50, 120]},
    {"num_tokens": 130},
    {"layout": "zigzag"},
    {"exchange": "sharded"},
    {"conv1d_kernel_size": 3},
]


def _build(pg: dist.ProcessGroup, **changes: object) -> str:
    """The error's type and text, or "" if a context came out."""
    arguments = {**AGREED, **changes}
    offsets = torch.tensor(arguments.pop("cu_seqlens"))
    try:
        build_cp_context(offsets, pg, **arguments)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: "-".join(map(str, change.items())))
def test_every_rank_raises_when_one_differs(change, pg, all_ranks) -> None:
    texts = all_ranks(_build(pg, **(change if dist.get_rank() == 1 else {})))
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith("RuntimeError: cp_context: ranks [1] planned something else"), texts[0]


def test_every_rank_raises_when_one_cannot_plan(pg, all_ranks) -> None:
    texts = all_ranks(_build(pg, **({"cu_seqlens": [0, 70, 60]} if dist.get_rank() == 1 else {})))
    assert texts[1].startswith("ValueError: cu_seqlens: offsets decrease")
    assert all("rank 1" in text and texts[1] in text for rank, text in enumerate(texts) if rank != 1), texts


@pytest.mark.parametrize("offsets", [None, "abc", [[0, 3]], [0, 2**70], [0.0, 3.0], 5])
def test_no_rank_hangs_on_another_ones_nonsense(offsets: object, pg, all_ranks) -> None:
    def build() -> str:
        try:
            build_cp_context(offsets if dist.get_rank() == 1 else [0, 120], pg)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    texts = all_ranks(build())
    assert texts[1].startswith(("TypeError: cu_seqlens", "ValueError: cu_seqlens")), texts[1]
    assert all(text.startswith("RuntimeError: rank 1") for rank, text in enumerate(texts) if rank != 1), texts


@pytest.mark.parametrize("value", ["1", "7"])
def test_nodes_of_one_rank_only(value: str, pg, all_ranks, monkeypatch) -> None:
    if dist.get_rank() == 1:
        monkeypatch.setenv("FLASHQLA_CP_RANKS_PER_NODE", value)
    texts = all_ranks(_build(pg, exchange="hierarchical"))
    assert all("planned something else" in text or "FLASHQLA_CP_RANKS_PER_NODE" in text for text in texts), texts


def test_the_group_works_after_a_disagreement(pg, all_ranks) -> None:
    _build(pg, **({"layout": "zigzag"} if dist.get_rank() == 1 else {}))
    assert all_ranks(_build(pg)) == [""] * dist.get_world_size()


def test_equal_offsets_of_any_type_agree(pg, all_ranks) -> None:
    dtype = [torch.int32, torch.int64][dist.get_rank() % 2]
    build_cp_context(torch.tensor([0, 50, 120], dtype=dtype), pg)
