"""Give modules of a foreign model another forward and take it back: dynamic subclasses, parameters untouched."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from flashqla_cp.integrations.documents import Sharding

KEY = "flashqla_cp"  # attribute of every module that was changed
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_subclasses: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}
WRAPPED = {"_orig_mod": "torch.compile", "_checkpoint_wrapped_module": "checkpoint wrapping"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Enabling:
    """One call that changed modules: how, and how many layers, which are to be restored together. attends: whether
    there is full attention beside them."""

    sharding: Sharding
    backend: str
    num_layers: int
    attends: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attachment:
    """What a changed module knows.

    names: parameters of its own forward. original: its own class, None where only hooks were added. hooks: handles.
    """

    enabling: Enabling
    names: tuple[str, ...]
    original: type[nn.Module] | None = None
    hooks: tuple[Any, ...] = ()

    @property
    def sharding(self) -> Sharding:
        return self.enabling.sharding

    @property
    def backend(self) -> str:
        return self.enabling.backend


def swap_class(module: nn.Module, mixin: type[nn.Module], enabling: Enabling) -> None:
    """Put the mixin in front of the module's class."""
    original = type(module)
    attachment = Attachment(enabling=enabling, names=forward_names(module), original=original)
    module.__class__ = _subclass(mixin, original)
    setattr(module, KEY, attachment)


def add_hook(module: nn.Module, hook: Any, enabling: Enabling) -> None:
    """Let hook(module, args, kwargs) -> (args, kwargs), or None to leave them, see every call of the module."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    before = getattr(module, KEY, None) or Attachment(enabling=enabling, names=forward_names(module))
    setattr(module, KEY, replace(before, hooks=(*before.hooks, handle)))


def is_changed(module: nn.Module) -> bool:
    return KEY in module.__dict__


def restore(modules: list[nn.Module]) -> None:
    """Undo swap_class and add_hook; raises ValueError, before it changes anything, if a class was swapped again."""
    for module in modules:
        original = getattr(module, KEY).original
        if original is not None and original not in type(module).__bases__:
            raise ValueError(
                f"model: a layer was wrapped since, {type(module).__name__}; expected it as it was enabled"
            )
    for module in modules:
        attachment = getattr(module, KEY)
        for hook in attachment.hooks:
            hook.remove()
        if attachment.original is not None:
            module.__class__ = attachment.original
        delattr(module, KEY)


def check_unwrapped(name: str, module: nn.Module) -> None:
    """Raise ValueError for a module whose forward something else has replaced or captured already."""
    by = _replacement(module)
    if by is not None:
        raise ValueError(f"model: {name or 'the model'} has been through {by}; enable context parallelism before")


def _replacement(module: nn.Module) -> str | None:
    """What put a forward of its own into this module, or around it."""
    wrapper = next((text for child, text in WRAPPED.items() if child in module._modules), None)
    if wrapper is not None:
        return wrapper
    if isinstance(module, FSDPModule):
        return "fully_shard"
    if module._compiled_call_impl is not None:
        return "torch.compile"
    if "forward" not in module.__dict__:
        return None
    if hasattr(module, "_hf_hook"):
        return "an accelerate hook"
    if hasattr(type(module), "kernel_layer_name"):
        return "kernelize (use_kernels=True)"
    return "a replacement of its forward"


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional parameters of a module's forward."""
    return tuple(name for name, p in _parameters(module).items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def passes_on(module: nn.Module, *names: str) -> bool:
    """Whether a forward takes one of these parameters and any further keywords."""
    found = _parameters(module)
    keywords = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())
    return keywords and any(name in found for name in names)


def modules_above(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that hold model.<name>, nearest first, without lists and other containers."""
    parts = name.split(".") if name else []
    holders = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]
    return [module for module in reversed(holders) if not isinstance(module, CONTAINERS)]


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module.forward).parameters)


def _subclass(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """One class for all modules of a class. Its name stays: wrapping policies look for decoder layers by it."""
    if (mixin, original) not in _subclasses:
        namespace = {"__module__": original.__module__, "__doc__": mixin.__doc__, "__reduce_ex__": _reduce}
        _subclasses[mixin, original] = type(original.__name__, (mixin, original), namespace)
    return _subclasses[mixin, original]


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """For pickle and copy, which would look such a class up by its name and find the original."""
    mixin, original = type(module).__bases__
    return _empty, (mixin, original), module.__getstate__()


def _empty(mixin: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    """A module without anything in it yet."""
    made = _subclass(mixin, original)
    return made.__new__(made)
