"""The table of named cases: what a stream looks like, who owns which tokens, and what the op is asked to do.

One place for all users: the tests run every row, `flashqla-cp verify` runs rows by layout and exchange. A case fits any
number of ranks; sizes are small (at most 300 tokens), since what a case is after does not depend on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashqla_cp.testing.inputs import GATES, packed_offsets

Ranges = list[list[tuple[int, int]]]


def split(num_tokens: int, parts: int) -> list[tuple[int, int]]:
    """Near-equal consecutive ranges."""
    cuts = [num_tokens * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(cuts))


def _interleaved(num_tokens: int, world_size: int) -> Ranges:
    """Blocks of 13 tokens dealt out in turn."""
    blocks = [(start, min(start + 13, num_tokens)) for start in range(0, num_tokens, 13)]
    return [blocks[rank::world_size] for rank in range(world_size)]


def _backwards(num_tokens: int, world_size: int) -> Ranges:
    """Two parts for each rank, stored against stream order, the last rank owning the first tokens."""
    parts = split(num_tokens, 2 * world_size)
    return [[parts[2 * world_size - 1 - rank], parts[world_size - 1 - rank]] for rank in range(world_size)]


def _lopsided(num_tokens: int, world_size: int) -> Ranges:
    """Rank r owns r + 1 tokens, the last rank all the rest."""
    cuts = [rank * (rank + 1) // 2 for rank in range(world_size)]
    return [[pair] for pair in zip(cuts, [*cuts[1:], num_tokens], strict=True)]


def _without(rank_of: Callable[[int], int]) -> Callable[[int, int], Ranges]:
    """Near-equal ranges on all ranks but one; a rank that is alone owns everything."""

    def ranges(num_tokens: int, world_size: int) -> Ranges:
        if world_size == 1:
            return [[(0, num_tokens)]]
        owned = [[pair] for pair in split(num_tokens, world_size - 1)]
        owned.insert(rank_of(world_size), [])
        return owned

    return ranges


CUSTOM_RANGES: dict[str, Callable[[int, int], Ranges]] = {
    "interleaved": _interleaved,
    "backwards": _backwards,
    "lopsided": _lopsided,
    "first_rank_without": _without(lambda world_size: 0),
    "middle_rank_without": _without(lambda world_size: world_size // 2),
    "last_rank_without": _without(lambda world_size: world_size - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    id: readable name. cu_seqlens: offsets of the documents. num_tokens: length of the stream (None: up to the last
    offset). layout, exchange: names as build_cp_context takes them. custom: with layout "custom", a key of
    CUSTOM_RANGES. gates: regime of make_gates. num_heads .. head_v_dim: H, HV, K, V. beta_max: beta lies in
    (0, beta_max). states: an initial state goes in, the final state comes out, both with gradients. The rest: the
    op's options of the same names.

    Raises:
        ValueError: unknown gates or custom ranges, or custom ranges without layout "custom".
    """

    id: str
    cu_seqlens: tuple[int, ...] = (0, 37, 90, 91, 170, 230)
    num_tokens: int | None = None
    layout: str = "contiguous"
    exchange: str = "auto"
    custom: str | None = None
    gates: str = "mixed"
    num_heads: int = 1
    num_v_heads: int = 2
    head_k_dim: int = 8
    head_v_dim: int = 12
    beta_max: float = 1.0
    states: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False

    def __post_init__(self) -> None:
        if self.gates not in GATES:
            raise ValueError(f"gates: got {self.gates!r}, expected one of {', '.join(GATES)}")
        if (self.layout == "custom") != (self.custom in CUSTOM_RANGES):
            names = ", ".join(CUSTOM_RANGES)
            raise ValueError(f"custom: got {self.custom!r} with layout {self.layout!r}, expected one of {names}")

    def __str__(self) -> str:
        return self.id

    @property
    def stream_length(self) -> int:
        """Tokens of the stream, padded tail included."""
        return self.cu_seqlens[-1] if self.num_tokens is None else self.num_tokens

    def context_options(self, world_size: int) -> dict[str, Any]:
        """Keyword arguments of build_cp_context for this case."""
        options: dict[str, Any] = {"layout": self.layout, "exchange": self.exchange, "num_tokens": self.num_tokens}
        if self.custom is not None:
            options["token_ranges"] = CUSTOM_RANGES[self.custom](self.stream_length, world_size)
        return options


def _packed(num_tokens: int, num_documents: int, empty: int = 0) -> tuple[int, ...]:
    return tuple(packed_offsets(num_tokens, num_documents, seed=num_documents, empty=empty))


# What the stream looks like and how it is cut; the op, the convolution and the layer run all of these.
STREAMS: tuple[Case, ...] = (
    Case(id="packed_rows_straddle_cuts"),
    Case(id="one_document", cu_seqlens=(0, 260)),
    Case(id="documents_end_at_cuts", cu_seqlens=(0, 60, 120, 180, 240)),
    Case(id="uneven_total", cu_seqlens=_packed(203, 3)),
    Case(id="many_short_documents", cu_seqlens=_packed(150, 60)),
    Case(id="shards_shorter_than_the_conv", cu_seqlens=(0, 9)),
    Case(id="tiny_packed_shards", cu_seqlens=(0, 2, 7, 8)),
    Case(id="fewer_tokens_than_ranks", cu_seqlens=(0, 3)),
    Case(id="one_token", cu_seqlens=(0, 1)),
    Case(id="no_tokens", cu_seqlens=(0, 0, 0)),
    Case(id="no_documents", cu_seqlens=(0,), num_tokens=70),
    Case(id="empty_first", cu_seqlens=(0, 0, 70, 150)),
    Case(id="empty_middle", cu_seqlens=(0, 70, 70, 150)),
    Case(id="empty_last", cu_seqlens=(0, 70, 150, 150)),
    Case(id="empty_at_the_cut", cu_seqlens=(0, 75, 75, 75, 150)),
    Case(id="many_empty", cu_seqlens=_packed(140, 30, empty=25)),
    Case(id="padded_tail", cu_seqlens=(0, 90, 150), num_tokens=203),
    Case(id="padded_tail_over_whole_ranks", cu_seqlens=(0, 20, 41), num_tokens=240),
    Case(id="padded_tail_and_empty_last", cu_seqlens=(0, 90, 150, 150), num_tokens=203),
    Case(id="zigzag", layout="zigzag"),
    Case(id="zigzag_one_document", cu_seqlens=(0, 261), layout="zigzag"),
    Case(id="zigzag_padded", cu_seqlens=(0, 90, 150), num_tokens=203, layout="zigzag"),
    Case(id="zigzag_short", cu_seqlens=(0, 5, 11), layout="zigzag"),
    Case(id="zigzag_per_document", layout="zigzag_per_document"),
    Case(id="zigzag_per_document_padded", cu_seqlens=(0, 90, 90, 150), num_tokens=203, layout="zigzag_per_document"),
    *(Case(id=name, layout="custom", custom=name) for name in CUSTOM_RANGES),
    Case(id="interleaved_one_document", cu_seqlens=(0, 230), layout="custom", custom="interleaved"),
    Case(id="backwards_one_document", cu_seqlens=(0, 230), layout="custom", custom="backwards"),
    Case(id="middle_rank_without_one_document", cu_seqlens=(0, 150), layout="custom", custom="middle_rank_without"),
)

_LONG = Case(id="", cu_seqlens=(0, 260))

# What the op is asked to do.
OPTIONS: tuple[Case, ...] = (
    *(replace(_LONG, id=f"gates_{name}", gates=name, states=True) for name in GATES),
    *(replace(_LONG, id=f"group_{n}", num_heads=1 + (n < 4), num_v_heads=n * (1 + (n < 4))) for n in (1, 2, 3, 4, 8)),
    replace(_LONG, id="beta_up_to_2", beta_max=2.0, gates="zero"),
    replace(_LONG, id="wide_keys", head_k_dim=16, head_v_dim=8),
    Case(id="states", states=True),
    Case(id="states_v_first", states=True, state_v_first=True),
    Case(id="states_of_empty_documents", cu_seqlens=(0, 0, 75, 75, 150, 150, 150), states=True),
    Case(id="states_without_tokens", cu_seqlens=(0, 0, 0), states=True),
    Case(id="states_padded_tail", cu_seqlens=(0, 90, 150, 150), num_tokens=203, states=True),
    Case(id="states_zigzag", layout="zigzag", states=True),
    Case(id="states_backwards", layout="custom", custom="backwards", states=True),
    Case(id="l2norm", use_qk_l2norm_in_kernel=True),
    Case(id="gate_in_kernel", use_gate_in_kernel=True),
    Case(id="beta_sigmoid", use_beta_sigmoid_in_kernel=True),
    Case(id="beta_sigmoid_up_to_2", use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    Case(
        id="everything_in_kernel",
        states=True,
        num_heads=2,
        num_v_heads=4,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        state_v_first=True,
    ),
)

STRATEGIES = ("allgather", "sharded", "hierarchical", "headwise")


def _exchange_cases() -> tuple[Case, ...]:
    """Every strategy on chains of every kind; with more value heads than ranks, fewer, and a number between."""
    long = Case(id="long", cu_seqlens=(0, 0, 260), gates="weak", states=True, num_heads=2, num_v_heads=4)
    streams: Sequence[Case] = (
        long,
        replace(long, id="one_head", num_heads=1, num_v_heads=1),
        replace(long, id="three_heads", num_heads=3, num_v_heads=3),
        replace(long, id="packed", cu_seqlens=Case(id="").cu_seqlens),
        replace(long, id="padded", cu_seqlens=(0, 90, 150, 150), num_tokens=203),
        replace(long, id="zigzag", layout="zigzag"),
        replace(long, id="interleaved", layout="custom", custom="interleaved"),
        replace(long, id="backwards", layout="custom", custom="backwards"),
        replace(long, id="rank_without_tokens", layout="custom", custom="middle_rank_without"),
        replace(long, id="fewer_tokens_than_ranks", cu_seqlens=(0, 3)),
    )
    return tuple(replace(case, id=f"{name}-{case.id}", exchange=name) for name in STRATEGIES for case in streams)


EXCHANGES: tuple[Case, ...] = _exchange_cases()

# What `flashqla-cp verify` runs unless it is asked for another row: a long document over all ranks between two short
# ones, grouped values, heads that hardly decay among others that do, and states in and out.
VERIFY = Case(id="verify", cu_seqlens=(0, 60, 380, 400), num_heads=2, num_v_heads=4, head_k_dim=16, states=True)

# The same with a head size that there are kernels for.
KERNELS = replace(VERIFY, id="kernels", head_k_dim=64, head_v_dim=64)

BY_ID: dict[str, Case] = {case.id: case for case in (VERIFY, KERNELS, *STREAMS, *OPTIONS)}
