"""What a context keeps on a device: by stream, found again in a capture, and complete after the first call."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashqla_cp import causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.cli.bench_contenders import middle_of_documents
from flashqla_cp.kernels.chunks import ChunkTable
from flashqla_cp.parallel import context as context_module
from flashqla_cp.parallel.context import CPContext, context_of
from flashqla_cp.parallel.exchange.choose import EXCHANGES
from flashqla_cp.program import Program
from flashqla_cp.testing.inputs import make_inputs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RANKS, OFFSETS = 3, (0, 70, 70, 128)


def middle_of(exchange: str) -> CPContext:
    """Of the middle rank of RANKS, each of which holds a part of two documents, or of one."""
    return middle_of_documents(OFFSETS, RANKS, CPU, exchange)


class Device:
    """Stands for torch.cuda: which stream is current, and whether it is captured."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stream, self.captured = 1, False
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captured)


def test_a_stream_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device, context, made = Device(monkeypatch), middle_of("allgather"), iter(range(9))
    assert [context.kept(("name",), GPU, lambda: next(made)) for _ in range(2)] == [0, 0]
    device.stream = 2
    assert context.kept(("name",), GPU, lambda: next(made)) == 1
    assert context.kept(("other",), GPU, lambda: next(made)) == 2
    device.stream = 1
    assert context.kept(("name",), GPU, lambda: next(made)) == 0
    assert context.kept(("name",), torch.device("cuda", 1), lambda: next(made)) == 3
    assert [context.kept(("name",), CPU, lambda: next(made)) for _ in range(2)] == [4, 4]


def test_a_capture_takes_what_another_stream_has(monkeypatch: pytest.MonkeyPatch) -> None:
    device, context = Device(monkeypatch), middle_of("allgather")
    context.kept(("name",), GPU, lambda: "made")
    device.stream, device.captured = 2, True
    assert context.kept(("name",), GPU, lambda: "not in a capture") == "made"
    with pytest.raises(RuntimeError, match=r"cp_context: .* make the same call once before the capture"):
        context.kept(("other",), GPU, lambda: "not in a capture")
    device.captured = False
    assert context.kept(("name",), GPU, lambda: "its own") == "its own"
    assert context.kept(("other",), GPU, lambda: "made") == "made", "a refused capture leaves nothing that is found"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_calls_after_the_first_make_nothing_of_numbers(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each such tensor is a copy that waits for it, and none can be made in a capture."""
    context = middle_of(exchange)
    inputs = make_inputs(context.local_tokens, 2, 4, 8, 8)
    initial = torch.randn(len(OFFSETS) - 1, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(32, 4, dtype=torch.float64, requires_grad=True)

    def step() -> list[torch.Tensor]:
        v, _ = causal_conv1d(inputs["v"].flatten(2), weight, cp_context=context)
        x = inputs | {"v": v.unflatten(2, (4, 8))}
        o, final = chunk_gated_delta_rule(**x, initial_state=initial, output_final_state=True, cp_context=context)
        assert final is not None
        return list(torch.autograd.grad(o.square().sum() + final.square().sum(), [*inputs.values(), initial, weight]))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("made again")

    first = step()
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (Program, "_build"), (ChunkTable, "of")):
        monkeypatch.setattr(owner, name, refuse)
    assert all(map(torch.equal, first, step()))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_inference_makes_all_that_training_reads(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a step can be captured after a call without gradients, and torch's after one on kernels."""
    context = middle_of(exchange)
    inputs = make_inputs(context.local_tokens, 2, 4, 8, 8)
    Program.of_context(context, CPU)  # as kernels want it
    with torch.inference_mode():
        chunk_gated_delta_rule(**inputs, cp_context=context)
    monkeypatch.setattr(ChunkTable, "of", lambda *_: pytest.fail("made in a capture"))
    o, _ = chunk_gated_delta_rule(**inputs, cp_context=context)
    o.sum().backward()


@pytest.mark.parametrize("exchange", ["allgather", "headwise"])
def test_unshard_finds_the_rows_once(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = middle_of(exchange)
    x = torch.arange(whole.local_tokens, dtype=torch.float64)[None, :, None]
    first = whole.unshard(x)
    monkeypatch.setattr(context_module, "token_rows", lambda plan: pytest.fail("counted again"))
    assert torch.equal(first, whole.unshard(x)) and first.shape[1] == OFFSETS[-1]


def test_a_copied_model_keeps_its_context() -> None:
    """Compiled calls find a context by its handle, which a copy shares."""
    context = middle_of("allgather")
    copied = copy.deepcopy({"context": context})["context"]
    del context
    assert context_of(copied.handle).plan is copied.plan
