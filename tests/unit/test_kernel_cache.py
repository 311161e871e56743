"""The cache of compiled kernels: private, complete or absent, made once however many processes ask."""

import multiprocessing
import os
import time

import pytest

from flashqla_cp.kernels.cache import Cache, content_key


def write_entry(folder):
    (folder / "file").write_text("content")


def make_slowly(root, key, counter):
    """Ask for an entry as one of many processes; a line in `counter` for each time it is made."""

    def make(folder):
        with open(counter, "a") as file:
            file.write("made\n")
        time.sleep(0.3)
        write_entry(folder)

    entry, _ = Cache(root).get_or_make(key, make)
    assert (entry / "file").read_text() == "content"


def test_key_depends_on_content_only():
    assert content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})
    assert content_key({"a": 1}) != content_key({"a": 2})


def test_folder_and_entries_are_private(tmp_path):
    old = os.umask(0)
    try:
        cache = Cache(tmp_path / "deep" / "cache")
        entry, made = cache.get_or_make("key", write_entry)
    finally:
        os.umask(old)
    assert made and cache.folder.stat().st_mode & 0o777 == 0o700 and entry.stat().st_mode & 0o777 == 0o700
    assert (entry / "file").stat().st_mode & 0o022 == 0
    assert cache.get_or_make("key", write_entry) == (entry, False)


def test_folder_that_others_may_write_is_refused(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    for mode in (0o770, 0o707, 0o777):
        folder.chmod(mode)
        with pytest.raises(RuntimeError, match="can be written by other users"):
            Cache(folder)
    folder.chmod(0o755)  # others may read
    Cache(folder)


def test_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        os.chown(tmp_path, 12345, -1)
    with pytest.raises(RuntimeError, match="belongs to user"):
        Cache(tmp_path)


def test_entry_or_file_that_others_may_write_is_refused(tmp_path):
    cache = Cache(tmp_path / "cache")
    entry, _ = cache.get_or_make("key", write_entry)
    for path in (entry / "file", entry):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        with pytest.raises(RuntimeError, match="can be written by other users"):
            cache.find("key")
        path.chmod(mode)
    assert cache.find("key") == entry


def test_a_failed_make_leaves_nothing(tmp_path):
    cache = Cache(tmp_path / "cache")

    def fail(folder):
        write_entry(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.get_or_make("key", fail)
    assert cache.find("key") is None and not list((cache.folder / "partial").iterdir())
    assert cache.get_or_make("key", write_entry)[1]


def test_many_processes_make_an_entry_once(tmp_path):
    context = multiprocessing.get_context("fork")
    counter = tmp_path / "counter"
    processes = [context.Process(target=make_slowly, args=(tmp_path / "cache", "key", counter)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0] * 6
    assert counter.read_text() == "made\n"


def test_a_holder_that_dies_frees_the_lock(tmp_path):
    cache = Cache(tmp_path / "cache")
    context = multiprocessing.get_context("fork")

    def die():
        Cache(cache.folder).get_or_make("key", lambda folder: os._exit(3))

    process = context.Process(target=die)
    process.start()
    process.join(30)
    assert process.exitcode == 3
    assert cache.get_or_make("key", write_entry)[1]
