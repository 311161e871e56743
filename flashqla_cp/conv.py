"""causal_conv1d: depthwise causal convolution of packed documents, on one device or sharded over ranks.

On kernels a table of the device says where each token's window begins (kernels/blocks/conv_places.py): made from the
offsets there, in each call, or from a context, once. The torch backend has a table of rows instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from flashqla_cp.bound import wants_gradients
from flashqla_cp.chains import documents_of
from flashqla_cp.checks import as_parameter, as_tensor, check_conv_inputs, offsets_for_kernels, read_documents
from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.backend import ConvSizes, Kernels, select
from flashqla_cp.kernels.host import causal_conv as kernels
from flashqla_cp.kernels.host.causal_conv import Fronts, Inputs, Places
from flashqla_cp.kernels.reference import causal_conv
from flashqla_cp.kernels.reference.causal_conv import ConvTable
from flashqla_cp.library import convolve_with
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.halo import Halo
from flashqla_cp.parallel.once import differentiable_once
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

    Differentiable once in every tensor argument; a backward with create_graph=True raises RuntimeError.

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
    given, routes = bind_conv(x, weight, bias, activation, cu_seqlens, cp_context, backend)
    y = CausalConv.apply(given[0].flatten(0, 1), *given[1:], routes)
    return y.view(given[0].shape), None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Routes:
    """Where a call finds the rows that a token reads: `places` on kernels of an arch, or a table of the torch backend.

    halo: rows of other ranks, None without a context. silu: whether it is the activation.
    """

    halo: Halo | None
    silu: bool
    arch: Arch | None = None
    places: Places | None = None
    table: ConvTable | None = None

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [arrived, D] in front of fragments, from other ranks. x: token rows [T, D]."""
        return x[:0] if self.halo is None else self.halo.fetch(x)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor
    ) -> torch.Tensor:
        """y [T, D]."""
        if self.places is not None and self.arch is not None:
            return kernels.causal_conv(Inputs.of(x, arrived, weight, bias, self.places, self.silu, self.arch))
        assert self.table is not None
        return causal_conv.forward(*_cast(x, arrived, weight, bias), self.table, self.silu).to(x.dtype)

    def backward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        arrived: torch.Tensor,
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gradients of x, weight and bias; those of rows that arrived travel back."""
        if self.places is not None and self.arch is not None:
            given = Inputs.of(x, arrived, weight, bias, self.places, self.silu, self.arch)
            dx, dhalo, dweight, dbias = _gradients_on_kernels(given, self.places.fronts, kernels.readable_rows(dy))
        else:
            assert self.table is not None
            operands = _cast(x, arrived, weight, bias)
            dx, dhalo, dweight, dbias = causal_conv.backward(*operands, self.table, self.silu, dy.to(operands[0].dtype))
        if self.halo is not None:
            dx = self.halo.return_gradient(dx, dhalo)
        return dx.to(x.dtype), dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)


def bind_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
    cp_context: CPContext | None,
    backend: str,
    trains: bool | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], Routes]:
    """Check the arguments of causal_conv1d and decide what runs it. -> x, weight, bias as tensors, and the routes.

    trains: whether gradients will be wanted, None to look for oneself.
    """
    x = as_tensor(x, "x")
    weight = as_tensor(weight, "weight")
    check_conv_inputs(x, weight, activation, cp_context)
    as_parameter(weight, "weight", tuple(weight.shape), x.device)
    bias = as_parameter(bias, "bias", tuple(weight.shape[:1]), x.device)
    width, silu = weight.shape[1], activation is not None
    chosen = _kernels(backend, x, weight, wants_gradients((x, weight, bias)) if trains is None else trains)
    halo = table = places = None
    if chosen is not None:
        places = _places(x, width, cu_seqlens, cp_context, chosen.arch)
    else:
        offsets = read_documents(x, "x", cu_seqlens, None, cp_context)
        if cp_context is None:
            table = _document_table(offsets, x.shape[0] * x.shape[1], width, x.device)
        else:
            table = _context_table(cp_context, width, x.device)
    if cp_context is not None:
        halo = cp_context.halo(width)
    arch = None if chosen is None else chosen.arch
    return (x, weight, bias), Routes(halo=halo, silu=silu, arch=arch, places=places, table=table)


def _kernels(backend: str, x: torch.Tensor, weight: torch.Tensor, trains: bool) -> Kernels | None:
    """The kernels that run this call, or None for the torch backend."""
    if backend == "auto" and x.dtype == torch.float64:
        backend = "torch"  # what fp64 is for needs no kernel
    sizes = ConvSizes(dtype=x.dtype, width=weight.shape[1])
    return select(backend, x.device, needs_grad=trains, sizes=sizes)


convolve_with(bind_conv)


class CausalConv(torch.autograd.Function):
    """x [T, D], weight [D, W], bias [D] or None -> y [T, D]; the halo travels in forward, its gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routes: Routes
    ) -> torch.Tensor:
        arrived = routes.fetch(x)
        table = None if routes.places is None else routes.places.places
        ctx.save_for_backward(x, weight, bias, arrived, table)
        ctx.routes = routes if table is None else _with_places(routes, table[:0])  # for checkpointing to let go
        return routes.forward(x, weight, bias, arrived)

    @staticmethod
    @differentiable_once("causal_conv1d")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias, arrived, table = ctx.saved_tensors
        routes = ctx.routes if table is None else _with_places(ctx.routes, table)
        return *routes.backward(x, weight, bias, arrived, dy), None


def _with_places(routes: Routes, table: torch.Tensor) -> Routes:
    assert routes.places is not None
    return replace(routes, places=replace(routes.places, places=table))


def _gradients_on_kernels(
    given: Inputs, fronts: Fronts | None, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx [T, D], of the rows that arrived, dweight, dbias."""
    dx, dweight, dbias = kernels.causal_conv_grad(given, dy)
    dhalo = torch.empty(0, dx.shape[1], dtype=torch.float32, device=dx.device)
    if fronts is not None:
        dhalo, dlocal = kernels.conv_halo_grad(given, dy, fronts)
        dx.index_copy_(0, fronts.local, (dx.index_select(0, fronts.local) + dlocal).to(dx.dtype))
    return dx, dhalo, dweight, dbias


def _cast(
    x: torch.Tensor, arrived: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """In the dtype that torch computes in."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(dtype), arrived.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _places(x: torch.Tensor, width: int, cu_seqlens: Any, context: CPContext | None, arch: Arch) -> Places:
    """Where windows begin, for kernels."""
    known = offsets_for_kernels(x, "x", cu_seqlens, None, context)
    if context is not None:
        return _context_places(context, width, x.device)
    batch, length = x.shape[:2]
    offsets = documents_of(known, batch, length, x.device).offsets
    if offsets is None:
        return kernels.places_of_batch(batch, length, width, arch, x.device)
    return kernels.places_of_documents(offsets[:-1], offsets[1:], batch * length, width, arch)


def _document_table(offsets: Sequence[int], num_tokens: int, width: int, device: torch.device) -> ConvTable:
    lengths = [end - start for start, end in pairwise(offsets)]
    nothing = torch.full((len(lengths), width - 1), -1, dtype=torch.int64, device="cpu")
    return ConvTable.of(offsets[:-1], lengths, num_tokens, nothing, 0, device)


def _context_table(context: CPContext, width: int, device: torch.device) -> ConvTable:
    def make() -> ConvTable:
        own, halo = context.plan.fragments.owned_by(context.rank), context.halo(width)
        starts, lengths = own.offset.tolist(), own.length.tolist()
        return ConvTable.of(starts, lengths, context.local_tokens, halo.sources, sum(halo.receive_counts), device)

    return context.kept(("conv", width), device, make)


def _context_places(context: CPContext, width: int, device: torch.device) -> Places:
    def make() -> Places:
        own, halo = context.plan.fragments.owned_by(context.rank), context.halo(width)
        arrived = sum(halo.receive_counts)
        return kernels.places_of_fragments(own.offset, own.length, context.local_tokens, halo.sources, arrived, device)

    return context.kept(("conv places", width), device, make)
