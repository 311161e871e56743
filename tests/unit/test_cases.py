"""The case table itself: names, ranges that tile the stream, and what a wrong row is told."""

from __future__ import annotations

import pytest

from flashqla_cp.testing.cases import BY_ID, CUSTOM_RANGES, EXCHANGES, KERNELS, OPTIONS, STREAMS, VERIFY, Case


def test_names_are_unique_and_streams_short() -> None:
    rows = (VERIFY, KERNELS, *STREAMS, *OPTIONS, *EXCHANGES)
    assert len({case.id for case in rows}) == len(rows)
    assert len(BY_ID) == 2 + len(STREAMS) + len(OPTIONS)
    assert all(case.stream_length <= 300 for case in rows if case not in (VERIFY, KERNELS))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", CUSTOM_RANGES)
def test_custom_ranges_tile_the_stream(name: str, world_size: int) -> None:
    ranges = CUSTOM_RANGES[name](230, world_size)
    assert len(ranges) == world_size
    assert sorted(token for owned in ranges for start, end in owned for token in range(start, end)) == [*range(230)]


def test_a_wrong_row_is_refused() -> None:
    with pytest.raises(ValueError, match="gates: got 'soft'"):
        Case(id="", gates="soft")
    with pytest.raises(ValueError, match="custom: got None with layout 'custom'"):
        Case(id="", layout="custom")
    with pytest.raises(ValueError, match="custom: got 'interleaved' with layout 'zigzag'"):
        Case(id="", layout="zigzag", custom="interleaved")
