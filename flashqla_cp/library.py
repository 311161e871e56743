"""The op and the convolution as operators of torch, which torch.compile takes into its graphs without looking inside.

    gated_delta_rule     the host code of an eager call, which returns what its backward reads beside the results
    causal_conv1d        the same for the convolution
    padding_rows         rows of no document

Each has a fake implementation, which says the results' sizes, and an operator for its backward. On kernels that is the
backward of an eager call; where torch has a part in the forward, that is run again and differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashqla_cp import fused_grad
from flashqla_cp.bound import Bound, Options, bind, kernels_for
from flashqla_cp.chains import Kept, documents_of
from flashqla_cp.gate import without_autocast
from flashqla_cp.opaque import again, apart, copied, fake_copied, fake_filled, filled, wide
from flashqla_cp.packing import SLOTS, nothing, pack, slot_dtypes, slot_sizes, unpack
from flashqla_cp.parallel.context import context_of
from flashqla_cp.parallel.once import differentiable_once
from flashqla_cp.program import Program

GIVEN = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state"
OPTIONS = (
    "Tensor? offsets, Tensor? handle, float scale, bool final, bool l2norm, bool state_v_first, bool sigmoid, "
    "bool double, str backend, str recompute, float forget_below, bool trains"
)
RULE = f"({GIVEN}, {OPTIONS}) -> (Tensor o, Tensor final_state, Tensor[] kept)"
RULE_GRAD = f"({GIVEN}, {OPTIONS}, Tensor? do, Tensor? dfinal, Tensor[] kept, bool wants_initial) -> Tensor[]"
CONV_GIVEN = "Tensor x, Tensor weight, Tensor? bias"
CONV = (
    f"({CONV_GIVEN}, Tensor? offsets, Tensor? handle, bool silu, str backend, bool trains) -> (Tensor y, Tensor[] kept)"
)
CONV_GRAD = f"({CONV_GIVEN}, Tensor? handle, bool silu, str backend, Tensor[] kept, Tensor dy) -> Tensor[]"
PADDING = "(Tensor like, Tensor handle) -> Tensor"
NUM_GIVEN = 8  # of the op's tensors that have gradients


def _bound(
    given: Sequence[torch.Tensor | None],
    offsets: torch.Tensor | None,
    handle: torch.Tensor | None,
    options: Sequence[Any],
) -> Bound:
    """The call of an operator, its arguments checked. options: what stands behind the handle in OPTIONS."""
    *passed, trains = options
    call = Options._make([*passed, given[5] is not None])
    return bind(given, call, offsets, None, None if handle is None else context_of(handle), trains)


def _run_rule(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    given, (offsets, handle, *options) = arguments[:NUM_GIVEN], arguments[NUM_GIVEN:]
    offsets = copied(offsets)  # the caller's may be others by the time of the backward
    with torch.no_grad(), without_autocast(given[0].device):
        bound = _bound(given, offsets, handle, options)
        call, context = bound.call, bound.context
        if bound.on_kernels:
            o, final_state, kept = call.run(bound.tensors, bound.gate, bound.initial_state, bound.offsets, context)
            slots = pack(kept.trimmed(call.recompute), given[0], given[2], context)
        else:
            o, final_state = bound.run()
            slots = nothing(given[0])
        if final_state is None:
            final_state = o.new_empty(0, dtype=wide(o))
        kept_offsets = o.new_empty(0, dtype=torch.int32) if offsets is None else offsets
        o, final_state, *slots = apart((o, final_state, *slots), given)
    return o, final_state, [kept_offsets, *slots]


def _fake_rule(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    given, (offsets, handle, *options) = arguments[:NUM_GIVEN], arguments[NUM_GIVEN:]
    final, state_v_first = options[1], options[3]
    q, v, initial = given[0], given[2], given[7]
    sizes = _fake_sizes(q, v, offsets, handle, initial is not None, options)
    slots = [q.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, slot_dtypes(q.dtype), strict=True)]
    state: tuple[Any, ...] = (0,)
    if final:
        if handle is not None and initial is None:
            number: Any = torch.library.get_ctx().new_dynamic_size()  # only the context knows
        else:
            number = next(x.shape[0] - less for x, less in ((initial, 0), (offsets, 1), (q, 0)) if x is not None)
        dims = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
        state = (number, v.shape[2], *dims)
    return v.new_empty(v.shape), v.new_empty(state, dtype=wide(v)), [fake_copied(offsets, v), *slots]


def _fake_sizes(
    q: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    handle: torch.Tensor | None,
    entered: bool,
    options: Sequence[Any],
) -> Sequence[Any]:
    """Sizes of the slots. What only a context knows is unknown, and so is what hangs on a length that may vary: how
    finely a device cuts its documents is no formula."""
    _, _, l2norm, _, _, _, backend, recompute, _, trains = options
    kernels = kernels_for(backend, q, v, trains)
    if kernels is None or recompute == "forward":
        return [0] * SLOTS
    known = (*q.shape, *(() if offsets is None else offsets.shape))
    if handle is not None or not all(isinstance(size, int) for size in known):
        return [torch.library.get_ctx().new_dynamic_size() for _ in range(SLOTS)]
    return slot_sizes(
        q,
        v,
        num_documents=q.shape[0] if offsets is None else offsets.shape[0] - 1,
        longest=q.shape[1] if offsets is None else None,
        processors=kernels.processors,
        l2norm=l2norm,
        entered=entered,
        recompute=recompute,
    )


def _run_rule_grad(*arguments: Any) -> list[torch.Tensor]:
    given, (_, handle, *options, do, dfinal, kept, wants_initial) = arguments[:NUM_GIVEN], arguments[NUM_GIVEN:]
    offsets = kept[0] if len(kept[0]) else None
    with torch.no_grad(), without_autocast(given[0].device):
        bound = _bound(given, offsets, handle, options)
        if bound.on_kernels:
            found = _gradients_on_kernels(bound, kept[1:], do, dfinal, wants_initial)
        else:
            found = again(lambda own: _bound(own, offsets, handle, options).run(), given, (do, dfinal))
    return filled(found, given)


def _gradients_on_kernels(
    bound: Bound, slots: Sequence[torch.Tensor], do: torch.Tensor | None, dfinal: torch.Tensor | None, wants: bool
) -> Sequence[torch.Tensor | None]:
    call, context, (q, _, v, *_) = bound.call, bound.context, bound.tensors
    x = call.inputs(bound.tensors, bound.gate)
    if context is None:
        begun = call.begin(x, documents_of(bound.offsets, q.shape[0], q.shape[1], q.device))
    else:
        begun = Kept(tables=call.local(x, context).tables)
    kept = begun.with_tensors(unpack(slots, q, v, context, call.recompute))
    given = (*bound.tensors, *bound.gate, bound.initial_state)
    return fused_grad.gradients(call, given, kept, context, do, dfinal, wants)


def _keep_rule(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
    given, (_, handle, *options) = inputs[:NUM_GIVEN], inputs[NUM_GIVEN:]
    ctx.options = options
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2])
    ctx.save_for_backward(*given, handle, *output[2])


@differentiable_once("chunk_gated_delta_rule")
def _differentiate_rule(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    given, (handle, *kept) = ctx.saved_tensors[:NUM_GIVEN], ctx.saved_tensors[NUM_GIVEN:]
    wants, final = ctx.needs_input_grad, ctx.options[1]
    upstream = do, dfinal if final else None, kept, wants[NUM_GIVEN - 1]
    found = torch.ops.flashqla_cp.gated_delta_rule_grad(*given, None, handle, *ctx.options, *upstream)
    grads = [dx if wanted else None for dx, wanted in zip(found, wants[:NUM_GIVEN], strict=True)]
    return *grads, *[None] * (2 + len(ctx.options))


_bind_conv: Callable[..., tuple[Sequence[Any], Any]] | None = None


def convolve_with(bind: Callable[..., tuple[Sequence[Any], Any]]) -> None:
    """Make this what checks a convolution and says how it runs: bind_conv, whose module stands above this one."""
    global _bind_conv
    _bind_conv = bind


def _conv(
    given: Sequence[torch.Tensor | None],
    offsets: torch.Tensor | None,
    handle: torch.Tensor | None,
    silu: bool,
    backend: str,
    trains: bool,
) -> tuple[list[Any], Any]:
    """Token rows, weight and bias, and the routes of a call."""
    assert _bind_conv is not None, "conv.py has given its function"
    context = None if handle is None else context_of(handle)
    (x, *shared), routes = _bind_conv(*given, "silu" if silu else None, offsets, context, backend, trains)
    return [x.flatten(0, 1), *shared], routes


def _run_conv(*arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    *given, offsets, handle, silu, backend, trains = arguments
    offsets = copied(offsets)
    with torch.no_grad(), without_autocast(given[0].device):
        tensors, routes = _conv(given, offsets, handle, silu, backend, trains)
        arrived = routes.fetch(tensors[0])
        y = routes.forward(*tensors, arrived).view(given[0].shape)
    kept_offsets = y.new_empty(0, dtype=torch.int32) if offsets is None else offsets
    y, arrived = apart((y, arrived if trains else arrived[:0]), given)
    return y, [kept_offsets, arrived.clone() if not arrived.numel() else arrived]


def _fake_conv(*arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x, *_, offsets, handle, _, _, trains = arguments
    arrived = torch.library.get_ctx().new_dynamic_size() if handle is not None and trains else 0
    return x.new_empty(x.shape), [fake_copied(offsets, x), x.new_empty(arrived, x.shape[2])]


def _run_conv_grad(*arguments: Any) -> list[torch.Tensor]:
    *given, handle, silu, backend, kept, dy = arguments
    offsets, arrived = kept
    with torch.no_grad(), without_autocast(given[0].device):
        tensors, routes = _conv(given, offsets if len(offsets) else None, handle, silu, backend, True)
        dx, *shared = routes.backward(*tensors, arrived, dy.flatten(0, 1))
    return filled((dx.view(given[0].shape), *shared), given)


def _keep_conv(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
    *given, _, handle, silu, backend, _ = inputs
    ctx.options = silu, backend
    ctx.mark_non_differentiable(*output[1])
    ctx.save_for_backward(*given, handle, *output[1])


@differentiable_once("causal_conv1d")
def _differentiate_conv(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    given, (handle, *kept) = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    found = torch.ops.flashqla_cp.causal_conv1d_grad(*given, handle, *ctx.options, kept, dy)
    grads = (dx if wanted else None for dx, wanted in zip(found, ctx.needs_input_grad[:3], strict=True))
    return *grads, *[None] * 5


def _run_padding(like: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    covered = Program.of_context(context_of(handle), like.device).covered
    if covered is None:
        return torch.zeros(like.shape[1], 1, dtype=torch.bool, device=like.device)
    return ~covered[:, None]


def _enter(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    entered = torch.library.custom_op(f"flashqla_cp::{name}", run, mutates_args=(), schema=schema)
    entered.register_fake(fake)
    return entered


_enter("gated_delta_rule", RULE, _run_rule, _fake_rule).register_autograd(_differentiate_rule, setup_context=_keep_rule)
_enter("gated_delta_rule_grad", RULE_GRAD, _run_rule_grad, lambda *given: fake_filled(given[:NUM_GIVEN]))
_enter("causal_conv1d", CONV, _run_conv, _fake_conv).register_autograd(_differentiate_conv, setup_context=_keep_conv)
_enter("causal_conv1d_grad", CONV_GRAD, _run_conv_grad, lambda *given: fake_filled(given[:3]))
_enter("padding_rows", PADDING, _run_padding, lambda like, _: like.new_empty(like.shape[1], 1, dtype=torch.bool))
