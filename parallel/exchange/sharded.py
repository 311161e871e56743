"""Sharded: all-to-all by head, the owner of a head folds all chains for it, all-to-all of the states back.

Bytes per rank do not grow with P. The owner of a head keeps its corrections, so backward ships none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashqla_cp.parallel.comm import Comm, Peers
from flashqla_cp.parallel.exchange.base import (
    Arrived,
    Exchange,
    GatheredFold,
    Kept,
    Links,
    PendingStates,
    Traffic,
    pack,
    unpack,
)


def head_counts(num_heads: int, num_owners: int) -> list[int]:
    """Heads each owner folds, near equal; owners may have none."""
    return [num_heads * (owner + 1) // num_owners - num_heads * owner // num_owners for owner in range(num_owners)]


class HeadRouter:
    """Moves messages [h, row] to the owners of their heads and state rows back. Works over Comm or Peers."""

    def __init__(self, comm: Comm | Peers):
        self.comm = comm

    def scatter(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start: this rank's message [HV, row] -> a wait for every rank's, for the heads owned here, [P, h, row]."""
        counts = head_counts(len(message), self.comm.world_size)
        mine = counts[self.comm.rank]
        pending = self.comm.all_to_all(message, counts, [mine] * self.comm.world_size)
        return lambda: pending.wait().unflatten(0, (self.comm.world_size, mine))

    def collect(self, states: torch.Tensor, num_heads: int, per_rank: int) -> Callable[[], torch.Tensor]:
        """Start: states for every rank, heads owned here [P*per_rank, h, V, K] -> a wait for those of this rank
        [per_rank, HV, V, K]."""
        size, counts = self.comm.world_size, head_counts(num_heads, self.comm.world_size)
        mine, shape = counts[self.comm.rank], states.shape[2:]
        send = states.unflatten(0, (size, per_rank)).transpose(1, 2).reshape(size * mine, per_rank * shape.numel())
        pending = self.comm.all_to_all(send, [mine] * size, counts)
        return lambda: pending.wait().unflatten(1, (per_rank, *shape)).transpose(0, 1)

    def sent(self, num_heads: int, row: int) -> int:
        """Numbers that scatter sends to other ranks."""
        return (num_heads - head_counts(num_heads, self.comm.world_size)[self.comm.rank]) * row

    def returned(self, num_heads: int, row: int) -> int:
        """Numbers that collect sends to other ranks."""
        return (self.comm.world_size - 1) * head_counts(num_heads, self.comm.world_size)[self.comm.rank] * row


class Sharded(Exchange):
    """Exchange by two all-to-alls, folded by the owners of the heads."""

    name = "sharded"

    def __init__(self, links: Links, comm: Comm):
        self.links, self.comm, self.router = links, comm, HeadRouter(comm)
        receivers, emitters = links.max_receivers, links.max_emitters
        self.fold = GatheredFold(
            links,
            lambda part: None if part.receives is None else part.owner * receivers + part.receives,
            lambda part: None if part.emits is None else part.owner * emitters + part.emits,
            links.max_receivers * comm.world_size,
            links.max_emitters * comm.world_size,
        )

    def forward(self, boundary: torch.Tensor, correction: torch.Tensor, *, keeps: bool = True) -> PendingStates:
        links, (num_heads, *shape) = self.links, boundary.shape[1:]
        counts = (links.max_emitters, links.max_interior)
        arrive = self.router.scatter(pack(boundary, correction, *counts))

        def finish() -> Arrived:
            maps = unpack(arrive(), *counts, torch.Size(shape))
            states = self.router.collect(self.fold.forward(*maps), num_heads, links.max_receivers)
            kept = self.fold.keep(maps[1]) if keeps else ()  # copied beside the way back
            return Arrived(states()[: links.receivers[self.comm.rank]], kept)

        return PendingStates(finish)

    def backward(self, boundary: torch.Tensor, kept: Kept) -> PendingStates:
        links, (num_heads, *shape) = self.links, boundary.shape[1:]
        counts = (links.max_receivers, 0)
        arrive = self.router.scatter(pack(boundary, None, *counts))

        def finish() -> Arrived:
            folded = self.fold.backward(unpack(arrive(), *counts, torch.Size(shape))[0], kept)
            states = self.router.collect(folded, num_heads, links.max_emitters)
            return Arrived(states()[: links.emitters[self.comm.rank]])

        return PendingStates(finish)

    def traffic(self, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> Traffic:
        links, state = self.links, head_k_dim * head_v_dim
        message = links.max_emitters * state + links.max_interior * head_k_dim**2
        sent, returned = self.router.sent, self.router.returned
        return {
            "forward": [
                ("all_to_all", sent(num_v_heads, message)),
                ("all_to_all", returned(num_v_heads, links.max_receivers * state)),
            ],
            "backward": [
                ("all_to_all", sent(num_v_heads, links.max_receivers * state)),
                ("all_to_all", returned(num_v_heads, links.max_emitters * state)),
            ],
        }
