"""causal_conv1d: depthwise causal convolution of packed documents, on one device or sharded over ranks.

On kernels a table of the device says where each token's window begins (kernels/blocks/conv_places.py): made from the
offsets there, in each call, or from a context, once. The torch backend has a table of rows instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from flashqla_cp.bound import conv_kernels_for, wants_gradients
from flashqla_cp.checks import as_parameter, as_tensor, check_conv_inputs, offsets_left_on, read_documents
from flashqla_cp.fused import documents_of
from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.backend import Kernels
from flashqla_cp.kernels.host import causal_conv as kernels
from flashqla_cp.kernels.host.causal_conv import Inputs, Places
from flashqla_cp.kernels.reference import causal_conv
from flashqla_cp.kernels.reference.causal_conv import ConvTable
from flashqla_cp.library import Convolution, convolve_with
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
    backend: str = "auto",
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
        backend: "auto", "tilelang" or "torch". Kernels take 2 to 4 taps, and x in bf16, fp16 or fp32; they read x in
            place, a column slice of a projection included. "auto" runs fp64 on torch.

    Returns:
        (y, None): y [B, T, D] in x's dtype, computed in fp32 (fp64 for fp64 x). The second place is where other
        libraries return a cache.

    Raises:
        TypeError, ValueError: a bad argument; the text names it. NotImplementedError: no kernel for it, with what
        would work. RuntimeError: backend="auto" in training on a GPU without kernels for the call.
    """
    if torch.compiler.is_compiling():
        check_conv_inputs(x, weight, activation, None)
        return traced_conv(x, weight, bias, activation is not None, cu_seqlens, cp_context, backend), None
    x = as_tensor(x, "x")
    weight = as_tensor(weight, "weight")
    check_conv_inputs(x, weight, activation, cp_context)
    as_parameter(weight, "weight", tuple(weight.shape), x.device)
    bias = as_parameter(bias, "bias", tuple(weight.shape[:1]), x.device)
    width, silu = weight.shape[1], activation is not None
    chosen = conv_kernels_for(backend, x, weight, wants_gradients((x, weight, bias)))
    if chosen is not None:
        places = _places(x, width, cu_seqlens, cp_context, chosen.arch)
        halo = None if cp_context is None else cp_context.halo(width)
        y = CausalConvOnKernels.apply(x.flatten(0, 1), weight, bias, halo, places, silu, chosen.arch)
        return y.view(x.shape), None
    offsets = read_documents(x, "x", cu_seqlens, None, cp_context)
    halo = None
    if cp_context is not None:
        halo, table = cp_context.halo(width), _context_table(cp_context, width, x.device)
    else:
        table = _document_table(offsets, x.shape[0] * x.shape[1], width, x.device)
    y = CausalConv.apply(x.flatten(0, 1), weight, bias, halo, table, silu)
    return y.view(x.shape), None


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


class CausalConvOnKernels(torch.autograd.Function):
    """The same on kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        halo: Halo | None,
        places: Places,
        silu: bool,
        arch: Arch,
    ) -> torch.Tensor:
        arrived = x[:0] if halo is None else halo.fetch(x)
        ctx.save_for_backward(x, weight, bias, arrived, places.places)
        ctx.halo, ctx.fronts, ctx.silu, ctx.arch = halo, places.fronts, silu, arch
        return kernels.causal_conv(Inputs.of(x, arrived, weight, bias, places, silu, arch))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias, arrived, table = ctx.saved_tensors
        places = Places(places=table, fronts=ctx.fronts)
        found = _gradients(Inputs.of(x, arrived, weight, bias, places, ctx.silu, ctx.arch), ctx.halo, dy)
        return *_like(found, weight, bias), None, None, None, None


def _gradients(given: Inputs, halo: Halo | None, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dx [T, D] in x's dtype, dweight and dbias in fp32; dy [T, D]."""
    dy = kernels.readable_rows(dy)
    dx, dweight, dbias = kernels.causal_conv_grad(given, dy)
    dhalo = torch.empty(0, dx.shape[1], dtype=torch.float32, device=dx.device)
    fronts = given.places.fronts
    if fronts is not None:
        dhalo, dlocal = kernels.conv_halo_grad(given, dy, fronts)
        dx.index_copy_(0, fronts.local, (dx.index_select(0, fronts.local) + dlocal).to(dx.dtype))
    if halo is not None:
        dx = halo.return_gradient(dx, dhalo)
    return dx, dweight, dbias


def _like(
    found: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Gradients in the parameters' dtypes."""
    dx, dweight, dbias = found
    return dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)


def _differentiate(
    given: Sequence[Any], offsets: torch.Tensor | None, context: CPContext | None, silu: bool, chosen: Kernels, dy: Any
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x [B, T, D], weight and bias, of a forward that kept nothing: its halo is fetched again."""
    x, weight, bias = given
    width, rows = weight.shape[1], x.flatten(0, 1)
    places = _places(x, width, offsets, context, chosen.arch)
    halo = None if context is None else context.halo(width)
    arrived = rows[:0] if halo is None else halo.fetch(rows)
    inputs = Inputs.of(rows, arrived, weight, bias, places, silu, chosen.arch)
    dx, *parameters = _like(_gradients(inputs, halo, dy.flatten(0, 1)), weight, bias)
    assert dx is not None
    return dx.view(x.shape), *parameters


convolve_with(Convolution(causal_conv1d, _differentiate))


def _cast(
    dtype: torch.dtype, x: torch.Tensor, halo: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return x.to(dtype), halo.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _places(x: torch.Tensor, width: int, cu_seqlens: Any, context: CPContext | None, arch: Arch) -> Places:
    """Where windows begin, for kernels."""
    if context is not None:
        read_documents(x, "x", cu_seqlens, None, context)
        return _context_places(context, width, x.device)
    known: Sequence[int] | torch.Tensor | None = offsets_left_on(x, "x", cu_seqlens, None)
    if known is None:
        known = read_documents(x, "x", cu_seqlens, None, None)
    batch, length = x.shape[:2]
    offsets = documents_of(known, batch, length, x.device).offsets
    if offsets is None:
        return kernels.places_of_batch(batch, length, width, arch, x.device)
    return kernels.places_of_documents(offsets[:-1], offsets[1:], batch * length, width, arch)


def _document_table(offsets: Sequence[int], num_tokens: int, width: int, device: torch.device) -> ConvTable:
    lengths = [end - start for start, end in pairwise(offsets)]
    nothing = torch.full((len(lengths), width - 1), -1, dtype=torch.int64)
    return ConvTable.of(offsets[:-1], lengths, num_tokens, nothing, 0, device)


@torch.inference_mode(False)
def _context_table(context: CPContext, width: int, device: torch.device) -> ConvTable:
    key = ("conv", width, device)
    if key not in context.memo:
        start, length = _pieces(context)
        halo = context.halo(width)
        context.memo[key] = ConvTable.of(
            start.tolist(),
            length.tolist(),
            context.local_tokens,
            halo.sources,
            sum(halo.receive_counts),
            device,
        )
    return context.memo[key]


@torch.inference_mode(False)
def _context_places(context: CPContext, width: int, device: torch.device) -> Places:
    key = ("conv places", width, device)
    if key not in context.memo:
        halo = context.halo(width)
        arrived = sum(halo.receive_counts)
        context.memo[key] = kernels.places_of_fragments(
            *_pieces(context), context.local_tokens, halo.sources, arrived, device
        )
    return context.memo[key]


def _pieces(context: CPContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Where this rank's fragments begin among its tokens, and their lengths, int64."""
    pieces = context.plan.fragments
    mine = pieces.of_rank(context.rank)
    return pieces.offset[mine], (pieces.end - pieces.start)[mine]
