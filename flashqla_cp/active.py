"""The context of the micro-batch that runs now, for frameworks whose layers take no cp_context argument.

A plugin reads it once, where the framework's model is entered, and from there passes it on as an argument, so that
activation checkpointing stores it with the layer's other arguments. It is never read inside backward: that may run in
a thread that knows nothing of it, after the block has ended, or inside the block of another micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from flashqla_cp.parallel.context import CPContext


@dataclass(slots=True)
class _Block:
    """A use_context block, and whether a layer has read its context."""

    context: CPContext
    read: bool = False


_active: ContextVar[_Block | None] = ContextVar("flashqla_cp_active_context", default=None)


@contextmanager
def use_context(context: CPContext) -> Iterator[CPContext]:
    """Run the forward passes inside the block with this context. backward() may be called inside or outside.

    Blocks nest, the innermost counts; a thread started inside starts without. Calling a layer's forward again during
    backward (activation checkpointing) uses the context of its first call, not that of the block around backward.
    A context of several ranks that nothing has read at the end of the block brings a warning: the model that ran, if
    one did, was not enabled and took each rank's rows for a whole sequence.

    Raises:
        TypeError: context is not what build_cp_context returns.
    """
    if not isinstance(context, CPContext):
        raise TypeError(f"context: expected a CPContext from build_cp_context, got {type(context).__name__}")
    block = _Block(context)
    token = _active.set(block)
    try:
        yield context
    finally:
        _active.reset(token)
    if context.world_size > 1 and not block.read:
        warnings.warn(
            f"context: no layer read {context!r}; expected a model changed by enable_context_parallel to run inside "
            "the block",
            stacklevel=3,  # past contextlib
        )


def active_context() -> CPContext | None:
    """The innermost use_context of this thread, None outside of any.

    Raises:
        RuntimeError: called during backward, where it may be that of another micro-batch.
    """
    if in_backward():
        raise RuntimeError(
            "cp_context: a layer is called again during backward, and its first call did not get its documents as an "
            "argument; checkpoint whole decoder layers of a model that is called as a whole, or pass cp_context=... "
            "(None without one) to the checkpointed layer"
        )
    block = _active.get()
    if block is None:
        return None
    block.read = True
    return block.context


def in_backward() -> bool:
    """Whether this thread is executing a backward pass, as in torch.utils.checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)
