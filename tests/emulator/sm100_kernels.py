"""What the tests of sm_100's kernels share: streams, schedules, and what the machine code of a schedule must hold."""

from typing import Any

from static_checks import all_faults, find_disassembler, opcodes, tensor_memory_columns

from flashqla_cp.kernels.build import CompiledKernel

ARCH = "sm_100a"
SCHEDULES = (("eager", 1), ("lazy", 1), ("random", 1), ("random", 2), ("random", 3))
PACKED, SHORT, EMPTY = (0, 300, 300, 633), (0, 1, 40, 103, 168), (0, 0, 0, 64, 129, 129)
_INCLUDE = "#include <tl_templates/cuda/instruction/tcgen05mma.h>"


def hold_code(kernel: CompiledKernel, config: Any, products: int, most_spilled: int = 0) -> None:
    """All products by tcgen05, within the memory of the config; tensor memory is given back after its last use."""
    assert all_faults(kernel, most_spilled) == []
    source = kernel.device_source()
    assert source.count("tcgen05mma") - source.count(_INCLUDE) == products
    assert tensor_memory_columns(source) <= config.tensor_memory_columns
    assert all(k["dynamic_shared_bytes"] <= config.shared_bytes for k in kernel.info()["kernels"])
    end = source.rindex("__syncthreads();")
    assert "tmem_deallocate" in source[end:] and "tcgen05_ld" not in source[end:]
    if find_disassembler():
        found = opcodes(kernel)
        assert "UTCHMMA" in found
        # Lengths of queries alone are added up by the warps' own products.
        lengths = kernel.spec.has("l2norm") and kernel.spec.stage in ("forward", "sweep", "summary_grad")
        assert ("HMMA" in found) == lengths
