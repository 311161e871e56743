"""The stages of the chunked gated delta rule in plain torch, fp32 or fp64, on any device.

Per value head, with G the cumulative log gate inside a chunk of C tokens, Gc its last value, S the state in front of
the chunk (K x V), lower triangular parts marked by i and j:

    solve      T = (I + A)^-1             A_ij = beta_i exp(G_i - G_j) (k_i . k_j)          j < i
    values     X = T diag(beta) (V - diag(exp G) K S)
    state      S' = exp(Gc) S + Kd^T X    Kd = diag(exp(Gc - G)) K
    output     O = scale (diag(exp G) Q S + P X)     P_ij = exp(G_i - G_j) (q_i . k_j)      j <= i
    map        M' = exp(Gc) M - Kd^T (W M)    W = T diag(beta exp G) K      final_correction, residual form

and backwards, with dO scaled, dS' behind and dS in front of the chunk, Y = X's right hand side:

    dX = P^T dO + Kd dS'      dY = T^T dX      dS = exp(Gc) dS' + (diag(exp G) Q)^T dO - W^T dX

A segment's gradient map D is its dS in front when nothing but its own outputs has a gradient.

Exponents are never positive: exp(G_i - G_j) is formed from the masked difference, never as a quotient.

Letters: T tokens, N chunks, C chunk, H key heads, HV value heads, R = HV/H, K key dim, V value dim. Tensors between
stages have token rows: q, k [T, H, K]; v, o [T, HV, V]; beta, decay (G) [T, HV]; inverse (T) [T, HV, C]. Products of
a value head's matrix with a key head's stack the R matrices of a group, so q and k are never repeated. Inside, states
are [HV, K, V] in the order of the recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from flashqla_cp.kernels.chunks import ChunkTable


@dataclass(frozen=True, slots=True, eq=False)
class EntryStates:
    """States in front of segments: values [rows, HV, K, V] and, for each segment, its row, or -1 for a zero state."""

    values: torch.Tensor
    row: torch.Tensor

    def of(self, segments: torch.Tensor) -> torch.Tensor:
        """States of some segments, [len(segments), HV, K, V]."""
        padded = torch.cat([self.values, self.values.new_zeros(1, *self.values.shape[1:])])
        row = self.row.index_select(0, segments)
        return padded.index_select(0, torch.where(row < 0, len(self.values), row))


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What backward returns: like the inputs, and the gradient of every segment's entry state [segments, HV, K, V]."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbeta: torch.Tensor
    ddecay: torch.Tensor
    dentry: torch.Tensor


def gate_cumsum(g: torch.Tensor, table: ChunkTable, *, reverse: bool = False) -> torch.Tensor:
    """Cumulative sum of g [T, HV] inside every chunk; from the end with reverse, which is its adjoint."""
    chunks = table.gather(g)
    total = chunks.flip(1).cumsum(1).flip(1) if reverse else chunks.cumsum(1)
    return table.scatter(total)


def solve(k: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor, table: ChunkTable) -> torch.Tensor:
    """The inverse (I + A)^-1 of every chunk, [T, HV, C]."""
    chunks = _Chunks(k, beta, decay, table)
    lower = chunks.similarity(chunks.k, diagonal=-1) * chunks.beta[..., None]
    return table.scatter(_unit_lower_inverse(lower).transpose(1, 2))


def _unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for strictly lower triangular A [.., C, C], C = 16 * 2^n.

    Substitution row by row in the diagonal blocks of 16, then blocks are joined in pairs:
    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]. Unlike a series in powers of A this never cancels.
    """
    blocks = torch.stack([lower[..., i : i + 16, i : i + 16] for i in range(0, lower.shape[-1], 16)], dim=-3)
    inverse = torch.eye(16, dtype=lower.dtype, device=lower.device).expand(blocks.shape).clone()
    for row in range(1, 16):
        solved = blocks[..., row, None, :row] @ inverse[..., :row, :row]
        inverse[..., row, :row] = -solved.squeeze(-2)
    while inverse.shape[-3] > 1:
        size = inverse.shape[-1]
        upper, below = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        starts = range(0, lower.shape[-1], 2 * size)
        corner = torch.stack([lower[..., i + size : i + 2 * size, i : i + size] for i in starts], dim=-3)
        left = torch.cat([upper, -(below @ corner @ upper)], dim=-2)
        inverse = torch.cat([left, torch.cat([torch.zeros_like(below), below], dim=-2)], dim=-1)
    return inverse.squeeze(-3)


def summary(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    inverse: torch.Tensor,
    entry: EntryStates,
    table: ChunkTable,
    corrected: ChunkTable,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps of segments: E of those of `table`, run from their entry states, and M of those of `corrected`.

    -> boundary_state [segments of table, HV, K, V], final_correction [segments of corrected, HV, K, K].
    """
    chunks = _Chunks(k, beta, decay, table, inverse)
    boundary = _run(chunks, chunks.written(chunks.heads(v)), entry).exits
    eye = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).repeat(1, v.shape[1], 1, 1)
    if not corrected.num_segments:
        return boundary, eye[:0]
    identity = EntryStates(eye, torch.zeros(corrected.num_segments, dtype=torch.int64, device=k.device))
    return boundary, _run(_Chunks(k, beta, decay, corrected, inverse), None, identity).exits


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a segment's chunks can compute before the state in front of it is known; see prepare."""

    chunks: _Chunks
    query: torch.Tensor
    attention: torch.Tensor
    value: torch.Tensor
    written: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """A recurrence over chunks: the states each chunk met and its values, and what comes out of every segment.

    Forward: states in front of chunks, X. Backward: gradients of the states behind chunks, dX.
    """

    states: torch.Tensor
    values: torch.Tensor
    exits: torch.Tensor


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    inverse: torch.Tensor,
    table: ChunkTable,
) -> Prepared:
    """The part of forward and backward that needs no entry state; an exchange of states hides behind it."""
    chunks = _Chunks(k, beta, decay, table, inverse)
    query, value = chunks.heads(q), chunks.heads(v)
    return Prepared(chunks, query, chunks.similarity(query, diagonal=0), value, chunks.written(value))


def replay(prepared: Prepared, entry: EntryStates) -> Sweep:
    """The recurrence of the state from the entry states: what forward and backward both build on."""
    return _run(prepared.chunks, prepared.written, entry)


def forward(prepared: Prepared, entry: EntryStates, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, HV, V], zero where no segment reaches, and the exit states [segments, HV, K, V]."""
    chunks, sweep = prepared.chunks, replay(prepared, entry)
    read = chunks.decay.exp()[..., None] * _key_times(prepared.query, sweep.states)
    out = scale * (read + prepared.attention @ sweep.values)
    return chunks.table.scatter(out.transpose(1, 2)), sweep.exits


def summary_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    inverse: torch.Tensor,
    do: torch.Tensor,
    dexit: EntryStates,
    table: ChunkTable,
    scale: float,
) -> torch.Tensor:
    """Gradient maps D [segments, HV, K, V] of the segments of `table`, run back from their exit gradients."""
    chunks = _Chunks(k, beta, decay, table, inverse)
    query = chunks.heads(q)
    return _run_back(chunks, query, chunks.similarity(query, diagonal=0), scale * chunks.heads(do), dexit).exits


def backward(prepared: Prepared, ahead: Sweep, do: torch.Tensor, dexit: EntryStates, scale: float) -> Gradients:
    """All gradients. ahead: the replay; do [T, HV, V]; dexit: gradients of the exit states. ddecay is that of G."""
    chunks, query, attention = prepared.chunks, prepared.query, prepared.attention
    key, dout = chunks.k, scale * chunks.heads(do)
    overlap = chunks.similarity(key, diagonal=-1)
    back = _run_back(chunks, query, attention, dout, dexit)
    states, values, dstates = ahead.states, ahead.values, back.states
    grow, fade, weight = chunks.decay.exp()[..., None], chunks.fade[..., None], chunks.beta[..., None]

    dright = chunks.inverse.mT @ back.values
    recalled = grow * _key_times(key, states)
    drecalled = -weight * dright
    doverlap = -(dright @ values.mT).tril(-1)
    dattention = (dout @ values.mT).tril()
    read = grow * _key_times(query, states)
    carried = fade * _key_times(key, dstates)

    dbeta = (dright * (prepared.value - recalled)).sum(-1) + (doverlap * overlap).sum(-1)
    pull = doverlap * weight * overlap + dattention * attention
    leaving = (values * carried).sum(-1)
    ddecay = (drecalled * recalled + dout * read).sum(-1) + pull.sum(-1) - pull.sum(-2) - leaving
    end = leaving.sum(-1) + chunks.last.exp() * (states * dstates).sum((-2, -1))
    ddecay = ddecay.scatter_add(2, chunks.end, end[..., None])

    pairs = chunks.per_key_head(doverlap * weight * chunks.ratio(-1))
    asked = chunks.per_key_head(dattention * chunks.ratio(0))
    dk = pairs @ key + pairs.mT @ key + asked.mT @ query
    dk = dk + chunks.per_key_head((grow * drecalled) @ states.mT + (fade * values) @ dstates.mT)
    dq = asked @ key + chunks.per_key_head((grow * dout) @ states.mT)
    to_tokens = chunks.table.scatter
    return Gradients(
        *(to_tokens(x.transpose(1, 2)) for x in (dq, dk, weight * dright, dbeta, ddecay)), dentry=back.exits
    )


class _Chunks:
    """Keys, gates and inverses of a table's chunks, heads before tokens: k [N, H, C, K], beta and decay [N, HV, C]."""

    def __init__(
        self,
        k: torch.Tensor,
        beta: torch.Tensor,
        decay: torch.Tensor,
        table: ChunkTable,
        inverse: torch.Tensor | None = None,
    ):
        self.table = table
        self.k, self.beta, known = self.heads(k), self.heads(beta), self.heads(decay)
        inside = (table.token < table.num_tokens)[:, None]
        self.end = (inside.sum(-1, keepdim=True) - 1).expand(-1, known.shape[1], -1)
        last = known.gather(2, self.end)
        self.last = last.squeeze(2)
        self.decay = torch.where(inside, known, last)
        self.fade = (last - self.decay).exp()
        self.inverse = None if inverse is None else self.heads(inverse)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Token rows [T, heads, ...] -> chunks [N, heads, C, ...]."""
        return self.table.gather(x).transpose(1, 2).contiguous()

    def written(self, value: torch.Tensor) -> torch.Tensor:
        """T diag(beta) V, [N, HV, C, V]: the values when the state in front is zero. value [N, HV, C, V]."""
        return (self.inverse * self.beta[..., None, :]) @ value

    @cached_property
    def erase(self) -> torch.Tensor:
        """W = T diag(beta exp G) K, [N, HV, C, K]: what the state in front contributes to the values, negated."""
        return _times_key(self.inverse * (self.beta * self.decay.exp())[..., None, :], self.k)

    def ratio(self, diagonal: int) -> torch.Tensor:
        """exp(G_i - G_j) for j <= i + diagonal, else 0: [N, HV, C, C]."""
        gap = self.decay[..., :, None] - self.decay[..., None, :]
        allowed = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).tril(diagonal)
        return torch.where(allowed, gap, -torch.inf).exp()

    def similarity(self, left: torch.Tensor, diagonal: int) -> torch.Tensor:
        """exp(G_i - G_j) (left_i . k_j) for j <= i + diagonal, else 0. left [N, H, C, K] -> [N, HV, C, C]."""
        ratio = self.ratio(diagonal)
        grouped = ratio.unflatten(1, (left.shape[1], -1)) * (left @ self.k.mT)[:, :, None]
        return grouped.flatten(1, 2)

    def per_key_head(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the value heads of a group: [N, HV, ...] -> [N, H, ...]."""
        return x.unflatten(1, (self.k.shape[1], -1)).sum(2)


def _run(chunks: _Chunks, written: torch.Tensor | None, entry: EntryStates) -> Sweep:
    """The recurrence of the state; with nothing written only what is remembered moves, S' = M S."""
    table, erase, keep = chunks.table, chunks.erase, chunks.last.exp()[..., None, None]
    state = entry.of(table.order)
    states, values, done = [], [], []
    for first, count in table.steps:
        rows = slice(first, first + count)
        done.append(state[count:])
        state = state[:count]
        value = -(erase[rows] @ state) if written is None else written[rows] - erase[rows] @ state
        states.append(state)
        values.append(value)
        state = keep[rows] * state + _key_transposed_times(chunks.k[rows], chunks.fade[rows][..., None] * value)
    exits = entry.of(torch.arange(table.num_segments, device=table.order.device))
    exits = exits.index_copy(0, table.order, torch.cat([state, *reversed(done)]))
    return Sweep(_joined(states, exits), _joined(values, exits[:, :, :1].expand(-1, -1, erase.shape[2], -1)), exits)


def _run_back(
    chunks: _Chunks, query: torch.Tensor, attention: torch.Tensor, dout: torch.Tensor, dexit: EntryStates
) -> Sweep:
    """The recurrence of the state's gradient, from the last chunk of every segment to its first."""
    table, erase, keep = chunks.table, chunks.erase, chunks.last.exp()[..., None, None]
    direct = attention.mT @ dout
    read = _key_transposed_times(query, chunks.decay.exp()[..., None] * dout)
    begin = dexit.of(table.order)
    state = begin[:0]
    states, values = [], []
    for first, count in reversed(table.steps):
        rows = slice(first, first + count)
        state = torch.cat([state, begin[len(state) : count]])
        value = direct[rows] + chunks.fade[rows][..., None] * _key_times(chunks.k[rows], state)
        states.append(state)
        values.append(value)
        state = keep[rows] * state + read[rows] - erase[rows].mT @ value
    exits = dexit.of(torch.arange(table.num_segments, device=table.order.device))
    exits = exits.index_copy(0, table.order, state)
    return Sweep(_joined(states[::-1], exits), _joined(values[::-1], direct), exits)


def _joined(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(rows) if rows else like[:0]


def _times_key(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """x [N, HV, M, C] times key [N, H, C, K] of its group -> [N, HV, M, K]."""
    group = x.shape[1] // key.shape[1]
    stacked = x.reshape(len(key), key.shape[1], group * x.shape[2], key.shape[2])
    return (stacked @ key).view(*x.shape[:3], key.shape[3])


def _key_times(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """key [N, H, C, K] times x [N, HV, K, V] -> [N, HV, C, V]."""
    return _times_key(x.mT, key.mT).mT


def _key_transposed_times(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """key^T [N, H, K, C] times x [N, HV, C, V] -> [N, HV, K, V]."""
    return _times_key(x.mT, key).mT
