"""Checkpoints of a training run: torch.distributed.checkpoint folders that hold tensors and one JSON file.

    OUT/checkpoints/step-00000100/   .metadata, *.distcp (tensors), settings.json
    OUT/checkpoints/latest           the name of the newest complete folder

A folder is written under another name and renamed when complete, and `latest` is replaced in one step, so a kill at any
moment leaves the previous checkpoint usable. Tensors are stored whole and once, so any number of ranks can read them.

Reading executes nothing that a checkpoint holds: torch reads tensors with weights_only=True, and the index, which is a
pickle, goes through an unpickler that knows the record types of the index and nothing else; entries other than tensors
are refused, because torch would unpickle those freely.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from flashqla_cp.launch.ranks import Ranks

FOLDER_NAME = re.compile(r"step-\d{8}")
_METADATA = "torch.distributed.checkpoint.metadata"
# The types that torch's writer puts into an index (torch 2.8 to 2.13).
_INDEX_TYPES = {
    *(
        (_METADATA, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "ChunkStorageMetadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def save(
    out: Path, step: int, model: nn.Module, optimizer: torch.optim.AdamW, settings: dict[str, Any], ranks: Ranks
) -> Path:
    """Write the state after `step` steps and make it the newest; every rank calls it. Returns the folder."""
    folder = out / "checkpoints" / f"step-{step:08d}"
    partial = folder.with_name(folder.name + ".partial")
    if ranks.rank == 0:
        _remove(partial)
        partial.mkdir(parents=True)
    ranks.wait_for_all()
    with _quiet():
        dcp.save(_state(model, optimizer, step), checkpoint_id=partial, no_dist=ranks.world_size == 1)
    if ranks.rank == 0:
        (partial / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
        # Left by an earlier run; `latest` does not name it (see start_from).
        _remove(folder)
        os.rename(partial, folder)
        _replace_text(folder.parent / "latest", folder.name)
    ranks.wait_for_all()
    return folder


def newest(out: Path) -> Path | None:
    """The folder that `latest` names, None if nothing was saved.

    Raises:
        ValueError: `latest` names something that is no checkpoint of this folder.
    """
    pointer = out / "checkpoints" / "latest"
    try:
        name = pointer.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{pointer}: cannot be read ({error.strerror})") from error
    if not FOLDER_NAME.fullmatch(name):
        raise ValueError(f"{pointer}: got {name[:80]!r}, expected a name like step-00000100")
    return check_folder(pointer.parent / name)


def check_folder(folder: Path) -> Path:
    """Return `folder` if it holds a complete checkpoint, else raise ValueError."""
    if not folder.is_dir():
        raise ValueError(
            f"--resume: there is no folder {str(folder)!r}; expected one like OUT/checkpoints/step-00000100"
        )
    for name in (".metadata", "settings.json"):
        if not (folder / name).is_file():
            raise ValueError(
                f"--resume: {str(folder)!r} is no complete checkpoint: it has no {name}; "
                "expected a folder like OUT/checkpoints/step-00000100"
            )
    return folder


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint: the objects "model" and "curve".

    Raises:
        ValueError: the file cannot be read or holds anything else.
    """
    path = folder / "settings.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except Exception as error:  # damage has no type of its own: nesting without end is a RecursionError
        raise ValueError(f"{path}: not JSON ({_reason(error)})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: got {type(settings).__name__}, expected an object")
    for name in ("model", "curve"):
        if not isinstance(settings.get(name), dict):
            raise ValueError(f"{path}: {name} is {type(settings.get(name)).__name__}, expected an object")
    return settings


def start_from(out: Path, folder: Path | None) -> bool:
    """Make `folder` the newest checkpoint, so that no later resume picks up what an earlier run left beyond it.

    None, or a folder elsewhere, leaves no newest one; returns whether there was one. Folders stay until a save or prune
    meets them.
    """
    pointer = out / "checkpoints" / "latest"
    if folder is not None and pointer.parent.exists() and folder.resolve().parent == pointer.parent.resolve():
        _replace_text(pointer, folder.name)
        return False
    existed = pointer.exists()
    pointer.unlink(missing_ok=True)
    return existed


def prune(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` folders up to the one that `latest` names."""
    last = newest(out)
    folders = sorted(path for path in (out / "checkpoints").iterdir() if FOLDER_NAME.fullmatch(path.name))
    for folder in [path for path in folders if last is not None and path.name <= last.name][:-keep]:
        _remove(folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, ranks: Ranks) -> int:
    """Read a checkpoint into model and optimizer; every rank calls it. Returns the number of steps done.

    Raises:
        ValueError: the index holds anything but tensors, or names and shapes other than the model's, or a file is
            damaged; on every rank alike, whichever rank met it.
    """
    state = _state(model, optimizer, 0)
    with _quiet():
        reader = TensorsOnlyReader(folder)

        def check() -> None:
            read_settings(folder)
            _check_names(folder, reader.read_metadata(), state)

        ranks.together(check)
        try:
            dcp.load(state, storage_reader=reader, no_dist=ranks.world_size == 1)
        except dcp.CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise ValueError(f"{folder}: cannot be read on rank {rank}: {_reason(cause)}") from error
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    step = int(state["step"])
    moments = {
        number: {
            "step": torch.tensor(float(step)),
            "exp_avg": state[f"exp_avg.{name}"],
            "exp_avg_sq": state[f"exp_avg_sq.{name}"],
        }
        for number, name in enumerate(order)
    }
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return step


class TensorsOnlyReader(dcp.FileSystemReader):
    """Reads a checkpoint folder without executing anything in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _unpickle_index(path.read_bytes())
            _check_index(metadata)
        except Exception as error:  # a damaged pickle can build anything, and so fail with anything
            raise ValueError(f"{path}: not an index of tensors ({_reason(error)})") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def _unpickle_index(data: bytes) -> Any:
    for opcode, argument, _ in pickletools.genops(data):
        # The unpickler makes room for all numbers up to this one: a damaged one would take the memory of the machine.
        if opcode.name.endswith("PUT") and int(argument or 0) > len(data):
            raise ValueError(f"it numbers an object {argument}")
    return _IndexUnpickler(io.BytesIO(data)).load()


def _check_index(metadata: Any) -> None:
    """Raise ValueError, or whatever broken records lead to, unless it lists tensors, each stored whole."""
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it is a {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name!r} is a {type(entry).__name__}, expected tensors only")
        parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        if parts != [((0,) * len(entry.size), tuple(entry.size))]:
            raise ValueError(f"{name!r} is not stored whole")
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            raise ValueError(f"it points outside of the folder, to {stored.relative_path!r}")


class _IndexUnpickler(pickle.Unpickler):
    """Knows the records of an index; any other name in the pickle is an error before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name == "PosixPath" and module.split(".")[0] == "pathlib":
            return PurePosixPath  # the module's name differs between versions of Python
        if (module, name) not in _INDEX_TYPES and not is_dtype:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _reason(error: BaseException) -> str:
    """One line: an error's type and the first line of its text, if it has any."""
    text = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *text[:1]])


def _state(model: nn.Module, optimizer: torch.optim.AdamW, step: int) -> dict[str, torch.Tensor]:
    """Everything a run needs to go on, as tensors by name; zeros where the optimizer has no moments yet."""
    state: dict[str, torch.Tensor] = {"step": torch.tensor(step)}
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        state[f"model.{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{moment}.{name}"] = moments.get(moment, torch.zeros_like(parameter.detach()))
    return state


def _check_names(folder: Path, metadata: Metadata, state: dict[str, torch.Tensor]) -> None:
    entries = metadata.state_dict_metadata
    stored = {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if stored != wanted:
        different = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
        name = different[0]
        raise ValueError(
            f"{folder}: {name} has shape {stored.get(name)}, expected {wanted.get(name)} "
            f"({len(different)} of {len(wanted)} tensors differ); was it saved by a model of another size?"
        )


def _replace_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader sees the old or the new text."""
    scratch = path.with_name(path.name + ".new")
    with open(scratch, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's notice that one process without a process group works alone, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
