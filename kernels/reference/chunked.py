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
    chunk = _Chunks(k, beta, decay, table)
    lower = chunk.similarity(chunk.k, diagonal=-1) * chunk.beta[..., None]
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
    boundary = _run(_Chunks(k, beta, decay, table, inverse), v, entry, table).exits
    eye = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).repeat(1, v.shape[1], 1, 1)
    if not corrected.num_segments:
        return boundary, eye[:0]
    identity = EntryStates(eye, torch.zeros(corrected.num_segments, dtype=torch.int64, device=k.device))
    correction = _run(_Chunks(k, beta, decay, corrected, inverse), None, identity, corrected).exits
    return boundary, correction


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    inverse: torch.Tensor,
    entry: EntryStates,
    table: ChunkTable,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, HV, V], zero where no segment reaches, and the exit states [segments, HV, K, V]."""
    chunk = _Chunks(k, beta, decay, table, inverse)
    query = chunk.heads(q)
    sweep = _run(chunk, v, entry, table)
    read = chunk.decay.exp()[..., None] * _key_times(query, sweep.states)
    out = scale * (read + chunk.similarity(query, diagonal=0) @ sweep.values)
    return table.scatter(out.transpose(1, 2)), sweep.exits


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
    chunk = _Chunks(k, beta, decay, table, inverse)
    query = chunk.heads(q)
    attention = chunk.similarity(query, diagonal=0)
    return _run_back(chunk, query, attention, scale * chunk.heads(do), dexit, table).exits


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    inverse: torch.Tensor,
    entry: EntryStates,
    do: torch.Tensor,
    dexit: EntryStates,
    table: ChunkTable,
    scale: float,
) -> Gradients:
    """All gradients. do [T, HV, V]; dexit: gradients of the exit states. ddecay is the gradient of G."""
    chunk = _Chunks(k, beta, decay, table, inverse)
    key, query, dout = chunk.k, chunk.heads(q), scale * chunk.heads(do)
    overlap, attention = chunk.similarity(key, diagonal=-1), chunk.similarity(query, diagonal=0)
    ahead = _run(chunk, v, entry, table)
    back = _run_back(chunk, query, attention, dout, dexit, table)
    states, values, dstates = ahead.states, ahead.values, back.states
    grow, fade, weight = chunk.decay.exp()[..., None], chunk.fade[..., None], chunk.beta[..., None]

    dright = chunk.inverse.mT @ back.values
    recalled = grow * _key_times(key, states)
    drecalled = -weight * dright
    doverlap = -(dright @ values.mT).tril(-1)
    dattention = (dout @ values.mT).tril()
    read = grow * _key_times(query, states)
    carried = fade * _key_times(key, dstates)

    dbeta = (dright * (chunk.heads(v) - recalled)).sum(-1) + (doverlap * overlap).sum(-1)
    pull = doverlap * weight * overlap + dattention * attention
    leaving = (values * carried).sum(-1)
    ddecay = (drecalled * recalled + dout * read).sum(-1) + pull.sum(-1) - pull.sum(-2) - leaving
    end = leaving.sum(-1) + chunk.last.exp() * (states * dstates).sum((-2, -1))
    ddecay = ddecay.scatter_add(2, chunk.end, end[..., None])

    pairs = chunk.per_key_head(doverlap * weight * chunk.ratio(-1))
    asked = chunk.per_key_head(dattention * chunk.ratio(0))
    dk = pairs @ key + pairs.mT @ key + asked.mT @ query
    dk = dk + chunk.per_key_head((grow * drecalled) @ states.mT + (fade * values) @ dstates.mT)
    dq = asked @ key + chunk.per_key_head((grow * dout) @ states.mT)
    back_to_tokens = [table.scatter(x.transpose(1, 2)) for x in (dq, dk, weight * dright, dbeta, ddecay)]
    return Gradients(*back_to_tokens, back.exits)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Sweep:
    """A recurrence over chunks: the states each chunk met and its values, and what comes out of every segment.

    Forward: states in front of chunks, X. Backward: gradients of the states behind chunks, dX.
    """

    states: torch.Tensor
    values: torch.Tensor
    exits: torch.Tensor


def _run(chunk: _Chunks, v: torch.Tensor | None, entry: EntryStates, table: ChunkTable) -> _Sweep:
    """The recurrence of the state; without v only what is remembered moves, S' = M S."""
    erase = chunk.erase
    write = None if v is None else (chunk.inverse * chunk.beta[..., None, :]) @ chunk.heads(v)
    keep = chunk.last.exp()[..., None, None]
    state = entry.of(table.order)
    states, values, done = [], [], []
    for first, count in table.steps:
        rows = slice(first, first + count)
        done.append(state[count:])
        state = state[:count]
        value = -(erase[rows] @ state) if write is None else write[rows] - erase[rows] @ state
        states.append(state)
        values.append(value)
        state = keep[rows] * state + _key_transposed_times(chunk.k[rows], chunk.fade[rows][..., None] * value)
    exits = entry.of(torch.arange(table.num_segments, device=table.order.device))
    exits = exits.index_copy(0, table.order, torch.cat([state, *reversed(done)]))
    return _Sweep(
        _joined(states, exits), _joined(values, erase[..., :1].expand(*erase.shape[:3], exits.shape[-1])), exits
    )


def _run_back(
    chunk: _Chunks,
    query: torch.Tensor,
    attention: torch.Tensor,
    dout: torch.Tensor,
    dexit: EntryStates,
    table: ChunkTable,
) -> _Sweep:
    """The recurrence of the state's gradient, from the last chunk of every segment to its first."""
    erase = chunk.erase
    direct = attention.mT @ dout
    read = _key_transposed_times(query, chunk.decay.exp()[..., None] * dout)
    keep = chunk.last.exp()[..., None, None]
    begin = dexit.of(table.order)
    state = begin[:0]
    states, values = [], []
    for first, count in reversed(table.steps):
        rows = slice(first, first + count)
        state = torch.cat([state, begin[len(state) : count]])
        value = direct[rows] + chunk.fade[rows][..., None] * _key_times(chunk.k[rows], state)
        states.append(state)
        values.append(value)
        state = keep[rows] * state + read[rows] - erase[rows].mT @ value
    exits = dexit.of(torch.arange(table.num_segments, device=table.order.device))
    exits = exits.index_copy(0, table.order, state)
    return _Sweep(_joined(states[::-1], exits), _joined(values[::-1], direct), exits)


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
