"""Plain torch in place of the backward's kernels, by the same arguments: what the host side is tested with, quickly.

Every tensor that a stage may only partly fill is left alone elsewhere, so whatever the host forgets stays as it was.
Letters: C chunk, h value heads of a slab, K key dim, V value dim; states are [K, V] inside and transposed outside.
"""

from __future__ import annotations

import math

import torch
from chunk_gradients import L2_EPS

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.chunks import CHUNK


class _Chunk:
    """One chunk's operands for value heads [first, first + count), heads first, fp32, zero past its length."""

    def __init__(self, start, length, number, heads, k, key_scale, decay, l2norm, scale=1.0):
        first, count = heads
        self.length, self.l2norm = length, l2norm
        self.rows = slice(start, start + length)
        self.values = slice(first, first + count)
        ratio = decay.shape[1] // k.shape[1]
        self.keys = torch.arange(first, first + count) // ratio
        self.k = self.read(k, self.keys)
        if l2norm and key_scale is None:
            self.k = self.k * torch.rsqrt(self.k.square().sum(-1, keepdim=True) + L2_EPS)
        elif l2norm:
            self.k = self.k * torch.where(torch.arange(CHUNK) < length, key_scale[number, self.keys], 0.0)[..., None]
        self.G = decay[number, self.values] * math.log(2)
        self.grow, self.fade = self.G.exp()[..., None], (self.G[:, -1:] - self.G).exp()[..., None]
        self.keep = self.G[:, -1].exp()[:, None, None]
        gap = self.G[..., :, None] - self.G[..., None, :]
        self.ratio = torch.where(torch.ones(CHUNK, CHUNK).tril().bool(), gap, -torch.inf).exp()
        self.scale = scale

    def read(self, x, heads):
        rows = torch.zeros(len(x[0, heads]), CHUNK, x.shape[2])
        rows[:, : self.length] = x[self.rows, heads].transpose(0, 1).float()
        return rows

    def back(self, q, do, inverse, dstate):
        """dS in front of the chunk and dR, from dS' behind it."""
        attention = self.scale * self.ratio * (q @ self.k.mT)
        dvalue = attention.mT @ do + self.fade * (self.k @ dstate)
        dright = inverse.float().mT @ dvalue
        read = (self.scale * self.grow * q).mT @ do
        return self.keep * dstate + read - (self.grow * self.k).mT @ dright, dright

    def query(self, q):
        rows = self.read(q, self.keys)
        if self.l2norm:
            rows = rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)
        return rows


def _segments(table):
    """(row, [(token, length, chunk number), ..]) of every segment with tokens."""
    for row in table.tolist():
        start, end, first = row[column.START], row[column.END], row[column.CHUNK]
        if end > start:
            spans = range(start, end, CHUNK)
            yield row, [(token, min(CHUNK, end - token), first + i) for i, token in enumerate(spans)]


def _known(row, rows, flag, values, index, heads, shape):
    """The state that a chain is given, [h, K, V], or zeros."""
    number = index[row[column.CHAIN]] if flag else -1
    return values[number, heads].mT.clone() if number >= 0 else torch.zeros(shape)


def summary_grad(spec, q, k, do, inverse, decay, key_scale, bound, table, dexit, exit_row, dboundary, scale, threshold):
    heads, width = (0, decay.shape[1]), k.shape[2]
    for row, chunks in _segments(table):
        if row[column.GRAD_EXIT] < 0:
            continue
        given = spec.has("final_grad") and row[column.LAST] == 1
        dstate = _known(row, None, given, dexit, exit_row, slice(None), (heads[1], width, width))
        for token, length, number in reversed(chunks):
            c = _Chunk(token, length, number, heads, k, key_scale, decay, spec.has("l2norm"), scale)
            dstate, _ = c.back(c.query(q), c.read(do, c.values), inverse[number], dstate)
        dboundary[row[column.GRAD_EXIT]] = dstate.mT


def replay(spec, k, v, inverse, decay, key_scale, table, carried, initial, entry_row, states16, values16, first):
    count, width = states16.shape[1], k.shape[2]
    for row, chunks in _segments(table):
        heads = slice(first, first + count)
        if row[column.ENTRY] >= 0:
            state = carried[row[column.ENTRY], heads].mT
        else:
            state = _known(row, None, spec.has("initial_state"), initial, entry_row, heads, (count, width, width))
        for token, length, number in chunks:
            c = _Chunk(token, length, number, (first, count), k, key_scale, decay, spec.has("l2norm"))
            states16[number] = state.mT.to(states16.dtype)
            right = c.read(v, c.values) - c.grow * (c.k @ state)
            value = inverse[number, heads].float() @ right
            values16[number] = value.to(values16.dtype)
            state = c.keep * state + (c.fade * c.k).mT @ value


def sweep(
    spec, q, k, do, inverse, decay, key_scale, table, dcarried, dexit, exit_row, dstates16, dv, dentry, scale, first
):
    count, width = dstates16.shape[1], k.shape[2]
    heads = slice(first, first + count)
    for row, chunks in _segments(table):
        if row[column.GRAD_ENTRY] >= 0:
            dstate = dcarried[row[column.GRAD_ENTRY], heads].mT
        else:
            dstate = _known(row, None, spec.has("final_grad"), dexit, exit_row, heads, (count, width, width))
        for token, length, number in reversed(chunks):
            c = _Chunk(token, length, number, (first, count), k, key_scale, decay, spec.has("l2norm"), scale)
            dstates16[number] = dstate.mT.to(dstates16.dtype)
            dstate, dright = c.back(c.query(q), c.read(do, c.values), inverse[number, heads], dstate)
            dv[c.rows, heads] = dright[:, :length].transpose(0, 1).to(dv.dtype)
        if spec.has("initial_grad") and row[column.ENTRY] < 0:
            dentry[row[column.CHAIN], heads] = dstate.mT


def gradients(
    spec, q, k, do, dv, values16, states16, dstates16, decay, beta, chunk_table, entry_row, dq, dk, dg, dbeta,
    scale, entered, first, blocks,
):  # fmt: skip
    count, ratio = states16.shape[1], decay.shape[1] // k.shape[1]
    assert blocks > 0
    for number, (token, length, begun) in enumerate(chunk_table.tolist()):
        if length <= 0:
            continue
        c = _Chunk(token, length, number, (first, count), k, None, decay, spec.has("l2norm"), scale)
        query, grad = c.query(q), c.read(do, c.values)
        dright, value = c.read(dv, c.values), values16[number].float()
        state, dstate = states16[number].float().mT, dstates16[number].float().mT
        asked = scale * c.ratio * (grad @ value.mT)
        pairs = -(c.ratio * (dright @ value.mT)).tril(-1)
        read = scale * c.grow * (grad @ state.mT)
        recalled = c.grow * (dright @ state.mT)
        written = c.fade * (value @ dstate.mT)
        leaving = (c.k * written).sum(-1)
        pull = (asked * (query @ c.k.mT) + pairs * (c.k @ c.k.mT)).tril(-1)
        ddecay = (query * read).sum(-1) - (c.k * recalled).sum(-1) - leaving + pull.sum(-1) - pull.sum(-2)
        ddecay[:, -1] += leaving.sum(-1) + c.keep[:, 0, 0] * (state * dstate).sum((-2, -1))
        strength = torch.ones(count, CHUNK)
        strength[:, :length] = beta[c.rows, c.values].T.float()
        if spec.has("sigmoid"):
            strength[:, :length] = strength[:, :length].sigmoid() * (2 if spec.has("double") else 1)
        dstrength = (dright * value).sum(-1) / strength.clamp(min=2.0**-40) ** 2
        if spec.has("sigmoid"):
            dstrength = dstrength * strength * (1 - strength / (2 if spec.has("double") else 1))
        dbeta[c.rows, c.values] = dstrength[:, :length].T
        dg[c.rows, c.values] = ddecay.flip(1).cumsum(1).flip(1)[:, :length].T
        if begun >= 0 and not (entered and entry_row[begun] >= 0):
            dg[token, c.values] = 0
        dquery = asked @ c.k + read
        dkey = asked.mT @ query + (pairs + pairs.mT) @ c.k - recalled + written
        own = torch.arange(first // ratio, (first + count) // ratio)
        for dx, x, unit, total in ((dq, q, query, dquery), (dk, k, c.k, dkey)):
            total = total.unflatten(0, (-1, ratio)).sum(1)
            if spec.has("l2norm"):
                unit = unit[::ratio]
                norm = torch.rsqrt(c.read(x, own).square().sum(-1, keepdim=True) + 1e-6)
                total = norm * (total - unit * (unit * total).sum(-1, keepdim=True))
            dx[c.rows, own] = total[:, :length].transpose(0, 1).to(dx.dtype)


STAGES = {stage.__name__: stage for stage in (summary_grad, replay, sweep, gradients)}
