"""Backward passes that are written by hand, and so have no derivative of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., Any]


def differentiable_once(name: str) -> Callable[[Backward], Backward]:
    """Mark the backward of an autograd function; name: what users call it.

    With create_graph=True autograd runs a backward in grad mode. torch's once_differentiable then refuses only what
    depends on the incoming gradient: behind a loss that is linear in the results nothing does, and a penalty on the
    gradients would be dropped without a word. Without create_graph grad mode is off, and nothing is recorded.
    """

    def mark(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def refuse_or_run(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: is differentiable once, and create_graph=True asks for a derivative of its gradients; "
                    "leave it out, keep the call out of that loss, or use a formula that autograd differentiates "
                    "again, as those in flashqla_cp.testing.oracle"
                )
            return backward(ctx, *gradients)

        return refuse_or_run

    return mark
