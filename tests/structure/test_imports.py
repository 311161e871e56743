"""Who may import whom, read from the syntax trees.

The face joins two pillars that know nothing of each other: kernels never see a rank, parallel never sees a kernel.
Inside each of the three, imports go down: a module may import from floors below its own and from its own folder.
"""

from __future__ import annotations

import ast

import pytest
from sources import imported_modules, product_files

FLOORS = {
    "face": [
        {"gate", "checks", "program", "active", "opaque"},
        {"chains"},
        {"autograd", "fused", "packing"},
        {"fused_grad"},
        {"bound"},
        {"library"},
        {"traced"},
        {"op", "conv"},
        {"layer"},
        {"integrations"},
        {"launch"},
        {"cli"},
    ],
    "parallel": [
        {"fragments", "affine", "comm", "foreign", "once"},
        {"plan"},
        {"halo", "exchange", "plan_check"},
        {"context"},
    ],
    "kernels": [
        {"arch", "settings", "chunks", "cache", "cubin"},
        {"spec", "emitted", "toolchain"},
        {"tuning", "blocks", "workers", "builders"},
        {"portable", "sm90", "sm100"},
        {"build"},
        {"stages"},
        {"host", "reference"},
        {"backend"},
    ],
}
TRACED = {"build", "blocks", "portable", "sm90", "sm100"}
COMPILERS = {"tilelang", "tvm", "tvm_ffi"}
# Peers of the benchmark, which times them as they are.
TIMED = {"fla": "flashqla_cp.cli.bench_contenders"}
FRAMEWORKS = {"transformers": "transformers", "deepspeed": "deepspeed", "megatron": "megatron", "fla": "fla"}
COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced all_to_all all_to_all_single "
    "barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend monitored_barrier recv "
    "reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list send P2POp"
).split()


def place(module: str) -> tuple[str, str]:
    """Return (pillar, room) of a product module: room is the first folder or file inside the pillar."""
    parts = module.split(".")[1:] or ["__init__"]
    if parts[0] in ("kernels", "parallel", "testing"):
        return parts[0], parts[1] if len(parts) > 1 else ""
    return "face", parts[0]


def floor(pillar: str, room: str) -> int | None:
    return next((number for number, rooms in enumerate(FLOORS[pillar]) if room in rooms), None)


def product_import_fault(module: str, target: str) -> str | None:
    """Return why `module` may not import `target`, both product modules, or None if it may."""
    (pillar, room), (target_pillar, target_room) = place(module), place(target)
    if room == "__init__" or target_room == "__version__":
        return None
    if pillar != target_pillar:
        is_user = room in ("cli", "launch")
        if pillar != "face" or (target_pillar == "testing" and not is_user):
            return f"{pillar} may not import {target_pillar}"
        return None
    if pillar == "testing" or room == target_room:
        return None
    mine, other = floor(pillar, room), floor(pillar, target_room)
    if mine is None or (other is None and target_room[:1].islower()):
        return f"{room if mine is None else target_room} has no floor in tests/structure/test_imports.py"
    if other is not None and other >= mine:
        return f"{pillar}.{room} may not import {pillar}.{target_room}: imports go down"
    if room == "reference" and target_room != "chunks":
        return "the reference may import chunks only"
    return None


def foreign_import_fault(module: str, target: str, in_function: bool) -> str | None:
    """Return why `module` may not import `target`, a module of another distribution, or None if it may."""
    pillar, room = place(module)
    library = target.split(".")[0]
    if library in ("kernels", "parallel", "launch"):
        return f"import flashqla_cp.{library}"
    if library in COMPILERS and not (pillar == "kernels" and room in TRACED):
        return f"{library} belongs in kernels/{{{','.join(sorted(TRACED))}}}"
    if library in FRAMEWORKS:
        home = f"flashqla_cp.integrations.{FRAMEWORKS[library]}"
        # A program that trains with a framework shows its users the framework's own calls.
        is_example = module.startswith("flashqla_cp.launch.train_")
        if module not in (home, TIMED.get(library)) and not is_example and not module.startswith(f"{home}."):
            return f"{library} belongs in {home}"
        if not in_function:
            return f"{library} is optional, so it is imported inside functions"
    return None


def collective_faults(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, name) of every collective of torch.distributed that is called or imported."""
    aliases = {"torch.distributed"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name for a in node.names if f"{node.module}.{a.name}" == "torch.distributed"}
            if (node.module or "").startswith("torch.distributed"):
                found += [(node.lineno, alias.name) for alias in node.names if alias.name in COLLECTIVES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and ast.unparse(node.value) in aliases:
            found.append((node.lineno, node.attr))
    return found


def faults(module: str, text: str) -> list[str]:
    """Return one line for each import or collective in `text` that the rules forbid in `module`."""
    tree = ast.parse(text)
    found = []
    for line, target, in_function in imported_modules(tree):
        if target.split(".")[0] == "flashqla_cp":
            why = product_import_fault(module, target)
        else:
            why = foreign_import_fault(module, target, in_function)
        if why:
            found.append(f"{module}:{line}: {why} (imports {target})")
    pillar, room = place(module)
    # A training program reduces its own gradients and losses; everything else goes through the one logged module.
    if (pillar, room) != ("parallel", "comm") and room != "launch":
        found += [f"{module}:{line}: {name} belongs in parallel/comm.py" for line, name in collective_faults(tree)]
    return found


@pytest.mark.parametrize("module", product_files())
def test_imports_go_down(module):
    found = faults(module, product_files()[module].read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("flashqla_cp.kernels.chunks", "from flashqla_cp.parallel.plan import ShardPlan"),
        ("flashqla_cp.kernels.reference.chunked", "from flashqla_cp.checks import check_inputs"),
        ("flashqla_cp.kernels.reference.chunked", "import flashqla_cp.kernels.backend"),
        ("flashqla_cp.kernels.sm90.forward", "from flashqla_cp.kernels.sm100 import forward"),
        ("flashqla_cp.kernels.host.forward", "import tilelang"),
        ("flashqla_cp.parallel.plan", "from flashqla_cp.kernels.chunks import Chunks"),
        ("flashqla_cp.parallel.fragments", "from flashqla_cp.parallel.plan import ShardPlan"),
        ("flashqla_cp.parallel.halo", "def f():\n    import torch.distributed as dist\n    dist.all_reduce(0)"),
        ("flashqla_cp.parallel.halo", "from torch.distributed import all_gather"),
        ("flashqla_cp.testing.oracle", "from flashqla_cp.op import chunk_gated_delta_rule"),
        ("flashqla_cp.op", "from flashqla_cp.layer import GatedDeltaNet"),
        ("flashqla_cp.op", "from flashqla_cp.testing.oracle import gated_delta_rule_oracle"),
        ("flashqla_cp.layer", "from flashqla_cp.cli import verify"),
        ("flashqla_cp.layer", "import kernels.chunks"),
        ("flashqla_cp.layer", "def f():\n    import fla"),
        ("flashqla_cp.integrations.fla", "import fla"),
        ("flashqla_cp.launch.train_deepspeed", "import deepspeed"),
        ("flashqla_cp.launch.train", "def f():\n    import deepspeed"),
        ("flashqla_cp.cli.bench_contenders", "import fla"),
        ("flashqla_cp.cli.bench_contenders", "def f():\n    import megatron"),
        ("flashqla_cp.unheard_of", "import flashqla_cp.op"),
    ],
)
def test_each_rule_refuses(module, text):
    assert len(faults(module, text)) == 1
