"""causal_conv1d: depthwise causal convolution of packed documents, on one device or sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from flashqla_cp.checks import as_parameter, as_tensor, check_conv_inputs, read_documents
from flashqla_cp.kernels.reference import causal_conv
from flashqla_cp.kernels.reference.causal_conv import ConvTable
from flashqla_cp.library import convolve_with
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.halo import Halo
from flashqla_cp.traced import traced_conv


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    cp_context: CPContext | None = None,
) -> tuple[torch.Tensor, None]:
    """y_t = act(bias + sum_w weight[:, w] x_{t - (W-1) + w}) inside each document.

    Args:
        x: [B, T, D], any float dtype; B = 1 with cu_seqlens or cp_context.
        weight: [D, W]. bias: [D] or None.
        activation: "silu" (or "swish"), or None.
        cu_seqlens: [N+1] offsets of documents packed in one row. Rows past the last offset are padding: their outputs
            and gradients are exactly 0.
        cp_context: from build_cp_context; x then holds this rank's rows, and the W-1 rows in front of each cut come
            from the ranks that hold them.

    Returns:
        (y, None): y [B, T, D] in x's dtype, computed in fp32 (fp64 for fp64 x). The second place is where other
        libraries return a cache.

    Raises:
        TypeError, ValueError: a bad argument; the text names it.
    """
    if torch.compiler.is_compiling():
        check_conv_inputs(x, weight, activation, None)
        return traced_conv(x, weight, bias, activation is not None, cu_seqlens, cp_context), None
    x = as_tensor(x, "x")
    weight = as_tensor(weight, "weight")
    check_conv_inputs(x, weight, activation, cp_context)
    as_parameter(weight, "weight", tuple(weight.shape), x.device)
    bias = as_parameter(bias, "bias", tuple(weight.shape[:1]), x.device)
    offsets = read_documents(x, "x", cu_seqlens, None, cp_context)
    width = weight.shape[1]
    halo = None
    if cp_context is not None:
        halo, table = cp_context.halo(width), _context_table(cp_context, width, x.device)
    else:
        table = _document_table(offsets, x.shape[0] * x.shape[1], width, x.device)
    y = CausalConv.apply(x.flatten(0, 1), weight, bias, halo, table, activation is not None)
    return y.view(x.shape), None


convolve_with(causal_conv1d)


class CausalConv(torch.autograd.Function):
    """x [T, D], weight [D, W], bias [D] or None -> y [T, D]; the halo travels in forward, its gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        halo: Halo | None,
        table: ConvTable,
        silu: bool,
    ) -> torch.Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        arrived = x[:0] if halo is None else halo.fetch(x)
        ctx.save_for_backward(x, weight, bias, arrived)
        ctx.halo, ctx.table, ctx.silu, ctx.dtype = halo, table, silu, dtype
        operands = _cast(dtype, x, arrived, weight, bias)
        return causal_conv.forward(*operands, table, silu).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias, arrived = ctx.saved_tensors
        operands = _cast(ctx.dtype, x, arrived, weight, bias)
        dx, dhalo, dweight, dbias = causal_conv.backward(*operands, ctx.table, ctx.silu, dy.to(ctx.dtype))
        if ctx.halo is not None:
            dx = ctx.halo.return_gradient(dx, dhalo)
        return (
            dx.to(x.dtype),
            dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            None,
            None,
            None,
        )


def _cast(
    dtype: torch.dtype, x: torch.Tensor, halo: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return x.to(dtype), halo.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _document_table(offsets: Sequence[int], num_tokens: int, width: int, device: torch.device) -> ConvTable:
    lengths = [end - start for start, end in pairwise(offsets)]
    nothing = torch.full((len(lengths), width - 1), -1, dtype=torch.int64)
    return ConvTable.of(offsets[:-1], lengths, num_tokens, nothing, 0, device)


@torch.inference_mode(False)
def _context_table(context: CPContext, width: int, device: torch.device) -> ConvTable:
    key = ("conv", width, device)
    if key not in context.memo:
        pieces, halo = context.plan.fragments, context.halo(width)
        mine = pieces.of_rank(context.rank)
        context.memo[key] = ConvTable.of(
            pieces.offset[mine].tolist(),
            (pieces.end - pieces.start)[mine].tolist(),
            context.local_tokens,
            halo.sources,
            sum(halo.receive_counts),
            device,
        )
    return context.memo[key]
