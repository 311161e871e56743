"""Halo: the W-1 rows in front of a fragment that its causal convolution reads, from whichever ranks hold them.

The plan tells every rank who needs which rows of whom, so one all-to-all moves them, over any number of ranks when
shards are shorter than the convolution. Rows that the rank holds itself are not sent. The adjoint returns gradients
along the same routes and adds them in a fixed order, so results repeat bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flashqla_cp.parallel.comm import Comm
from flashqla_cp.parallel.plan import ShardPlan


@dataclass(slots=True, eq=False)
class Halo:
    """Routes of one rank, int64 tensors.

    sources [fragments of this rank in slot order, W-1]: where the rows in front of a fragment stand, nearest last:
    a local row, local_tokens + i for row i of the received halo, or -1 in front of the document. send_rows: local
    rows to send, ordered by the rank they go to. needed: whether any rank sends a row; alike on all ranks.
    """

    comm: Comm
    sources: torch.Tensor
    send_rows: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    needed: bool
    _prepared: dict[torch.device, tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, plan: ShardPlan, comm: Comm, kernel_size: int) -> Halo:
        """Prepare the routes for a convolution over kernel_size tokens."""
        pieces, reach = plan.fragments, kernel_size - 1
        offsets = torch.tensor(plan.cu_seqlens, dtype=torch.int64, device="cpu")
        token = pieces.start[:, None] - torch.arange(reach, 0, -1, device="cpu")
        inside = token >= offsets[pieces.document][:, None]
        owner, row = plan.owners.locate(token.clamp(min=0)) if len(token) else (token, token)
        reader = pieces.rank[:, None].expand_as(token)
        away = inside & (owner != reader)
        routes = torch.stack([owner[away], reader[away], row[away]], dim=1).unique(dim=0)
        sent, received = routes[routes[:, 0] == comm.rank], routes[routes[:, 1] == comm.rank]
        mine = pieces.of_rank(comm.rank)
        sources = torch.where(inside, row, -1)[mine]
        key = received[:, 0] * (plan.num_tokens + 1) + received[:, 2]
        wanted = owner[mine] * (plan.num_tokens + 1) + row[mine]
        arrived = plan.local_tokens(comm.rank) + torch.searchsorted(key, wanted)
        return cls(
            comm,
            torch.where(away[mine], arrived, sources),
            sent[:, 2].contiguous(),
            torch.bincount(sent[:, 1], minlength=plan.world_size).tolist(),
            torch.bincount(received[:, 0], minlength=plan.world_size).tolist(),
            bool(len(routes)),
        )

    @torch.inference_mode(False)
    def _on(self, device: torch.device) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Rows to send, and the rounds of (arrived row, local row) in which gradients come home, each row once."""
        if device not in self._prepared:
            rows = self.send_rows.tolist()
            seen: dict[int, int] = {}
            rounds: list[list[tuple[int, int]]] = []
            for place, row in enumerate(rows):
                turn = seen.get(row, 0)
                seen[row] = turn + 1
                if turn == len(rounds):
                    rounds.append([])
                rounds[turn].append((place, row))
            tables = [torch.tensor(pairs, dtype=torch.int64, device=device).T.contiguous() for pairs in rounds]
            self._prepared[device] = (self.send_rows.to(device), [(table[0], table[1]) for table in tables])
        return self._prepared[device]

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x [local_tokens, D] -> halo rows of this rank [received, D]. A collective when any rank needs it."""
        if not self.needed:
            return x[:0]
        send = x.index_select(0, self._on(x.device)[0])
        return self.comm.all_to_all(send, self.send_counts, self.receive_counts).wait()

    def return_gradient(self, dx: torch.Tensor, dhalo: torch.Tensor) -> torch.Tensor:
        """Add the gradients of halo rows [received, D] to those of their owners' rows dx [local_tokens, D], in place,
        in the wider of the two dtypes."""
        if not self.needed:
            return dx
        arrived = self.comm.all_to_all(dhalo, self.receive_counts, self.send_counts).wait()
        for place, row in self._on(dx.device)[1]:
            dx.index_copy_(0, row, (dx.index_select(0, row) + arrived.index_select(0, place)).to(dx.dtype))
        return dx
