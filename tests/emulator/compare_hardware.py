"""Do the emulator and an H200 agree? Two steps, because a GPU host may be offline and without compilers.

    python tests/emulator/compare_hardware.py prepare runs/hardware
        where tilelang and g++ are, no GPU needed: compiles the sm_90a proof kernels into runs/hardware/cache, runs
        them in the emulator and saves inputs and outputs in runs/hardware/emulated.npz
    python tests/emulator/compare_hardware.py run runs/hardware --out tests/emulator/results/h200.json
        on the GPU host: runs the same compiled kernels on the same inputs, compares, writes the results with versions

Outputs must be equal bit for bit where no tensor core sums and no approximate function is involved, else within 1e-3
relative L2. The exit code is 0 only if all agree. The folder must not be writable by other users: chmod -R go-w.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE / "kernels")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from proof_table import Proof, proofs  # noqa: E402

from flashqla_cp.kernels.build import CompiledKernel, build_all  # noqa: E402
from flashqla_cp.kernels.builders import cache_key  # noqa: E402

CLOSE = 1e-3
SEED = 20


def _chosen() -> list[Proof]:
    return [proof for proof in proofs() if proof.spec.target.family == "sm90"]


def _to_array(tensor: torch.Tensor) -> np.ndarray:
    """numpy has no bfloat16: its bits travel as int16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _to_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if like.dtype == torch.bfloat16 else tensor


def prepare(folder: Path) -> int:
    """Compile, emulate, save. Returns an exit code."""
    from cta_emulator import load

    folder.mkdir(parents=True, exist_ok=True)
    results = build_all([proof.spec for proof in _chosen()], cache_folder=folder / "cache")
    arrays, entries = {}, {}
    for proof, result in zip(_chosen(), results, strict=True):
        if result.kernel is None:
            print(f"{proof.name}: {result.error}", file=sys.stderr)
            return 1
        inputs, outputs = proof.make(torch.Generator().manual_seed(SEED))
        load(result.kernel)(*inputs, *outputs, schedule="random").assert_clean()
        for kind, tensors in (("input", inputs), ("output", outputs)):
            arrays |= {f"{proof.name}/{kind}{i}": _to_array(tensor) for i, tensor in enumerate(tensors)}
        entries[proof.name] = result.kernel.folder.name
    np.savez_compressed(folder / "emulated.npz", **arrays)
    (folder / "entries.json").write_text(json.dumps(entries, indent=1))
    print(f"{len(entries)} kernels in {folder}")
    return 0


def compare_outputs(got: torch.Tensor, emulated: torch.Tensor, bitwise: bool) -> dict[str, Any]:
    """Agreement of one output: equal bits, relative L2, and whether that is enough."""
    same = torch.equal(got.view(torch.uint8), emulated.view(torch.uint8))
    norm = emulated.double().norm().clamp_min(1e-30)
    error = float((got.double() - emulated.double()).norm() / norm)
    return {"bitwise": same, "relative_l2": error, "agrees": same if bitwise else bool(error <= CLOSE)}


def _run_one(proof: Proof, kernel: CompiledKernel, saved: Any) -> dict[str, Any]:
    inputs, outputs = proof.make(torch.Generator().manual_seed(SEED))
    inputs = [_to_tensor(saved[f"{proof.name}/input{i}"], x) for i, x in enumerate(inputs)]
    expected = proof.expect(*inputs)
    on_device = [x.cuda() for x in inputs] + [x.cuda() for x in outputs]
    kernel.load()(*on_device)
    torch.cuda.synchronize()
    rows = []
    for i, result in enumerate(on_device[len(inputs) :]):
        got = result.cpu()
        row = compare_outputs(got, _to_tensor(saved[f"{proof.name}/output{i}"], outputs[i]), proof.bitwise)
        row["relative_l2_to_expected"] = float(
            (got.double() - expected[i].double()).norm() / expected[i].double().norm()
        )
        rows.append(row)
    return {
        "must_be_bitwise": proof.bitwise,
        "outputs": rows,
        "sources_unchanged": cache_key(proof.spec) == kernel.folder.name,
    }


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else "unknown"


def _versions() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")},
    }


def run(folder: Path, out: Path) -> int:
    """Run on the GPU, compare, write the results. Returns an exit code."""
    saved = np.load(folder / "emulated.npz")
    entries = json.loads((folder / "entries.json").read_text())
    results: dict[str, Any] = {"close": CLOSE, "versions": _versions(), "kernels": {}}
    failed = 0
    for proof in _chosen():
        kernel = CompiledKernel(spec=proof.spec, folder=folder / "cache" / entries[proof.name])
        try:
            row = _run_one(proof, kernel, saved)
            row["compiled_with"] = kernel.info()["versions"]
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}", "outputs": []}
        agrees = bool(row["outputs"]) and all(o["agrees"] for o in row["outputs"])
        failed += not agrees
        results["kernels"][proof.name] = row
        detail = row.get("error") or ", ".join(
            f"bitwise {o['bitwise']}, L2 {o['relative_l2']:.1e}" for o in row["outputs"]
        )
        print(f"{'agrees ' if agrees else 'DIFFERS'} {proof.name}: {detail}", flush=True)
    results["agreeing"] = len(results["kernels"]) - failed
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{results['agreeing']} of {len(results['kernels'])} agree; written to {out}")
    return 1 if failed else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "h200.json")
    arguments = parser.parse_args()
    return prepare(arguments.folder) if arguments.step == "prepare" else run(arguments.folder, arguments.out)


if __name__ == "__main__":
    raise SystemExit(main())
