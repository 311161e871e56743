"""One op on one draw of the inputs: held to fp64 first, then timed, in the direction that was asked for.

forward     o of the inputs, nothing kept for a backward
backward    gradients of q, k, v, g and beta from that of o, by a graph of autograd that was made before
step        both
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from flashqla_cp.cli.bench_contenders import Contender
from flashqla_cp.cli.bench_timing import Call, Prepare, first_line, measure
from flashqla_cp.cli.verify import BARS
from flashqla_cp.testing.conv_workload import ConvWorkload
from flashqla_cp.testing.workload import Workload, relative_error

DIRECTIONS = ("forward", "backward", "step")
BAR = BARS["bfloat16"]["o"]
GRADIENT_BARS = {name: BARS["bfloat16"]["dg" if name == "dg" else "rest"] for name in Workload.gradients}
GRADIENT_BARS |= dict.fromkeys(ConvWorkload.gradients, BAR)
TIMES = ("eager_ms", "graph_ms", "host_us", "peak_mib")

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Inputs, and the gradient of o where there is a backward."""

    tensors: Tensors
    upstream: torch.Tensor | None

    @classmethod
    def of(cls, work: Workload | ConvWorkload, seed: int, direction: str, device: torch.device) -> Draw:
        upstream = None if direction == "forward" else work.upstream(seed, device)
        return cls(tensors=work.draw(seed, device), upstream=upstream)

    def leaves(self) -> Tensors:
        """The inputs as the beginning of a new graph of autograd."""
        return tuple(x.detach().requires_grad_() for x in self.tensors)

    def expected(self, work: Workload | ConvWorkload, ranks: int | None, rank: int | None = None) -> Expected:
        """fp64 results; with `ranks` those of `rank`, or of the middle one, every other rank holding the same."""
        place = (ranks or 1) // 2 if rank is None else rank
        before, behind = (place, ranks - place - 1) if ranks else (0, 0)
        o, gradients = work.expected(self.tensors, 1 + before), None
        if self.upstream is not None:
            found = work.expected_gradients(self.tensors, self.upstream, before, behind)
            gradients = dict(zip(work.gradients, found, strict=True))
        return Expected(o=o, gradients=gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """fp64 results of a draw, in fp32. gradients: by name, where there is a backward."""

    o: torch.Tensor
    gradients: dict[str, torch.Tensor] | None


def time_draw(
    contender: Contender, draw: Draw, expected: Expected | None, direction: str, device: torch.device
) -> dict[str, Any]:
    """One contender's numbers for one draw, or why there are none: "refused" or "failed"."""
    row: dict[str, Any] = dict.fromkeys((*TIMES, "o_error", "gradient_errors", "first_call_s"))
    try:
        if contender.check is not None and expected is not None:
            began = time.perf_counter()
            row |= _errors(contender, draw, expected)
            row["first_call_s"] = time.perf_counter() - began
            refusal = refusal_of(row) if contender.strict else None
            if refusal is not None:
                return row | {"refused": refusal}
        with torch.set_grad_enabled(direction != "forward"):
            return row | measure(preparation(contender, draw, direction), device)
    except Exception as error:  # one op that cannot run a case must not cost the others' numbers
        return row | {"failed": first_line(error)}


def preparation(contender: Contender, draw: Draw, direction: str) -> Prepare:
    """What has to run before the timed call, and returns it."""
    if draw.upstream is None:
        return lambda: lambda: contender.call(*draw.tensors)

    def step() -> Tensors:
        leaves = draw.leaves()
        return torch.autograd.grad(contender.call(*leaves), leaves, draw.upstream)

    def backward() -> Call:
        leaves = draw.leaves()
        o = contender.call(*leaves)
        return lambda: torch.autograd.grad(o, leaves, draw.upstream, retain_graph=True)

    return backward if direction == "backward" else lambda: step


def _errors(contender: Contender, draw: Draw, expected: Expected) -> dict[str, Any]:
    """How far the contender's results are from the expected ones."""
    assert contender.check is not None
    if expected.gradients is None:
        with torch.no_grad():
            return {"o_error": relative_error(contender.check(*draw.tensors), expected.o)}
    leaves = draw.leaves()
    o = contender.check(*leaves)
    return errors_of(o, torch.autograd.grad(o, leaves, draw.upstream), expected)


def errors_of(o: torch.Tensor, gradients: Tensors, expected: Expected) -> dict[str, Any]:
    """The same of results that are there already, gradients included."""
    assert expected.gradients is not None
    pairs = zip(expected.gradients.items(), gradients, strict=True)
    errors = {name: relative_error(x, exact) for (name, exact), x in pairs}
    return {"o_error": relative_error(o.detach(), expected.o), "gradient_errors": errors}


def refusal_of(row: dict[str, Any]) -> str | None:
    """Why these errors forbid to time, if they do."""
    errors, bars = {"o": row["o_error"]} | (row["gradient_errors"] or {}), {"o": BAR} | GRADIENT_BARS
    for name, error in errors.items():
        if not error <= bars[name]:
            return f"not timed: {name} is off by {error:.1e}, allowed are {bars[name]:.0e}"
    return None
