"""A pool of compiler processes. Each reads one request a line, compiles into the cache and answers one line, in JSON.

Processes rather than threads because the JIT prints, logs and keeps global state; started by command line rather than
by multiprocessing because that would run the user's main module again.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
Reply = dict[str, Any]


def run_requests(requests: dict[int, Request], jobs: int, entry: str, on_reply: Callable[[int, Reply], None]) -> None:
    """Have at most `jobs` processes answer all requests; on_reply(index, reply) is called from several threads.

    Args:
        entry: "module:function" that each process runs; it calls `serve`.

    Raises:
        ValueError: `jobs` is not positive.
        Exception: the first one that on_reply raised; the other processes finish what they have.
    """
    if jobs < 1:
        raise ValueError(f"jobs: got {jobs}, expected a positive integer")
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in requests:
        waiting.put(index)
    failures: list[Exception] = []

    def feed() -> None:
        try:
            _feed_one_process(waiting, requests, entry, on_reply)
        except Exception as error:  # a thread's exception would be lost
            failures.append(error)

    threads = [threading.Thread(target=feed, daemon=True) for _ in range(min(jobs, len(requests)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _feed_one_process(
    waiting: queue.SimpleQueue[int], requests: dict[int, Request], entry: str, on_reply: Callable[[int, Reply], None]
) -> None:
    process = None
    while True:
        try:
            index = waiting.get_nowait()
        except queue.Empty:
            break
        if process is None or process.poll() is not None:  # one that died failed its own kernel only
            process = _start_process(entry)
        on_reply(index, _ask(process, requests[index]))
    if process is not None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _start_process(entry: str) -> subprocess.Popen[str]:
    module, _, function = entry.partition(":")
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}()"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(process: subprocess.Popen[str], request: Request) -> Reply:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if line.endswith("\n"):  # less is what a process wrote while it died
        return json.loads(line)
    return {"error": f"the compiler process ended with code {process.wait()}", "compiled": False}


def serve(handle: Callable[[Request], bool]) -> None:
    """Answer requests until standard input ends: `handle` says whether it compiled. Runs in the process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the JIT prints must not mix with the answers
    for line in sys.stdin:
        try:
            reply = {"error": "", "compiled": handle(json.loads(line))}
        except Exception:
            reply = {"error": traceback.format_exc(), "compiled": False}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
