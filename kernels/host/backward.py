"""The stages of the backward on kernels: one wrapper each, as chunked.py has for the forward.

States and their gradients are [.., HV, V, K], fp32. Letters: T tokens, C chunk, H key heads, HV value heads, K key dim,
V value dim. What lies between the stages replay, sweep and gradients is as large as all states of all chunks, so these
run for a slab of value heads after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from flashqla_cp.kernels.chunks import CHUNK
from flashqla_cp.kernels.host.chunked import Entries, Inputs, Maps, Solved, entry_arguments
from flashqla_cp.kernels.host.launcher import launch, spec_of
from flashqla_cp.kernels.host.tables import Tables
from flashqla_cp.kernels.tuning import GATE_GRAD_TOKENS, SCRATCH_BUDGET, head_slabs


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenGradients:
    """Like the op's inputs, token rows: dq, dk [T, H, K], dv [T, HV, V] in their dtype, dg, dbeta [T, HV] fp32."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor

    @classmethod
    def of(cls, x: Inputs, *, padded: bool, zero: bool) -> TokenGradients:
        """To be filled. padded: some rows belong to no document; they are 0 in dg and dbeta, and with `zero` in all."""
        fill = torch.zeros_like if zero else torch.empty_like
        dq, dk, dv = (fill(like, memory_format=torch.contiguous_format) for like in (x.q, x.k, x.v))
        both = x.numbers(2, *x.v.shape[:2])
        dg, dbeta = (both.zero_() if padded or zero else both).unbind(0)
        return cls(dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Slab:
    """What replay and sweep leave to `gradients`, for value heads from `first` on, in q's dtype.

    states in front of chunks, dstates gradients behind them, both [chunks, heads, V, K]. values [chunks, heads, C, V].
    """

    first: int
    states: torch.Tensor
    dstates: torch.Tensor
    values: torch.Tensor


def slab_parts(chunks: int, width: int) -> tuple[int, int, int]:
    """Elements of a slab's states, dstates and values for one value head."""
    return chunks * width * width, chunks * width * width, chunks * CHUNK * width


def slabs_of(x: Inputs, tables: Tables) -> list[Slab]:
    """Slabs that cover all value heads, one after the other in the same memory: of SCRATCH_BUDGET at most, or what
    one group of value heads takes."""
    heads, width = x.v.shape[1:]
    chunks = len(tables.chunks)
    parts = slab_parts(chunks, width)
    runs = head_slabs(heads, heads // x.q.shape[1], sum(parts) * x.q.element_size(), SCRATCH_BUDGET)
    most = max(count for _, count in runs)
    memory = [torch.empty(most * part, dtype=x.q.dtype, device=x.q.device) for part in parts]
    rows = (width, width), (width, width), (CHUNK, width)

    def slab(first: int, count: int) -> Slab:
        states, dstates, values = (
            (part if count == most else part[: chunks * count * prod(row)]).view(chunks, count, *row)
            for part, row in zip(memory, rows, strict=True)
        )
        return Slab(first=first, states=states, dstates=dstates, values=values)

    return [slab(first, count) for first, count in runs]


def summary_grad(
    x: Inputs,
    solved: Solved,
    maps: Maps,
    tables: Tables,
    do: torch.Tensor,
    exits: Entries | None,
    scale: float,
) -> Maps:
    """Gradient maps (D) of the segments that something precedes: the adjoints of `maps`, by rows of tables.back_links.

    exits: known gradients of the states behind chains; do [T, HV, V].
    """
    dboundary = torch.empty_like(maps.boundary)
    launch(
        x.spec("summary_grad", final_grad=exits is not None),
        x.q,
        x.k,
        do,
        solved.inverse,
        solved.decay,
        solved.key_scale,
        solved.bound,
        tables.segments,
        *entry_arguments(exits, dboundary, tables),
        dboundary,
        scale,
        x.forgotten,
    )
    return Maps(boundary=dboundary, correction=maps.correction, corrects=maps.corrects)


def replay(
    x: Inputs, solved: Solved, tables: Tables, carried: torch.Tensor | None, entries: Entries | None, slab: Slab
) -> None:
    """Fills the slab's states and values. carried: states behind the segments that something follows."""
    carried = x.numbers(1, x.v.shape[1], x.v.shape[2], x.q.shape[2]) if carried is None else carried
    launch(
        x.spec("replay", initial_state=entries is not None),
        x.k,
        x.v,
        solved.inverse,
        solved.decay,
        solved.key_scale,
        tables.segments,
        carried,
        *entry_arguments(entries, carried, tables),
        slab.states,
        slab.values,
        slab.first,
    )


def sweep(
    x: Inputs,
    solved: Solved,
    tables: Tables,
    do: torch.Tensor,
    dcarried: torch.Tensor | None,
    exits: Entries | None,
    scale: float,
    slab: Slab,
    dv: torch.Tensor,
    dentry: torch.Tensor | None,
) -> None:
    """Fills the slab's dstates, its heads of dv [T, HV, V] and, where given, of dentry [chains, HV, V, K], in rows of
    chains with tokens. dcarried: gradients of the states behind segments; exits: of those behind chains."""
    dcarried = x.numbers(1, x.v.shape[1], x.v.shape[2], x.q.shape[2]) if dcarried is None else dcarried
    launch(
        x.spec("sweep", final_grad=exits is not None, initial_grad=dentry is not None),
        x.q,
        x.k,
        do,
        solved.inverse,
        solved.decay,
        solved.key_scale,
        tables.segments,
        dcarried,
        *entry_arguments(exits, dcarried, tables),
        slab.dstates,
        dv,
        dcarried if dentry is None else dentry,
        scale,
        slab.first,
    )


def gradients(
    x: Inputs,
    solved: Solved,
    tables: Tables,
    do: torch.Tensor,
    slab: Slab,
    grads: TokenGradients,
    entries: Entries | None,
    scale: float,
    processors: int,
) -> None:
    """Fills the slab's heads of dq, dk, dg and dbeta (all but dv), rows of documents only. entries: states in front of
    chains."""
    launch(
        x.spec("gradients", sigmoid=x.sigmoid, double=x.double),
        x.q,
        x.k,
        do,
        grads.dv,
        slab.values,
        slab.states,
        slab.dstates,
        solved.decay,
        x.beta,
        tables.chunks,
        entry_arguments(entries, solved.decay, tables)[1],
        grads.dq,
        grads.dk,
        grads.dg,
        grads.dbeta,
        scale,
        0 if entries is None else 1,
        slab.first,
        processors,
    )


def gate_grad(x: Inputs, dg: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of g [T, HV] in its dtype and, where gates are made inside, of A_log and dt_bias fp32 [HV].

    dg: of the log gate, fp32; 0 in rows of no document.
    """
    inside = x.A_log is not None
    da = torch.empty(x.g.shape, dtype=x.g.dtype, device=x.g.device)
    sums = x.numbers(-(-len(dg) // GATE_GRAD_TOKENS) if inside else 1, 2, dg.shape[1])
    A_log = dg.view(-1) if x.A_log is None else x.A_log
    dt_bias = A_log if x.dt_bias is None else x.dt_bias
    spec = spec_of("gate_grad", x.arch.name, (), (("g", x.g.dtype),), gate=inside)
    launch(spec, x.g, dg, A_log, dt_bias, da, sums)
    if not inside:
        return da, None, None
    dA_log, ddt_bias = sums.sum(0).unbind(0)
    return da, dA_log, ddt_bias
