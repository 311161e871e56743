"""Every kind of fault the emulator claims to see: the sound kernel is clean, the one-line fault is reported."""

import pytest
import torch
from cta_emulator import Finding, Report, Suppression, UnsupportedSourceError, Virtual
from cta_emulator.launch import load_sources
from fault_cases import CASES
from handmade import STUB, Handmade, HandmadeLibrary


@pytest.fixture(scope="module")
def library():
    return HandmadeLibrary([kernel for case in CASES for kernel in (case.sound(), case.faulty())])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_sound_kernel_is_clean(case, schedule, library):
    library.run(case.name + "_sound", schedule=schedule).assert_clean()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault_is_reported(case, library):
    rules = set()
    for schedule in ("eager", "lazy", "random"):
        report = library.run(case.name + "_faulty", schedule=schedule, max_switches=200_000)
        rules |= report.rules()
        if case.rule in rules:
            break
    assert case.rule in rules, f"expected {case.rule}, found {rules}"


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.rule in ("race", "missing-proxy-fence", "wgmma")], ids=lambda c: c.name
)
def test_findings_point_to_source_lines(case, library):
    reports = [library.run(case.name + "_faulty", schedule=schedule) for schedule in ("eager", "lazy", "random")]
    report, finding = next((r, f) for r in reports for f in r.findings if f.rule == case.rule)
    lines = report.source.splitlines()
    assert finding.lines and all(0 < line <= len(lines) for line in finding.lines)
    assert lines[finding.lines[0] - 1].strip() in report.describe()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("tl::no_such_intrinsic(out);", "no_such_intrinsic"),
        ("__no_such_builtin(3);", "__no_such_builtin"),
        ('asm volatile("nanosleep.u32 5;");', "inline assembly"),
        ("tl::tcgen05_ld_16dp64bNx<8, false>(0, 0, out);", "tcgen05_ld_16dp64bNx"),
        ("tl::tmem_allocate<true>(out, 32);", "one block"),
        ("__shared__ float4 odd[4];", "float4"),
    ],
)
def test_what_is_not_emulated_is_named(body, named):
    with pytest.raises(UnsupportedSourceError, match=named):
        load_sources("unknown", Handmade(name="unknown", body=body).source(), "")


def test_32_bit_index_overflow():
    sound = Handmade(name="wide", body="if (threadIdx.x == 0) out[(int64_t)n * 1024] = 1.0f;")
    faulty = Handmade(name="narrow", body="if (threadIdx.x == 0) out[n * 1024] = 1.0f;")
    library = HandmadeLibrary([sound, faulty])
    huge = Virtual((3 << 30,), torch.float32)  # 12 GiB that nobody touches
    library.run("wide", huge, (5 << 28) // 512).assert_clean()
    report = library.run("narrow", huge, (5 << 28) // 512)
    assert "index-overflow" in report.rules() and "out-of-bounds" in report.rules()


def test_suppressions_need_a_reason_and_a_use(library):
    finding = Finding(severity="error", rule="race", text="on shared memory", lines=(3,))
    report = Report(
        kernel="k", finished=True, error="", findings=(finding,), source="", seconds=0.0, switches=0, accesses=0, mma=0,
        bulk_copies=0, blocks=1,
    )  # fmt: skip
    known = Suppression(kernel="k", pattern="race", reason="harmless because it is a test")
    report.assert_clean(allow=[known])
    with pytest.raises(AssertionError, match="race"):
        report.assert_clean(allow=[Suppression(kernel="other", pattern="race", reason="for another kernel")])
    with pytest.raises(AssertionError, match="suppress nothing"):
        report.assert_clean(allow=[known, Suppression(kernel="k", pattern="deadlock", reason="never needed")])
    with pytest.raises(ValueError, match="reason"):
        Suppression(kernel="k", pattern="race", reason=" ")


def test_deadlock_says_who_waits_for_what(library):
    report = library.run("mbarrier_count_faulty")
    text = report.describe()
    assert not report.finished
    assert "128 threads" in text and "mbarrier at shared offset" in text and "1 of 129 arrivals left" in text


def test_arguments_are_checked(library):
    with pytest.raises(ValueError, match="schedule: got 'soon'"):
        library.run("barrier_sound", schedule="soon")
    with pytest.raises(TypeError, match="argument 1: got str"):
        library.run("barrier_sound", n="1")
    for bad, named in (
        (torch.zeros(1024, device="meta"), "on meta"),
        (torch.zeros(1024).to_sparse(), "sparse"),
        (torch.zeros(1024, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (Virtual((8,), torch.complex64), "complex64"),
    ):
        with pytest.raises(TypeError, match=f"argument 0: got .*{named}"):
            library.run("barrier_sound", bad)


def test_overlapping_arguments_share_memory():
    """Halves of one tensor overlap as spans: writes through one must survive the copy back of the other."""
    stub = STUB.replace("int32_t __tvm_ffi_handmade(", "int32_t __tvm_ffi_two(")
    stub = stub.replace("stack[1].v_int64 = given[1].v_int64;", "stack[1].v_ptr = ((DLTensor*)given[1].v_ptr)->data;")
    body = """for (int row = 0; row < 8; ++row) {
  a[row * 256 + threadIdx.x] = 1.0f;
  b[row * 256 + threadIdx.x] += 2.0f;
}"""
    source = Handmade(name="halves", body=body).source().replace("float* __restrict__ out, int n", "float* a, float* b")
    kernel = load_sources("two", source, stub % ('"halves"', "128", "0"))
    base = torch.zeros(8, 256)
    kernel(base[:, :128], base[:, 128:], 0).assert_clean()
    assert torch.equal(base, torch.cat([torch.ones(8, 128), torch.full((8, 128), 2.0)], dim=1))
    same = torch.zeros(8, 256)
    kernel(same, same, 0, races=False)
    assert torch.equal(same[:, :128], torch.full((8, 128), 3.0)) and not same[:, 128:].any()
    apart = torch.zeros(4096)
    report = kernel(apart[:2048], apart[2048:2304], 0)
    assert "out-of-bounds" in report.rules(), "tensors that do not overlap keep their own bounds"
