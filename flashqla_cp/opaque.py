"""What torch asks of an operator that it cannot look into, and how such an operator can differentiate what it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def again(
    run: Callable[[Sequence[Any]], Sequence[Any]], given: Sequence[torch.Tensor | None], gradients: Sequence[Any]
) -> list[torch.Tensor | None]:
    """Gradients of all that is given, by autograd, of a forward that is run again."""
    with recording():
        own = [None if x is None else x.detach().requires_grad_() for x in given]
        pairs = [(x, dx) for x, dx in zip(run(own), gradients, strict=True) if x is not None and dx is not None]
        leaves = [x for x in own if x is not None]
        outputs, upstream = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, leaves, upstream, allow_unused=True))
    return [None if x is None else next(found) for x in own]


@contextmanager
def recording() -> Iterator[None]:
    """Autograd inside an operator, where torch has switched it off below the operator's own entry."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude), torch.enable_grad():
        yield


def copied(offsets: torch.Tensor | None) -> torch.Tensor | None:
    return None if offsets is None else offsets.to(torch.int32, copy=True).contiguous()


def fake_copied(offsets: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0, dtype=torch.int32) if offsets is None else torch.empty_like(offsets, dtype=torch.int32)


def wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def apart(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The results contiguous and aligned, none in memory of an argument or of another one, as torch wants them."""
    taken = {x.untyped_storage().data_ptr() for x in given if x is not None and x.numel()}
    apart = []
    for x in results:
        x = x.detach().contiguous()
        if x.numel() and (x.untyped_storage().data_ptr() in taken or x.data_ptr() % 16):
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        apart.append(x)
    return apart


def filled(found: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Gradients of the arguments, empty for those that are not there, 0 where there is none."""
    like = given[0]
    assert like is not None
    whole = []
    for dx, x in zip(found, given, strict=True):
        if x is None:
            whole.append(like.new_empty(0))
        else:
            whole.append(torch.zeros_like(x, memory_format=torch.contiguous_format) if dx is None else dx)
    return apart(whole, given)


def fake_filled(given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    like = given[0]
    assert like is not None
    return [
        like.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in given
    ]
