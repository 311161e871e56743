"""cu_seqlens beside its copy on the CPU: what costs no waiting for a device is looked at, and a difference refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashqla_cp import build_cp_context, chunk_gated_delta_rule
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.spawn import run_ranks

TOKENS = 20
COPY = torch.tensor([0, 7, TOKENS])
FAULTS: dict[str, tuple[type[Exception], str, Any]] = {
    "dtype": (TypeError, r"cu_seqlens: expected integers, got torch\.float32", torch.tensor([0.0, 7.0, TOKENS])),
    "rank": (ValueError, r"cu_seqlens: expected offsets of shape \[N\+1\], got \[1, 3\]", COPY[None]),
    "length": (ValueError, "cu_seqlens: has 2 offsets, expected the 3 of cu_seqlens_cpu, its copy", [0, TOKENS]),
    "no_offsets": (TypeError, "cu_seqlens: expected integer offsets", "offsets"),
}
VALUES = (
    ValueError,
    "cu_seqlens: is 8 at index 1, expected 7 as in cu_seqlens_cpu, its copy",
    torch.tensor([0, 8, 20]),
)
# A device whose values would cost something: meta has none at all.
ELSEWHERE = {name: (error, text, x.to("meta")) for name, (error, text, x) in FAULTS.items() if torch.is_tensor(x)}
ELSEWHERE["length"] = (*FAULTS["length"][:2], torch.zeros(2, dtype=torch.int32, device="meta"))
ALL = {**FAULTS, "values": VALUES, **{f"{name}_elsewhere": fault for name, fault in ELSEWHERE.items()}}


def _run(run: Callable[..., Any] = chunk_gated_delta_rule, **offsets: Any) -> torch.Tensor:
    x = {name: t.detach() for name, t in make_inputs(TOKENS, 1, 2, 8, 6).items()}
    return run(**x, **offsets)[0]


@pytest.mark.parametrize("fault", ALL)
def test_the_op_refuses(fault: str) -> None:
    error, text, given = ALL[fault]
    with pytest.raises(error, match=f"^{text}"):
        _run(cu_seqlens=given, cu_seqlens_cpu=COPY)


AGREEING = (COPY, COPY.int(), COPY.tolist(), COPY.clone(), COPY.to("meta"), None)


def _contexts(rank: int) -> list[str]:
    texts = []
    for given in (*(given for *_, given in ALL.values()), *AGREEING):
        try:
            context = build_cp_context(given, dist.group.WORLD, cu_seqlens_cpu=COPY)
            texts.append(str(context.plan.cu_seqlens))
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_a_context_refuses() -> None:
    (texts,) = run_ranks(_contexts, 1)
    for text, (error, expected, _) in zip(texts, ALL.values(), strict=False):
        assert re.match(f"{error.__name__}: {expected}", text), text
    assert set(texts[len(ALL) :]) == {"(0, 7, 20)"}


@pytest.mark.parametrize("fault", [name for name in ALL if name not in ("values", "no_offsets")])
def test_a_compiled_call_refuses(fault: str) -> None:
    """But for values, which a graph would have to wait for."""
    torch._dynamo.reset()
    _, text, given = ALL[fault]
    run = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=text):
        _run(run, cu_seqlens=torch.as_tensor(given), cu_seqlens_cpu=COPY)


@pytest.mark.parametrize("given", AGREEING)
def test_what_agrees_is_taken(given: Any) -> None:
    expected = _run(cu_seqlens=COPY)
    assert torch.equal(_run(cu_seqlens=given, cu_seqlens_cpu=COPY), expected)
    assert torch.equal(_run(cu_seqlens=given, cu_seqlens_cpu=COPY.tolist()), expected)


def test_offsets_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="cu_seqlens: is on meta, which has no values"):
        _run(cu_seqlens=COPY.to("meta"))
