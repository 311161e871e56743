"""Arrays that are not torch's: objects with __dlpack__ and capsules made by hand, as a C caller makes them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from flashqla_cp import GatedDeltaNet, causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.bound import Options, bind
from flashqla_cp.checks import as_tensor, offsets_for_kernels
from flashqla_cp.conv import bind_conv
from flashqla_cp.kernels.arch import arch_by_name
from flashqla_cp.kernels.backend import Kernels
from flashqla_cp.parallel.plan import offsets_to_read, read_offsets
from flashqla_cp.testing.inputs import make_inputs

OFFSETS = [0, 7, 30, 96]
INT, FLOAT = 0, 2  # DLPack's codes


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    pass


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER))
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Handmade:
    """The memory of a compact array, described as plain C would: no strides."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.deleted = np.ascontiguousarray(array), 0
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        code = FLOAT if array.dtype.kind == "f" else INT
        described = DLTensor(
            data=self.array.ctypes.data,
            device_type=1,
            ndim=array.ndim,
            code=code,
            bits=8 * array.itemsize,
            lanes=1,
            shape=ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64)),
            strides=None,
        )
        self.deleter = DELETER(self._delete)
        self.managed = DLManagedTensor(dl_tensor=described, deleter=self.deleter)

    def _delete(self, managed: Any) -> None:
        self.deleted += 1

    def capsule(self) -> Any:
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


class Foreign:
    """An array of a library that knows nothing but DLPack."""

    def __init__(self, handmade: Handmade) -> None:
        self.handmade = handmade

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.handmade.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def as_foreign(tensor: torch.Tensor, kind: str) -> Any:
    array = tensor.detach().numpy()
    if kind == "numpy":
        return array
    return Handmade(array).capsule() if kind == "capsule" else Foreign(Handmade(array))


KEPT: list[Handmade] = []


@pytest.fixture(autouse=True)
def _keep_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The memory and the description of a capsule outlive what is made of it."""
    init = Handmade.__init__

    def kept(self: Handmade, array: np.ndarray) -> None:
        init(self, array)
        KEPT.append(self)

    monkeypatch.setattr(Handmade, "__init__", kept)
    yield
    KEPT.clear()


@pytest.mark.parametrize("kind", ["numpy", "capsule", "object"])
def test_op_takes_arrays(kind: str) -> None:
    tensors = make_inputs(96, 2, 4, 16, 8)
    more = {
        "initial_state": torch.randn(3, 4, 16, 8, dtype=torch.float64),
        "A_log": torch.randn(4, dtype=torch.float64),
        "dt_bias": torch.randn(4, dtype=torch.float64),
        "cu_seqlens": torch.tensor(OFFSETS),
    }
    options = {"use_gate_in_kernel": True, "output_final_state": True}
    wanted = chunk_gated_delta_rule(**tensors, **more, **options)
    foreign = {name: as_foreign(tensor, kind) for name, tensor in (tensors | more).items()}
    found = chunk_gated_delta_rule(**foreign, **options)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("kind", ["numpy", "capsule", "object"])
def test_conv_and_layer_take_arrays(kind: str) -> None:
    x, weight, bias = torch.randn(1, 96, 6), torch.randn(6, 4), torch.randn(6)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    wanted, _ = causal_conv1d(x, weight, bias, cu_seqlens=offsets)
    found, _ = causal_conv1d(*(as_foreign(y, kind) for y in (x, weight, bias)), cu_seqlens=as_foreign(offsets, kind))
    assert torch.equal(found, wanted)
    layer = GatedDeltaNet(hidden_size=6, head_dim=4, num_heads=1)
    assert torch.equal(layer(as_foreign(x, kind), as_foreign(offsets, kind)), layer(x, offsets))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_offsets_of_a_context(dtype: type) -> None:
    """As build_cp_context reads them."""
    array = np.array([0, 7, 96], dtype=dtype)
    assert read_offsets(array) == [0, 7, 96]
    if dtype is not np.uint8:
        assert read_offsets(Handmade(array).capsule()) == [0, 7, 96]
        assert read_offsets(Foreign(Handmade(array))) == [0, 7, 96]


@pytest.fixture
def kernels_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on meta count as those of a device with kernels: there offsets on the CPU are looked at twice."""
    chosen = Kernels(arch=arch_by_name("sm_90a"), processors=132)
    monkeypatch.setattr("flashqla_cp.checks.DEVICES", ("cpu", "cuda", "meta"))
    for chooses in ("bound.kernels_for", "conv._kernels"):
        monkeypatch.setattr(f"flashqla_cp.{chooses}", lambda *_: chosen)
    monkeypatch.setattr("flashqla_cp.kernels.host.causal_conv.places_of_documents", lambda starts, ends, *_: ends)


@pytest.mark.parametrize("offsets", [OFFSETS, [0, 96], [0]], ids=str)
@pytest.mark.parametrize("kind", ["numpy", "capsule", "object"])
def test_kernels_take_offsets_over_once(kernels_on_meta: None, kind: str, offsets: list[int]) -> None:
    """Offsets on the CPU beside tensors on a device: a capsule cannot be taken over a second time."""
    options = Options(None, False, False, False, False, False, "auto", "none", None, False)
    given = [x.to("meta") for x in make_inputs(96, 2, 4, 16, 8).values()]
    found = bind([*given, None, None, None], options, as_foreign(torch.tensor(offsets), kind), None, None)
    assert found.offsets == offsets
    x, weight = torch.zeros(1, 96, 6, device="meta"), torch.zeros(6, 4, device="meta")
    _, routes = bind_conv(x, weight, None, None, as_foreign(torch.tensor(offsets), kind), None, "auto")
    assert len(routes.places) == len(offsets) - 1


def test_one_capsule_as_offsets_and_their_copy() -> None:
    capsule = as_foreign(torch.tensor(OFFSETS), "capsule")
    assert read_offsets(*offsets_to_read(capsule, capsule)) == OFFSETS


def test_one_capsule_as_offsets_and_their_copy_for_kernels() -> None:
    capsule = as_foreign(torch.tensor(OFFSETS), "capsule")
    x = torch.zeros(1, OFFSETS[-1], 1, 1)
    assert list(offsets_for_kernels(x, "q", capsule, capsule, None)) == OFFSETS


def test_nothing_is_copied_and_memory_is_given_back() -> None:
    handmade = Handmade(np.arange(12, dtype=np.float32).reshape(3, 4))
    tensor = as_tensor(handmade.capsule(), "q")
    assert tensor.is_contiguous()
    assert tensor.data_ptr() == handmade.array.ctypes.data
    handmade.array[1, 2] = -1.0
    assert tensor[1, 2] == -1.0
    assert handmade.deleted == 0
    del tensor
    assert handmade.deleted == 1


def test_what_cannot_be_taken_over() -> None:
    with pytest.raises(ValueError, match="q: a view with negative strides cannot be taken over; pass a copy"):
        as_tensor(np.arange(4.0)[::-1], "q")
    with pytest.raises(TypeError, match="q: ndarray cannot be taken over: DLPack only supports"):
        as_tensor(np.array(["text"]), "q")
    used = Handmade(np.zeros(3)).capsule()
    as_tensor(used, "q")
    with pytest.raises(TypeError, match=r"q: PyCapsule cannot be taken over: .*consumed only once"):
        as_tensor(used, "q")
    with pytest.raises(TypeError, match="q: expected a tensor or an object with __dlpack__, got list"):
        as_tensor([1.0], "q")
    with pytest.raises(TypeError, match=r"cu_seqlens: expected integers, got torch\.float64"):
        read_offsets(np.array([0.0, 4.0]))
