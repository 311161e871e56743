"""All-gather: one collective, then every rank folds the chains it needs. Best for few ranks; bytes grow with P."""

from __future__ import annotations

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


class AllGather(Exchange):
    """Exchange by one all-gather. Works over a whole group (Comm), or over some ranks of it (Peers)."""

    name = "allgather"

    def __init__(self, links: Links, comm: Comm | Peers):
        self.links, self.comm = links, comm
        self.fold = GatheredFold(
            links,
            lambda part: part.receives if part.owner == comm.rank else None,
            lambda part: part.emits if part.owner == comm.rank else None,
            links.receivers[comm.rank],
            links.emitters[comm.rank],
        )

    def forward(self, boundary: torch.Tensor, correction: torch.Tensor, *, keeps: bool = True) -> PendingStates:
        counts, shape = (self.links.max_emitters, self.links.max_interior), boundary.shape[2:]
        pending = self.comm.all_gather(pack(boundary, correction, *counts))

        def finish() -> Arrived:
            maps = unpack(pending.wait(), *counts, shape)
            return Arrived(self.fold.forward(*maps), self.fold.keep(maps[1]) if keeps else ())

        return PendingStates(finish)

    def backward(self, boundary: torch.Tensor, kept: Kept) -> PendingStates:
        counts, shape = (self.links.max_receivers, 0), boundary.shape[2:]
        pending = self.comm.all_gather(pack(boundary, None, *counts))
        return PendingStates(lambda: Arrived(self.fold.backward(unpack(pending.wait(), *counts, shape)[0], kept)))

    def traffic(self, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> Traffic:
        links, copies = self.links, num_v_heads * head_k_dim * (self.comm.world_size - 1)
        forward = copies * (links.max_emitters * head_v_dim + links.max_interior * head_k_dim)
        return {
            "forward": [(self.comm.gather_name, forward)],
            "backward": [(self.comm.gather_name, copies * links.max_receivers * head_v_dim)],
        }
