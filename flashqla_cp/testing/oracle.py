"""Oracles: the gated delta rule and the short convolution, one token at a time, in fp64.

Nothing here is chunked, sharded or clever, and nothing is shared with the product, so an error of the product cannot
hide in its own reference. Per value head, with state S of shape [K, V] (decay first, then correct):

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T
    o_t = scale * S_t^T q_t

Letters: B batch, T tokens, H query/key heads, HV value heads, K head_k_dim, V head_v_dim, N documents, D channels,
W taps of the convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

Offsets = Sequence[int] | torch.Tensor


def gated_delta_rule_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Offsets | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence token by token, document by document, in fp64; autograd differentiates it.

    Args:
        q, k: [B, T, H, K], any floating dtype (upcast to fp64).
        v: [B, T, HV, V]; value head i reads query/key head i // (HV // H).
        g, beta: [B, T, HV], log decay and step size.
        scale: factor of the output, K**-0.5 if None.
        initial_state: [N, HV, K, V] or None for zeros.
        cu_seqlens: offsets [N + 1] of the documents in the one row (B = 1); None makes each row one document.
        use_qk_l2norm: normalise q and k as x * rsqrt(sum(x^2) + 1e-6) first.

    Returns:
        o [B, T, HV, V] (rows past the last offset are 0) and final_state [N, HV, K, V], both fp64.
    """
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    outputs, states = [], []
    for number, (row, start, end) in enumerate(_documents(q.shape[0], q.shape[1], cu_seqlens)):
        if initial_state is None:
            state = q.new_zeros(v.shape[2], k.shape[-1], v.shape[-1])
        else:
            state = initial_state[number].double()
        o, state = _document([x[row, start:end] for x in (q, k, v, g, beta)], state)
        outputs.append(o)
        states.append(state)
    return _rows(outputs, v), torch.stack(states) if states else v.new_zeros(0, v.shape[2], k.shape[-1], v.shape[-1])


def causal_conv1d_oracle(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    cu_seqlens: Offsets | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution in fp64 that never looks across a document's start.

    Args:
        x: [B, T, D]; weight: [D, W] (weight[:, W - 1] multiplies the token itself); bias: [D] or None.
        activation: "silu" (or "swish") or None.
        cu_seqlens: offsets [N + 1] of the documents in the one row (B = 1); None makes each row one document.

    Returns:
        y [B, T, D] in fp64; rows past the last offset are 0.
    """
    x, weight = x.double(), weight.double()
    taps = weight.shape[1]
    outputs = []
    for row, start, end in _documents(x.shape[0], x.shape[1], cu_seqlens):
        document = x[row, start:end]
        y = torch.zeros_like(document) if bias is None else torch.zeros_like(document) + bias.double()
        for back in range(min(taps, end - start)):
            shifted = document[: end - start - back] * weight[:, taps - 1 - back]
            y = y + F.pad(shifted, (0, 0, back, 0))
        outputs.append(F.silu(y) if activation in ("silu", "swish") else y)
    return _rows(outputs, x)


def _documents(num_rows: int, num_tokens: int, cu_seqlens: Offsets | None) -> list[tuple[int, int, int]]:
    """(row, start, end) of each document."""
    if cu_seqlens is None:
        return [(row, 0, num_tokens) for row in range(num_rows)]
    offsets = [int(x) for x in cu_seqlens]
    return [(0, start, end) for start, end in itertools.pairwise(offsets)]


def _document(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One document: q, k, v, g, beta [T, HV, ...] that enter with `state` [HV, K, V]; returns o and the last state."""
    outputs = []
    # unbind, not indexing: its backward stacks the T gradients once instead of adding T full-sized tensors.
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(0) for x in inputs), strict=True):
        state = state * g_t.exp()[:, None, None]
        error = v_t - torch.einsum("hkv,hk->hv", state, k_t)
        state = state + torch.einsum("hk,hv->hkv", k_t, beta_t[:, None] * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q_t))
    return torch.stack(outputs) if outputs else torch.zeros_like(inputs[2]), state


def _rows(outputs: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Lay the documents' outputs back into [B, T, ...]; what no document covers is 0."""
    flat = torch.cat([*outputs, like.new_zeros(0, *like.shape[2:])])
    missing = like.shape[0] * like.shape[1] - flat.shape[0]
    padding = like.new_zeros(missing, *like.shape[2:])
    return torch.cat([flat, padding]).reshape(like.shape)
