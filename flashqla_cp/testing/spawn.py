"""Run a function on N ranks, each a process of its own, and never hang.

Processes come from a fork server that has torch loaded, so a run costs a fraction of a second. The parent watches
every rank: a failure is raised with that rank's traceback and its peers are killed; past the time limit all are killed.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_preloaded = ["torch", "torch.distributed", __name__]


def preload(*modules: str) -> None:
    """Let the fork server import these modules too, once for all ranks; of no effect when it runs already."""
    _preloaded.extend(module for module in modules if module not in _preloaded)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", timeout: float = 60.0
) -> list[Any]:
    """Call fn(rank, *args) on `world_size` processes with the default process group initialised.

    Args:
        fn: a function at the top level of an importable module (it is sent by name).
        world_size: number of ranks.
        args: picklable arguments, the same for each rank.
        backend: "gloo", or "nccl" with one GPU for each rank (made the current device).
        timeout: seconds after which all ranks are killed.

    Returns:
        What each rank returned, in rank order.

    Raises:
        ValueError: world_size below 1.
        RuntimeError: too few GPUs, or a rank raised or died; the text holds its traceback.
        TimeoutError: a rank had not returned after `timeout` seconds.
    """
    if world_size < 1:
        raise ValueError(f"world_size: got {world_size}, expected at least 1")
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        raise RuntimeError(f"backend 'nccl': got {torch.cuda.device_count()} GPUs, expected {world_size}")
    payload = pickle.dumps((fn, args))
    _start_fork_server()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="flashqla-cp-") as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        ranks = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                settings = (rank, world_size, backend, rendezvous, timeout, dict(os.environ))
                process = context.Process(target=_rank_main, args=(theirs, payload, *settings), daemon=True)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return _collect(ranks, time.monotonic() + timeout, timeout)
        finally:
            for process, ours in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
                ours.close()


def _start_fork_server() -> None:
    """Start the fork server with torch and what preload named loaded; a no-op when it runs already."""
    multiprocessing.set_forkserver_preload(_preloaded)
    before = os.environ.get("PYTHONPATH")
    # The fork server of older Pythons does not inherit sys.path, and a preload that it cannot find is skipped silently.
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _collect(ranks: list[tuple[Any, connection.Connection]], deadline: float, timeout: float) -> list[Any]:
    """Wait for every rank's result, then release all; raises at the first failure."""
    results: dict[int, Any] = {}
    pending = dict(enumerate(pipe for _, pipe in ranks))
    while pending:
        ready = connection.wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(str(rank) for rank in pending)
            raise TimeoutError(f"no result from rank(s) {names} after {timeout:g} s")
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            try:
                ok, value = pickle.loads(pending.pop(rank).recv_bytes())
            except (EOFError, ConnectionResetError):
                ranks[rank][0].join()
                raise RuntimeError(f"rank {rank} died with exit code {ranks[rank][0].exitcode}") from None
            if not ok:
                raise RuntimeError(f"rank {rank} of {len(ranks)} failed:\n{value}")
            results[rank] = value
    # No rank leaves before all have finished: a peer may still be reading from its sockets.
    for _, ours in ranks:
        ours.send_bytes(b"leave")
    for process, _ in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(
    pipe: connection.Connection,
    payload: bytes,
    rank: int,
    world_size: int,
    backend: str,
    rendezvous: str,
    timeout: float,
    environment: dict[str, str],
) -> None:
    """A rank's life: join the group, run the function, report, wait for the release."""
    # The fork server's environment is that of its start; tests set variables later.
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        device = torch.device("cuda", rank) if backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
            device_id=device,
        )
        fn, args = pickle.loads(payload)
        message = pickle.dumps((True, fn(rank, *args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    # As plain bytes: tensors sent as objects would share memory with a process that is about to end.
    pipe.send_bytes(message)
    pipe.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()
