"""Which documents a batch holds: one source decides, the others agree or are refused; the context that is active."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import flashqla_cp
from flashqla_cp.active import active_context, use_context
from flashqla_cp.integrations.documents import Sharding, Told, find_documents
from flashqla_cp.parallel.comm import Comm
from flashqla_cp.testing.spawn import run_ranks

ALONE = Sharding(comm=None, layout="contiguous", exchange="auto", conv_width=4)
LENGTHS = (4, 10)  # documents of the stream that ranks share below


@pytest.fixture
def one_rank(pg: Any) -> Any:
    if pg.size() != 1:
        pytest.skip("needs one rank")
    return pg


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (
            {"cu_seqlens": [0, 4, 9], "position_ids": [0, 1, 2, 0, 1, 2, 3, 4, 5]},
            "position_ids: 0 at row 3 of this rank",
        ),
        ({"cu_seqlens": [0, 4, 9], "position_ids": list(range(9))}, "position_ids: 4 at row 4 .* begin a document"),
        ({"cu_seqlens": [0, 4, 9], "seq_idx": [0] * 5 + [1] * 4}, "seq_idx: changes at other rows"),
        ({"position_ids": [0, 1, 2, 0, 1, 2, 3, 4, 5], "seq_idx": [0] * 9}, "seq_idx: changes at other rows"),
        ({"position_ids": [0, 1, 2, 3, 3, 4, 5, 6, 7]}, "position_ids: in row 0, position 3 comes after 3"),
        ({"position_ids": [0, 1, 2]}, r"position_ids: got shape \[1, 3\], expected \[1, 9\] like the batch"),
        ({"cu_seqlens": [0, 4, 10]}, "cu_seq_lens_q: ends at 10, past the 9 tokens"),
        ({"context": [0, 4, 9], "cu_seqlens": [0, 5, 9]}, r"cu_seq_lens_q: \[0, 5, 9\] contradict the context's"),
        ({"context": [0, 4, 9], "position_ids": list(range(9))}, "position_ids: 4 at row 4 .* begin a document"),
        ({"context": [0, 4, 9], "seq_idx": [0] * 9}, "seq_idx: changes at other rows"),
        ({"cu_seqlens": [0, 4, 7]}, "cu_seq_lens_q: end at 7 in a row of 9 tokens, expected 9"),
        (
            {"context": [0, 4, 9], "position_ids": [0, 1, 2, 3, 0, 1, 3, 4, 5]},
            "position_ids: 3 at row 6 of this rank, which by its plan holds position 2",
        ),
        ({"context": [0, 4, 8]}, "cp_context: the batch has 1 rows of 9 tokens, rank 0 stores one row of 8"),
    ],
)
def test_contradictions(told: dict[str, Any], text: str, one_rank: Any) -> None:
    given = {
        name: torch.tensor(value if name in ("cu_seqlens", "context") else [value]) for name, value in told.items()
    }
    if "context" in given:
        given["context"] = flashqla_cp.build_cp_context(given["context"], one_rank)
    with pytest.raises(ValueError, match=text):
        find_documents(ALONE, 1, 9, Told(**given))


def test_sources_that_agree(one_rank: Any) -> None:
    positions, index = [[0, 1, 2, 3, 0, 1, 2, 7, 7]], [[3] * 4 + [5] * 3 + [0, 1]]
    told = {"position_ids": torch.tensor(positions), "seq_idx": torch.tensor(index)}
    padded = flashqla_cp.build_cp_context([0, 4, 4, 7], one_rank, num_tokens=9)
    for offsets in ([0, 4, 7], [0, 4, 4, 7, 9]):
        found = find_documents(ALONE, 1, 9, Told(context=padded, cu_seqlens=torch.tensor(offsets), **told))
        assert found.context is padded
    told["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])  # padding is a document of its own
    told["seq_idx"] = torch.tensor([[3] * 4 + [5] * 3 + [0, 0]])
    found = find_documents(ALONE, 1, 9, Told(cu_seqlens=torch.tensor([0, 4, 4, 7, 9]), **told))
    assert found.cu_seqlens.tolist() == [0, 4, 4, 7, 9]
    alone = find_documents(ALONE, 2, 3, Told(position_ids=torch.tensor([[5, 6, 9]])))
    assert (alone.context, alone.cu_seqlens) == (None, None)


def test_active_context(one_rank: Any) -> None:
    outer, inner = (flashqla_cp.build_cp_context([0, n], one_rank) for n in (4, 5))
    assert active_context() is None
    with use_context(outer) as given:
        assert given is outer
        with pytest.raises(KeyError), use_context(inner):
            assert active_context() is inner
            raise KeyError
        assert active_context() is outer
    assert active_context() is None
    with pytest.raises(TypeError, match="context: expected a CPContext from build_cp_context, got list"):
        use_context([0, 4]).__enter__()


def test_on_ranks() -> None:
    for texts in run_ranks(try_sources, 2):
        assert {name: text for name, text in texts.items() if text} == {}


def try_sources(rank: int) -> dict[str, str]:
    """What differs from the expected error, or from the expected offsets, for each way to tell the documents."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    offsets = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    shards = {name: flashqla_cp.build_cp_context(offsets, None, layout=name).shard for name in ("contiguous", "zigzag")}
    mine = {name: shard(positions) for name, shard in shards.items()}
    solo = [dist.new_group([member]) for member in range(2)][rank]
    alone = flashqla_cp.build_cp_context([0, 7], solo)
    cases: list[tuple[str, str, Told, str]] = [
        ("positions", "contiguous", Told(position_ids=mine["contiguous"]), ""),
        ("positions in zigzag", "zigzag", Told(position_ids=mine["zigzag"]), ""),
        ("offsets", "zigzag_per_document", Told(cu_seqlens=offsets), ""),
        ("all", "zigzag", Told(cu_seqlens=offsets, position_ids=mine["zigzag"]), ""),
        ("none", "contiguous", Told(), "no document boundaries came with it; pass them by `with use_context"),
        ("made up", "contiguous", Told(position_ids=torch.arange(7)[None]), "every rank counts its own rows from 0"),
        ("other layout", "contiguous", Told(position_ids=mine["zigzag"]), "is the batch sharded in another layout?"),
        ("other layout", "zigzag_per_document", Told(position_ids=mine["zigzag"]), "do not tell documents in layout"),
        ("uneven", "contiguous", Told(position_ids=torch.arange(6 + 2 * rank)[None] + 1), "gives them [7, 7]"),
        (
            "offsets of one rank",
            "contiguous",
            Told(cu_seqlens=torch.tensor([0, 7])),
            f"cu_seq_lens_q: offsets up to 7, of which rank {rank} stores {3 + rank} tokens",
        ),
        (
            "other group",
            "contiguous",
            Told(context=alone),
            f"over ranks [{rank}], the model was enabled for ranks [0, 1]",
        ),
        ("no agreement", "contiguous", Told(cu_seqlens=torch.tensor([0, 4 + rank, 14])), "planned something else"),
    ]
    wrong = {}
    for name, layout, told, text in cases:
        sharding = Sharding(comm=Comm(None), layout=layout, exchange="auto", conv_width=4)
        length = 7 if told.position_ids is None else told.position_ids.shape[1]
        try:
            context = find_documents(sharding, 1, length, told).context
            found = f"offsets {context.plan.cu_seqlens}" if context and not text else "no error"
            matches = found == f"offsets {tuple(offsets.tolist())}"
        except (ValueError, RuntimeError) as error:
            found, matches = str(error), bool(text) and text in str(error)
        wrong[f"{name}, {layout}"] = "" if matches else found
    return wrong


def test_what_one_rank_refuses_is_raised_on_all() -> None:
    """Also by the rank that itself sees nothing wrong; it would else wait for the other one until that exits."""
    for texts in run_ranks(try_faults_of_one_rank, 2):
        assert {name: text for name, text in texts.items() if text} == {}


def try_faults_of_one_rank(rank: int) -> dict[str, str]:
    """What differs from the expected error, for faults that rank 1 alone can see."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    offsets = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    mine = flashqla_cp.build_cp_context(offsets, None).shard(positions)
    spoiled, mask = mine.clone(), torch.ones_like(mine)
    spoiled[0, 3], mask[0, -2:] = 0, 0
    both, other = {"cu_seqlens": offsets, "position_ids": mine}, {"cu_seqlens": offsets, "position_ids": spoiled}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "padding, positions": (
            {"position_ids": mine},
            {"position_ids": mine, "mask": mask},
            "attention_mask: got zeros",
        ),
        "padding, offsets": (both, both | {"mask": mask}, "attention_mask: got zeros"),
        "contradiction": (both, other, "position_ids: 0 at row 3 of this rank"),
        "shape": ({"position_ids": mine}, {"position_ids": mine[:, :5]}, "position_ids: got shape [1, 5]"),
        "another source": (both, {"position_ids": mine}, "planned something else"),
        "nothing": ({"position_ids": mine}, {}, "no document boundaries came with it"),
    }
    wrong = {}
    for name, (first, second, text) in cases.items():
        sharding = Sharding(comm=Comm(None), layout="contiguous", exchange="auto", conv_width=4)
        kind = RuntimeError if rank == 0 or name == "another source" else ValueError
        try:
            find_documents(sharding, 1, 7, Told(**(second if rank else first)))
            wrong[name] = "no error"
        except (ValueError, RuntimeError) as error:
            quoted = rank == 1 or name == "another source" or "rank 1 of the context-parallel group" in str(error)
            wrong[name] = "" if type(error) is kind and text in str(error) and quoted else repr(error)
    for batch, length in ((2, 7), (2, 14)):
        try:
            find_documents(sharding, batch, length, Told(position_ids=positions[:, :length].expand(batch, -1)))
            wrong["batch"] = "no error"
        except ValueError as error:
            if f"input: got a batch of {batch} rows" not in str(error):
                wrong["batch"] = repr(error)
    return wrong
