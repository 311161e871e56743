"""Files as packed documents: a stream of bytes in a seeded order, cut into rows of equal length.

Every epoch lays all documents in a new order, cuts that stream into rows of T bytes and visits the rows in a new order
too, so that a long file does not fill many steps in a row. What is left over at the epoch's end, less than a row, waits
for the next epoch. A document that a row's end cuts becomes two.

All of this follows from the seed and a row's number alone, whatever the number of ranks: a resumed run continues
without having to remember a position. Nothing is read before it is needed; one batch is in memory at a time.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

IGNORED_LABEL = -100
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
# A document of one byte has no next byte to learn from.
SHORTEST_DOCUMENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A file that is one document."""

    path: Path
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows side by side: tokens and labels [1, T] (int64) and the documents' offsets."""

    tokens: torch.Tensor
    labels: torch.Tensor
    offsets: tuple[int, ...]


def find_documents(paths: Sequence[Path] = (), suffixes: Sequence[str] = ()) -> list[Document]:
    """List the documents below files and folders in an order that is the same on every machine.

    Hidden entries, caches, installed packages and what cannot be read are left out, and so are files of less than two
    bytes. Encodings do not matter: a document is its bytes.

    Args:
        paths: files and folders; none stands for the sources of Python's standard library.
        suffixes: file name endings to keep in folders, such as ".py"; none keeps all.

    Raises:
        ValueError: a path that does not exist, or no document found.
    """
    if not paths:
        paths, suffixes = [standard_library()], suffixes or (".py",)
    found = []
    for number, path in enumerate(paths):
        if not path.exists():
            raise ValueError(f"--data: got {str(path)!r}, which does not exist; expected files or folders")
        for file in sorted(_files_below(path, tuple(suffixes)), key=lambda file: os.fsencode(file)):
            num_bytes = _readable_bytes(file)
            if num_bytes >= SHORTEST_DOCUMENT:
                inside = file.relative_to(path).as_posix()
                found.append(Document(path=file, name=f"{number}/{inside}", num_bytes=num_bytes))
    if not found:
        only = f" ending in {', '.join(suffixes)}" if suffixes else ""
        raise ValueError(f"--data: found no readable file of at least two bytes{only} in {', '.join(map(str, paths))}")
    return found


def standard_library() -> Path:
    """The folder of Python's own sources."""
    path = Path(sysconfig.get_path("stdlib"))
    if not path.is_dir():
        raise ValueError(f"--data: this Python keeps no library sources in {str(path)!r}; name files or folders")
    return path


class PackedDocuments:
    """Rows of packed documents, by number.

    Args:
        documents: what find_documents returned.
        row_tokens: length of a row.
        seed: of the documents' order.
    """

    def __init__(self, documents: Sequence[Document], row_tokens: int, seed: int) -> None:
        self.documents, self.row_tokens, self.seed = list(documents), row_tokens, seed
        self._sizes = torch.tensor([document.num_bytes for document in documents], dtype=torch.int64)
        self.num_bytes = int(self._sizes.sum())
        # Few documents and long rows: an epoch goes round them as often as one row needs.
        self._laps = -(-row_tokens // self.num_bytes)
        self.rows_per_epoch = self._laps * self.num_bytes // row_tokens
        self._epochs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """(document, start, end) of the bytes that make up the row visited as number `row`, in order."""
        epoch, visit = divmod(row, self.rows_per_epoch)
        order, ends, rows = self._epoch(epoch)
        position = int(rows[visit]) * self.row_tokens
        row_end = position + self.row_tokens
        slot = int(torch.searchsorted(ends, position, right=True))
        while position < row_end:
            document, document_end = int(order[slot]), int(ends[slot])
            document_start = document_end - self.documents[document].num_bytes
            end = min(document_end, row_end)
            yield document, position - document_start, end - document_start
            position, slot = end, slot + 1

    def num_labels(self, first_row: int, num_rows: int) -> int:
        """Tokens of these rows that have a next token in their document; reads no file."""
        rows = range(first_row, first_row + num_rows)
        return sum(end - start - 1 for row in rows for _, start, end in self.pieces(row))

    def batch(self, first_row: int, num_rows: int) -> Batch:
        """Read rows first_row .. first_row + num_rows - 1, packed side by side.

        Raises:
            RuntimeError: a file that has changed since it was listed.
        """
        text, offsets = bytearray(), [0]
        for row in range(first_row, first_row + num_rows):
            for document, start, end in self.pieces(row):
                text += self._read(document, start, end)
                offsets.append(len(text))
        tokens = torch.frombuffer(text, dtype=torch.uint8).long()
        labels = torch.full_like(tokens, IGNORED_LABEL)
        labels[:-1] = tokens[1:]
        labels[torch.tensor(offsets[1:]) - 1] = IGNORED_LABEL
        return Batch(tokens=tokens[None], labels=labels[None], offsets=tuple(offsets))

    def digest(self) -> str:
        """Hex digits that differ where the documents' names or lengths, the row length or the seed differ."""
        text = hashlib.sha256(f"{self.row_tokens} {self.seed}".encode())
        for document in self.documents:
            text.update(os.fsencode(document.name) + f"\0{document.num_bytes}\0".encode())
        return text.hexdigest()

    def _epoch(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The documents' order in an epoch, where each ends, and the order of the rows."""
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            laps = [torch.randperm(len(self.documents), generator=generator) for _ in range(self._laps)]
            order = torch.cat(laps)
            rows = torch.randperm(self.rows_per_epoch, generator=generator)
            # Rows are asked for in order: an epoch and the one before it are all that a step needs.
            self._epochs = {number: kept for number, kept in self._epochs.items() if number == epoch - 1}
            self._epochs[epoch] = order, self._sizes[order].cumsum(0), rows
        return self._epochs[epoch]

    def _read(self, document: int, start: int, end: int) -> bytes:
        path = self.documents[document].path
        try:
            with open(path, "rb") as file:
                file.seek(start)
                text = file.read(end - start)
        except OSError as error:
            raise RuntimeError(f"{path}: can no longer be read ({error.strerror}); documents must stay") from error
        if len(text) != end - start:
            raise RuntimeError(f"{path}: has become shorter since the run began; documents must stay as they were")
        return text


def _files_below(path: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and (not suffixes or name.endswith(suffixes)):
                yield Path(folder, name)


def _readable_bytes(file: Path) -> int:
    """The size of a regular file that can be read, 0 for anything else."""
    try:
        # Not opened before it is known to be a file: opening a pipe would wait for its writer.
        if not stat.S_ISREG(file.stat().st_mode):
            return 0
        with open(file, "rb") as opened:
            return os.fstat(opened.fileno()).st_size
    except OSError:
        return 0
