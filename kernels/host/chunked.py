"""The stages of the forward on kernels: one wrapper each, which allocates, names the specialisation and launches.

States are [.., HV, V, K], fp32. Letters: T tokens, C chunk, H key heads, HV value heads, K key dim, V value dim. What
each call makes anew are named tuples here: a frozen dataclass takes twice as long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.blocks.product_shares import fold_shares
from flashqla_cp.kernels.chunks import CHUNK
from flashqla_cp.kernels.host.launcher import launch, machine_of, spec_of
from flashqla_cp.kernels.host.tables import Tables
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.stages import HEAD_DIMS


class Inputs(NamedTuple):
    """Of the op, token rows: q, k [T, H, K], v [T, HV, V] (views with unit stride along the last dimension), g, beta
    [T, HV]. A_log, dt_bias fp32 [HV] or None: g is then the gate's input. l2norm, sigmoid, double: what the op's
    use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel and allow_neg_eigval say; forgotten: base-2 logarithm of its
    forget_below.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    l2norm: bool
    sigmoid: bool
    double: bool
    forgotten: float
    arch: Arch

    def spec(self, stage: str, **flags: bool) -> KernelSpec:
        """The specialisation of a stage for these inputs."""
        _, heads, width = self.q.shape
        dims = (("head_dim", width), ("ratio", self.v.shape[1] // heads))
        dtypes = (("qkv", self.q.dtype),)
        if stage in ("solve", "gradients"):
            dtypes = (*dtypes, ("beta", self.beta.dtype))
        return spec_of(stage, self.arch.name, dims, dtypes, **flags, l2norm=self.l2norm)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Uninitialised fp32."""
        return torch.empty(*shape, dtype=torch.float32, device=self.q.device)


class Solved(NamedTuple):
    """What the chunks know without a state. decay [chunks, HV, C] (base 2), inverse [chunks, HV, C, C], key_scale
    [chunks, H, C] with l2norm (else [1, H, C], unused), bound [HV, chunks]."""

    decay: torch.Tensor
    inverse: torch.Tensor
    key_scale: torch.Tensor
    bound: torch.Tensor


class Maps(NamedTuple):
    """Of segments that something follows: boundary (E) and correction (M^T) [rows, HV, ., K], corrects [rows, HV]; or
    their adjoints, of those that something precedes: D, and the same correction by rows of its own. Or, of chain_maps,
    of chains up to each of these rows."""

    boundary: torch.Tensor
    correction: torch.Tensor
    corrects: torch.Tensor


class Entries(NamedTuple):
    """States in front of chains, or gradients of those behind them: each chain's row, int32 [chains], -1 for zero, of
    values [entries, HV, V, K]."""

    row: torch.Tensor
    values: torch.Tensor


def gate_cumsum(x: Inputs, tables: Tables) -> torch.Tensor:
    """Cumulative log gate of every chunk, base 2: [chunks, HV, C]."""
    heads = x.v.shape[1]
    decay = x.numbers(tables.chunks.shape[0], heads, CHUNK)
    spec = spec_of("gate_cumsum", x.arch.name, (), (("g", x.g.dtype),), gate=x.A_log is not None)
    A_log = decay.view(-1) if x.A_log is None else x.A_log
    dt_bias = A_log if x.dt_bias is None else x.dt_bias
    launch(spec, x.g, tables.chunks, A_log, dt_bias, decay)
    return decay


def solve(x: Inputs, decay: torch.Tensor, tables: Tables) -> Solved:
    """(I + A)^-1 diag(beta) of every chunk."""
    chunks, heads, _ = decay.shape
    inverse = x.q.new_empty(chunks, heads, CHUNK, CHUNK)
    key_scale = decay.new_empty(chunks if x.l2norm else 1, x.q.shape[1], CHUNK)
    bound = decay.new_empty(heads, chunks)
    spec = x.spec("solve", sigmoid=x.sigmoid, double=x.double)
    launch(spec, x.k, x.beta, decay, tables.chunks, inverse, key_scale, bound)
    return Solved(decay=decay, inverse=inverse, key_scale=key_scale, bound=bound)


def summary(x: Inputs, solved: Solved, tables: Tables, *, entered: bool) -> Maps:
    """Maps of the segments that something follows. entered: whether chains may start from a state."""
    rows, (_, heads, width) = tables.links.shape[0], x.v.shape
    boundary = solved.decay.new_empty(rows, heads, width, width)
    maps = Maps(
        boundary=boundary,
        correction=torch.empty_like(boundary),
        corrects=tables.links.new_empty(rows, heads),
    )
    launch(
        x.spec("summary", initial_state=entered),
        x.k,
        x.v,
        solved.inverse,
        solved.decay,
        solved.key_scale,
        solved.bound,
        tables.segments,
        maps.boundary,
        maps.correction,
        maps.corrects,
        x.forgotten,
    )
    return maps


def affine_chain(
    x: Inputs, maps: Maps, tables: Tables, entries: Entries | None, *, apart: bool = False, reverse: bool = False
) -> torch.Tensor:
    """States behind the segments that something follows or, with `reverse`, gradients of the states in front of those
    that something precedes: [rows, HV, V, K], maps.boundary itself unless `apart`.

    entries: what meets the first segment of a chain, or in reverse the last one, which exits already met otherwise.
    """
    carried = torch.empty_like(maps.boundary) if apart else maps.boundary
    dims = (("head_dim", x.q.shape[2]),)
    launch(
        spec_of("affine_chain", x.arch.name, dims, initial_state=entries is not None, apart=apart, reverse=reverse),
        tables.back_links if reverse else tables.links,
        maps.correction,
        maps.corrects,
        *entry_arguments(entries, carried, tables),
        maps.boundary,
        carried,
    )
    return carried


def chain_maps(x: Inputs, maps: Maps, tables: Tables, entries: Entries | None, enters: torch.Tensor) -> Maps:
    """What chains make of their entries, up to each row: E, with `entries`, and M^T of those that something else
    enters, enters[chain] >= 0, where no segment so far forgets, which `corrects` says; M of a chain's last row is 0 if
    one forgets. E is maps.boundary itself, M is not maps.correction. The context-parallel specialisation of
    affine_chain."""
    whole = Maps(maps.boundary, torch.empty_like(maps.correction), torch.empty_like(maps.corrects))
    dims = (("head_dim", x.q.shape[2]),)
    launch(
        spec_of("affine_chain", x.arch.name, dims, initial_state=entries is not None, final_correction=True),
        tables.links,
        maps.correction,
        maps.corrects,
        *entry_arguments(entries, whole.boundary, tables),
        enters,
        maps.boundary,
        whole.boundary,
        whole.correction,
        whole.corrects,
    )
    return whole


def enter_chains(x: Inputs, whole: Maps, tables: Tables, entries: Entries) -> None:
    """Add to E of chains up to each row what their M makes of `entries` in front of them: then whole.boundary is the
    states behind segments."""
    launch(
        spec_of("enter_chains", x.arch.name, (("head_dim", x.q.shape[2]),)),
        tables.links,
        whole.correction,
        whole.corrects,
        entries.values,
        entries.row,
        whole.boundary,
    )


def forward(
    x: Inputs,
    solved: Solved,
    tables: Tables,
    carried: torch.Tensor | None,
    entries: Entries | None,
    scale: float,
    o: torch.Tensor,
    final: torch.Tensor | None,
) -> None:
    """Fills o [T, HV, V], rows of chains only, and final [chains, HV, V, K], rows of chains with tokens only."""
    carried = x.numbers(1, x.v.shape[1], x.v.shape[2], x.q.shape[2]) if carried is None else carried
    launch(
        x.spec("forward", initial_state=entries is not None, final_state=final is not None),
        x.q,
        x.k,
        x.v,
        solved.inverse,
        solved.decay,
        solved.key_scale,
        tables.segments,
        carried,
        *entry_arguments(entries, carried, tables),
        o,
        carried if final is None else final,
        scale,
    )


def entry_arguments(
    entries: Entries | None, stand_in: torch.Tensor, tables: Tables
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments of a kernel that may have no entry states: it was built without them, and never reads these."""
    if entries is None:
        return stand_in, tables.end
    return entries.values, entries.row


def clear_rows(o: torch.Tensor, end: torch.Tensor, arch: Arch) -> None:
    """Zeros in the rows of o [T, HV, V] from the last of `end` on."""
    launch(spec_of("clear_rows", arch.name, (), (("x", o.dtype),)), end, o.view(o.shape[0], -1))


def fold(
    boundary: torch.Tensor,
    correction: torch.Tensor,
    links: torch.Tensor,
    first: torch.Tensor,
    num_out: int,
    adjoint: bool,
) -> torch.Tensor | None:
    """States [num_out, h, V, K] of a fold along chains, or None where no kernel takes these tensors.

    boundary [rows, h, V, K], correction M^T, or with `adjoint` M, [corrections, h, K, K]; links int32 [links, 3]: rows
    of boundary and correction, and the output row or -1; first int32 [chains + 1]: where chains begin. Rows of the
    result that no link names hold anything.
    """
    arch, _ = machine_of(boundary.device)
    value_dim, key_dim = boundary.shape[2:]
    if arch is None or boundary.dtype != torch.float32 or key_dim not in HEAD_DIMS:
        return None
    if value_dim % fold_shares(key_dim).columns:
        return None
    out = boundary.new_empty(num_out, *boundary.shape[1:])
    if len(first) > 1 and boundary.shape[1]:
        states, *state_steps = _lines(boundary)
        matrices, *matrix_steps = _lines(correction if len(correction) else boundary)
        spec = spec_of("fold", arch.name, (("head_dim", key_dim),), adjoint=adjoint)
        launch(spec, states, matrices, links, first, out, *state_steps, *matrix_steps)
    return out


def _lines(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The memory of x [rows, h, n, K] as lines [.., K], and lines from a row, or a head, to the next: of x itself where
    kernels can read it in place, as in a message, else of a copy."""
    rows, heads, count, width = x.shape
    row, head, line, element = x.stride()
    if (line, element) != (width, 1) or row % width or head % width or row < 0 or x.data_ptr() % 16:
        x = x.contiguous()
        row, head = heads * count * width, count * width
    lines = ((rows - 1) * row + (heads - 1) * head) // width + count
    return x.as_strided((lines, width), (width, 1)), row // width, head // width
