"""The Megatron plugin in one process: specs, the layer's parameters and checkpoints, documents of a batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_megatron import (
    cpu_as_gpu,
    fill,
    initialize,
    make_batch,
    make_block_spec,
    make_config,
    make_model,
    make_packed,
    release,
    step,
    stock_on_cpu,
)

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module

from flashqla_cp.integrations import megatron as plugin
from flashqla_cp.integrations.megatron import batches, with_context_parallel_gdn
from flashqla_cp.testing.metrics import relative_l2

NEEDS_HYBRID = pytest.mark.skipif(release() < (0, 18), reason="this release has no hybrid stack with these layers")


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with torch._dynamo.config.patch(disable=True):  # Megatron fuses a norm with torch.compile
        yield


@pytest.fixture
def groups(pg: Any) -> Iterator[Any]:
    """Megatron's groups for one process."""
    if pg.size() != 1:
        pytest.skip("needs one rank")
    initialize(1)
    yield ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    parallel_state.destroy_model_parallel()


def stock_spec() -> Any:
    return make_block_spec(make_config()).layer_specs[0].submodules.self_attention


def build_layer(groups: Any, config: Any = None, spec: Any = None, **kwargs: Any) -> Any:
    spec = with_context_parallel_gdn(stock_spec()) if spec is None else spec
    return build_module(spec, config=config or make_config(), layer_number=1, pg_collection=groups, **kwargs)


def classes(spec: Any) -> list[str]:
    """Names of all GDN classes in a spec, in the order of its fields."""
    if isinstance(spec, ModuleSpec) and "GatedDeltaNet" in getattr(spec.module, "__name__", ""):
        return [spec.module.__name__]
    inside = [spec.submodules] if isinstance(spec, ModuleSpec) else list(spec) if isinstance(spec, list) else []
    if hasattr(spec, "__dataclass_fields__") and not isinstance(spec, ModuleSpec):
        inside = [getattr(spec, field.name) for field in fields(spec)]
    return [name for part in inside for name in classes(part)]


def make_hybrid_stack() -> Any:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules

    layer = make_block_spec(make_config()).layer_specs[0]
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(gdn_layer=layer))


def test_specs_of_blocks_and_layers() -> None:
    block = make_block_spec(make_config(num_layers=3))
    before = copy.deepcopy(block)
    replaced = with_context_parallel_gdn(block, exchange="sharded")
    assert classes(block) == classes(before) == ["GatedDeltaNet"] * 3
    assert classes(replaced) == ["CPGatedDeltaNet"] * 3
    assert classes(with_context_parallel_gdn(block.layer_specs)) == ["CPGatedDeltaNet"] * 3
    assert classes(with_context_parallel_gdn(block.layer_specs[0])) == ["CPGatedDeltaNet"]
    attention = replaced.layer_specs[0].submodules.self_attention
    assert attention.module is plugin.CPGatedDeltaNet
    assert attention.params["exchange"] == "sharded"
    assert block.layer_specs[0].submodules.self_attention.params == {}
    assert attention.submodules == before.layer_specs[0].submodules.self_attention.submodules


def test_only_gdn_layers_are_replaced() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    block = make_block_spec(make_config(num_layers=2))
    block.layer_specs[1] = get_gpt_layer_local_spec()
    before = block.layer_specs[1].submodules.self_attention
    replaced = with_context_parallel_gdn(block)
    assert classes(replaced) == ["CPGatedDeltaNet"]
    assert replaced.layer_specs[1].submodules.self_attention.module is before.module


def test_spec_of_multi_token_prediction(groups: Any) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = make_config(mtp_num_layers=2)
    block = get_gpt_mtp_block_spec(config, make_block_spec(config), use_transformer_engine=False)
    assert classes(with_context_parallel_gdn(block)) == ["CPGatedDeltaNet"] * 2


def test_named_module_is_replaced() -> None:
    spec = stock_spec()
    spec.module = ("megatron.core.ssm.gated_delta_net", "GatedDeltaNet")
    assert with_context_parallel_gdn(spec).module is plugin.CPGatedDeltaNet


@NEEDS_HYBRID
def test_spec_of_hybrid_stacks() -> None:
    assert classes(with_context_parallel_gdn(make_hybrid_stack())) == ["CPGatedDeltaNet"]
    # What Megatron's --spec flashqla_cp.integrations.megatron hybrid_stack_spec does.
    vars(plugin).pop("hybrid_stack_spec", None)
    found = import_module(("flashqla_cp.integrations.megatron", "hybrid_stack_spec"))
    assert found.submodules.gdn_layer.submodules.self_attention.module is plugin.CPGatedDeltaNet
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as stock

    assert stock.submodules.gdn_layer.submodules.self_attention.module is GatedDeltaNet


class Derived(GatedDeltaNet):
    """Somebody's own layer, whose changes we would lose."""


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: ModuleSpec(module=torch.nn.Linear), {}, "spec: has no Gated DeltaNet layer"),
        (lambda: with_context_parallel_gdn(stock_spec()), {}, "CPGatedDeltaNet is replaced already"),
        (lambda: [GatedDeltaNet], {}, "GatedDeltaNet is a bare class"),
        (lambda: ModuleSpec(module=Derived, submodules=GatedDeltaNetSubmodules()), {}, "Derived is not Megatron's own"),
        (stock_spec, {"exchange": "ring"}, "exchange: got 'ring'"),
        (stock_spec, {"backend": "cuda"}, "backend: got 'cuda'"),
        (stock_spec, {"packed_layout": "custom"}, "packed_layout: got 'custom'"),
    ],
)
def test_spec_is_refused(make: Any, options: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        with_context_parallel_gdn(make(), **options)


def test_parameters_and_marks_of_the_stock_layer(groups: Any) -> None:
    named = {"name": "decoder.0"} if release() >= (0, 18) else {}
    ours = build_layer(groups, **named, cp_comm_type="p2p", pp_layer_offset=0, is_mtp_layer=False)
    assert ours.dt_bias.eq(1).all()
    assert (ours.A_log >= 0).all()
    assert (ours.A_log <= torch.log(torch.tensor(16.0))).all()
    with stock_on_cpu():
        stock = build_layer(groups, make_config(perform_initialization=False), stock_spec())
    found, wanted = dict(ours.named_parameters()), dict(stock.named_parameters())
    assert list(found) == list(wanted)
    for name, parameter in wanted.items():
        assert (found[name].shape, found[name].dtype) == (parameter.shape, parameter.dtype)
        if name.startswith(("conv1d", "A_log", "dt_bias")):
            assert found[name].tensor_model_parallel is parameter.tensor_model_parallel is True
            assert found[name].partition_dim == getattr(parameter, "partition_dim", 0)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert ours.load_state_dict(stock.state_dict()).missing_keys == []
    assert isinstance(ours, GatedDeltaNet)
    assert type(ours).__module__ == "flashqla_cp.integrations.megatron"


def shards(layer: Any) -> dict[str, tuple[Any, ...]]:
    """Everything that says where a tensor lies in a sharded checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    found = {}
    for name, value in layer.sharded_state_dict(prefix="layer.").items():
        parts = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        for part in parts:
            where = (part.global_shape, part.global_offset, part.replica_id) if hasattr(part, "global_shape") else ()
            found[f"{name} {part.key}"] = where
    return found


def test_sharded_checkpoint_of_the_stock_layer(groups: Any) -> None:
    with stock_on_cpu():
        stock = build_layer(groups, make_config(perform_initialization=False), stock_spec())
    found = shards(build_layer(groups))
    assert found == shards(stock)
    assert any(name.endswith("in_proj.weight.beta") for name in found)
    assert any(name.endswith("conv1d.weight.value") for name in found)


def test_checkpoint_saved_by_the_stock_layer_loads(groups: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import dist_checkpointing

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with stock_on_cpu():
        stock = build_layer(groups, make_config(perform_initialization=False), stock_spec())
        fill(stock)
        dist_checkpointing.save(stock.sharded_state_dict(prefix="layer."), str(tmp_path))
    ours = build_layer(groups)
    loaded = dist_checkpointing.load(ours.sharded_state_dict(prefix="layer."), str(tmp_path))
    ours.load_state_dict({name.removeprefix("layer."): value for name, value in loaded.items()})
    for name, parameter in stock.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


@NEEDS_HYBRID
def test_hybrid_stack_computes_what_the_stock_one_does(groups: Any) -> None:
    def outputs(spec: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

        torch.manual_seed(0)
        all_groups = ProcessGroupCollection.use_mpu_process_groups()
        stack = build_module(
            spec, config, layer_type_list=[Symbols.GDN] * 2, post_layer_norm=False, pg_collection=all_groups
        )
        fill(stack)
        x = torch.randn(24, 2, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
        y = stack(x, attention_mask=None)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), gradient

    with stock_on_cpu():
        wanted = outputs(make_hybrid_stack(), make_config(perform_initialization=False))
    found = outputs(with_context_parallel_gdn(make_hybrid_stack()), make_config())
    for ours, stock in zip(found, wanted, strict=True):
        assert relative_l2(ours, stock) < 1e-5


def test_recomputed_norm_changes_nothing(groups: Any) -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    def gradients(recompute: bool) -> tuple[list[torch.Tensor], int]:
        layer = build_layer(groups)
        layer.recompute_norm_out = recompute
        fill(layer)
        calls: list[int] = []
        norm = type(layer)._apply_gated_norm

        def counted(self: Any, *args: Any) -> torch.Tensor:
            calls.append(1)
            return norm(self, *args)

        x = torch.randn(24, 2, 32, generator=torch.Generator().manual_seed(3))
        with mock.patch.object(type(layer), "_apply_gated_norm", counted):
            y, _ = layer(x, None)
            (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        return [parameter.grad for parameter in layer.parameters()], len(calls)

    # Its checkpointing saves the random state of a GPU, and compiles an extension where torch has no other way.
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_as_gpu())
        for name, replacement in (
            ("_get_all_rng_states", lambda: ()),
            ("_set_all_rng_states", lambda *states: None),
            ("_fork_rng", contextlib.nullcontext),
        ):
            if hasattr(megatron_random, name):
                stack.enter_context(mock.patch.object(megatron_random, name, replacement))
        if hasattr(megatron_random, "_get_share_storage"):
            stack.enter_context(mock.patch.object(megatron_random, "_get_share_storage", lambda: _share_storage))
        recomputed, calls = gradients(True)
    plain, once = gradients(False)
    assert (calls, once) == (2, 1)
    for found, wanted in zip(recomputed, plain, strict=True):
        assert torch.equal(found, wanted)


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    output.untyped_storage().resize_(recomputed.untyped_storage().nbytes())
    with torch.no_grad():
        output.untyped_storage().copy_(recomputed.untyped_storage())


def test_calls_and_configurations_that_are_refused(groups: Any) -> None:
    import torch.nn.functional as F

    layer = build_layer(groups)
    with pytest.raises(NotImplementedError, match=r"inference_context: .* train only"):
        layer(torch.zeros(4, 1, 32), None, inference_context=object())
    with pytest.raises(ValueError, match="activation_func: got gelu, expected silu"):
        build_layer(groups, make_config(activation_func=F.gelu))
    with pytest.raises(ValueError, match="linear_num_value_heads: got 3, with linear_num_key_heads=2"):
        build_layer(groups, make_config(linear_num_value_heads=3))
    with pytest.raises(ValueError, match="pg_collection: has no group 'cp'"):
        build_layer(ProcessGroupCollection.use_mpu_process_groups(["tp"]))


class TwoRanks:
    """A group that must not be asked to communicate."""

    def size(self) -> int:
        return 2


def find(T: int, B: int, packed: Any, ranks: Any = None, **options: Any) -> Any:
    layer = SimpleNamespace(
        pg_collection=SimpleNamespace(cp=ranks), exchange="auto", conv_kernel_dim=4, packed_layout="zigzag_per_document"
    )
    vars(layer).update(options)
    return batches.find_documents(layer, T, B, packed)


def packed_params(**changed: Any) -> Any:
    """PackedSeqParams of one document of 16 tokens."""
    packed = make_packed((0, 16))
    for name, value in changed.items():
        setattr(packed, name, torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value)
    return packed


@pytest.mark.parametrize(
    ("T", "B", "changed", "text"),
    [
        (8, 1, {"cu_seqlens_q": None}, "has no cu_seqlens_q"),
        (8, 2, {}, "got 2 sequences in format 'thd', expected one row"),
        (
            8,
            1,
            {"cu_seqlens_q": [0, 8, 12], "cu_seqlens_kv": [0, 8, 12]},
            "end at 12, expected 16, the 8 rows of each of 2",
        ),
        (8, 1, {"cu_seqlens_q": [0, 6, 16], "cu_seqlens_kv": [0, 6, 16]}, "got 6 tokens, expected document .* by 4"),
        (8, 1, {"cu_seqlens_q": [0, 12, 8, 16], "cu_seqlens_kv": None}, "offsets decrease at index 2"),
        (8, 1, {"cu_seqlens_kv": [0, 8, 16]}, "cu_seqlens_kv differs from cu_seqlens_q"),
        (8, 1, {"qkv_format": "thdx"}, "qkv_format='thdx', expected one of"),
        (
            8,
            1,
            {"qkv_format": "sbhd", "cu_seqlens_q": [0, 8, 16], "cu_seqlens_kv": None},
            "expected one sequence of 16",
        ),
        (8, 1, {"local_cp_size": 2}, "local_cp_size=2 without a cp_group"),
    ],
)
def test_documents_that_cannot_be(T: int, B: int, changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"packed_seq_params: {text}|packed_seq_params.cu_seqlens_q: {text}|{text}"):
        find(T, B, packed_params(**changed), TwoRanks())


def test_rows_that_are_no_zigzag() -> None:
    with pytest.raises(ValueError, match="hidden_states: got 7 rows of each sequence"):
        find(7, 2, None, TwoRanks())


def test_padded_offsets_come_first() -> None:
    packed = packed_params(cu_seqlens_q=[0, 5, 13], cu_seqlens_kv=[0, 5, 13])
    packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = torch.tensor([0, 8, 16])
    assert find(16, 1, packed).cu_seqlens.tolist() == [0, 8, 16]
    packed.local_cp_size = 1  # dynamic context parallelism that leaves this batch on one rank
    assert find(16, 1, packed, TwoRanks()).cu_seqlens.tolist() == [0, 8, 16]


def test_offsets_are_never_stale() -> None:
    packed = make_packed((0, 8, 16))
    first = find(16, 1, packed)
    assert find(16, 1, packed) is first
    packed.cu_seqlens_q[1] = packed.cu_seqlens_kv[1] = 4
    assert find(16, 1, packed).cu_seqlens.tolist() == [0, 4, 16]
    packed.cu_seqlens_q.numpy()[1] = packed.cu_seqlens_kv.numpy()[1] = 12
    assert find(16, 1, packed).cu_seqlens.tolist() == [0, 12, 16]
    packed.cu_seqlens_q = packed.cu_seqlens_kv = torch.tensor([0, 3, 16])
    assert find(16, 1, packed).cu_seqlens.tolist() == [0, 3, 16]
    for number in range(1000):
        offsets = (0, number % 15 + 1, 16)
        assert find(16, 1, make_packed(offsets)).cu_seqlens.tolist() == list(offsets)
    del packed
    assert len(batches._of_packed) == 0


def test_packed_documents_on_one_rank(groups: Any) -> None:
    """Documents in one row give what each gives alone."""
    model = make_model(make_config(), with_context_parallel_gdn(make_block_spec(make_config())))
    fill(model)
    offsets = (0, 7, 30, 96)
    batch = make_batch(offsets)
    total = batch["loss_mask"].sum()
    together = step(model, batch, total, make_packed(offsets))
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    alone = torch.tensor(0.0)
    for start, end in pairwise(offsets):
        alone += step(model, {name: x[:, start:end] for name, x in batch.items()}, total)
    assert abs(together - alone) < 1e-5
    for found, parameter in zip(gradients, model.parameters(), strict=True):
        assert relative_l2(found, parameter.grad) < 3e-5
