"""Who owns which tokens: layouts, fragments, empty documents, and what a plan refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flashqla_cp.parallel.plan import LAYOUTS, ShardPlan, read_offsets

OFFSETS = (0, 0, 37, 90, 90, 200, 260, 260)


def build(layout: str, world_size: int, num_tokens: int | None = 300, offsets: tuple[int, ...] = OFFSETS) -> ShardPlan:
    ranges = None
    if layout == "custom":
        cuts = list(pairwise([*range(0, num_tokens, 11), num_tokens]))
        ranges = [cuts[rank::world_size][::-1] for rank in range(world_size)]
    return ShardPlan.build(layout, offsets, world_size, num_tokens, ranges)


def test_contiguous_cuts_are_near_equal():
    plan = ShardPlan.build("contiguous", [0, 10], 4)
    assert plan.ranges == (((0, 2),), ((2, 5),), ((5, 7),), ((7, 10),))


def test_zigzag_pairs_the_ends_and_joins_the_middle():
    plan = ShardPlan.build("zigzag", [0, 16], 2)
    assert plan.ranges == (((0, 4), (12, 16)), ((4, 12),))


def test_zigzag_per_document_cuts_each_document_and_the_tail():
    plan = ShardPlan.build("zigzag_per_document", [0, 8, 16], 2, 20)
    assert plan.ranges == (((0, 2), (6, 10), (14, 17), (19, 20)), ((2, 6), (10, 14), (17, 19)))


def test_ranges_that_touch_in_storage_are_one_and_others_are_not():
    plan = ShardPlan.build("custom", [0, 9], 1, token_ranges=[[(0, 3), (3, 5), (7, 9), (5, 7)]])
    assert plan.ranges == (((0, 5), (7, 9), (5, 7)),)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fragments_cover_each_document_once_and_say_where_they_are(layout, world_size):
    plan = build(layout, world_size)
    stored = [[t for start, end in owned for t in range(start, end)] for owned in plan.ranges]
    assert sorted(t for tokens in stored for t in tokens) == list(range(300))
    assert [len(tokens) for tokens in stored] == [plan.local_tokens(rank) for rank in range(world_size)]
    pieces = plan.fragments
    covered = []
    for slot in range(len(pieces.start)):
        start, end, rank = int(pieces.start[slot]), int(pieces.end[slot]), int(pieces.rank[slot])
        offset, document = int(pieces.offset[slot]), int(pieces.document[slot])
        assert stored[rank][offset : offset + end - start] == list(range(start, end))
        assert OFFSETS[document] <= start < end <= OFFSETS[document + 1]
        assert bool(pieces.has_predecessor[slot]) == (start > OFFSETS[document])
        assert bool(pieces.has_successor[slot]) == (end < OFFSETS[document + 1])
        covered += range(start, end)
    assert covered == list(range(260))  # in stream order, without the padded tail


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_document_enters_and_leaves_on_one_rank(layout, world_size):
    plan = build(layout, world_size)
    for documents in (plan.entry_documents, plan.exit_documents):
        assert sorted(doc for rank in range(world_size) for doc in documents(rank)) == list(range(7))
    owner = {doc: rank for rank in range(world_size) for doc in plan.entry_documents(rank)}
    place = torch.tensor([0, 90, 260])  # of the empty documents 0, 3 and 6
    assert [owner[0], owner[3], owner[6]] == plan.owners.locate(place)[0].tolist()


def test_states_of_empty_documents_without_any_token():
    assert ShardPlan.build("contiguous", [0, 0, 0], 3).entry_documents(0) == [0, 1]
    assert ShardPlan.build("contiguous", [0, 4, 4], 2).exit_documents(1) == [0, 1]


def test_documents_that_stay_on_a_rank_cross_nothing():
    assert not ShardPlan.build("contiguous", [0, 5, 10], 2).fragments.crosses_ranks
    assert ShardPlan.build("contiguous", [0, 4, 10], 2).fragments.crosses_ranks
    assert not ShardPlan.build("custom", [0, 10], 1, token_ranges=[[(5, 10), (0, 5)]]).fragments.crosses_ranks


def test_digest_tells_plans_apart():
    plans = [build(layout, 2) for layout in LAYOUTS] + [build("zigzag", 2, 301), build("zigzag", 3)]
    assert len({plan.digest() for plan in plans}) == len(plans)
    assert build("zigzag", 2).digest() == build("zigzag", 2).digest()


@pytest.mark.parametrize(
    ("layout", "offsets", "num_tokens", "ranges", "text"),
    [
        ("ring", [0, 4], None, None, "layout: got 'ring'"),
        ("contiguous", [1, 4], None, None, "cu_seqlens: expected offsets that start at 0"),
        ("contiguous", [], None, None, "cu_seqlens: expected offsets that start at 0"),
        ("contiguous", [0, 4, 3], None, None, "cu_seqlens: offsets decrease at index 2, from 4 to 3"),
        ("contiguous", [0, 4], 3, None, "cu_seqlens: ends at 4, past the 3 tokens"),
        ("custom", [0, 4], None, None, "token_ranges: required by"),
        ("zigzag", [0, 4], None, [[(0, 4)], []], "token_ranges: only allowed with"),
        ("custom", [0, 4], None, [[(0, 4)]], "token_ranges: got 1 lists"),
        ("custom", [0, 4], None, [[(0, 2)], [(3, 4)]], "no rank owns tokens 2 to 3"),
        ("custom", [0, 4], None, [[(0, 2)], [(2, 3)]], "no rank owns tokens 3 to 4"),
        ("custom", [0, 4], None, [[(0, 3)], [(2, 4)]], r"\[1\]: range \(2, 4\) overlaps"),
        ("custom", [0, 4], None, [[(0, 4)], [(4, 6)]], "does not have tokens 4 to 6"),
        ("custom", [0, 4], None, [[(0, 4)], [(3, 1)]], "is not a range of tokens"),
        ("custom", [0, 4], None, [[(0, 4)], [(3,)]], r"expected \(start, end\) pairs"),
    ],
)
def test_refusals(layout, offsets, num_tokens, ranges, text):
    with pytest.raises(ValueError, match=text):
        ShardPlan.build(layout, offsets, 2, num_tokens, ranges)


def test_offsets_are_integers_of_one_dimension():
    assert read_offsets(torch.tensor([0, 3], dtype=torch.uint8)) == [0, 3]
    with pytest.raises(TypeError, match=r"cu_seqlens: expected integers, got torch.float32"):
        read_offsets(torch.tensor([0.0, 3.0]))
    with pytest.raises(ValueError, match=r"shape \[N\+1\], got \[1, 2\]"):
        read_offsets(torch.tensor([[0, 3]]))


@pytest.mark.parametrize("ranges", [5, [(0, 4)], [[None]], [[(0, 3.7)], [(3.2, 4)]], [[("0", "4")], []], [[(0, 4)], 7]])
def test_ranges_are_pairs_of_integers(ranges):
    with pytest.raises((TypeError, ValueError), match="token_ranges"):
        ShardPlan.build("custom", [0, 4], 2, token_ranges=ranges)
