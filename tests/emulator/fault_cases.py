"""Sound kernels and the one-line faults the emulator must see in them. Each case: a body, and one replacement."""

from __future__ import annotations

from dataclasses import dataclass

from handmade import Handmade


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """body is sound; with `old` replaced by `new` it must be reported under `rule`."""

    name: str
    rule: str
    body: str
    old: str
    new: str = ""
    threads: int = 128
    dynamic: int = 0

    def __post_init__(self) -> None:
        assert self.body.count(self.old) == 1, (
            f"{self.name}: the text to replace occurs {self.body.count(self.old)} times"
        )

    def _kernel(self, suffix: str, body: str) -> Handmade:
        return Handmade(name=self.name + suffix, body=body, threads=self.threads, dynamic=self.dynamic)

    def sound(self) -> Handmade:
        """The kernel as it should be."""
        return self._kernel("_sound", self.body)

    def faulty(self) -> Handmade:
        """The kernel with its fault."""
        return self._kernel("_faulty", self.body.replace(self.old, self.new))


_EXCHANGE = """  __shared__ __align__(16) float slots[128];
  slots[threadIdx.x] = (float)threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = slots[threadIdx.x ^ 64];"""

_WARP_EXCHANGE = """  __shared__ __align__(16) float slots[128];
  slots[threadIdx.x] = (float)threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = slots[threadIdx.x ^ 1];"""

_BULK_STORE = """  ((float*)buffer)[threadIdx.x] = 1.0f;
  tl::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tl::tma_store(out, buffer, 512);
    tl::tma_store_arrive();
    tl::tma_store_wait<0>();
  }"""

_STORE_REUSE = """  for (int i = 0; i < 2; ++i) {
    ((float*)buffer)[threadIdx.x] = (float)i;
    tl::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      tl::tma_store(out + i * 128, buffer, 512);
      tl::tma_store_arrive();
      tl::tma_store_wait<0>();
    }
    __syncthreads();
  }"""

_BULK_LOAD = """  __shared__ __align__(16) uint64_t full_mem[1];
  auto full = reinterpret_cast<Barrier*>(full_mem);
  if (threadIdx.x == 0) full[0].init(1);
  tl::fence_barrier_init();
  __syncthreads();
  for (int i = 0; i < 3; ++i) {
    if (threadIdx.x == 0) {
      full[0].arrive_and_expect_tx(512);
      tl::tma_load(buffer, out + i * 128, full[0], 512);
    }
    full[0].wait(i & 1);
    float x = ((float*)buffer)[threadIdx.x ^ 1];
    __syncthreads();
    out[512 + threadIdx.x] = x;
  }"""

_MBARRIER = """  __shared__ __align__(16) uint64_t ready_mem[1];
  __shared__ __align__(16) float slots[128];
  auto ready = reinterpret_cast<Barrier*>(ready_mem);
  if (threadIdx.x == 0) ready[0].init(128);
  __syncthreads();
  slots[threadIdx.x] = 2.0f;
  ready[0].arrive();
  ready[0].wait(0);
  out[threadIdx.x] = slots[threadIdx.x ^ 96];"""

_NAMED = """  __shared__ __align__(16) float slots[256];
  slots[threadIdx.x] = 1.0f;
  if (threadIdx.x < 128) {
    tl::__sync_thread_partial(3, 128);
    out[threadIdx.x] = slots[threadIdx.x ^ 32];
  } else {
    tl::__sync_thread_partial(4, 128);
    out[threadIdx.x] = slots[threadIdx.x ^ 32];
  }"""

_CP_ASYNC = """  tl::cp_async_gs<16>(buffer + threadIdx.x * 16, out + threadIdx.x * 4);
  tl::cp_async_commit();
  tl::cp_async_wait<0>();
  __syncthreads();
  float x = ((float*)buffer)[511 - threadIdx.x];
  out[512 + threadIdx.x] = x;"""

_SHUFFLE = """  float x = (float)threadIdx.x;
  if (threadIdx.x % 32 < 16) x += 1.0f;
  x += tl::shfl_xor_sync(~0u, x, 1);
  out[threadIdx.x] = x;"""

_REGISTERS = """  if (threadIdx.x < 128) {
    tl::warpgroup_reg_dealloc<40>();
    out[threadIdx.x] = 1.0f;
  } else {
    tl::warpgroup_reg_alloc<232>();
    out[threadIdx.x] = 2.0f;
  }"""

_WGMMA = """  for (int i = 0; i < 32; ++i) ((bfloat16_t*)buffer)[threadIdx.x * 32 + i] = bfloat16_t(1.0f);
  for (int i = 0; i < 32; ++i) ((bfloat16_t*)(buffer + 8192))[threadIdx.x * 32 + i] = bfloat16_t(1.0f);
  float sums[32];
  for (int i = 0; i < 32; ++i) sums[i] = 0.0f;
  tl::fence_proxy_async();
  __syncthreads();
  tl::GmmaDescriptor a, b;
  tl::initialize_wgmma_descriptor<1, 1, 64>(a, (bfloat16_t*)buffer);
  tl::initialize_wgmma_descriptor<1, 1, 64>(b, (bfloat16_t*)(buffer + 8192));
  tl::warpgroup_arrive();
  using tl::DataType;
  tl::wgmma_ss<DataType::kBFloat16, DataType::kBFloat16, DataType::kFloat32, 64, 64, 16, false, false, 1, 1>(
      uint64_t(a), uint64_t(b), (uint32_t*)sums, true);
  tl::warpgroup_commit_batch();
  tl::warpgroup_wait<0>();
  for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = sums[i];"""

_TCGEN05 = """  __shared__ __align__(16) uint64_t done_mem[1];
  __shared__ __align__(16) uint columns[1];
  auto done = reinterpret_cast<Barrier*>(done_mem);
  for (int i = 0; i < 64; ++i) ((bfloat16_t*)buffer)[threadIdx.x * 64 + i] = bfloat16_t(1.0f);
  if (threadIdx.x == 0) done[0].init(1);
  tl::fence_barrier_init();
  if (threadIdx.x < 32) tl::tmem_allocate(&columns[0], 64);
  tl::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x < 32) {
    tl::Tcgen05SMemDescriptor a, b;
    tl::initialize_tcgen05_descriptor(a, (bfloat16_t*)buffer, 1, 64, 0, 0, 2);
    tl::initialize_tcgen05_descriptor(b, (bfloat16_t*)buffer, 1, 64, 0, 0, 2);
    constexpr auto bf16 = tl::DataType::kBFloat16;
    tl::tcgen05mma_ss<bf16, false>(uint64_t(a), uint64_t(b), columns[0], 0, 0x8100490u, 0, 0, 0, 0);
    tl::tcgen05mma_ss<bf16, false>(uint64_t(a + 32), uint64_t(b + 32), columns[0], 1, 0x8100490u, 0, 0, 0, 0);
    tl::tcgen05_mma_arrive(&done[0]);
  }
  done[0].wait(0);
  tl::tcgen05_after_thread_sync();
  float x[8];
  tl::tcgen05_ld_32dp32bNx<8, false>(columns[0], 0, x);
  for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = x[i];
  tl::tcgen05_before_thread_sync();
  __syncthreads();
  if (threadIdx.x < 32) tl::tmem_deallocate(&columns[0], 64);"""

_TMEM_EXCHANGE = """  __shared__ __align__(16) uint columns[1];
  if (threadIdx.x < 32) tl::tmem_allocate(&columns[0], 32);
  __syncthreads();
  float x[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  if (threadIdx.x < 128) tl::tcgen05_st_32dp32bNx<4, false>(columns[0], 0, x);
  tl::tcgen05_before_thread_sync();
  __syncthreads();
  tl::tcgen05_after_thread_sync();
  if (threadIdx.x >= 128) tl::tcgen05_ld_32dp32bNx<4, false>(columns[0], 0, x);
  out[threadIdx.x] = x[1];
  tl::tcgen05_before_thread_sync();
  __syncthreads();
  if (threadIdx.x < 32) tl::tmem_deallocate(&columns[0], 32);"""

_PLAIN = """  __shared__ __align__(16) float slots[64];
  if (threadIdx.x < 64) slots[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 64) out[threadIdx.x * 4] = slots[63 - threadIdx.x];"""


def _cases(body: str, faults: list[tuple[str, str, str, str]], **sizes: int) -> list[Case]:
    return [Case(name=name, rule=rule, body=body, old=old, new=new, **sizes) for name, rule, old, new in faults]


CASES: list[Case] = [
    *_cases(_EXCHANGE, [
        ("barrier", "race", "  __syncthreads();\n", ""),
        ("barrier_some", "deadlock", "__syncthreads();", "if (threadIdx.x < 96) __syncthreads();"),
        ("barrier_warp_only", "race", "__syncthreads();", "__syncwarp();"),
    ]),
    *_cases(_WARP_EXCHANGE, [
        ("warp_barrier", "race", "  __syncwarp();\n", ""),
        ("warp_mask", "unsupported", "__syncwarp()", "__syncwarp(0xffff)"),
    ]),
    *_cases(_BULK_STORE, [
        ("store_fence", "missing-proxy-fence", "  tl::fence_proxy_async();\n", ""),
        ("store_barrier", "race", "  __syncthreads();\n", ""),
        ("store_wait", "bulk-store", "    tl::tma_store_wait<0>();\n", ""),
        ("store_commit", "bulk-store", "    tl::tma_store_arrive();\n", ""),
        ("store_size", "tma", "512", "504"),
        ("store_bounds", "out-of-bounds", "tma_store(out,", "tma_store(out + 1000,"),
        ("store_address", "tma", "tma_store(out, buffer,", "tma_store(out, buffer + 8,"),
    ], dynamic=1024),
    *_cases(_STORE_REUSE, [
        ("reuse_wait", "race", "tma_store_wait<0>", "tma_store_wait<1>"),
        ("reuse_barrier", "race", "    }\n    __syncthreads();\n  }", "    }\n  }"),
    ], dynamic=1024),
    *_cases(_MBARRIER.replace("ready[0].wait(0);", "while (!ready[0].try_wait(0)) {\n  }"), [
        ("poll_count", "deadlock", "init(128)", "init(129)"),
        ("poll_parity", "race", "try_wait(0)", "try_wait(1)"),
    ]),
    *_cases(_BULK_LOAD, [
        ("load_reuse", "race", "    __syncthreads();\n    out", "    out"),
        ("load_wait", "race", "    full[0].wait(i & 1);\n", ""),
        ("load_bytes", "deadlock", "arrive_and_expect_tx(512)", "arrive_and_expect_tx(528)"),
        ("load_parity", "deadlock", "wait(i & 1)", "wait((i & 1) ^ (i == 2))"),
        ("load_init_fence", "mbarrier", "  tl::fence_barrier_init();\n", ""),
        ("load_init_barrier", "mbarrier", "_init();\n  __syncthreads();\n", "_init();\n"),
        ("load_source_bounds", "out-of-bounds", "out + i * 128", "out + i * 480"),
        ("load_on_mbarrier", "mbarrier", "  __shared__ __align__(16) uint64_t full_mem[1];\n",
         "  auto full_mem = (uint64_t*)(buffer + 256);\n"),
        ("load_in_flight", "in-flight", "    full[0].wait(i & 1);\n", "    if (i < 2) full[0].wait(i & 1);\n"),
        ("load_past_block", "out-of-bounds", "tl::tma_load(buffer,", "tl::tma_load(buffer + 768,"),
    ], dynamic=1024),
    *_cases(_MBARRIER, [
        ("mbarrier_count", "deadlock", "init(128)", "init(129)"),
        ("mbarrier_low_count", "deadlock", "init(128)", "init(64)"),
        ("mbarrier_parity", "race", "wait(0)", "wait(1)"),
        ("mbarrier_arrive", "deadlock", "  ready[0].arrive();\n", ""),
        ("mbarrier_wait", "race", "  ready[0].wait(0);\n", ""),
        ("mbarrier_overwritten", "mbarrier", "  slots[threadIdx.x] = 2.0f;\n",
         "  slots[threadIdx.x] = 2.0f;\n  if (threadIdx.x == 5) *(float*)ready_mem = 7.0f;\n"),
        ("mbarrier_twice", "mbarrier", "if (threadIdx.x == 0)", "if (threadIdx.x < 2)"),
        ("mbarrier_bad_parity", "mbarrier", "wait(0)", "wait(2)"),
        ("mbarrier_uninitialised", "mbarrier", "  if (threadIdx.x == 0) ready[0].init(128);\n", ""),
        ("mbarrier_aligned", "mbarrier", "uint64_t ready_mem[1];\n",
         "uint64_t odd_mem[2];\n  auto ready_mem = (char*)odd_mem + 4;\n"),
        ("mbarrier_unsynchronised", "mbarrier", "init(128);\n  __syncthreads();\n", "init(128);\n"),
    ]),
    *_cases(_NAMED, [
        ("named_id", "named-barrier", "partial(4, 128)", "partial(19, 128)"),
        ("named_shared_id", "named-barrier", "partial(4, 128)", "partial(3, 128)"),
        ("named_count", "named-barrier", "partial(4, 128)", "partial(4, 100)"),
        ("named_count_high", "deadlock", "partial(4, 128)", "partial(4, 160)"),
        ("named_missing", "race", "    tl::__sync_thread_partial(4, 128);\n", ""),
        ("named_arrive_only", "race", "__sync_thread_partial(4, 128)", "__named_barrier_arrive(4, 128)"),
    ], threads=256),
    *_cases(_CP_ASYNC, [
        ("copy_wait", "race", "  tl::cp_async_wait<0>();\n", ""),
        ("copy_left", "cp-async", "  tl::cp_async_wait<0>();\n", ""),
        ("copy_wait_few", "race", "wait<0>", "wait<1>"),
        ("copy_barrier", "race", "  __syncthreads();\n", ""),
        ("copy_bounds", "out-of-bounds", "out + threadIdx.x * 4)", "out + threadIdx.x * 12)"),
        ("copy_alignment", "misaligned", "out + threadIdx.x * 4)", "out + threadIdx.x * 4 + 1)"),
    ], dynamic=2048),
    *_cases(_SHUFFLE, [
        ("shuffle_divergent", "divergence", "x += 1.0f;", "x += tl::shfl_xor_sync(~0u, x, 2); else __syncwarp();"),
        ("shuffle_partial", "deadlock", "x += tl::shfl_xor_sync(~0u, x, 1);",
         "if (threadIdx.x % 32 < 16) x += tl::shfl_xor_sync(~0u, x, 1);"),
        ("registers_one_warp", "registers", "  float x = (float)threadIdx.x;\n",
         "  float x = (float)threadIdx.x;\n  if (threadIdx.x < 32) tl::warpgroup_reg_alloc<240>();\n"),
        ("registers_half_warp", "divergence", "  float x = (float)threadIdx.x;\n",
         "  float x = (float)threadIdx.x;\n  if (threadIdx.x < 16) tl::warpgroup_reg_alloc<240>();\n"),
        ("registers", "registers", "  float x = (float)threadIdx.x;\n",
         "  float x = (float)threadIdx.x;\n  tl::warpgroup_reg_alloc<100>();\n"),
    ]),
    *_cases(_REGISTERS, [
        ("registers_no_dealloc", "registers", "    tl::warpgroup_reg_dealloc<40>();\n", ""),
        ("registers_all_alloc", "registers", "reg_dealloc<40>", "reg_alloc<240>"),
    ], threads=384),
    *_cases(_WGMMA, [
        ("wgmma_one_warp", "wgmma", "  tl::warpgroup_arrive();\n",
         "  if (threadIdx.x >= 32) return;\n  tl::warpgroup_arrive();\n"),
        ("wgmma_arrive", "wgmma", "  tl::warpgroup_arrive();\n", ""),
        ("wgmma_wait", "wgmma", "  tl::warpgroup_wait<0>();\n", ""),
        ("wgmma_wait_few", "wgmma", "warpgroup_wait<0>", "warpgroup_wait<1>"),
        ("wgmma_commit", "wgmma", "  tl::warpgroup_commit_batch();\n", ""),
        ("wgmma_fence", "missing-proxy-fence", "  tl::fence_proxy_async();\n", ""),
        ("wgmma_barrier", "race", "  __syncthreads();\n", ""),
        ("wgmma_operand", "uninitialised-read", "descriptor<1, 1, 64>(b, (bfloat16_t*)(buffer + 8192))",
         "descriptor<1, 1, 64>(b, (bfloat16_t*)(buffer + 16384))"),
    ], dynamic=32768),
    *_cases(_TCGEN05, [
        ("mma_fence", "missing-proxy-fence", "  tl::fence_proxy_async();\n", ""),
        ("mma_wait", "race", "  done[0].wait(0);\n", ""),
        ("mma_after_fence", "missing-tcgen05-fence", "  tl::tcgen05_after_thread_sync();\n", ""),
        ("mma_commit", "deadlock", "    tl::tcgen05_mma_arrive(&done[0]);\n", ""),
        ("mma_accumulate", "uninitialised-read", "columns[0], 0, 0x8100490u", "columns[0], 1, 0x8100490u"),
        ("mma_lane_mask", "unsupported", "columns[0], 1, 0x8100490u, 0, 0, 0, 0)",
         "columns[0], 1, 0x8100490u, -1, -1, -1, -1)"),
        ("mma_shape", "tcgen05", "columns[0], 1, 0x8100490u", "columns[0], 1, 0x7100490u"),
        ("mma_format", "tcgen05", "columns[0], 1, 0x8100490u", "columns[0], 1, 0x8100410u"),
        ("mma_columns", "tensor-memory", "uint64_t(b), columns[0], 0", "uint64_t(b), columns[0] + 32, 0"),
        ("mma_leak", "tensor-memory", "  if (threadIdx.x < 32) tl::tmem_deallocate(&columns[0], 64);", ""),
        ("mma_free_twice", "tensor-memory", "< 32) tl::tmem_deallocate", "< 64) tl::tmem_deallocate"),
        ("mma_free_early", "tensor-memory", "  tl::tcgen05_before_thread_sync();\n  __syncthreads();\n", ""),
        ("mma_free_unfenced", "tensor-memory", "  tl::tcgen05_before_thread_sync();\n", ""),
        ("mma_alloc_size", "tensor-memory", "tmem_allocate(&columns[0], 64)", "tmem_allocate(&columns[0], 48)"),
    ], dynamic=16384),
    *_cases(_TMEM_EXCHANGE, [
        ("tmem_before", "race", "x);\n  tl::tcgen05_before_thread_sync();", "x);"),
        ("tmem_after", "missing-tcgen05-fence", "  tl::tcgen05_after_thread_sync();\n", ""),
        ("tmem_uninitialised", "uninitialised-read", "< 128) tl::tcgen05_st", "< 64) tl::tcgen05_st"),
        ("tmem_lane", "tensor-memory", "tcgen05_ld_32dp32bNx<4, false>(columns[0],",
         "tcgen05_ld_32dp32bNx<4, false>(columns[0] + (((threadIdx.x / 32 + 1) % 4) << 21),"),
    ], threads=256),
    *_cases(_PLAIN, [
        ("plain_uninitialised", "uninitialised-read", "if (threadIdx.x < 64) slots", "if (threadIdx.x < 63) slots"),
        ("plain_global_bounds", "out-of-bounds", "out[threadIdx.x * 4]", "out[threadIdx.x * 17]"),
        ("plain_shared_bounds", "out-of-bounds", "slots[63 - threadIdx.x]", "slots[1063 - threadIdx.x]"),
        ("plain_misaligned", "misaligned", "out[threadIdx.x * 4] =", "*(float*)((char*)out + threadIdx.x * 4 + 2) ="),
        ("plain_wild", "out-of-bounds", "out[threadIdx.x * 4] =", "*(float*)(uintptr_t)(threadIdx.x * 4 + 4096) ="),
    ]),
]  # fmt: skip
