"""Documents from files, and their rows: order, boundaries, labels, what is left out."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from flashqla_cp.launch.packing import IGNORED_LABEL, PackedDocuments, find_documents, standard_library

TEXTS = {"a.txt": b"alpha", "b/c.txt": b"\xff\xfe\x00\x80gamma", "b/d.bin": b"delta delta", "e": b"ee"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    return tmp_path


def names(documents: list) -> list[str]:
    return [document.name.split("/", 1)[1] for document in documents]


def test_files_in_a_fixed_order_whatever_their_encoding(folder: Path) -> None:
    (folder / os.fsdecode(b"b/\xe9\xff")).write_bytes(b"name of no encoding")
    documents = find_documents([folder])
    assert names(documents)[:4] == ["a.txt", "b/c.txt", "b/d.bin", os.fsdecode(b"b/\xe9\xff")]
    assert [document.num_bytes for document in documents] == [5, 9, 11, 19, 2]
    assert len(PackedDocuments(documents, 16, 0).digest()) == 64


def test_what_is_left_out(folder: Path) -> None:
    for name in (".hidden", ".git/config", "__pycache__/x.pyc", "site-packages/p.py", "empty", "one"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes({"empty": b"", "one": b"1"}.get(name, b"text"))
    os.mkfifo(folder / "pipe")  # opening it would wait for ever
    (folder / "dangling").symlink_to("nowhere")
    locked = folder / "locked"
    locked.write_bytes(b"secret")
    locked.chmod(0)
    found = names(find_documents([folder]))
    assert found == sorted(TEXTS) if not os.access(locked, os.R_OK) else [*sorted(TEXTS), "locked"]


def test_suffixes_files_and_several_paths(folder: Path) -> None:
    assert names(find_documents([folder], [".txt"])) == ["a.txt", "b/c.txt"]
    both = find_documents([folder / "e", folder / "b"])
    assert [document.path for document in both] == [folder / "e", folder / "b/c.txt", folder / "b/d.bin"]
    assert len({document.name for document in both}) == 3


def test_standard_library_is_the_default() -> None:
    documents = find_documents()
    assert all(document.path.suffix == ".py" for document in documents)
    assert standard_library() / "argparse.py" in {document.path for document in documents}
    assert not any("site-packages" in document.path.parts for document in documents)


def test_missing_and_empty_sources(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"--data: got '.*nothing', which does not exist"):
        find_documents([folder / "nothing"])
    with pytest.raises(ValueError, match=r"--data: found no readable file of at least two bytes ending in \.py"):
        find_documents([folder], [".py"])


def test_an_epoch_visits_every_byte_once_in_a_new_order(folder: Path) -> None:
    data = PackedDocuments(find_documents([folder]), row_tokens=3, seed=3)
    assert data.num_bytes == 27 and data.rows_per_epoch == 9
    epochs = []
    for epoch in range(4):
        pieces = [piece for row in range(9 * epoch, 9 * epoch + 9) for piece in data.pieces(row)]
        covered = sorted((document, byte) for document, start, end in pieces for byte in range(start, end))
        assert covered == [(number, byte) for number, size in enumerate((5, 9, 11, 2)) for byte in range(size)]
        epochs.append(tuple(pieces))
    assert len(set(epochs)) == 4


def test_rows_of_a_long_document_are_spread(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(bytes(1000))
    (tmp_path / "other").write_bytes(bytes(1000))
    data = PackedDocuments(find_documents([tmp_path]), row_tokens=10, seed=0)
    visited = [next(data.pieces(row))[0] for row in range(data.rows_per_epoch)]
    assert 60 < sum(a != b for a, b in itertools.pairwise(visited)) < 140


def test_the_rest_of_an_epoch_is_less_than_a_row(folder: Path) -> None:
    data = PackedDocuments(find_documents([folder]), row_tokens=10, seed=0)
    assert data.rows_per_epoch == 2
    assert sum(end - start for row in (0, 1) for _, start, end in data.pieces(row)) == 20


def test_documents_are_bounded_and_labels_never_cross(folder: Path) -> None:
    data = PackedDocuments(find_documents([folder]), row_tokens=10, seed=0)
    for first, count in ((0, 1), (2, 3), (7, 2)):
        batch = data.batch(first, count)
        tokens, labels, offsets = batch.tokens[0], batch.labels[0], batch.offsets
        assert tokens.shape == labels.shape == (10 * count,)
        assert offsets[0] == 0 and offsets[-1] == 10 * count
        assert set(range(0, 10 * count + 1, 10)) <= set(offsets)  # a row's end is a document's end
        pieces = [bytes(tokens[a:b].tolist()) for a, b in itertools.pairwise(offsets)]
        assert all(any(piece in text for text in TEXTS.values()) for piece in pieces)
        for start, end in itertools.pairwise(offsets):
            assert labels[start : end - 1].tolist() == tokens[start + 1 : end].tolist()
            assert labels[end - 1] == IGNORED_LABEL
        assert data.num_labels(first, count) == int((labels != IGNORED_LABEL).sum())


def test_rows_do_not_depend_on_how_they_are_asked_for(folder: Path) -> None:
    documents = find_documents([folder])
    forward, backward = PackedDocuments(documents, 7, 1), PackedDocuments(documents, 7, 1)
    rows = [forward.batch(row, 1).tokens for row in range(12)]  # four epochs
    assert all(torch.equal(rows[row], backward.batch(row, 1).tokens) for row in reversed(range(12)))
    assert torch.equal(torch.cat(rows[4:7], dim=1), backward.batch(4, 3).tokens)


def test_a_row_may_be_longer_than_all_documents(folder: Path) -> None:
    data = PackedDocuments(find_documents([folder]), row_tokens=100, seed=0)
    batch = data.batch(1, 1)
    assert batch.tokens.shape == (1, 100) and len(batch.offsets) > 3 * len(TEXTS)


def test_digest_tells_data_apart(folder: Path) -> None:
    documents = find_documents([folder])
    digests = {PackedDocuments(documents, 8, 0).digest(), PackedDocuments(documents, 9, 0).digest()}
    digests |= {PackedDocuments(documents, 8, 1).digest(), PackedDocuments(documents[1:], 8, 0).digest()}
    (folder / "e").write_bytes(b"eee")
    digests.add(PackedDocuments(find_documents([folder]), 8, 0).digest())
    assert len(digests) == 5
    (folder / "e").write_bytes(b"ee")
    assert PackedDocuments(find_documents([folder]), 8, 0).digest() in digests


def test_a_file_that_changes_during_the_run_is_reported(folder: Path) -> None:
    data = PackedDocuments(find_documents([folder / "b/d.bin"]), row_tokens=11, seed=0)
    (folder / "b/d.bin").write_bytes(b"short")
    with pytest.raises(RuntimeError, match=r"d\.bin: has become shorter"):
        data.batch(0, 1)
    (folder / "b/d.bin").unlink()
    with pytest.raises(RuntimeError, match=r"d\.bin: can no longer be read"):
        data.batch(0, 1)
