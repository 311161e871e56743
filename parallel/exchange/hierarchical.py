"""Hierarchical: sharded by head inside a node, and one map per run of fragments between nodes.

A run is a stretch of neighbouring fragments of one document that all live on one node. Inside the node the owner of a
head composes each run to one map; runs are the parts of a second exchange among the ranks of all nodes that own the
same heads, an all-gather for up to 8 nodes and a log-step scan above. With the state in front of each run known, the
owner finishes the states of its fragments and returns them.

    way there:  prefix of fragment i of a run   (E_i.., M_i..) = map_i after ... after map_first
                state in front of i + 1         S = E_i.. + M_i.. S_run
    way back:   the same from the other end, with M transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from flashqla_cp.parallel.affine import ChainFold, Link, affine
from flashqla_cp.parallel.comm import Comm, Peers
from flashqla_cp.parallel.exchange.all_gather import AllGather
from flashqla_cp.parallel.exchange.base import (
    Arrived,
    Exchange,
    Kept,
    Links,
    Part,
    PendingStates,
    Traffic,
    pack,
    sure,
    unpack,
)
from flashqla_cp.parallel.exchange.scan import Scan
from flashqla_cp.parallel.exchange.sharded import HeadRouter, head_counts

GATHER_UP_TO_NODES = 8


Columns = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of one chain on one node; part: the run as a part of the exchange between nodes."""

    fragments: tuple[Part, ...]
    part: Part


@dataclass(slots=True)
class Sweep:
    """Composition of the runs of one node in one direction, and where states go.

    Rows named `map` count the maps that were folded; rows of `out` are owner * count + place, as messages count.
    """

    folds: ChainFold
    boundary: torch.Tensor
    correction: torch.Tensor
    first: torch.Tensor
    run_boundary: torch.Tensor
    run_correction: torch.Tensor
    plain: Columns
    direct: Columns
    through: Columns
    num_out: int

    def compose(self, boundary: torch.Tensor, correction: torch.Tensor, *, adjoint: bool) -> torch.Tensor:
        """Prefix maps [maps, h, V + K, K] of all runs, E above M; M is meaningless where E is the whole state."""
        boundary = boundary.index_select(0, self.boundary)
        correction = correction.index_select(0, self.correction)
        matrix = correction.mT if adjoint else correction
        begins = torch.where(self.first[:, None, None, None], matrix, torch.zeros_like(matrix))
        return self.folds(torch.cat([boundary, begins], dim=-2), correction, adjoint=adjoint)

    def finish(self, prefixes: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        """Combine prefixes with the states [runs, h, V, K] that reached the runs -> [num_out, h, V, K]."""
        value = runs.shape[-2]
        out = runs.new_zeros(self.num_out, *runs.shape[1:])
        rows, source = self.plain
        out.index_copy_(0, rows, prefixes.index_select(0, source)[..., :value, :])
        rows, source = self.direct
        out.index_copy_(0, rows, runs.index_select(0, source))
        rows, source, run = self.through
        prefix = prefixes.index_select(0, source)
        out.index_copy_(0, rows, affine(prefix[..., value:, :], runs.index_select(0, run), prefix[..., :value, :]))
        return out


class _Sweeper:
    """Collects the rows of a Sweep, run by run."""

    def __init__(self) -> None:
        self.chains: list[list[Link]] = []
        self.boundary: list[int] = []
        self.correction: list[int] = []
        self.first: list[bool] = []
        self.run_boundary: list[int] = []
        self.run_correction: list[int] = []
        self.plain: list[tuple[int, int]] = []
        self.direct: list[tuple[int, int]] = []
        self.through: list[tuple[int, int, int]] = []

    def add(
        self,
        maps: Sequence[tuple[int, int | None]],
        outs: Sequence[int | None],
        enters: int | None,
        leaves: bool,
        corrects: bool,
    ) -> None:
        """One run in the order of the sweep. maps: (boundary row, correction row) of the parts that have a map.

        outs: for each part, the out row of the state that reaches it. enters: row of the state that reaches the run,
        None when the run's first map is the whole state. leaves, corrects: whether the run's own map goes on, with M.
        """
        base = len(self.boundary)
        for place, (boundary, correction) in enumerate(maps):
            self.boundary.append(boundary)
            self.correction.append(0 if correction is None else correction)
            self.first.append(place == 0 and enters is not None)
        if maps:
            self.chains.append([Link(base + place, base + place, base + place) for place in range(len(maps))])
        for place, out in enumerate(outs):
            if out is None:
                continue
            if place == 0 and enters is not None:
                self.direct.append((out, enters))
            elif enters is None:
                self.plain.append((out, base + place - 1))
            else:
                self.through.append((out, base + place - 1, enters))
        if leaves:
            self.run_boundary.append(base + len(maps) - 1)
        if corrects:
            self.run_correction.append(base + len(maps) - 1)

    def build(self, num_out: int, device: torch.device) -> Sweep:
        def rows(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def columns(table: Sequence[tuple[int, ...]], width: int) -> Columns:
            return tuple(rows([row[column] for row in table]) for column in range(width))

        return Sweep(
            ChainFold.of(self.chains, len(self.boundary), device),
            rows(self.boundary),
            rows(self.correction),
            torch.tensor(self.first, dtype=torch.bool, device=device),
            rows(self.run_boundary),
            rows(self.run_correction),
            columns(self.plain, 2),
            columns(self.direct, 2),
            columns(self.through, 3),
            num_out,
        )


class Hierarchical(Exchange):
    """Exchange in two levels. ranks_per_node divides the group; ranks of a node are consecutive."""

    name = "hierarchical"

    def __init__(self, links: Links, comm: Comm, ranks_per_node: int, gather_up_to: int = GATHER_UP_TO_NODES):
        self.links, self.comm, self.size = links, comm, ranks_per_node
        self.node, local = divmod(comm.rank, ranks_per_node)
        num_nodes = comm.world_size // ranks_per_node
        first = self.node * ranks_per_node
        self.router = HeadRouter(Peers(comm, range(first, first + ranks_per_node)))
        runs = [
            [tuple(run) for _, run in groupby(chain, key=lambda part: part.owner // ranks_per_node)]
            for chain in links.chains
        ]
        owners = [[run[0].owner // ranks_per_node for run in chain] for chain in runs]
        outer = Links.of_owners(owners, num_nodes)
        across = Peers(comm, range(local, comm.world_size, ranks_per_node))
        self.outer: Exchange | None = None
        if any(len(chain) > 1 for chain in runs):
            self.outer = AllGather(outer, across) if num_nodes <= gather_up_to else Scan(outer, across)
        pairs = (zip(chain, parts, strict=True) for chain, parts in zip(runs, outer.chains, strict=True))
        self.runs = [Run(run, part) for chain in pairs for run, part in chain if part.owner == self.node]
        self.num_runs = (outer.receivers[self.node], outer.emitters[self.node])
        self._prepared: dict[torch.device, tuple[Sweep, Sweep]] = {}

    def _row(self, part: Part, count: int, place: int | None) -> int | None:
        return None if place is None else (part.owner - self.node * self.size) * count + place

    @torch.inference_mode(False)
    def _on(self, device: torch.device) -> tuple[Sweep, Sweep]:
        if device in self._prepared:
            return self._prepared[device]
        links, there, back = self.links, _Sweeper(), _Sweeper()
        for run in self.runs:
            part, corrects = run.part, run.part.corrects is not None
            correction = {p: self._row(p, links.max_interior, p.corrects) for p in run.fragments}
            emit = {p: self._row(p, links.max_emitters, p.emits) for p in run.fragments}
            receive = {p: self._row(p, links.max_receivers, p.receives) for p in run.fragments}
            ahead, behind = list(run.fragments), list(run.fragments[::-1])
            there.add(
                [(sure(emit[p]), correction[p]) for p in ahead if p.emits is not None],
                [receive[p] for p in ahead],
                part.receives,
                part.emits is not None,
                corrects,
            )
            back.add(
                [(sure(receive[p]), correction[p]) for p in behind if p.receives is not None],
                [emit[p] for p in behind],
                part.emits,
                part.receives is not None,
                corrects,
            )
        self._prepared[device] = (
            there.build(self.size * links.max_receivers, device),
            back.build(self.size * links.max_emitters, device),
        )
        return self._prepared[device]

    def forward(self, boundary: torch.Tensor, correction: torch.Tensor, *, keeps: bool = True) -> PendingStates:
        links, (num_heads, *shape) = self.links, boundary.shape[1:]
        counts = (links.max_emitters, links.max_interior)
        arrive = self.router.scatter(pack(boundary, correction, *counts))
        sweep, _ = self._on(boundary.device)

        def finish() -> Arrived:
            maps, corrections = unpack(arrive(), *counts, torch.Size(shape))
            prefixes = sweep.compose(maps, _never_empty(corrections), adjoint=False)
            value = shape[0]
            entering = maps.new_zeros(self.num_runs[0], *maps.shape[1:])
            kept: Kept = ()
            if self.outer is not None:
                run_maps = prefixes.index_select(0, sweep.run_boundary)[..., :value, :].contiguous()
                run_corrections = prefixes.index_select(0, sweep.run_correction)[..., value:, :].contiguous()
                arrived = self.outer.forward(run_maps, run_corrections, keeps=keeps).wait()
                entering, kept = arrived.states, arrived.kept
            out = self.router.collect(sweep.finish(prefixes, entering), num_heads, links.max_receivers)
            kept = (corrections.contiguous(), *kept) if keeps else ()
            return Arrived(out()[: links.receivers[self.comm.rank]], kept)

        return PendingStates(finish)

    def backward(self, boundary: torch.Tensor, kept: Kept) -> PendingStates:
        links, (num_heads, *shape) = self.links, boundary.shape[1:]
        counts = (links.max_receivers, 0)
        arrive = self.router.scatter(pack(boundary, None, *counts))
        _, sweep = self._on(boundary.device)

        def finish() -> Arrived:
            maps, _ = unpack(arrive(), *counts, torch.Size(shape))
            prefixes = sweep.compose(maps, _never_empty(kept[0]), adjoint=True)
            leaving = maps.new_zeros(self.num_runs[1], *maps.shape[1:])
            if self.outer is not None:
                run_maps = prefixes.index_select(0, sweep.run_boundary)[..., : shape[0], :].contiguous()
                leaving = self.outer.backward(run_maps, kept[1:]).wait().states
            out = self.router.collect(sweep.finish(prefixes, leaving), num_heads, links.max_emitters)
            return Arrived(out()[: links.emitters[self.comm.rank]])

        return PendingStates(finish)

    def traffic(self, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> Traffic:
        links, state = self.links, head_k_dim * head_v_dim
        mine = head_counts(num_v_heads, self.size)[self.router.comm.rank]
        outer = self.outer.traffic(mine, head_k_dim, head_v_dim) if self.outer is not None else {}
        message = links.max_emitters * state + links.max_interior * head_k_dim**2
        inside = self.size > 1
        sizes = {
            "forward": (message, links.max_receivers * state),
            "backward": (links.max_receivers * state, links.max_emitters * state),
        }
        return {
            way: [("all_to_all", self.router.sent(num_v_heads, there))] * inside
            + outer.get(way, [])
            + [("all_to_all", self.router.returned(num_v_heads, back))] * inside
            for way, (there, back) in sizes.items()
        }


def _never_empty(correction: torch.Tensor) -> torch.Tensor:
    """A row to select where no part has a correction, so that index 0 exists."""
    return correction if len(correction) else correction.new_zeros(1, *correction.shape[1:])
