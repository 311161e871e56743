"""The backward chunk by chunk in plain fp64, and the tensors that its kernels take.

Letters: T tokens, N chunks, C chunk, H key heads, HV value heads, K key dim, V value dim. States are [HV, V, K].
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.gates import normalizes_keys
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.testing.inputs import make_inputs

GHOSTS = 2  # rows of no chunk or segment at the ends of the tables
L2_EPS = 1e-6


def gates_of(kind, tokens, heads, seed):
    """g [T, HV]: a regime of make_inputs, -20 everywhere, or weak with one -90."""
    known = kind if kind not in ("twenty", "drop") else "weak"
    g = make_inputs(tokens, 1, heads, 8, 8, gates=known, seed=seed)["g"].detach()[0]
    if kind == "twenty":
        g = torch.full_like(g, -20.0)
    if kind == "drop":
        g[tokens // 2] = -90.0
    return g


def tables_of(offsets, most):
    """Chunk table [N, 3] and segment table, both with ghosts; gradient rows in an order of their own.

    -> chunks, segments, number of rows. Every chain has a row in front of it too, as if it received its state.
    """
    chunks, segments, rows = [], [], 0
    for chain, (start, end) in enumerate(itertools.pairwise(offsets)):
        length = -(-(end - start) // C)
        parts, done = -(-length // most), 0
        for place in range(parts):
            share = length // parts + (place < length % parts)
            row = [0] * column.COLUMNS
            row[column.START], row[column.END] = start + done * C, min(end, start + (done + share) * C)
            row[column.CHUNK], row[column.CHAIN], row[column.LAST] = len(chunks) + done, chain, int(place == parts - 1)
            row[column.ENTRY] = rows + place - 1 if place else -1
            row[column.EXIT] = rows + place if place < parts - 1 else -1
            row[column.GRAD_EXIT], row[column.GRAD_ENTRY] = rows + place, rows + place + 1 if place < parts - 1 else -1
            segments.append(row)
            done += share
        chunks += [[start + i * C, min(end - start - i * C, C), -1 if i else chain] for i in range(length)]
        rows += parts
    ghost = [0] * column.COLUMNS
    for name in (column.ENTRY, column.EXIT, column.GRAD_ENTRY, column.GRAD_EXIT):
        ghost[name] = -1
    chunks += [[0, 0, -1]] * GHOSTS
    segments += [ghost] * GHOSTS
    return torch.tensor(chunks, dtype=torch.int32), torch.tensor(segments, dtype=torch.int32), rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Case:
    """Inputs of the backward's kernels, rounded as the kernels take them; see make_case."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor
    inverse: torch.Tensor
    key_scale: torch.Tensor
    bound: torch.Tensor
    chunks: torch.Tensor
    segments: torch.Tensor
    rows: int
    offsets: tuple[int, ...]
    scale: float
    l2norm: bool

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.v.shape[1] // self.q.shape[1]

    def states(self, number, seed, dtype=torch.float32):
        """Random states [number, HV, V, K]."""
        shape = (number, self.v.shape[1], self.v.shape[2], self.k.shape[2])
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def chunk(self, n, tiles=False):
        """What the formulas want of chunk n: fp64, heads first, rows past its length 0. tiles: with what is lost where
        queries and keys of length 1 lie in tiles of 16 bits."""
        start, length, _ = self.chunks[n].tolist()

        def rows_of(x):
            x = x[start : start + length].double().movedim(0, 1)
            x = x.repeat_interleave(self.v.shape[1] // len(x), 0)
            return torch.cat([x, x.new_zeros(len(x), C - length, *x.shape[2:])], 1)

        q, k, v, do = map(rows_of, (self.q, self.k, self.v, self.do))
        r = [(x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() if self.l2norm else torch.ones(()) for x in (q, k)]
        q, k = q * r[0], k * r[1]
        if tiles and normalizes_keys(self.l2norm, str(self.k.dtype).removeprefix("torch.")):
            q, k = (x.to(self.k.dtype).double() for x in (q, k))
        G = self.decay[n].double() * math.log(2)
        gap = (G[:, :, None] - G[:, None, :]).masked_fill(~torch.ones(C, C, dtype=torch.bool).tril(), -torch.inf)
        return SimpleNamespace(
            rows=slice(start, start + length),
            length=length,
            q=q,
            k=k,
            r=r,
            v=v,
            do=do,
            beta=rows_of(self.beta),
            grow=G.exp()[..., None],
            fade=(G[:, -1:] - G).exp()[..., None],
            keep=G[:, -1, None, None].exp(),
            ratio=gap.exp(),
            inverse=self.inverse[n].double(),
        )


def make_case(head_dim, ratio, dtype, offsets, gates="weak", l2norm=False, most=3, heads=2, seed=0, foreign=7):
    """A Case of documents at `offsets`, cut into segments of at most `most` chunks; `foreign` NaN rows behind."""
    tokens = offsets[-1] + foreign
    x = make_inputs(tokens, heads, heads * ratio, head_dim, head_dim, seed=seed)
    q, k, v = (x[name].detach()[0].to(dtype) for name in "qkv")
    if l2norm:
        q, k = q * 0.3, k * 2.5
    beta = x["beta"].detach()[0].to(torch.float64 if dtype == torch.float64 else torch.float32)
    do = torch.randn(v.shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    g = gates_of(gates, tokens, heads * ratio, seed).to(beta.dtype)
    for tensor in (q, k, v, do, g, beta):
        tensor[offsets[-1] :] = float("nan")
    chunks, segments, rows = tables_of(offsets, most)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    decay = torch.zeros(len(chunks), heads * ratio, C, dtype=exact)
    inverse = torch.zeros(len(chunks), heads * ratio, C, C, dtype=dtype)
    key_scale = torch.ones(len(chunks), heads, C, dtype=exact)
    bound = torch.zeros(heads * ratio, len(chunks))
    for n, (start, length, _) in enumerate(chunks.tolist()):
        inside = slice(start, start + length)
        keys = k[inside].double()
        if length and l2norm:
            key_scale[n, :, :length] = (keys.square().sum(-1) + L2_EPS).rsqrt().T
            keys = keys * (keys.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
        if not length:
            continue
        keys = keys.repeat_interleave(ratio, 1).movedim(0, 1)
        G = g[inside].double().cumsum(0).T
        strength = beta[inside].double().T
        lower = torch.exp((G[:, :, None] - G[:, None, :]).tril(-1)) * strength[..., None] * (keys @ keys.mT)
        solved = torch.linalg.inv(torch.eye(length, dtype=torch.float64) + lower.tril(-1)) * strength[:, None, :]
        inverse[n, :, :length, :length] = solved.to(dtype)
        decay[n, :, :length] = G / math.log(2)
        decay[n, :, length:] = (G[:, -1:] / math.log(2)).expand(-1, C - length)
        growth = (1 - strength * keys.square().sum(-1)).abs().clamp(min=1).log2().sum(-1)
        bound[:, n] = growth + decay[n, :, -1]
    return Case(
        q=q,
        k=k,
        v=v,
        do=do,
        g=g,
        beta=beta,
        decay=decay,
        inverse=inverse,
        key_scale=key_scale,
        bound=bound,
        chunks=chunks,
        segments=segments,
        rows=rows,
        offsets=tuple(offsets),
        scale=head_dim**-0.5,
        l2norm=l2norm,
    )


def replay(x, segment, state):
    """States [n, HV, V, K] in front of a segment's chunks, their U [n, HV, C, V], and the state behind."""
    states, values = [], []
    for n in chunks_of(x, segment):
        c = x.chunk(n)
        states.append(state)
        values.append(c.inverse @ (c.v - c.grow * (c.k @ state.mT)))
        state = c.keep * state + values[-1].mT @ (c.fade * c.k)
    return torch.stack(states), torch.stack(values), state


def sweep(x, segment, state, count=None):
    """dS' [n, HV, V, K] behind the `count` leading chunks of a segment, their dV [n, HV, C, V], and dS in front."""
    states, values = [], []
    for n in reversed(chunks_of(x, segment)[:count]):
        c = x.chunk(n)
        du = (x.scale * c.ratio * (c.q @ c.k.mT)).mT @ c.do + c.fade * (c.k @ state.mT)
        states.append(state)
        values.append(c.inverse.mT @ du)
        state = c.keep * state + c.do.mT @ (x.scale * c.grow * c.q) - values[-1].mT @ (c.grow * c.k)
    return torch.stack(states[::-1]), torch.stack(values[::-1]), state


def chunks_of(x, segment):
    """Chunk numbers of a segment."""
    row = x.segments[segment].tolist()
    return range(row[column.CHUNK], row[column.CHUNK] - (-(row[column.END] - row[column.START]) // C))


def gradients(x, n, state, value, dstate, dr, floor=2.0**-40):
    """dq, dk [C, H, K] summed over value heads, dg, dbeta [C, HV] of chunk n from S, U, dS', dR of all heads."""
    c = x.chunk(n, tiles=True)
    attention = c.q @ c.k.mT
    asked = x.scale * c.ratio * (c.do @ value.mT)
    both = dr @ value.mT
    lower = -(c.ratio * both).tril(-1)
    read = x.scale * c.grow * (c.do @ state)
    recalled = c.grow * (dr @ state)
    carried = c.fade * (value @ dstate)
    dq = asked @ c.k + read
    dk = asked.mT @ c.q + (lower + lower.mT) @ c.k - recalled + carried
    pull = (asked * attention).tril(-1) + lower * (c.k @ c.k.mT)
    leaving = (c.k * carried).sum(-1)
    ddecay = (c.q * read).sum(-1) - (c.k * recalled).sum(-1) - leaving + pull.sum(-1) - pull.sum(-2)
    ddecay[:, -1] += leaving.sum(-1) + (c.keep * state * dstate).sum((-2, -1))
    beta = c.beta.clamp(min=floor)
    group = (x.q.shape[1], x.ratio)
    dq, dk = (y.unflatten(0, group).sum(1) for y in (dq, dk))
    if x.l2norm:
        q, k = (y.unflatten(0, group)[:, 0] for y in (c.q, c.k))
        dq, dk = (
            r.unflatten(0, group)[:, 0] * (dy - y * (y * dy).sum(-1, keepdim=True))
            for r, dy, y in zip(c.r, (dq, dk), (q, k), strict=True)
        )
    dg = ddecay.flip(-1).cumsum(-1).flip(-1)
    return [y[:, : c.length].movedim(0, 1) for y in (dq, dk, dg, both.diagonal(dim1=1, dim2=2) / beta.square())]
