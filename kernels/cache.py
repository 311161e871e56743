"""A folder of finished builds: private, keyed by content, safe for many processes, and copyable to another host.

Layout: <folder>/<key>/... finished entries, <folder>/locks/<key> one lock a key, <folder>/partial/... unfinished work.
An entry appears by one rename, so a reader sees all of it or nothing. Its manifest.json holds the size and SHA-256 of
every file, so that an entry damaged later (a full disk, a copy cut short, a clean-up by age) is made again, not loaded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
MANIFEST = "manifest.json"
STALE_SECONDS = 24 * 3600  # no compilation takes a day
MOST_LINKS = 40  # as in Linux
PUBLISH_ATTEMPTS = 3

_log = logging.getLogger(__name__)


def content_key(values: Mapping[str, Any]) -> str:
    """Hash of plain values, the same on every host and in every process."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:40]


def refuse_if_shared(path: Path) -> None:
    """Refuse a file or folder that holds code to be loaded but that somebody else may write or redirect.

    Raises:
        RuntimeError: another user owns `path`, its mode lets group or others write, or it is a symbolic link.
    """
    status = path.lstat()
    _refuse_other_owner(path, status, "")
    if stat.S_ISLNK(status.st_mode):
        raise RuntimeError(f"kernel cache {path} is a symbolic link, expected a file or folder of the cache's own")
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise RuntimeError(
            f"kernel cache {path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}), and code in "
            f"it would be run; make it private (chmod go-w {path}) if you trust what it holds, or set FLASHQLA_CP_CACHE"
        )


def _refuse_other_owner(path: Path, status: os.stat_result, what: str) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise RuntimeError(
            f"kernel cache {what}{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}), and code in it "
            "would be run; set FLASHQLA_CP_CACHE to a folder of your own"
        )


def _resolve(path: Path) -> Path:
    """Path without symbolic links; refuses a link, anywhere on the way, that another user may point elsewhere."""
    absolute = path.absolute()
    here, rest, links = Path(absolute.anchor), list(reversed(absolute.parts[1:])), 0
    while rest:
        part = rest.pop()
        if part == "..":
            here = here.parent
            continue
        step = here / part
        if not step.is_symlink():
            here = step
            continue
        _refuse_other_owner(step, step.lstat(), "link ")
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = Path(os.readlink(step))
        if target.is_absolute():
            here = Path(target.anchor)
        rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return here


def _make_private(folder: Path) -> None:
    """Make a folder and its missing parents, all of them private whatever the umask."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _this_host() -> str:
    """Short name of what shares file locks with this process: one running system, not one host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return hashlib.sha256(f"{platform.node()} {boot}".encode()).hexdigest()[:8]


def _describe(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class Cache:
    """Entries under one folder.

    Raises:
        RuntimeError: the folder cannot be made, other users may write to it, or a link to it belongs to one of them.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.folder = _resolve(Path(folder))
            _make_private(self.folder)
        except OSError as error:
            raise RuntimeError(
                f"kernel cache {folder} cannot be used as a folder ({error.strerror}); set FLASHQLA_CP_CACHE to another"
            ) from error
        refuse_if_shared(self.folder)

    def entry(self, key: str) -> Path:
        """Where the entry of `key` is or would be."""
        return self.folder / key

    def find(self, key: str) -> Path | None:
        """Folder of a finished and undamaged entry, or None; says so when it is there but damaged.

        Raises:
            RuntimeError: the entry or a file in it can be written by other users.
        """
        found, damage = self._look(key)
        if damage:
            _log.warning("kernel cache: %s is damaged (%s) and cannot be used", self.entry(key), damage)
        return found

    def _look(self, key: str) -> tuple[Path | None, str]:
        """Entry of `key` if it is whole; what is wrong with it if it is there but not whole."""
        entry = self.entry(key)
        if not os.path.lexists(entry):
            return None, ""
        try:
            damage = self._damage(entry)
        except FileNotFoundError as error:  # it is being replaced, or the manifest is gone
            damage = f"{Path(error.filename).name} is missing"
        return (None, damage) if damage else (entry, "")

    def _damage(self, entry: Path) -> str:
        refuse_if_shared(entry)
        if not entry.is_dir():
            return "not a folder"
        files = {file.name: file for file in entry.iterdir()}
        for file in files.values():
            refuse_if_shared(file)
        try:
            expected = json.loads((entry / MANIFEST).read_bytes())
        except ValueError:
            expected = None
        if not isinstance(expected, dict):
            return f"{MANIFEST} cannot be read"
        for name, facts in expected.items():
            if name not in files:
                return f"{name} is missing"
            if not files[name].is_file() or _describe(files[name]) != facts:
                return f"{name} is not as it was made"
        return ""

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of `key`: one process of this host at a time. Freed when the holder dies.

        Raises:
            RuntimeError: other users may write to the folder of locks.
        """
        with open(self._own_folder("locks") / key, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _own_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        refuse_if_shared(folder)
        return folder

    def get_or_make(self, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
        """Entry of `key`, made by `make(folder)` if it is missing or damaged; second value: whether it was made now.

        `make` fills an empty private folder with files; if it raises, nothing is published and the next caller tries
        again. On hosts that share the folder but not its locks, the first to finish wins and the others use its entry.

        Raises:
            RuntimeError: other users may write to the entry or to a folder of the cache.
        """
        found, _ = self._look(key)
        if found:
            return found, False
        with self.lock(key):
            found, damage = self._look(key)  # another process may have made it while this one waited
            if found:
                return found, False
            if damage:
                self._discard(key, damage)
            partial = self._own_folder("partial")
            mine = f"{key}-{_this_host()}-"
            _clean(partial, mine)
            work = Path(tempfile.mkdtemp(dir=partial, prefix=mine))
            try:
                make(work)
                for file in work.iterdir():
                    file.chmod(file.stat().st_mode & ~WRITABLE_BY_OTHERS)
                manifest = {file.name: _describe(file) for file in sorted(work.iterdir())}
                (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
                (work / MANIFEST).chmod(0o600)
                return self.entry(key), self._publish(work, key)
            finally:
                shutil.rmtree(work, ignore_errors=True)  # nothing is there any more if it was published

    def _publish(self, work: Path, key: str) -> bool:
        """Rename finished work to its entry; False if another host has put a good one there first."""
        for attempt in range(PUBLISH_ATTEMPTS):
            try:
                os.rename(work, self.entry(key))
                return True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == PUBLISH_ATTEMPTS - 1:
                    raise
            found, damage = self._look(key)
            if found:
                return False
            if damage:
                self._discard(key, damage)
        return False

    def _discard(self, key: str, damage: str) -> None:
        """Take a damaged entry away, by one rename, so that no reader sees half of it go."""
        _log.warning("kernel cache: %s is damaged (%s); making it again", self.entry(key), damage)
        grave = Path(tempfile.mkdtemp(dir=self._own_folder("partial"), prefix=f"{key}-{_this_host()}-"))
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.entry(key), grave / key)
        _remove(grave)


def _clean(partial: Path, mine: str) -> None:
    """Remove what killed processes left: of the key whose lock is held, on this host; of any key, when a day old."""
    oldest = time.time() - STALE_SECONDS
    for left in partial.iterdir():
        with contextlib.suppress(OSError):  # another process may be removing it too
            if left.name.startswith(mine) or left.lstat().st_mtime < oldest:
                _remove(left)
