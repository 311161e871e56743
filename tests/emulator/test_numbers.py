"""Fragments of mma.sync and shuffles, against plain arithmetic: every operand type and every mode."""

import pytest
import torch
from handmade import Handmade, HandmadeLibrary

# Values that 16-bit and tf32 operands hold exactly, different for every element.
_A, _B = "(float)((row * 7 + k * 3) % 13 - 6)", "(float)((k * 5 + col * 11) % 17 - 8)"
_SETUP = f"""  const int lane = threadIdx.x, group = lane / 4, t = lane % 4;
  unsigned a[4], b[2];
  float d[4] = {{0.5f, 0.5f, 0.5f, 0.5f}};
  auto left = [](int row, int k) {{ return {_A}; }};
  auto right = [](int k, int col) {{ return {_B}; }};
"""
_FINISH = """
  for (int i = 0; i < 4; ++i) out[(group + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];"""


def _mma_16_bits(name: str, number: str, operand: str) -> Handmade:
    fill = f"""  for (int i = 0; i < 4; ++i) {{
    const int row = group + i % 2 * 8, k = t * 2 + i / 2 * 8;
    a[i] = emu_pack({number}(left(row, k)).bits, {number}(left(row, k + 1)).bits);
  }}
  for (int i = 0; i < 2; ++i) {{
    const int k = t * 2 + i * 8;
    b[i] = emu_pack({number}(right(k, group)).bits, {number}(right(k + 1, group)).bits);
  }}
  using tl::DataType;
  tl::mma_sync<DataType::{operand}, DataType::{operand}, DataType::kFloat32, 16, 8, 16, false, true>(d, a, b);"""
    return Handmade(name=name, body=_SETUP + fill + _FINISH, threads=32)


def _mma_tf32(name: str, fill: str) -> Handmade:
    multiply = """  constexpr auto tf32 = tl::DataType::kTensorFloat32, fp32 = tl::DataType::kFloat32;
  tl::mma_sync<tf32, tf32, fp32, 16, 8, 8, false, true>(d, a, b);"""
    return Handmade(name=name, body=_SETUP + fill + multiply + _FINISH, threads=32)


_TF32 = """  for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(left(group + i % 2 * 8, t + i / 2 * 4));
  for (int i = 0; i < 2; ++i) b[i] = __float_as_uint(right(t + i * 4, group));
"""
_CUT_OFF = """  const float sign = group % 2 ? -1.0f : 1.0f;
  for (int i = 0; i < 4; ++i) d[i] = sign;
  for (int i = 0; i < 4; ++i) a[i] = t == 0 && i < 2 ? __float_as_uint(sign) : 0u;
  for (int i = 0; i < 2; ++i) b[i] = t == 0 && i == 0 ? __float_as_uint(0x1.8p-24f) : 0u;
"""
SHUFFLES = {
    "shfl_sync": lambda lane: 5,
    "shfl_xor_sync": lambda lane: lane ^ 5,
    "shfl_down_sync": lambda lane: lane + 5 if lane + 5 < 32 else lane,
    "shfl_up_sync": lambda lane: lane - 5 if lane >= 5 else lane,
}


def _shuffle(name: str) -> Handmade:
    wide = "make_float2(threadIdx.x * 2.0f, threadIdx.x * 3.0f)"
    body = f"""  float2 pair = tl::{name}(~0u, {wide}, 5);
  out[threadIdx.x] = (float)tl::{name}(~0u, (int)threadIdx.x, 5);
  out[64 + threadIdx.x] = pair.y;"""
    return Handmade(name=name, body=body, threads=32)


@pytest.fixture(scope="module")
def library():
    sixteen_bits = [_mma_16_bits("bf16", "bfloat16_t", "kBFloat16"), _mma_16_bits("fp16", "half_t", "kFloat16")]
    products = [*sixteen_bits, _mma_tf32("tf32", _TF32), _mma_tf32("cut_off", _CUT_OFF)]
    return HandmadeLibrary([*products, *map(_shuffle, SHUFFLES)])


@pytest.mark.parametrize(("name", "depth"), [("bf16", 16), ("fp16", 16), ("tf32", 8)])
def test_mma_fragments(name, depth, library):
    out = torch.full((1024,), float("nan"))
    library.run(name, out).assert_clean()
    row, k, col = torch.arange(16), torch.arange(depth), torch.arange(8)
    a = ((row[:, None] * 7 + k[None, :] * 3) % 13 - 6).float()
    b = ((k[:, None] * 5 + col[None, :] * 11) % 17 - 8).float()
    assert torch.equal(out[:128].view(16, 8), a @ b + 0.5)


def test_tensor_cores_cut_off_what_they_add(library):
    out = torch.full((1024,), float("nan"))
    library.run("cut_off", out).assert_clean()
    sign = 1.0 - 2.0 * (torch.arange(16) % 2)[:, None]
    assert torch.equal(out[:128].view(16, 8), sign.expand(16, 8)), "not 1 + 2^-23, which is nearest to 1 + 1.5 2^-24"


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles(name, library):
    out = torch.full((1024,), float("nan"))
    library.run(name, out).assert_clean()
    source = torch.tensor([SHUFFLES[name](lane) for lane in range(32)]).float()
    assert torch.equal(out[:32], source) and torch.equal(out[64:96], source * 3)
