"""What every test gets: seeds, NaN-filled empties, device markers, and tests that run on all ranks of mpirun.

`pytest` runs the tests of one process; those marked `mpi` are skipped there. `mpirun -n N pytest --only-mpi` runs the
marked ones on N ranks: rank 0 alone prints, the ranks agree on each test's outcome before they go on, so that a fault
of one rank is reported once, with its traceback, and never leaves the others in a collective of another test.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist


class Ranks:
    """The processes that one mpirun started, seen from one of them; a size of 1 without mpirun."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
        self.size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
        self.timeout = datetime.timedelta(seconds=60)
        self._store: dist.Store | None = None
        self._numbers = itertools.count()

    @property
    def store(self) -> dist.Store:
        """One store for the session. MPI carries its port and nothing else: an MPI wait spins on the shared cores."""
        if self._store is None:
            patience = 10 * self.timeout
            if self.size == 1:
                self._store = dist.HashStore()
            else:
                from mpi4py import MPI

                if self.rank == 0:
                    server = dist.TCPStore("127.0.0.1", 0, self.size, True, patience, wait_for_workers=False)
                    self._store = server
                    MPI.COMM_WORLD.bcast(server.port, root=0)
                else:
                    port = MPI.COMM_WORLD.bcast(None, root=0)
                    self._store = dist.TCPStore("127.0.0.1", port, self.size, False, patience)
        return self._store

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on every rank; sleeps on a socket while it waits."""
        number = next(self._numbers)
        self.store.set(f"gather/{number}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self.store.get(f"gather/{number}/{rank}")) for rank in range(self.size)]

    def fresh_store(self) -> dist.Store:
        """A part of the store that no earlier process group has used."""
        return dist.PrefixStore(f"group/{next(self._numbers)}", self.store)

    def leave_together(self) -> None:
        """Hold this process until all have come here, so that none exits before rank 0 has printed."""
        if self.size > 1 and self._store is not None:
            sys.stdout.flush()
            self.gather(None)


RANKS = Ranks()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rank-timeout", type=float, default=60.0, help="seconds a collective of a test may take")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    RANKS.timeout = datetime.timedelta(seconds=config.getoption("--rank-timeout"))
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if RANKS.rank and reporter:
        config.pluginmanager.unregister(reporter)


def pytest_unconfigure(config: pytest.Config) -> None:
    RANKS.leave_together()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason."""
    gpus = torch.cuda.device_count()
    major = torch.cuda.get_device_capability()[0] if gpus else 0
    reasons = {
        "gpu": "needs a CUDA device" if gpus < 1 else None,
        "multi_gpu": "needs two CUDA devices" if gpus < 2 else None,
        "sm90": "needs a Hopper device" if major != 9 else None,
        "sm100": "needs a Blackwell data-centre device" if major != 10 else None,
        "mpi": None if config.pluginmanager.hasplugin("pytest_mpi") else "needs pytest-mpi and mpirun",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test that fails on one rank fails on all of them; setup too, lest some ranks go on alone."""
    report = yield
    if RANKS.size > 1 and call.when != "teardown" and item.get_closest_marker("mpi"):
        faults = RANKS.gather(report.longreprtext if report.failed else None)
        if any(fault is not None for fault in faults):
            report.outcome, report.longrepr = "failed", _tell_faults(faults)
    return report


def _tell_faults(faults: list[str | None]) -> str:
    """The ranks' tracebacks; a rank that only waited for a faulty one in vain gets one line, at the end."""

    def is_echo(text: str) -> bool:
        return "Timed out waiting" in text or "Connection closed by peer" in text

    found = [(is_echo(text), rank, text) for rank, text in enumerate(faults) if text is not None]
    only_echoes = all(echo for echo, _, _ in found)
    lines = []
    for echo, rank, text in sorted(found):
        errors = [line for line in text.splitlines() if line.startswith("E ")]
        short = errors[-1] if errors and echo and not only_echoes else text
        lines.append(f"--- rank {rank} of {len(faults)} ---\n{short}")
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nan_filled_empties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory is NaN, so that a read of it shows."""

    def filled(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = original(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return wrapper

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of this rank's tensors: a GPU of its own if there are enough, else the CPU."""
    if torch.cuda.device_count() < RANKS.size:
        return torch.device("cpu")
    return torch.device("cuda", RANKS.rank)


@pytest.fixture
def pg(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A fresh default process group over all ranks: NCCL where each rank has a GPU, else gloo."""
    os.environ.update(RANK=str(RANKS.rank), LOCAL_RANK=str(RANKS.rank), WORLD_SIZE=str(RANKS.size))
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    dist.init_process_group(
        backend, store=RANKS.fresh_store(), rank=RANKS.rank, world_size=RANKS.size, timeout=RANKS.timeout
    )
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    RANKS.gather(None)
    # DeepSpeed keeps a handle of its own, and a second engine in this process would meet it.
    deepspeed = sys.modules.get("deepspeed.comm")
    if deepspeed is not None and deepspeed.is_initialized():
        deepspeed.destroy_process_group()
    else:
        dist.destroy_process_group()


@pytest.fixture
def all_ranks(pg: dist.ProcessGroup) -> Callable[[Any], list[Any]]:
    """gather(value) -> every rank's value, outside the process group, so that no collective is added to a test's."""
    return RANKS.gather
