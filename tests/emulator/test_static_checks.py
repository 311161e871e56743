"""The static checks on every proof kernel, and each check on a kernel that breaks its rule."""

import json

import pytest
import static_checks
from proof_table import proofs

from flashqla_cp.kernels.build import CompiledKernel, build
from flashqla_cp.kernels.cubin import extract_cubins, read_resources
from flashqla_cp.kernels.spec import make_spec

PROOFS = {proof.name: proof for proof in proofs()}
needs_disassembler = pytest.mark.skipif(
    static_checks.find_disassembler() is None, reason="nvdisasm not found: pip install nvidia-cuda-nvdisasm"
)


@pytest.mark.parametrize("name", PROOFS)
def test_proof_kernels_have_no_faults(name, compiled):
    assert static_checks.all_faults(compiled[name]) == []


@needs_disassembler
@pytest.mark.parametrize("name", PROOFS)
def test_machine_code_holds_the_expected_opcodes(name, compiled):
    missing = set(PROOFS[name].opcodes) - static_checks.opcodes(compiled[name])
    assert not missing


@needs_disassembler
def test_sm_103a_gets_the_same_schedules():
    """The architecture without proof kernels of its own compiles the family's."""
    kernel = build(make_spec("proof_product_ss", "sm_103a", {"M": 128, "N": 64, "K": 320}))
    assert static_checks.all_faults(kernel) == []
    assert {"UTCHMMA", "LDTM", "UTMALDG"} <= static_checks.opcodes(kernel)


def test_resources_come_from_the_cubin(compiled):
    kernel = compiled["proof_product_ss-sm_90a"]
    (cubin,) = extract_cubins(kernel.library().read_bytes())
    (resources,) = read_resources(cubin)
    info = kernel.info()["kernels"][0]
    assert resources.kernel == info["name"] == "product_ss_kernel"
    assert resources.registers == info["registers"] > 16
    with pytest.raises(ValueError, match="expected an ELF file for CUDA"):
        read_resources(b"\x7fELF" + bytes(60))


def test_parameter_list(compiled):
    found = static_checks.parameters(compiled["proof_cp_async-sm_90a"])
    assert [(p.name, p.type) for p in found] == [("X", "const float*"), ("Y", "float*"), ("rows", "int")]
    maps = static_checks.parameters(compiled["proof_product_ss-sm_90a"])
    assert [p.type for p in maps] == ["const CUtensorMap", "const CUtensorMap", "float*"]


def broken(tmp_path, source="", arch="sm_90a", **info):
    """A kernel folder with this source and these resources."""
    sound = {
        "name": "k",
        "registers": 64,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "static_shared_bytes": 0,
        "dynamic_shared_bytes": 0,
        "threads": 128,
    }
    (tmp_path / "kernel.json").write_text(json.dumps({"kernels": [sound | info]}))
    (tmp_path / "device.cu").write_text(source)
    return CompiledKernel(spec=make_spec("s", arch), folder=tmp_path)


ROLES = """
  if (((int)threadIdx.x) < 128) {
    tl::warpgroup_reg_dealloc<40>();
    for (int i = 0; i < 3; ++i) {
    }
  } else {
    if (((int)threadIdx.x) < 256) {
      tl::warpgroup_reg_alloc<%d>();
    } else {
      tl::warpgroup_reg_alloc<232>();
    }
  }
"""


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spill_load_bytes": 8}, "8 spilled bytes"),
        ({"stack_bytes": 16, "spill_store_bytes": 24, "spill_load_bytes": 40}, "16 spilled bytes"),
        ({"registers": 256}, "256 registers per thread"),
        ({"registers": 168, "threads": 512}, "86016 registers per block"),
        ({"static_shared_bytes": 1024, "dynamic_shared_bytes": 227 * 1024}, "233472 shared bytes"),
        ({"threads": 1056}, "1056 threads"),
        ({"source": "tl::__sync_thread_partial(17, 128);"}, r"barrier ids \[17\]"),
        ({"source": "tl::__sync_thread_partial(((i & 1) + 15), 128);"}, r"barrier ids \[16\]"),
        ({"source": "tl::__sync_thread_partial(2, 64); tl::NamedBarrier<64>"}, "those of cross-warp reductions"),
        ({"source": "tl::tmem_allocate((&(a[0])), 32);"}, "32 tensor-memory columns, sm_90a has 0"),
        (
            {"source": "tl::tmem_allocate((&(a[0])), 32);", "arch": "sm_100a"},
            "32 tensor-memory columns are allocated and 0",
        ),
        ({"source": "tl::tmem_allocate(a, 512); tl::tmem_allocate(b, 32);", "arch": "sm_100a"}, "544 tensor-memory"),
        ({"source": "for (int i = 0; i < 2; ++i) {\ntl::tmem_allocate(a, 32);\n}", "arch": "sm_100a"}, "in a loop"),
        ({"source": "tl::tmem_allocate(a, n);", "arch": "sm_100a"}, "constant number of columns"),
        ({"source": "tl::tmem_allocate(a, 32); tl::tmem_deallocate(a, n);", "arch": "sm_100a"}, "constant number"),
        ({"source": "tl::__sync_thread_partial(17);"}, r"barrier ids \[17\]"),
        ({"source": "tl::__sync_thread_partial(17, n);"}, r"barrier ids \[17\]"),
        ({"source": "tl::__sync_thread_partial(n ? 3 : 17, 128);"}, "expected a constant"),
        ({"source": ROLES % 240, "threads": 384}, "^$"),
        ({"source": ROLES % 248, "threads": 384}, "roles take 66560 registers"),
        ({"source": ROLES % 240, "threads": 512}, "roles take"),
    ],
)
def test_broken_rules_are_found(changes, fault, tmp_path):
    import re

    text = "; ".join(static_checks.all_faults(broken(tmp_path, **changes)))
    assert re.search(fault, text), text


def test_register_budget_follows_the_branches():
    assert static_checks.register_budget(ROLES % 240, 384) == 128 * (40 + 240 + 232)
    assert static_checks.register_budget("float x;", 128) is None
    with pytest.raises(ValueError, match="covers 128 of 256 threads"):
        static_checks.register_budget("if (((int)threadIdx.x) < 128) {\ntl::warpgroup_reg_alloc<40>();\n}", 256)


TWO_ROLES = "if (%s) {\ntl::warpgroup_reg_alloc<168>();\n} else {\ntl::warpgroup_reg_dealloc<40>();\n}"


@pytest.mark.parametrize(
    "condition",
    [
        "128 <= ((int)threadIdx.x)",
        "((int)threadIdx.x) >= 128",
        "127 < ((int)threadIdx.x)",
        "((int)threadIdx.x) > 127",
        "(((int)threadIdx.x) >= 128)",
    ],
)
def test_register_budget_reads_both_orders(condition):
    assert static_checks.register_budget(TWO_ROLES % condition, 384) == 256 * 168 + 128 * 40


def test_register_budget_follows_else_if():
    text = TWO_ROLES % "((int)threadIdx.x) < 128"
    text = text.replace("} else {", "} else if (((int)threadIdx.x) < 256) {\ntl::warpgroup_reg_alloc<80>();\n} else {")
    assert static_checks.register_budget(text, 384) == 128 * (168 + 80 + 40)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (TWO_ROLES % "rows < 128", "cannot read which threads"),
        (TWO_ROLES % "(((int)threadIdx.x) >> 7) == 0", "cannot read which threads"),
        (TWO_ROLES % "((int)threadIdx.x) < 32", "part of a warpgroup"),
        ("for (int i = 0; i < 2; ++i) {\ntl::warpgroup_reg_alloc<40>();\n}", "cannot read which threads"),
        ("if (((int)threadIdx.x) < 128) tl::warpgroup_reg_alloc<40>();", "cannot read which threads"),
        ("tl::warpgroup_reg_alloc<n>();", "how many registers"),
        ("tl::warpgroup_reg_alloc<40>();\ntl::warpgroup_reg_alloc<80>();", "768 times"),
    ],
)
def test_register_budget_refuses_what_it_cannot_read(source, fault):
    with pytest.raises(ValueError, match=fault):
        static_checks.register_budget(source, 384)


@pytest.mark.parametrize(
    "call",
    [
        "(f(x), 128)",
        "(n > 0 ? 3 : 17, 128)",
        "((x & 1) ? 3 : ((i & 1) + 5), 128)",
        "((((i & 1) * 9) + 5), 128)",
        "(i + 3)",
    ],
)
def test_barrier_id_that_cannot_be_read_is_refused(call):
    with pytest.raises(ValueError, match="expected a constant"):
        static_checks.barrier_ids(f"tl::__sync_thread_partial{call};")


def test_barrier_ids_are_read_whatever_the_count():
    assert static_checks.barrier_ids("tl::__sync_thread_partial(17, n); tl::__named_barrier_arrive((4), f(a, b));") == {
        4,
        17,
    }
    assert static_checks.barrier_ids("tl::__sync_thread_partial(((i_1 & 1) + 3), 256);") == {3, 4}
    assert static_checks.barrier_ids("tl::__sync_thread_partial();") == {0}
    with pytest.raises(ValueError, match="inline assembly"):
        static_checks.barrier_ids('asm volatile("bar.sync %0, 128;" :: "r"(n));')
