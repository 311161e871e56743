"""What the exchanges of boundary maps share: which parts send and receive, how maps are packed, how chains fold.

Forward, each part that its document leaves (an emitter) sends its boundary state E; one that lies strictly inside its
document (interior) sends its final correction M as well; each part that its document enters (a receiver) gets the
state S_in in front of it. An emitter that begins its document has run from the document's initial state, so its E is
the whole state and needs no M.

Backward is the adjoint: each receiver sends D, each emitter gets the gradient dS_out of the state behind it. M does
not travel again: whoever folded forward kept what the way back needs.

A part is a fragment of a rank or, one level up, a run of neighbouring fragments of a node. Every owner counts its
emitters, receivers and interior parts in stream order, and that is the order of the tensors it passes.

States and maps are transposed as affine.py says. Letters: P owners, n parts, h heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from flashqla_cp.parallel.affine import ChainFold, Link
from flashqla_cp.parallel.plan import ShardPlan

Kept = tuple[torch.Tensor, ...]
Traffic = dict[str, list[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class Arrived:
    """What an exchange brings: states [n, h, V, K], and what the backward exchange needs of the forward one."""

    states: torch.Tensor
    kept: Kept = ()


@dataclass(frozen=True, slots=True)
class PendingStates:
    """An exchange on its way. wait() returns what arrived; call it once."""

    wait: Callable[[], Arrived]


class Exchange(Protocol):
    """Brings every receiver the state in front of it, and gradients back. Stateless between calls."""

    name: str

    def forward(self, boundary: torch.Tensor, correction: torch.Tensor, *, keeps: bool = True) -> PendingStates:
        """Start. boundary [emitters, h, V, K], correction [interior, h, K, K] -> states [receivers, h, V, K]. keeps:
        whether what it keeps will be read."""
        ...

    def backward(self, boundary: torch.Tensor, kept: Kept) -> PendingStates:
        """Start. boundary D [receivers, h, V, K] -> gradients [emitters, h, V, K]."""
        ...

    def traffic(self, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> Traffic:
        """Numbers this rank sends to others, per direction a list of (collective, count) in order of issue."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a cut document: its owner, and its place among that owner's emitters, receivers, interior parts."""

    owner: int
    emits: int | None
    receives: int | None
    corrects: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """The cut documents as chains of parts in stream order, and how many of each kind every owner has."""

    chains: tuple[tuple[Part, ...], ...]
    emitters: tuple[int, ...]
    receivers: tuple[int, ...]
    interior: tuple[int, ...]
    max_emitters: int = field(init=False)
    max_receivers: int = field(init=False)
    max_interior: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("emitters", "receivers", "interior"):
            object.__setattr__(self, f"max_{name}", max(getattr(self, name)))

    @classmethod
    def of_plan(cls, plan: ShardPlan) -> Links:
        """Chains of the plan's fragments, owned by ranks."""
        pieces = plan.fragments
        linked = pieces.has_predecessor | pieces.has_successor
        chains: list[list[int]] = []
        for rank, enters in zip(pieces.rank[linked].tolist(), pieces.has_predecessor[linked].tolist(), strict=True):
            if not enters:
                chains.append([])
            chains[-1].append(rank)
        return cls.of_owners(chains, plan.world_size)

    @classmethod
    def of_owners(cls, chains: Iterable[Sequence[int]], num_owners: int) -> Links:
        """Chains given by the owner of each part; a chain of one part sends and receives nothing."""
        emitters, receivers, interior = ([0] * num_owners for _ in range(3))
        parts = []
        for owners in chains:
            last = len(owners) - 1
            parts.append(
                tuple(
                    Part(
                        owner,
                        _take(emitters, owner, place < last),
                        _take(receivers, owner, place > 0),
                        _take(interior, owner, 0 < place < last),
                    )
                    for place, owner in enumerate(owners)
                )
            )
        return cls(tuple(parts), tuple(emitters), tuple(receivers), tuple(interior))


def _take(counters: list[int], owner: int, wanted: bool) -> int | None:
    if not wanted:
        return None
    counters[owner] += 1
    return counters[owner] - 1


def pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Append zero rows up to `count`, so that every owner's message has one size."""
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def pack(
    boundary: torch.Tensor, correction: torch.Tensor | None, num_boundary: int, num_correction: int
) -> torch.Tensor:
    """One owner's message, head by head: [n, h, V, K], [m, h, K, K] -> [h, num_boundary*V*K + num_correction*K*K]."""
    columns = [pad_rows(boundary, num_boundary).transpose(0, 1).flatten(1)]
    if num_correction and correction is not None:
        columns.append(pad_rows(correction, num_correction).transpose(0, 1).flatten(1))
    return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]


def unpack(
    messages: torch.Tensor, num_boundary: int, num_correction: int, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """Messages of P owners [P, h, row] -> boundary [P*num_boundary, h, V, K], correction [P*num_correction, h, K, K].

    shape: that of one state, (V, K). Row p*count+i belongs to part i of owner p. Views where a count is 1.
    """
    value, key = shape
    cut = num_boundary * value * key
    boundary = messages[:, :, :cut].unflatten(2, (num_boundary, value, key)).transpose(1, 2).flatten(0, 1)
    correction = messages[:, :, cut:].unflatten(2, (num_correction, key, key)).transpose(1, 2).flatten(0, 1)
    return boundary, correction


class GatheredFold:
    """Folds over the messages of all owners, forward and adjoint, prepared per device.

    entry_row(part), exit_row(part): output row for the state in front of a part, or for the gradient of the state
    behind it; None where it is not wanted here.
    """

    def __init__(
        self,
        links: Links,
        entry_row: Callable[[Part], int | None],
        exit_row: Callable[[Part], int | None],
        num_entries: int,
        num_exits: int,
    ):
        self._kept_rows: list[int] = []
        emitted, received, interior = links.max_emitters, links.max_receivers, links.max_interior

        def ahead(a: Part, b: Part) -> Link:
            return Link(sure(_at(a, emitted, a.emits)), _at(a, interior, a.corrects), entry_row(b))

        def back(a: Part, b: Part) -> Link:
            return Link(sure(_at(b, received, b.receives)), self._keep(b, interior), exit_row(a))

        self._forward = [[ahead(a, b) for a, b in pairwise(chain)] for chain in links.chains]
        reachable = _until_first(links.chains, exit_row)
        self._backward = [[back(a, b) for b, a in pairwise(chain[::-1])] for chain in reachable]
        self._num_entries, self._num_exits = num_entries, num_exits
        self._prepared: dict[torch.device, tuple[ChainFold, ChainFold, torch.Tensor]] = {}

    def _keep(self, part: Part, interior: int) -> int | None:
        if part.corrects is None:
            return None
        self._kept_rows.append(part.owner * interior + part.corrects)
        return len(self._kept_rows) - 1

    @torch.inference_mode(False)
    def _on(self, device: torch.device) -> tuple[ChainFold, ChainFold, torch.Tensor]:
        if device not in self._prepared:
            self._prepared[device] = (
                ChainFold.of(self._forward, self._num_entries, device),
                ChainFold.of(self._backward, self._num_exits, device),
                torch.tensor(self._kept_rows, dtype=torch.int64, device=device),
            )
        return self._prepared[device]

    def forward(self, boundary: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
        """boundary [rows, h, V, K], correction [rows, h, K, K] -> entry states."""
        fold, _, _ = self._on(boundary.device)
        return fold(boundary, correction)

    def keep(self, correction: torch.Tensor) -> Kept:
        """The corrections that backward needs."""
        _, _, kept = self._on(correction.device)
        return (correction.index_select(0, kept),)

    def backward(self, boundary: torch.Tensor, kept: Kept) -> torch.Tensor:
        """boundary D [rows, h, V, K] -> gradients of the states behind emitters."""
        _, fold, _ = self._on(boundary.device)
        return fold(boundary, kept[0], adjoint=True)


def _at(part: Part, count: int, place: int | None) -> int | None:
    return None if place is None else part.owner * count + place


def sure(row: int | None) -> int:
    """A row that the rules of chains say exists: all parts of a chain but the last emit, all but the first receive."""
    assert row is not None
    return row


def _until_first(chains: Sequence[Sequence[Part]], wanted: Callable[[Part], int | None]) -> list[Sequence[Part]]:
    """Cut what the adjoint fold need not reach: the parts in front of the first wanted one."""
    trimmed = []
    for chain in chains:
        first = next((place for place, part in enumerate(chain[:-1]) if wanted(part) is not None), None)
        if first is not None:
            trimmed.append(chain[first:])
    return trimmed
