"""The cache of compiled kernels: private, complete or absent, made once however many processes ask."""

import multiprocessing
import os
import shutil
import time

import pytest

from flashqla_cp.kernels import cache as cache_module
from flashqla_cp.kernels.cache import MANIFEST, STALE_SECONDS, Cache, content_key


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


def truncate(entry):
    os.truncate(entry / "file", 3)


def change_a_byte(entry):
    (entry / "file").write_text("CONTENT")


def empty(entry):
    for file in entry.iterdir():
        file.unlink()


def spoil_manifest(entry):
    (entry / MANIFEST).write_text("{")


def replace_by_a_file(entry):
    shutil.rmtree(entry)
    entry.write_text("content")


DAMAGE = {
    truncate: "file is not as it was made",
    change_a_byte: "file is not as it was made",
    lambda entry: (entry / "file").unlink(): "file is missing",
    lambda entry: (entry / MANIFEST).unlink(): "manifest.json is missing",
    empty: "manifest.json is missing",
    spoil_manifest: "manifest.json cannot be read",
    replace_by_a_file: "not a folder",
}


@pytest.mark.parametrize(("spoil", "word"), DAMAGE.items(), ids=[getattr(f, "__name__", "") for f in DAMAGE])
def test_a_damaged_entry_is_made_again(spoil, word, tmp_path, caplog):
    cache = Cache(tmp_path / "cache")
    entry, _ = cache.get_or_make("key", write_entry)
    spoil(entry)
    assert cache.find("key") is None and word in caplog.text
    caplog.clear()
    assert cache.get_or_make("key", write_entry) == (entry, True)
    assert word in caplog.text and "making it again" in caplog.text
    assert (entry / "file").read_text() == "content" and cache.find("key") == entry
    assert not list((cache.folder / "partial").iterdir())


def test_an_entry_that_appears_meanwhile_is_used(tmp_path):
    """Another host that shares the folder but not the locks finishes first."""
    cache = Cache(tmp_path / "cache")
    other = Cache(tmp_path / "other")

    def make(folder):
        write_entry(folder)
        shutil.copytree(other.get_or_make("key", write_entry)[0], cache.entry("key"))
        (cache.entry("key") / "by_the_other_host").touch()

    entry, made = cache.get_or_make("key", make)
    assert not made and (entry / "by_the_other_host").exists()
    assert not list((cache.folder / "partial").iterdir())


def test_a_damaged_entry_that_appears_meanwhile_is_replaced(tmp_path):
    cache = Cache(tmp_path / "cache")

    def make(folder):
        write_entry(folder)
        cache.entry("key").mkdir(mode=0o700)
        (cache.entry("key") / "file").write_text("half")

    entry, made = cache.get_or_make("key", make)
    assert made and (entry / "file").read_text() == "content" and cache.find("key") == entry


def test_what_killed_processes_left_is_removed(tmp_path):
    """At once for the key that is made again; for other keys, and other hosts, when a day old."""
    cache = Cache(tmp_path / "cache")
    context = multiprocessing.get_context("fork")
    for key in ("key", "another"):
        process = context.Process(target=Cache.get_or_make, args=(cache, key, lambda folder: os._exit(3)))
        process.start()
        process.join(30)
    elsewhere = cache.folder / "partial" / "key-otherhost-1"
    elsewhere.mkdir()
    left = sorted((cache.folder / "partial").iterdir())
    assert len(left) == 3
    cache.get_or_make("key", write_entry)
    remaining = sorted((cache.folder / "partial").iterdir())
    assert elsewhere in remaining and sorted(f.name.split("-")[0] for f in remaining) == ["another", "key"]
    for folder in remaining:
        old = time.time() - STALE_SECONDS - 60
        os.utime(folder, (old, old))
    cache.get_or_make("third", write_entry)
    assert not list((cache.folder / "partial").iterdir())


@pytest.mark.parametrize("name", ["locks", "partial"])
def test_working_folders_that_others_may_write_are_refused(name, tmp_path):
    cache = Cache(tmp_path / "cache")
    (cache.folder / name).mkdir()
    (cache.folder / name).chmod(0o777)
    with pytest.raises(RuntimeError, match=f"{name} can be written by other users"):
        cache.get_or_make("key", write_entry)
    (cache.folder / name).rmdir()
    (tmp_path / "elsewhere").mkdir()
    (cache.folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match=f"{name} is a symbolic link"):
        cache.get_or_make("key", write_entry)


def test_missing_parents_are_made_private(tmp_path):
    old = os.umask(0)
    try:
        cache = Cache(tmp_path / "deep" / "deeper" / "cache")
    finally:
        os.umask(old)
    assert [f.stat().st_mode & 0o777 for f in (cache.folder, *cache.folder.parents[:2])] == [0o700] * 3


def test_only_links_of_ones_own_are_followed(tmp_path, monkeypatch):
    """Wherever on the way they are, and behind another link too."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "second").symlink_to("real")
    (tmp_path / "first").symlink_to(tmp_path / "second")
    assert Cache(tmp_path / "first" / "cache").folder == tmp_path.resolve() / "real" / "cache"
    owner = os.geteuid()
    if owner == 0:
        os.lchown(tmp_path / "second", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(RuntimeError, match=r"link .*(first|second) belongs to user"):
        Cache(tmp_path / "first" / "other")
    assert not (tmp_path / "real" / "other").exists()


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for folder in ("file", "file/cache", "loop"):
        with pytest.raises(RuntimeError, match="cannot be used as a folder"):
            Cache(tmp_path / folder)


def test_hosts_are_told_apart(monkeypatch):
    here = cache_module._this_host()
    assert here == cache_module._this_host()
    monkeypatch.setattr(cache_module.platform, "node", lambda: "elsewhere")
    assert here != cache_module._this_host()
