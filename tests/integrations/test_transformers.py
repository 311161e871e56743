"""The transformers plugin in one process: packed rows, caches, checkpointing, what it refuses and leaves alone."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_transformers import (
    HYBRID,
    LINEAR,
    OFFSETS,
    errors,
    expected,
    families,
    gradients,
    make_batch,
    make_model,
    num_targets,
    token_loss,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import flashqla_cp
from flashqla_cp.integrations.attention import find_attention, warn_of_attention
from flashqla_cp.integrations.transformers import disable_context_parallel, enable_context_parallel, use_context
from flashqla_cp.testing.metrics import relative_l2

pytest.importorskip("transformers", reason="transformers is not installed")

FAMILIES = pytest.mark.parametrize("family", families())


@pytest.fixture
def one_rank(pg: Any) -> Any:
    if pg.size() != 1:
        pytest.skip("needs one rank")
    return pg


def enabled(family: str = "qwen3_next", layers: tuple[str, ...] = LINEAR) -> Any:
    model = make_model(family, layers)
    assert enable_context_parallel(model, None) == layers.count("linear_attention")
    return model


def train(model: Any, family: str = "qwen3_next", **told: Any) -> dict[str, float]:
    """Errors of one step on the packed batch; parameters that are gone count for nothing."""
    batch = make_batch()
    logits = model(input_ids=batch["input_ids"], **told).logits
    loss = token_loss(logits, batch["labels"], num_targets(batch))
    loss.backward()
    found = {name: getattr(gradient, "_local_tensor", gradient) for name, gradient in gradients(model).items()}
    wanted_loss, wanted = expected(family)
    return errors(loss.item(), found, (wanted_loss, {name: wanted[name] for name in dict(model.named_parameters())}))


def assert_close(found: dict[str, float]) -> None:
    assert found["loss"] < 1e-6
    assert max(found.values()) < 3e-5, max(found.items(), key=lambda item: item[1])


@FAMILIES
@pytest.mark.parametrize("layers", [LINEAR, HYBRID], ids=["linear", "hybrid"])
def test_rows_equal_the_unpatched_model(family: str, layers: tuple[str, ...]) -> None:
    """Each row is a document; attention, where there is some, is that of transformers."""
    # Not any rows: where dA_log nearly cancels, transformers itself is 1e-4 away from fp64.
    ids = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(1))
    model = make_model(family, layers)
    scores = []
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        scores.append((loss.item(), gradients(model)))
        if len(scores) == 1:
            assert enable_context_parallel(model, None) == 2
    assert_close(errors(*scores[1], scores[0]))


@FAMILIES
@pytest.mark.parametrize("source", ["positions", "cu_seqlens", "both"])
def test_packed_row_equals_documents_one_by_one(family: str, source: str) -> None:
    model, batch = enabled(family), make_batch()
    told: dict[str, Any] = {}
    if source != "cu_seqlens":
        told["position_ids"] = batch["position_ids"]
    if source != "positions":
        told["cu_seq_lens_q"] = torch.tensor(OFFSETS, dtype=torch.int32)
    assert_close(train(model, family, **told))


def test_context_of_one_rank(one_rank: Any) -> None:
    model = make_model("qwen3_next")
    enable_context_parallel(model, one_rank)
    with use_context(flashqla_cp.build_cp_context(OFFSETS, one_rank)):
        assert_close(train(model))


def test_control_forgotten_boundaries_are_seen() -> None:
    assert max(train(enabled()).values()) > 0.03


def test_documents_inside_several_rows() -> None:
    """Restarting positions in a batch of two rows; the rows of one document each give the same outputs."""
    model = enabled()
    ids = torch.randint(64, (2, 24))
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    with torch.no_grad():
        whole = model(input_ids=ids, position_ids=positions).logits
        parts = [model(input_ids=ids[:, start:end]).logits for start, end in pairwise([0, 10, 24])]
    torch.testing.assert_close(whole, torch.cat(parts, dim=1))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("source", ["position_ids", "context"])
def test_checkpointing(source: str, use_reentrant: bool, one_rank: Any) -> None:
    model = make_model("qwen3_next")
    enable_context_parallel(model, one_rank)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    if source == "position_ids":
        assert_close(train(model, position_ids=make_batch()["position_ids"]))
    else:
        assert_close(train(model, cp_context=flashqla_cp.build_cp_context(OFFSETS, one_rank)))


def test_checkpoint_that_loses_the_documents_raises(one_rank: Any) -> None:
    """A layer that is called on its own binds nothing before the checkpoint, so its second call cannot know."""
    layer = enabled().model.layers[0].linear_attn
    x = torch.randn(1, 20, 32, requires_grad=True)
    context = flashqla_cp.build_cp_context([0, 8, 20], one_rank)
    with use_context(context):
        y = checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="called again during backward"):
        y.sum().backward()
    bound = checkpoint(layer, x, cp_context=context, use_reentrant=False)
    bound.sum().backward()
    with use_context(context):
        torch.testing.assert_close(bound, layer(x))


def test_decoder_layer_called_by_itself() -> None:
    """A pipeline stage's loop over decoder layers, or a call of forward itself, misses no boundary."""
    model = enabled()
    x, positions = torch.randn(1, 24, 32), torch.cat([torch.arange(10), torch.arange(14)])[None]
    layer, told = model.model.layers[0], {"position_embeddings": None, "attention_mask": None}
    with torch.no_grad():
        parts = [layer(x[:, :10], **told), layer(x[:, 10:], **told)]
        for call in (layer, layer.forward):
            torch.testing.assert_close(call(x, position_ids=positions, **told), torch.cat(parts, dim=1))


def test_a_layer_that_is_passed_over_is_noticed() -> None:
    model = enabled()
    layer = model.model.layers[1].linear_attn
    original = type(layer).__mro__[2]
    layer.forward = original.forward.__get__(layer)
    with pytest.raises(RuntimeError, match="was passed over"):
        model(input_ids=torch.randint(64, (1, 24)))


def test_full_attention_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"full-attention layers \(1 modules, the first 'model.layers.1.self_attn'\)"):
        warn_of_attention(find_attention(make_model("qwen3_next", HYBRID)))
    assert find_attention(make_model("qwen3_next", LINEAR)) == []


@FAMILIES
def test_state_dict_names_and_types_stay(family: str) -> None:
    model = make_model(family, HYBRID)
    before, classes = {k: v.clone() for k, v in model.state_dict().items()}, [type(m) for m in model.modules()]
    outputs = model(input_ids=make_batch()["input_ids"]).logits
    enable_context_parallel(model, None)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    model.load_state_dict(before)
    assert [cls.__name__ for cls in classes] == [type(m).__name__ for m in model.modules()]
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    copied = copy.deepcopy(model)
    for restored in (copied, model):
        assert disable_context_parallel(restored) == 2
        assert [type(m) for m in restored.modules()] == classes
        assert not any(vars(m).get("flashqla_cp") or m._forward_pre_hooks for m in restored.modules())
        assert torch.equal(restored(input_ids=make_batch()["input_ids"]).logits, outputs)
    assert enable_context_parallel(model, None) == 2


@FAMILIES
def test_generation_with_a_cache_is_that_of_transformers(family: str) -> None:
    model = make_model(family, HYBRID).eval()
    ids, mask = torch.randint(64, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    told = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    before = model.generate(ids, **told)
    enable_context_parallel(model, None)
    assert torch.equal(model.generate(ids, **told), before)


def test_cache_in_training_or_with_packed_documents() -> None:
    model, batch = enabled(layers=HYBRID), make_batch()
    with pytest.raises(ValueError, match="cache: got one in training, expected none; pass use_cache=False"):
        model(input_ids=batch["input_ids"], use_cache=True)
    with pytest.raises(ValueError, match="cache: got one with packed documents"), torch.no_grad():
        model.eval()(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=True)


def test_padding_is_refused() -> None:
    model, ids = enabled(), torch.randint(64, (2, 12))
    mask = torch.ones_like(ids)
    model(input_ids=ids, attention_mask=mask)
    mask[1, :4] = 0
    with pytest.raises(ValueError, match=r"attention_mask: got zeros \(padding\), expected ones; pack"):
        model(input_ids=ids, attention_mask=mask)
    mask[1, :4] = 2
    with pytest.raises(ValueError, match="attention_mask: got values other than 1"):
        model(input_ids=ids, attention_mask=mask)


def test_automodels_gate_is_called() -> None:
    """Its fp32 parameters live in a module of their own, to be reached through _compute_gate only."""
    model = enabled()
    for layer in (decoder.linear_attn for decoder in model.model.layers):
        held = {name: layer._parameters.pop(name) for name in ("A_log", "dt_bias")}

        def compute_gate(a: torch.Tensor, held: dict[str, nn.Parameter] = held) -> torch.Tensor:
            return -held["A_log"].exp() * nn.functional.softplus(a.float() + held["dt_bias"])

        layer._compute_gate = compute_gate
    assert not any("A_log" in name for name, _ in model.named_parameters())
    assert_close(train(model, position_ids=make_batch()["position_ids"]))


def test_autocast() -> None:
    """In bf16 the layer is about as far from fp32 as that of transformers."""
    x = torch.randn(1, 60, 32)
    layer = make_model("qwen3_next").model.layers[0].linear_attn
    whole, scores = layer(x), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            narrow = layer(x)
        assert narrow.dtype == torch.bfloat16
        scores.append(relative_l2(narrow, whole))
        if len(scores) == 1:
            enable_context_parallel(layer, None)
    assert 0 < scores[1] < 1.5 * scores[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layout": "custom"}, "layout: got 'custom', .*use_context takes a context with any token ranges"),
        ({"layout": "striped"}, "layout: got 'striped'"),
        ({"exchange": "ring"}, "exchange: got 'ring'"),
        ({"backend": "triton"}, "backend: got 'triton'"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        enable_context_parallel(make_model("qwen3_next"), None, **options)


def test_models_that_cannot_be_enabled() -> None:
    with pytest.raises(ValueError, match="model: has no Gated DeltaNet layer"):
        enable_context_parallel(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="0 is a GatedDeltaNet, whose attributes are not those known"):
        enable_context_parallel(nn.Sequential(flashqla_cp.GatedDeltaNet(8, head_dim=4, num_heads=1)), None)
    with pytest.raises(ValueError, match="is enabled already"):
        enable_context_parallel(enabled(), None)
    with pytest.raises(ValueError, match="no layer is enabled"):
        disable_context_parallel(make_model("qwen3_next"))
    model = make_model("qwen3_next")
    model.model.layers[1].linear_attn.activation = "gelu"
    with pytest.raises(ValueError, match=r"layers\.1\.linear_attn has activation 'gelu'"):
        enable_context_parallel(model, None)
    model = make_model("qwen3_next")
    model.model.layers[1].linear_attn.conv1d = nn.Sequential(model.model.layers[1].linear_attn.conv1d)
    with pytest.raises(ValueError, match=r"conv1d of .*\.1\.linear_attn is a Sequential, whose forward would"):
        enable_context_parallel(model, None)
    assert not any("flashqla_cp" in vars(module) for module in model.modules())


@pytest.mark.parametrize("how", ["torch.compile", "checkpoint wrapping", "fully_shard", "accelerate"])
def test_order_of_wrapping(how: str, one_rank: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def wrap(model: Any) -> None:
        decoder = model.model.layers[0]
        if how == "torch.compile":
            decoder.compile()
        elif how == "checkpoint wrapping":
            model.model.layers[0] = checkpoint_wrapper(decoder)
        elif how == "fully_shard":
            fully_shard(decoder, mesh=init_device_mesh("cpu", (1,)))
        else:
            decoder.linear_attn.forward, decoder.linear_attn._hf_hook = decoder.linear_attn.forward, None

    model = make_model("qwen3_next")
    wrap(model)
    with pytest.raises(ValueError, match=rf"layers\.0.* has been through .*{how}.*; enable context parallelism before"):
        enable_context_parallel(model, None)
    model = enabled()
    wrap(model)
    if how == "fully_shard":
        with pytest.raises(ValueError, match="a layer was wrapped since, FSDPQwen3NextDecoderLayer"):
            disable_context_parallel(model)
        assert_close(train(model, position_ids=make_batch()["position_ids"]))


def test_two_contexts(one_rank: Any) -> None:
    outer, inner = (flashqla_cp.build_cp_context([0, n], one_rank) for n in (4, 5))
    with use_context(outer), pytest.raises(ValueError, match=r"cp_context: got .* inside use_context of"):
        enabled()(input_ids=torch.zeros(1, 5, dtype=torch.int64), cp_context=inner)


def test_an_enabled_model_is_saved_as_it_is(tmp_path: Any) -> None:
    model, ids = enabled(layers=HYBRID), make_batch()["input_ids"]
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert disable_context_parallel(loaded) == 2
    classes = [type(m) for m in make_model("qwen3_next", HYBRID).modules()]
    assert [type(m) for m in loaded.modules()] == classes and not any(m._forward_pre_hooks for m in loaded.modules())


def test_a_group_cannot_be_saved(one_rank: Any, tmp_path: Any) -> None:
    model = make_model("qwen3_next")
    enable_context_parallel(model, one_rank)
    with pytest.raises(TypeError, match=r"group: .* cannot be saved .*save model.state_dict\(\), or call disable_"):
        torch.save(model, tmp_path / "model.pt")
    assert copy.deepcopy(model).model.layers[0].flashqla_cp.sharding.comm is not None
    disable_context_parallel(model)
    torch.save(model, tmp_path / "model.pt")


def test_a_part_that_is_disabled_alone_is_warned_of() -> None:
    model = enabled()
    with pytest.warns(UserWarning, match="holds 1 of the 2 layers that were enabled together, the others stay enabled"):
        assert disable_context_parallel(model.model.layers[0]) == 1
    for part in model.model.layers[0], make_model("qwen3_next"):
        enable_context_parallel(part, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(part)
        assert disable_context_parallel(part) == disable_context_parallel(copied) == 2


@pytest.mark.parametrize(
    ("attribute", "text"), [("_hf_hook", "an accelerate hook"), ("", "a replacement of its forward")]
)
def test_who_replaced_a_forward_is_named(attribute: str, text: str) -> None:
    model = make_model("qwen3_next")
    layer = model.model.layers[1].linear_attn
    layer.forward = layer.forward
    if attribute:
        setattr(layer, attribute, object())
    with pytest.raises(ValueError, match=rf"layers\.1\.linear_attn has been through {text}; enable"):
        enable_context_parallel(model, None)


def test_kernelize_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels package of Hugging Face replaces has a class with the name of a kernel's layer."""
    model = make_model("qwen3_next")
    norm = model.model.layers[0].input_layernorm
    monkeypatch.setattr(type(norm), "kernel_layer_name", "RMSNorm", raising=False)
    norm.forward = norm.forward
    with pytest.raises(ValueError, match=r"input_layernorm has been through kernelize \(use_kernels=True\); enable"):
        enable_context_parallel(model, None)
