"""Arch, KernelSpec, tuning and settings: values, and what they refuse."""

import dataclasses
import pickle
import re

import numpy as np
import pytest
import torch

from flashqla_cp.fused import readable
from flashqla_cp.kernels import settings, tuning
from flashqla_cp.kernels.arch import ARCHES, Arch, arch_by_name, detect
from flashqla_cp.kernels.host.backward import SCRATCH_BUDGET
from flashqla_cp.kernels.host.memory import training_bytes
from flashqla_cp.kernels.spec import KernelSpec, make_spec

SM90, SM100 = ARCHES["sm_90a"], ARCHES["sm_100a"]


def test_arches_are_frozen_explicit_targets():
    assert set(ARCHES) == {"sm_90a", "sm_100a", "sm_103a"}
    for name, arch in ARCHES.items():
        assert arch.target == {"kind": "cuda", "arch": name} and arch_by_name(name) is arch
        with pytest.raises(dataclasses.FrozenInstanceError):
            arch.name = "other"
    assert SM90.family == "sm90" and ARCHES["sm_103a"].family == SM100.family == "sm100"
    with pytest.raises(ValueError, match="arch: got 'sm_80', expected one of sm_90a"):
        arch_by_name("sm_80")
    with pytest.raises(ValueError, match="tensor_memory_columns"):
        Arch(name="x", family="x", capability=(9, 0), mma="wgmma", accumulator="tensor_memory")


def test_detect_asks_at_call_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        detect()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, name in (((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert detect(0).name == name
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(NotImplementedError, match=r"8\.0 has no kernels"):
        detect()


def test_spec_is_a_value():
    one = make_spec("forward", "sm_90a", {"V": 128, "K": 64}, {"q": "bfloat16"}, {"cp": True, "state": False})
    same = make_spec("forward", SM90, {"K": 64, "V": 128}, {"q": "bfloat16"}, ["cp"])
    assert one == same and hash(one) == hash(same)
    assert KernelSpec.from_dict(one.to_dict()) == one == pickle.loads(pickle.dumps(one))
    assert one.dim("V") == 128 and one.dtype("q") == "bfloat16" and one.has("cp") and not one.has("state")
    assert one.label() == "forward sm_90a K=64 V=128 q:bfloat16 cp" and one.target is SM90
    assert not hasattr(one, "__dict__")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": "two words", "arch": "sm_90a"}, "stage: got 'two words'"),
        ({"stage": "s", "arch": "sm_12"}, "arch: got 'sm_12'"),
        ({"stage": "s", "arch": "sm_90a", "dims": {"tokens": 8192}}, "run-time size"),
        ({"stage": "s", "arch": "sm_90a", "dims": {"K": 0}}, "expected a positive int"),
        ({"stage": "s", "arch": "sm_90a", "dims": {"K": 64.0}}, "expected a positive int"),
    ],
)
def test_spec_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_spec(**arguments)


def test_spec_wants_sorted_names():
    with pytest.raises(ValueError, match="sorted distinct names"):
        KernelSpec(stage="s", arch="sm_90a", dims=(("V", 1), ("K", 1)))


def test_pipeline_stages_fill_shared_memory():
    stage, fixed = 32 * 1024, 40 * 1024
    stages = tuning.pipeline_stages(SM90, stage, fixed, most=8)
    assert stages * stage + fixed <= SM90.shared_memory_bytes < (stages + 1) * stage + fixed
    assert tuning.pipeline_stages(SM90, 1024, 0, most=3) == 3
    with pytest.raises(ValueError, match="stage_bytes: got 200000"):
        tuning.pipeline_stages(SM90, 200_000, 100_000, most=2)


@pytest.mark.parametrize(("producers", "consumers"), [(128, 128), (128, 256), (128, 384), (32, 512)])
def test_registers_fit_the_file(producers, consumers):
    low, high = tuning.split_registers(SM90, producers, consumers)
    assert low % 8 == high % 8 == 0 and high <= 240
    assert producers * low + consumers * high <= SM90.registers
    assert high == 240 or producers * low + consumers * (high + 8) > SM90.registers


def test_registers_refused_when_none_are_left():
    with pytest.raises(ValueError, match="consumer_threads: got 4096"):
        tuning.split_registers(SM90, 128, 4096)


def test_tensor_memory_columns_are_a_power_of_two():
    assert tuning.tensor_memory_columns(SM100, [64]) == 64
    assert tuning.tensor_memory_columns(SM100, [64, 33, 1]) == 256
    with pytest.raises(ValueError, match="needed"):
        tuning.tensor_memory_columns(SM100, [512, 32])
    with pytest.raises(ValueError, match="at most 0 on sm_90a"):
        tuning.tensor_memory_columns(SM90, [32])


@pytest.mark.parametrize(
    ("heads", "ratio", "budget", "slabs"),
    [
        (32, 2, 10**9, [(0, 32)]),
        (32, 2, 900, [(0, 8), (8, 8), (16, 8), (24, 8)]),
        (12, 4, 799, [(0, 4), (4, 4), (8, 4)]),
        (10, 2, 600, [(0, 4), (4, 6)]),
        (6, 3, 1, [(0, 3), (3, 3)]),
        (1, 1, 0, [(0, 1)]),
    ],
)
def test_slabs_are_whole_groups_within_the_budget(heads, ratio, budget, slabs):
    assert tuning.head_slabs(heads, ratio, 100, budget) == slabs
    assert all(count * 100 <= budget or count == ratio for _, count in slabs)


def test_training_bytes_follow_the_sizes():
    sizes = {"num_heads": 16, "num_v_heads": 32, "head_dim": 128, "processors": 132}
    said = training_bytes(65536, 1, **sizes)
    assert said.scratch <= SCRATCH_BUDGET + 2 * 65536 * 32 * 4 + 32 * 64 * 128 * 128 * 4
    inverse = (65536 // 64 + 1) * 32 * 64 * 64 * 2
    assert inverse < said.saved < 2 * inverse
    assert training_bytes(65536, 1, **sizes, exchanged=True).saved > said.saved
    state = 32 * 128 * 128 * 4
    some = training_bytes(65536, 50, **sizes, exchanged=True, num_cut=2)
    assert training_bytes(np.int32(65536), np.uint8(50), **sizes, exchanged=True, num_cut=np.uint8(2)) == some
    assert training_bytes(65536, 50, **sizes, exchanged=True).saved == some.saved + 48 * (2 * state + 32 * 4)
    more = training_bytes(65536, 1, **sizes, num_entries=1).saved
    assert more == said.saved + 32 * 128 * 128 * 4 + 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_heads": 2, "num_v_heads": 3}, "num_v_heads: got 3 value heads, expected a multiple of num_heads=2"),
        ({"num_heads": 1, "num_v_heads": 5}, "num_v_heads / num_heads: got 5, expected one of 1, 2, 3, 4, 8"),
        ({"num_heads": 0}, "num_heads: got 0, expected an integer of at least 1"),
        ({"num_v_heads": 0}, "num_v_heads: got 0, expected an integer of at least 1"),
        ({"num_v_heads": 32.0}, "num_v_heads: got 32.0, expected an integer"),
        ({"processors": 0}, "processors: got 0, expected an integer of at least 1"),
        ({"num_tokens": -1}, "num_tokens: got -1, expected an integer of at least 0"),
        ({"num_documents": -1}, "num_documents: got -1"),
        ({"num_entries": -1}, "num_entries: got -1"),
        ({"num_exits": -1}, "num_exits: got -1"),
        ({"longest": -1}, "longest: got -1"),
        ({"num_cut": -1}, "num_cut: got -1"),
        ({"num_cut": 1}, "num_cut: got 1, expected 0 without exchanged=True"),
        ({"num_cut": 2, "exchanged": True}, "num_cut: got 2, expected at most num_documents=1"),
        ({"longest": 65537}, "longest: got 65537, expected no more than num_tokens=65536"),
        ({"head_dim": 0}, "head_dim: got 0, expected one of 64, 128"),
        ({"head_dim": 96}, "head_dim: got 96, expected one of 64, 128"),
        ({"element_size": 4}, "element_size: got 4, expected one of 2"),
        ({"recompute": "all"}, "recompute: got 'all', expected one of 'none', 'solve', 'forward'"),
    ],
)
def test_training_bytes_of_what_no_call_has_are_refused(changed, message):
    sizes = {"num_tokens": 65536, "num_documents": 1, "num_heads": 16, "num_v_heads": 32}
    sizes |= {"head_dim": 128, "processors": 132}
    assert training_bytes(**sizes | {"longest": 65536}).saved
    assert training_bytes(**sizes | {"num_tokens": 0, "num_documents": 0}).scratch >= 0  # a rank without tokens
    with pytest.raises(ValueError, match=re.escape(message)):
        training_bytes(**sizes | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shared_bytes": 228 * 1024}, "shared_bytes"),
        ({"roles": (tuning.Role(name="all", threads=512, registers=136),)}, "registers"),
        ({"tensor_memory_columns": 32}, "tensor_memory_columns"),
        ({"stages": 0}, "stages"),
    ],
)
def test_tile_config_refuses_what_cannot_launch(changed, message):
    roles = (
        tuning.Role(name="load", threads=128, registers=40),
        tuning.Role(name="compute", threads=256, registers=232),
    )
    sound = {"roles": roles, "stages": 2, "shared_bytes": 200 * 1024}
    tuning.TileConfig(**sound).check(SM90)
    with pytest.raises(ValueError, match=message):
        tuning.TileConfig(**(sound | changed)).check(SM90)


@pytest.mark.parametrize("changed", [{"threads": 48}, {"registers": 100}, {"registers": 264}])
def test_roles_are_checked(changed):
    with pytest.raises(ValueError, match="of role 'r'"):
        tuning.Role(**({"name": "r", "threads": 128, "registers": 64} | changed))


def test_settings_come_from_the_environment(tmp_path):
    assert settings.cache_folder({"FLASHQLA_CP_CACHE": str(tmp_path)}) == tmp_path
    assert settings.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "flashqla_cp"
    assert settings.cache_folder({}).name == "flashqla_cp"
    assert settings.build_jobs({"FLASHQLA_CP_BUILD_JOBS": "3"}) == 3 and settings.build_jobs({}) >= 1
    with pytest.raises(ValueError, match="FLASHQLA_CP_BUILD_JOBS: got 'many'"):
        settings.build_jobs({"FLASHQLA_CP_BUILD_JOBS": "many"})
    assert settings.find_nvcc({"PATH": str(tmp_path)}) is None
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    assert settings.find_nvcc({"PATH": "", "CUDA_HOME": str(tmp_path)}) == str(nvcc)


def test_rows_at_odd_addresses_are_copied_and_others_are_not():
    flat = torch.arange(3 + 4 * 2 * 64, dtype=torch.bfloat16)
    odd = flat[3:].view(1, 4, 2, 64)
    assert odd.is_contiguous() and odd.data_ptr() % 16
    assert readable(odd).data_ptr() % 16 == 0 and torch.equal(readable(odd), odd[0])
    even = flat.clone()[: odd.numel()].view(1, 4, 2, 64)
    assert readable(even).data_ptr() == even.data_ptr()


def test_tiles_of_the_convolution():
    """A thread's row is one load of 16 bytes or less; a warp of the gradients owns what it does not share."""
    for stage in tuning.CONV_WALKED:
        for dtype in ("bfloat16", "float16", "float32"):
            for width in (2, 3, 4):
                operands = {"x": dtype, "weight": "float32"}
                tile = tuning.conv_tile(make_spec(stage, SM90, {"width": width}, operands))
                assert tile.channels * tuning.ELEMENT_BYTES[dtype] == tuning.CONV_BYTES[stage] <= tuning.VECTOR_BYTES
                assert tile.walked - tile.tokens == (width - 1 if stage == "causal_conv_grad" else 0)
                assert tile.walked % tile.ahead == 0
                assert tuning.conv_tile(make_spec(stage, SM90, {"width": width}, operands, ["ragged"])).channels == 1
