"""Small kernels written by hand in the style of emitted source, several in one library, with a host stub for them.

Each takes the same arguments: a float pointer and an int. Compiling one library takes seconds, tracing none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from cta_emulator import EmulatedKernel, Report
from cta_emulator.launch import load_sources

# Host stub: %s names, threads, dynamic shared bytes; called with (pointer, int, index of the kernel).
STUB = """
#include "tvm/runtime/base.h"
#include "tvm/runtime/c_backend_api.h"
#include "tvm/ffi/c_api.h"
int32_t __tvm_ffi_handmade(void* self, void* args, int32_t num_args, void* result) {
  static const char* names[] = {%s};
  static const int threads[] = {%s}, dynamic[] = {%s};
  TVMFFIAny* given = (TVMFFIAny*)args;
  DLTensor* tensor = (DLTensor*)given[0].v_ptr;
  const int which = (int)given[2].v_int64;
  TVMFFIAny stack[8];
  void* function = 0;
  stack[0].v_ptr = tensor->data;
  stack[1].v_int64 = given[1].v_int64;
  stack[2].v_int64 = 1;
  stack[3].v_int64 = threads[which];
  stack[4].v_int64 = 1;
  stack[5].v_int64 = 1;
  stack[6].v_int64 = dynamic[which];
  if (TVMBackendGetFuncFromEnv(0, names[which], &function)) return -1;
  return TVMFFIFunctionCall(function, stack, dynamic[which] ? 7 : 6, 0);
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handmade:
    """Body of one kernel: `out` is the float pointer, `n` the int, `buffer` its dynamic shared memory in bytes."""

    name: str
    body: str
    threads: int = 128
    dynamic: int = 0

    def source(self) -> str:
        """CUDA source of the kernel."""
        shared = "  extern __shared__ __align__(1024) uchar buffer[];\n" if self.dynamic else ""
        head = f'extern "C" __global__ void __launch_bounds__({self.threads}, 1) {self.name}'
        return f"{head}(float* __restrict__ out, int n) {{\n{shared}{self.body}\n}}\n"


class HandmadeLibrary:
    """Several handmade kernels, callable by name."""

    def __init__(self, kernels: list[Handmade]) -> None:
        self._index = {kernel.name: i for i, kernel in enumerate(kernels)}
        quoted = ", ".join(f'"{k.name}"' for k in kernels)
        threads = ", ".join(str(k.threads) for k in kernels)
        dynamic = ", ".join(str(k.dynamic) for k in kernels)
        device = "\n".join(k.source() for k in kernels)
        self._kernel: EmulatedKernel = load_sources("handmade", device, STUB % (quoted, threads, dynamic))

    def run(self, name: str, out: torch.Tensor | Any | None = None, n: int = 0, **options: Any) -> Report:
        """Run one kernel; `out` is 1024 floats of zeros if left out."""
        return self._kernel(torch.zeros(1024) if out is None else out, n, self._index[name], **options)
