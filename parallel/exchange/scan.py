"""Log-step scan: every emitter's map is composed with its predecessors' in ceil(log2 n) rounds, then shifted by one.

After round k an emitter's map covers the 2^(k+1) parts that end with it, or all back to the start of its document;
then its boundary state is the whole state and its correction is dropped. The way back is the adjoint, round by round
in reverse: gradients travel to the parts whose maps were used, through the corrections kept from the way there, so no
correction travels again.

Numbers sent per part: at most (log2 n) * K * (K + V) + K * V forward and (log2 n + 1) * K * V backward, a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch

from flashqla_cp.parallel.affine import affine
from flashqla_cp.parallel.comm import Comm, Peers
from flashqla_cp.parallel.exchange.base import Arrived, Exchange, Kept, Links, Part, PendingStates, Traffic


@dataclass(frozen=True, slots=True)
class Hop:
    """One message of a round: from emitter `source` to part `target`; whole: its boundary state is the whole state."""

    source: Part
    target: Part
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One round seen from one owner: rows it sends and receives, with counts per rank.

    sources: own emitter rows to send. carriers: places among them that bring a correction, carried: its interior row.
    targets: own emitter (or, in the last round, receiver) rows that the arrivals join. target_corrections: own interior
    rows that apply to them, none in the last round. partial: places among the arrivals that bring a correction.
    carries: whether rows of this round have room for one at all, alike on every rank.
    """

    sources: torch.Tensor
    carriers: torch.Tensor
    carried: torch.Tensor
    send_counts: list[int]
    targets: torch.Tensor
    target_corrections: torch.Tensor
    partial: torch.Tensor
    receive_counts: list[int]
    carries: bool

    @classmethod
    def of(cls, hops: list[Hop], rank: int, world_size: int, *, last: bool) -> Round:
        sent = sorted((hop for hop in hops if hop.source.owner == rank), key=lambda hop: hop.target.owner)
        received = sorted((hop for hop in hops if hop.target.owner == rank), key=lambda hop: hop.source.owner)
        return cls(
            _rows(hop.source.emits for hop in sent),
            _rows(place for place, hop in enumerate(sent) if not hop.whole),
            _rows(hop.source.corrects for hop in sent if not hop.whole),
            [sum(hop.target.owner == peer for hop in sent) for peer in range(world_size)],
            _rows((hop.target.receives if last else hop.target.emits) for hop in received),
            _rows(hop.target.corrects for hop in received if not last),
            _rows(place for place, hop in enumerate(received) if not hop.whole),
            [sum(hop.source.owner == peer for hop in received) for peer in range(world_size)],
            any(not hop.whole for hop in hops),
        )

    def on(self, device: torch.device) -> Round:
        """The same round with its rows on a device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("sources", "carriers", "carried", "targets", "target_corrections", "partial")
        }
        return Round(**moved, send_counts=self.send_counts, receive_counts=self.receive_counts, carries=self.carries)


def _rows(values: Iterable[int | None]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


class Scan(Exchange):
    """Exchange by a log-step scan over the parts of every chain. Works over Comm or Peers."""

    name = "scan"

    def __init__(self, links: Links, comm: Comm | Peers):
        self.links, self.comm = links, comm
        longest = max((len(chain) for chain in links.chains), default=0)
        self.rounds, reach = [], 1
        while reach < longest - 1:
            self.rounds.append(self._round(reach))
            reach *= 2
        shift = [Hop(a, b, True) for chain in links.chains for a, b in pairwise(chain)]
        self.shift = Round.of(shift, comm.rank, comm.world_size, last=True)
        self._prepared: dict[torch.device, tuple[list[Round], Round]] = {}

    def _round(self, reach: int) -> Round:
        """Emitters whose map does not yet begin with their document join the one `reach` places in front."""
        hops = [
            Hop(chain[place - reach], chain[place], whole=place - reach < reach)
            for chain in self.links.chains
            for place in range(reach, len(chain) - 1)
        ]
        return Round.of(hops, self.comm.rank, self.comm.world_size, last=False)

    @torch.inference_mode(False)
    def _on(self, device: torch.device) -> tuple[list[Round], Round]:
        if device not in self._prepared:
            self._prepared[device] = ([step.on(device) for step in self.rounds], self.shift.on(device))
        return self._prepared[device]

    def forward(self, boundary: torch.Tensor, correction: torch.Tensor, *, keeps: bool = True) -> PendingStates:
        # Each round needs the one before it, so all of them run when the states are waited for.
        return PendingStates(lambda: self._forward(boundary, correction, keeps))

    def _forward(self, boundary: torch.Tensor, correction: torch.Tensor, keeps: bool) -> Arrived:
        rounds, shift = self._on(boundary.device)
        value = boundary.shape[-2]
        kept = []
        for step in rounds:
            send = boundary.index_select(0, step.sources)
            if step.carries:
                room = correction.new_zeros(len(send), *correction.shape[1:])
                room.index_copy_(0, step.carriers, correction.index_select(0, step.carried))
                send = torch.cat([send, room], dim=-2)
            arrived = self.comm.all_to_all(send, step.send_counts, step.receive_counts).wait()
            matrix = correction.index_select(0, step.target_corrections)
            if keeps:
                kept.append(matrix)
            joined = affine(matrix, arrived[..., :value, :], boundary.index_select(0, step.targets))
            boundary = boundary.index_copy(0, step.targets, joined)
            if len(step.partial):
                own = matrix.index_select(0, step.partial)
                arriving = arrived.index_select(0, step.partial)[..., value:, :]
                rows = step.target_corrections.index_select(0, step.partial)
                correction = correction.index_copy(0, rows, affine(own, arriving, torch.zeros_like(arriving)))
        send = boundary.index_select(0, shift.sources)
        arrived = self.comm.all_to_all(send, shift.send_counts, shift.receive_counts).wait()
        states = arrived.new_empty(arrived.shape).index_copy(0, shift.targets, arrived)
        return Arrived(states, tuple(kept))

    def backward(self, boundary: torch.Tensor, kept: Kept) -> PendingStates:
        return PendingStates(lambda: self._backward(boundary, kept))

    def _backward(self, boundary: torch.Tensor, kept: Kept) -> Arrived:
        rounds, shift = self._on(boundary.device)
        send = boundary.index_select(0, shift.targets)
        arrived = self.comm.all_to_all(send, shift.receive_counts, shift.send_counts).wait()
        gradient = arrived.new_empty(arrived.shape).index_copy(0, shift.sources, arrived)
        for step, matrix in zip(reversed(rounds), reversed(kept), strict=True):
            gone = gradient.index_select(0, step.targets)
            send = affine(matrix, gone, torch.zeros_like(gone), adjoint=True)
            arrived = self.comm.all_to_all(send, step.receive_counts, step.send_counts).wait()
            gradient = gradient.index_add(0, step.sources, arrived)
        return Arrived(gradient)

    def traffic(self, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> Traffic:
        rank = self.comm.rank

        def away(counts: list[int]) -> int:
            return (sum(counts) - counts[rank]) * num_v_heads * head_k_dim

        rows = [away(step.send_counts) * (head_v_dim + head_k_dim * step.carries) for step in self.rounds]
        back = [away(step.receive_counts) * head_v_dim for step in reversed(self.rounds)]
        return {
            "forward": [("all_to_all", count) for count in (*rows, away(self.shift.send_counts) * head_v_dim)],
            "backward": [("all_to_all", count) for count in (away(self.shift.receive_counts) * head_v_dim, *back)],
        }
