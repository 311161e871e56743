"""Times of a call that several ranks make together.

All ranks of a group line up before each call, so what is timed is the call and not how long a rank waits for another
one that came late. The number of calls is fixed: each of them may hold collectives, of which every rank must issue as
many. On a GPU the time is that between two events, from a cold cache; the host may run ahead, as it does in training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashqla_cp.cli.bench_timing import Call, Prepare, captured
from flashqla_cp.parallel.comm import Comm

CACHE_BYTES = 256 * 2**20  # more than any L2
WARM_UPS = 2

Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks of a group, seen from one of them. calls: how many are timed; graphs: whether replays are timed too."""

    comm: Comm
    device: torch.device
    calls: int
    graphs: bool

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device, calls: int) -> Together:
        """gloo's collectives run on the host, so no graph can hold them."""
        return cls(Comm(group), device, calls, device.type == "cuda" and "nccl" in dist.get_backend(group))

    def line_up(self) -> None:
        """Let no rank go on, on a GPU: let nothing start there, before all have come here."""
        self.comm.all_gather(torch.zeros(1, device=self.device)).wait()

    def agree(self, fine: bool) -> bool:
        """Whether all are fine. A rank that gave up alone would leave the others in a collective."""
        flags = self.comm.all_gather(torch.tensor([fine], dtype=torch.uint8, device=self.device)).wait()
        return bool(flags.all().item())

    def times(self, prepare: Prepare) -> Times:
        """Milliseconds of each call that prepare() returns: "eager" and, where all could capture it, "graph"."""
        call = prepare()
        for _ in range(WARM_UPS):
            call()
        found = {"eager": self._milliseconds(call)}
        if self.graphs:
            del call
            replay = self._captured(prepare)
            if replay is not None:
                found["graph"] = self._milliseconds(replay)
        return found

    def _captured(self, prepare: Prepare) -> Call | None:
        try:
            replay = captured(prepare)
        except Exception:  # whatever the call does that a graph cannot hold
            torch.cuda.synchronize()
            replay = None
        return replay if self.agree(replay is not None) else None

    def _milliseconds(self, call: Call) -> list[float]:
        if self.device.type != "cuda":
            return [self._one(call) for _ in range(self.calls)]
        cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.calls)]
        call()
        for begin, end in events:
            cache.zero_()
            self.line_up()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    def _one(self, call: Call) -> float:
        self.line_up()
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
