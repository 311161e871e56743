"""Checkpoints of the training program: what comes back, what a kill leaves, and that loading executes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import tracemalloc
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from flashqla_cp.launch import checkpoints
from flashqla_cp.launch.ranks import Ranks

ALONE = Ranks(rank=0, world_size=1, data_rank=0, data_size=1, cp_group=None, device=torch.device("cpu"))

SETTINGS = {"model": {"width": 4}, "curve": {"seed": 0}}


class Trap:
    """A pickle of it creates the file `path` when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def make(width: int = 4, seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    return model, torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.1)


def advance(model: nn.Module, optimizer: torch.optim.AdamW, steps: int) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def save(out: Path, step: int = 3) -> Path:
    model, optimizer = make()
    advance(model, optimizer, step)
    return checkpoints.save(out, step, model, optimizer, SETTINGS, ALONE)


def test_what_was_saved_goes_on_bitwise_alike(tmp_path: Path) -> None:
    folder = save(tmp_path)
    model, optimizer = make()
    advance(model, optimizer, 3)
    expected = advance(model, optimizer, 2)
    other, other_optimizer = make(seed=1)
    assert checkpoints.load(folder, other, other_optimizer, ALONE) == 3
    assert all(torch.equal(a, b) for a, b in zip(expected, advance(other, other_optimizer, 2), strict=True))
    assert checkpoints.read_settings(folder) == SETTINGS
    assert checkpoints.newest(tmp_path) == folder


def test_a_folder_is_torch_s_own_format(tmp_path: Path) -> None:
    state = {"model.0.weight": torch.zeros(4, 3), "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=save(tmp_path), no_dist=True)
    model, optimizer = make()
    assert torch.equal(state["model.0.weight"], advance(model, optimizer, 3)[0]) and state["step"] == 3


def test_a_kill_while_saving_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, step=2)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    replacements = [("dcp", dcp, "save"), ("os", os, "rename"), ("os", os, "replace")]
    for name, module, function in replacements:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(checkpoints, name, SimpleNamespace(**{**vars(module), function: killed}))
            save(tmp_path, step=4)
        assert checkpoints.newest(tmp_path) == first
        checkpoints.load(first, *make(), ALONE)
    assert checkpoints.newest(tmp_path) == first
    assert save(tmp_path, step=4) == checkpoints.newest(tmp_path)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    checkpoints.prune(tmp_path, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000003", "step-00000004"]


def test_a_new_start_forgets_what_lies_beyond_it(tmp_path: Path) -> None:
    early, _ = save(tmp_path, 1), save(tmp_path, 2)
    assert not checkpoints.start_from(tmp_path, early)
    assert checkpoints.newest(tmp_path) == early
    assert checkpoints.start_from(tmp_path, None)
    assert checkpoints.newest(tmp_path) is None
    assert not checkpoints.start_from(tmp_path, None)
    assert not checkpoints.start_from(tmp_path / "other", early)
    assert checkpoints.newest(tmp_path / "other") is None


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "step-1", "step-00000001/..", ""])
def test_the_pointer_names_a_folder_beside_it_and_nothing_else(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text(name)
    with pytest.raises(ValueError, match="expected a name like step-00000100"):
        checkpoints.newest(tmp_path)


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"no complete checkpoint: it has no \.metadata"):
        checkpoints.newest(tmp_path)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path)
    with pytest.raises(ValueError, match=r"0\.bias has shape \(4,\), expected \(5,\).* another size"):
        checkpoints.load(folder, *make(width=5), ALONE)


def index_trap(folder: Path, trap: Trap) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(trap))


def hidden_index_trap(folder: Path, trap: Trap) -> None:
    """A whole index with the trap in a field that nobody reads."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = trap
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def tensor_trap(folder: Path, trap: Trap) -> None:
    """The index points at a pickle where a tensor is expected."""
    (file,) = folder.glob("*.distcp")
    torch.save(trap, file)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, file.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def object_trap(folder: Path, trap: Trap) -> None:
    """The whole checkpoint as torch would write it with an object among the tensors."""
    state = {**checkpoints._state(*make(), 3), "step": trap}
    shutil.rmtree(folder)
    dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("plant", [index_trap, hidden_index_trap, tensor_trap, object_trap])
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, plant: Any) -> None:
    folder, sprung = save(tmp_path), tmp_path / "sprung"
    plant(folder, Trap(sprung))
    sprung.unlink(missing_ok=True)
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        checkpoints.load(folder, *make(), ALONE)
    assert not sprung.exists()


@pytest.mark.parametrize("plant", [index_trap, hidden_index_trap, object_trap])
def test_the_traps_work(tmp_path: Path, plant: Any) -> None:
    """torch's own reader springs them, so that the test above means something."""
    folder, sprung = save(tmp_path), tmp_path / "sprung"
    plant(folder, Trap(sprung))
    sprung.unlink(missing_ok=True)
    with contextlib.suppress(dcp.CheckpointException):
        dcp.load(checkpoints._state(*make(), 0), checkpoint_id=folder, no_dist=True)
    assert sprung.exists()


def test_settings_are_plain_json(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert json.loads((folder / "settings.json").read_text()) == SETTINGS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{bad", "not JSON"),
        (b"", "not JSON"),
        (b'{"model": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "got list, expected an object"),
        (b"{}", "model is NoneType, expected an object"),
        (b'{"model": {}, "curve": 5}', "curve is int, expected an object"),
    ],
)
def test_damaged_settings_are_refused(tmp_path: Path, text: bytes, expected: str) -> None:
    folder = save(tmp_path)
    (folder / "settings.json").write_bytes(text)
    for read in (lambda: checkpoints.read_settings(folder), lambda: checkpoints.load(folder, *make(), ALONE)):
        with pytest.raises(ValueError, match=expected) as caught:
            read()
        assert "settings.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_tensors_are_refused_with_a_cause(tmp_path: Path, kept: float) -> None:
    folder = save(tmp_path)
    (file,) = folder.glob("*.distcp")
    os.truncate(file, int(kept * file.stat().st_size))
    with pytest.raises(ValueError, match=r"cannot be read on rank 0: \w+") as caught:
        checkpoints.load(folder, *make(), ALONE)
    assert "\n" not in str(caught.value)


def test_a_damaged_index_is_refused_or_harmless(tmp_path: Path) -> None:
    """Whatever the damage breaks; what still loads is what was saved."""
    folder, random = save(tmp_path), Random(0)
    model, optimizer = make()
    expected = [*advance(model, optimizer, 3), *checkpoints._state(model, optimizer, 3).values()]
    whole, causes = (folder / ".metadata").read_bytes(), set()
    for trial in range(1500):
        damaged = bytearray(whole)
        for _ in range(1 + trial % 3):
            damaged[random.randrange(len(whole))] = random.randrange(256)
        (folder / ".metadata").write_bytes(damaged[: random.randrange(len(whole))] if trial % 10 == 0 else damaged)
        other, other_optimizer = make(seed=1)
        try:
            checkpoints.load(folder, other, other_optimizer, ALONE)
        except ValueError as error:
            assert str(error).startswith(str(folder)) and "\n" not in str(error)
            causes.add(str(error).split("(")[-1].split(":")[0])
        else:
            state = [*other.parameters(), *checkpoints._state(other, other_optimizer, 3).values()]
            assert all(torch.equal(a, b) for a, b in zip(expected, state, strict=True))
    assert {"UnicodeDecodeError", "AttributeError", "TypeError"} <= causes


def test_a_damaged_number_does_not_take_the_memory(tmp_path: Path) -> None:
    folder = save(tmp_path)
    for opcode in (pickle.LONG_BINPUT, pickle.BINBYTES, pickle.BINUNICODE):
        (folder / ".metadata").write_bytes(b"\x80\x04N" + opcode + b"\xff\xff\xff\x7f.")
        tracemalloc.start()
        with pytest.raises(ValueError, match="not an index of tensors"):
            checkpoints.load(folder, *make(), ALONE)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**24


def test_a_tensor_in_parts_is_refused(tmp_path: Path) -> None:
    """A part that is missing would leave the rows as they were."""
    folder = save(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (chunk,) = metadata.state_dict_metadata["model.0.weight"].chunks
    chunk.sizes = torch.Size([3, 3])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"'model\.0\.weight' is not stored whole"):
        checkpoints.load(folder, *make(), ALONE)


def test_a_pointer_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    with pytest.raises(ValueError, match="latest: cannot be read"):
        checkpoints.newest(tmp_path)


def test_paths_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = "../" + stored.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="points outside of the folder"):
        checkpoints.load(folder, *make(), ALONE)
