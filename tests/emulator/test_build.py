"""Building for real: once per host, hits that need no compiler, errors that name what to install, warm-up's table."""

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from proof_table import proofs

from flashqla_cp.cli import warm_up
from flashqla_cp.kernels import builders, settings, toolchain
from flashqla_cp.kernels.build import build, build_all
from flashqla_cp.kernels.builders import cache_key, register_builder
from flashqla_cp.kernels.spec import make_spec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = ("proof_exchange-sm_90a", "proof_row_reduce-sm_90a")
SPECS = [proof.spec for proof in proofs() if proof.name in NAMES]

RANK = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from proof_table import proofs
from flashqla_cp.kernels.build import build_all
specs = [p.spec for p in proofs() if p.name in {names!r}]
results = build_all(specs, jobs=1, cache_folder=Path({folder!r}))
assert all(r.kernel for r in results), results
print(sum(r.compiled for r in results))
"""


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    """A cache that three processes filled at the same time, and how many kernels each compiled."""
    folder = tmp_path_factory.mktemp("build") / "cache"
    code = RANK.format(path=[str(ROOT), str(HERE / "kernels")], names=NAMES, folder=str(folder))
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [int(rank.communicate(timeout=400)[0]) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    return folder, counts


def hide_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(settings, "installed_cuda_folders", list)


def test_ranks_compile_each_kernel_once(shared_cache):
    folder, counts = shared_cache
    assert sum(counts) == len(SPECS)
    assert sorted(e.name for e in folder.iterdir() if e.name not in ("locks", "partial")) == sorted(
        map(cache_key, SPECS)
    )
    assert not list((folder / "partial").iterdir())


def test_a_copied_cache_serves_without_a_compiler(shared_cache, tmp_path, monkeypatch):
    copied = tmp_path / "elsewhere"
    shutil.copytree(shared_cache[0], copied)
    copied.chmod(0o700)
    hide_nvcc(tmp_path, monkeypatch)
    assert settings.find_nvcc() is None
    for result in build_all(SPECS, cache_folder=copied):
        assert not result.compiled and result.kernel.folder.parent == copied
        assert callable(result.kernel.load())


def test_entry_holds_sources_resources_and_versions(shared_cache):
    kernel = build(SPECS[0], cache_folder=shared_cache[0])
    info = kernel.info()
    assert info["spec"] == SPECS[0].to_dict() and info["seconds"] > 0
    assert info["versions"]["tilelang"] == importlib.metadata.version("tilelang") and "13" in info["versions"]["nvcc"]
    assert "__global__" in kernel.device_source() and "__tvm_ffi_" in kernel.host_source()
    assert (kernel.folder.stat().st_mode & 0o077) == 0


def test_missing_nvcc_names_the_package(tmp_path, monkeypatch):
    hide_nvcc(tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match=r"nvcc was not found.*pip install 'cuda-toolkit\[nvcc,cudart,cccl\]==13"):
        build(SPECS[0], cache_folder=tmp_path / "cache")


def test_nvcc_of_an_installed_package_is_found(tmp_path, monkeypatch):
    """Where CUDA's packages put it: nvidia/cu13/bin, without a folder of PATH or CUDA_HOME."""
    nvcc = tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "site" / "nvidia")]
    monkeypatch.setattr(importlib.util, "find_spec", {"nvidia": spec}.get)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert settings.find_nvcc() == str(nvcc)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert settings.find_nvcc() is None


def test_missing_host_compiler_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match=r"g\+\+ was not found on PATH.*package g\+\+ on Debian"):
        build(SPECS[0], cache_folder=tmp_path / "cache")
    monkeypatch.setenv("CXX", "clang++-99")
    with pytest.raises(RuntimeError, match=r"the C\+\+ compiler 'clang\+\+-99' of CXX or CC was not found"):
        build(SPECS[0], cache_folder=tmp_path / "cache")


def test_untested_version_is_a_warning_once(monkeypatch):
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "9.9" if n == "tilelang" else found(n))
    monkeypatch.setattr(toolchain, "_warned", set())
    with pytest.warns(UserWarning, match=r"tilelang 9\.9 is installed.*tested with 0\.1\.15 only"):
        toolchain.check_versions()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toolchain.check_versions()


def test_a_damaged_kernel_is_compiled_again(shared_cache, tmp_path, caplog):
    """Cut short, the library would kill the process that loads it."""
    copied = tmp_path / "cache"
    shutil.copytree(shared_cache[0], copied)
    copied.chmod(0o700)
    os.truncate(copied / cache_key(SPECS[0]) / "library.so", 4096)
    results = build_all(SPECS, jobs=1, cache_folder=copied)
    assert [r.compiled for r in results] == [True, False] and "library.so is not as it was made" in caplog.text
    assert callable(results[0].kernel.load())


@pytest.mark.parametrize(("package", "version"), [("tilelang", "0.1.15"), ("apache-tvm-ffi", "0.1.12")])
def test_missing_package_is_named(package, version, tmp_path, monkeypatch):
    found = importlib.metadata.version

    def version_of(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    with pytest.raises(RuntimeError, match=f"pip install {package}=={version}"):
        build(SPECS[0], cache_folder=tmp_path / "cache")


def test_a_cache_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(RuntimeError, match="can be written by other users"):
        build(SPECS[0], cache_folder=tmp_path)


def test_stage_without_kernel_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="'proof_transpose' has no kernel for sm_100a; it has for: sm90"):
        build(make_spec("proof_transpose", "sm_100a", {"D": 64}), cache_folder=tmp_path / "cache")


@pytest.fixture
def scratch_builder(tmp_path, monkeypatch):
    """A module with builders of its own, registered for this test only."""
    module = tmp_path / "scratch_builders.py"
    module.write_text(
        "from flashqla_cp.kernels.spec import make_spec\n"
        "def broken(spec):\n    raise ValueError('no such tile')\n"
        "def dying(spec):\n    import os\n    os._exit(5)\n"
        "def rows(arch, choices):\n"
        "    kinds = ('broken', 'dying')\n"
        "    return [make_spec('scratch_' + k, arch, {'D': d}) for k in kinds for d in choices['head_dim']]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builders, "_BUILDERS", {})
    for kind in ("broken", "dying"):
        rows = "scratch_builders:rows" if kind == "broken" else ""
        register_builder(f"scratch_{kind}", "sm90", f"scratch_builders:{kind}", rows=rows)
    return module


def test_changed_sources_change_the_key(scratch_builder):
    spec = make_spec("scratch_broken", "sm_90a", {"D": 64})
    before = cache_key(spec)
    assert cache_key(spec) == before != cache_key(make_spec("scratch_broken", "sm_90a", {"D": 128}))
    scratch_builder.write_text(scratch_builder.read_text() + "# changed\n")
    assert cache_key(spec) != before


def test_two_builders_for_one_stage_are_refused(scratch_builder):
    register_builder("scratch_dying", "sm90", "scratch_builders:dying")
    with pytest.raises(ValueError, match="'scratch_dying' for 'sm90' twice"):
        register_builder("scratch_dying", "sm90", "scratch_builders:broken")


def options(tmp_path, *arguments):
    parser = argparse.ArgumentParser()
    warm_up.add_arguments(parser)
    return parser.parse_args([*arguments, "--cache", str(tmp_path / "cache")])


def test_warm_up_reports_failures(scratch_builder, tmp_path, capfd):
    """One builder raises, one kills its process: both are reported, and neither stops the other."""
    code = warm_up.run(options(tmp_path, "--arch", "sm_90a", "--head-dim", "64", "--jobs", "1"))
    output = capfd.readouterr()
    assert code == 1 and "0 of 2 kernels" in output.out
    assert "no such tile" in output.err and "ended with code 5" in output.err


def test_warm_up_without_kernels(scratch_builder, tmp_path, capfd):
    assert warm_up.run(options(tmp_path, "--arch", "sm_100a")) == 2
    assert "no kernels are registered for sm_100a" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--jobs", "-1"], "--jobs: got -1, expected a positive integer"),
        (["--jobs", "0"], "--jobs: got 0, expected a positive integer"),
        (["--cache", "{tmp}/file"], "cannot be used as a folder"),
        (["--cache", "{tmp}/file/cache"], "cannot be used as a folder"),
        (["--cache", "/proc/cache"], "cannot be used as a folder"),
        ([], "FLASHQLA_CP_BUILD_JOBS: got 'abc', expected a positive integer"),
    ],
)
def test_warm_up_with_options_that_cannot_work(arguments, word, scratch_builder, tmp_path, capfd, monkeypatch):
    """One line and exit code 2, before anything is printed or started."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHQLA_CP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHQLA_CP_BUILD_JOBS", "2" if arguments else "abc")
    parser = argparse.ArgumentParser()
    warm_up.add_arguments(parser)
    code = warm_up.run(parser.parse_args(["--arch", "sm_90a", *(a.format(tmp=tmp_path) for a in arguments)]))
    output = capfd.readouterr()
    assert code == 2 and output.out == ""
    assert output.err.startswith("warm-up: ") and word in output.err and output.err.count("\n") == 1


def test_warm_up_without_a_compiler(scratch_builder, tmp_path, capfd, monkeypatch):
    hide_nvcc(tmp_path, monkeypatch)
    assert warm_up.run(options(tmp_path, "--arch", "sm_90a")) == 2
    assert "warm-up: nvcc was not found" in capfd.readouterr().err


@pytest.mark.parametrize("jobs", [0, -1])
def test_a_number_of_processes_that_cannot_work_is_refused(jobs, tmp_path):
    with pytest.raises(ValueError, match=f"jobs: got {jobs}, expected a positive integer"):
        build_all(SPECS, jobs=jobs, cache_folder=tmp_path / "cache")


def test_an_error_while_reporting_is_not_lost(scratch_builder, tmp_path):
    def fail(result):
        raise KeyError("on_done")

    with pytest.raises(KeyError, match="on_done"):
        build_all([make_spec("scratch_broken", "sm_90a", {"D": 64})], cache_folder=tmp_path / "cache", on_done=fail)


def test_warm_up_prints_one_line_a_kernel(shared_cache, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(warm_up, "rows_to_compile", lambda arch, choices: SPECS)
    arguments = options(tmp_path, "--arch", "sm_90a")
    arguments.cache = shared_cache[0]
    assert warm_up.run(arguments) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "seconds", "registers", "shared", "spills"]
    for line, spec in zip(sorted(lines[1:3]), sorted(SPECS, key=lambda s: s.label()), strict=True):
        info = json.loads((shared_cache[0] / cache_key(spec) / "kernel.json").read_text())["kernels"][0]
        assert line.startswith(spec.label()) and line.split()[-4] == "cached"
        assert line.split()[-3] == str(info["registers"]) and line.split()[-1] == "0"
    assert lines[-1].startswith("2 of 2 kernels in") and "0 compiled now" in lines[-1]


def test_building_does_not_import_the_compiler():
    """Key and cache look-up happen on every rank at start-up: they must not load tilelang."""
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(HERE / 'kernels')]!r}\n"
        "from proof_table import proofs\nfrom flashqla_cp.kernels.builders import cache_key\n"
        "cache_key(proofs()[0].spec)\nassert not {'tilelang', 'tvm_ffi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
