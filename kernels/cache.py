"""A folder of finished builds: private, keyed by content, safe for many processes, and copyable to another host.

Layout: <folder>/<key>/... finished entries, <folder>/locks/<key> one lock a key, <folder>/partial/... unfinished work.
An entry appears by one rename, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def content_key(values: Mapping[str, Any]) -> str:
    """Hash of plain values, the same on every host and in every process."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:40]


def refuse_if_shared(path: Path) -> None:
    """Refuse a file or folder that holds code to be loaded but that somebody else may write.

    Raises:
        RuntimeError: another user owns `path`, or its mode lets group or others write.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise RuntimeError(
            f"kernel cache {path} belongs to user {status.st_uid}, not to you ({os.geteuid()}), and code in it would "
            "be run; set FLASHQLA_CP_CACHE to a folder of your own"
        )
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise RuntimeError(
            f"kernel cache {path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}), and code in "
            f"it would be run; make it private (chmod go-w {path}) if you trust what it holds, or set FLASHQLA_CP_CACHE"
        )


class Cache:
    """Entries under one folder.

    Raises:
        RuntimeError: other users may write to the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_if_shared(self.folder)

    def entry(self, key: str) -> Path:
        """Where the entry of `key` is or would be."""
        return self.folder / key

    def find(self, key: str) -> Path | None:
        """Folder of a finished entry, or None.

        Raises:
            RuntimeError: the entry or a file in it can be written by other users.
        """
        entry = self.entry(key)
        if not entry.is_dir():
            return None
        refuse_if_shared(entry)
        for file in entry.iterdir():
            refuse_if_shared(file)
        return entry

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of `key`: one process of this host at a time. Freed when the holder dies."""
        locks = self.folder / "locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        with open(locks / key, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def get_or_make(self, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
        """Entry of `key`, made by `make(folder)` if it is missing; second value: whether it was made now.

        `make` fills an empty private folder; if it raises, nothing is published and the next caller tries again.
        """
        found = self.find(key)
        if found:
            return found, False
        with self.lock(key):
            found = self.find(key)  # another process may have made it while this one waited
            if found:
                return found, False
            partial = self.folder / "partial"
            partial.mkdir(mode=0o700, exist_ok=True)
            work = Path(tempfile.mkdtemp(dir=partial, prefix=key[:8] + "-"))
            try:
                make(work)
                for file in work.iterdir():
                    file.chmod(file.stat().st_mode & ~WRITABLE_BY_OTHERS)
                os.rename(work, self.entry(key))
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
        return self.entry(key), True
