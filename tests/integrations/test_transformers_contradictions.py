"""Calls of models of transformers that would be silently wrong: refused, or at least warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_transformers import HYBRID, LINEAR, make_batch, make_model

from flashqla_cp import build_cp_context
from flashqla_cp.integrations.transformers import enable_context_parallel, use_context
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.spawn import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS = 96
OFFSETS = (0, 7, 20)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_full_attention_must_be_told_packed_documents() -> None:
    model = make_model("qwen3_next", HYBRID).eval()
    batch = make_batch(OFFSETS)
    with torch.no_grad():
        alone = [model(input_ids=batch["input_ids"][:, s:e]).logits for s, e in pairwise(OFFSETS)]
        enable_context_parallel(model, None, backend="torch")
        with pytest.raises(ValueError, match=r"position_ids: got none for packed documents .* \('sdpa'\)"):
            model(input_ids=batch["input_ids"], cu_seq_lens_q=offsets(*OFFSETS))
        whole = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        told = model(**whole, cu_seq_lens_q=offsets(*OFFSETS))
        assert relative_l2(told.logits, torch.cat(alone, 1)) <= 1e-5
        model(input_ids=batch["input_ids"], cu_seq_lens_q=offsets(0, 20))  # one document
        model.model.config._attn_implementation = "flash_attention_2"  # which reads cu_seq_lens_q
        with pytest.raises(Exception) as other:  # and is not here: it raises where attention begins
            model(input_ids=batch["input_ids"], cu_seq_lens_q=offsets(*OFFSETS))
        assert "position_ids: got none" not in str(other.value)


def test_linear_models_need_no_positions() -> None:
    model = make_model("qwen3_next", LINEAR).eval()
    enable_context_parallel(model, None, backend="torch")
    with torch.no_grad():
        model(input_ids=make_batch(OFFSETS)["input_ids"], cu_seq_lens_q=offsets(*OFFSETS))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cu_seq_lens_q": offsets(0, 7, 10)}, "cu_seq_lens_q: end at 10 in a row of 20 tokens, expected 20"),
        (
            {"cu_seq_lens_q": offsets(0, 7, 20), "cu_seq_lens_k": offsets(0, 8, 20)},
            r"cu_seq_lens_k: got \[0, 8, 20\] with cu_seq_lens_q \[0, 7, 20\]",
        ),
        ({"cu_seq_lens_k": offsets(0, 8, 20)}, r"cu_seq_lens_k: got \[0, 8, 20\] with cu_seq_lens_q None"),
    ],
)
def test_offsets_that_cannot_be_meant(given: dict[str, torch.Tensor], text: str) -> None:
    model = make_model("qwen3_next", LINEAR).eval()
    enable_context_parallel(model, None, backend="torch")
    with pytest.raises(ValueError, match=text):
        model(input_ids=make_batch(OFFSETS)["input_ids"], **given)


def test_equal_offsets_of_keys_are_fine() -> None:
    model = make_model("qwen3_next", LINEAR).eval()
    enable_context_parallel(model, None, backend="torch")
    with torch.no_grad():
        both = {"cu_seq_lens_q": offsets(*OFFSETS), "cu_seq_lens_k": offsets(*OFFSETS)}
        model(input_ids=make_batch(OFFSETS)["input_ids"], **both)


def test_a_compiled_model_is_called_so() -> None:
    with pytest.raises(ValueError, match=r"has been through torch\.compile; enable context parallelism before"):
        enable_context_parallel(torch.compile(make_model("qwen3_next", LINEAR), backend="eager"), None)


def _refusals(rank: int) -> dict[str, str]:
    """What each wrong call says."""
    ids, positions = make_batch((0, TOKENS))["input_ids"], torch.arange(TOKENS)[None]
    straight = build_cp_context(torch.tensor([0, TOKENS]), dist.group.WORLD)
    zigzag = build_cp_context(torch.tensor([0, TOKENS]), dist.group.WORLD, layout="zigzag")

    def said(call: Callable[[], Any]) -> str:
        try:
            with torch.no_grad():
                call()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    def within(context: Any, model: Any, **batch: torch.Tensor) -> Any:
        with use_context(context):
            return model(**batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of full attention
        linear, hybrid, plain = (make_model("qwen3_next", kind).eval() for kind in (LINEAR, HYBRID, LINEAR))
        enable_context_parallel(linear, dist.group.WORLD)
        enable_context_parallel(hybrid, dist.group.WORLD)
    wrong = {"input_ids": zigzag.shard(ids), "position_ids": zigzag.shard(positions)}
    right = {"input_ids": straight.shard(ids), "position_ids": straight.shard(positions)}
    jump = right["position_ids"] + (torch.arange(TOKENS // 2) >= 9)  # on all ranks: one alone would leave the others
    found = {
        "right": said(lambda: within(straight, linear, **right)),
        "zigzag": said(lambda: within(zigzag, linear, **wrong)),
        "other layout": said(lambda: within(straight, linear, **wrong)),
        "other layout by offsets": said(lambda: linear(**wrong, cu_seq_lens_q=offsets(0, TOKENS))),
        "jump": said(lambda: within(straight, linear, **right | {"position_ids": jump})),
        "no positions": said(lambda: within(straight, hybrid, input_ids=right["input_ids"])),
        "cache": said(lambda: within(straight, hybrid, **right, use_cache=True)),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        within(straight, plain, **right)
        within(straight, linear, **right)
    found["not enabled"] = " ".join(str(w.message) for w in caught if "no layer read" in str(w.message))
    found["warnings"] = str(sum("no layer read" in str(w.message) for w in caught))
    return found


def test_what_ranks_refuse() -> None:
    first, second = run_ranks(_refusals, 2, timeout=240.0)
    for found in (first, second):
        assert found["right"] == "" and found["zigzag"] == "", found
        assert "position_ids: got none for a model with full attention" in found["no positions"]
        assert "to generate call disable_context_parallel(model) first" in found["cache"]
        assert found["not enabled"].startswith("context: no layer read CPContext") and found["warnings"] == "1"
        # Alone with a context, on both with offsets, where they agree.
        assert "position_ids: " in found["other layout by offsets"]
    assert "position_ids: 72 at row 24 of this rank, which by its plan holds position 24" in first["other layout"]
    assert "position_ids: 58 at row 9 of this rank, which by its plan holds position 57" in second["jump"]


# What rank 1 alone is given in the place of what both are given, by name; None takes it away.
BY_OFFSETS, BY_POSITIONS = ("cu_seq_lens_q", "position_ids"), ("position_ids",)
FAULTS_OF_ONE_RANK: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any], str]] = {
    "no positions": (HYBRID, BY_OFFSETS, {"position_ids": None}, "position_ids: got none for a model with full"),
    "other keys": (LINEAR, BY_OFFSETS, {"cu_seq_lens_k": offsets(0, 8, TOKENS)}, "cu_seq_lens_k: got [0, 8, 96] with"),
    "keys alone": (LINEAR, BY_POSITIONS, {"cu_seq_lens_k": offsets(0, TOKENS)}, "with cu_seq_lens_q None, expected"),
    "keys for queries": (
        LINEAR,
        BY_OFFSETS,
        {"cu_seq_lens_q": None, "cu_seq_lens_k": offsets(0, TOKENS)},
        "with cu_seq_lens_q None, expected",
    ),
    "labels": (LINEAR, BY_POSITIONS, {"labels": torch.zeros(1, TOKENS // 2).long()}, "labels: got them without shift"),
}


def _refusal_of_one_rank(rank: int, name: str) -> tuple[str, str]:
    """The error of a call whose fault rank 1 alone can see, and whether the next call of both is right again."""
    kind, sources, fault, _ = FAULTS_OF_ONE_RANK[name]
    batch, context = make_batch((0, TOKENS)), build_cp_context([0, TOKENS], dist.group.WORLD)
    model = make_model("qwen3_next", kind).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of full attention
        enable_context_parallel(model, dist.group.WORLD)
    given = {"input_ids": context.shard(batch["input_ids"])}
    told = {"cu_seq_lens_q": offsets(0, TOKENS), "position_ids": context.shard(batch["position_ids"])}
    given |= {source: told[source] for source in sources}
    with torch.no_grad():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            model(**given | (fault if rank else {}))
        right = model(**given).logits.shape
    return f"{caught.type.__name__}: {caught.value}", str(list(right))


@pytest.mark.parametrize("name", FAULTS_OF_ONE_RANK)
def test_what_one_rank_refuses_without_a_context_is_raised_on_all(name: str) -> None:
    """The other rank would else wait for it until it exits."""
    text = FAULTS_OF_ONE_RANK[name][-1]
    (first, *right), (second, *_) = run_ranks(_refusal_of_one_rank, 2, name, timeout=60.0)
    assert first.startswith("RuntimeError: rank 1 of the context-parallel group") and text in first
    assert second.startswith("ValueError: ") and text in second
    assert right == [f"[1, {TOKENS // 2}, 64]"]
