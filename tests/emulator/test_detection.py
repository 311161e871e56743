"""Every kind of fault the emulator claims to see: the sound kernel is clean, the one-line fault is reported."""

import pytest
import torch
from cta_emulator import Finding, Report, Suppression, UnsupportedSourceError, Virtual
from cta_emulator.launch import load_sources
from fault_cases import CASES
from handmade import Handmade, HandmadeLibrary


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
