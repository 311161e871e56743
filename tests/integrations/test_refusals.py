"""What plugins say where their framework is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from flashqla_cp.integrations import deepspeed, fla
from flashqla_cp.integrations.refusals import need


def megatron_spec() -> None:
    from flashqla_cp.integrations.megatron import with_context_parallel_gdn

    with_context_parallel_gdn(None)


def megatron_class() -> None:
    from flashqla_cp.integrations.megatron.layer import layer_class

    layer_class.__wrapped__()  # past what an earlier test has made


@pytest.mark.parametrize(
    ("framework", "extra", "call"),
    [
        ("deepspeed", "deepspeed", deepspeed.init_distributed),
        ("megatron.core", "megatron", megatron_spec),
        ("megatron.core", "megatron", megatron_class),
        ("fla.backends", "fla", fla.register_fla_backend),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(
    framework: str, extra: str, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == framework.split(".")[0]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework.split(".")[0], None)
    with pytest.raises(ModuleNotFoundError) as caught:
        call()
    assert str(caught.value).startswith(f"{framework} is not installed")
    assert f"pip install 'flashqla-cp[{extra}]'" in str(caught.value) and caught.value.name == framework


def test_what_is_there_is_not_complained_of() -> None:
    need("torch", "gpu")
    need("torch.nn", "gpu")
