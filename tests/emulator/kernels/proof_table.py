"""The proof kernels: their specs, inputs, expected results and what their machine code must hold.

Registered in the same table as the product's kernels. ROWS of run-time rows are chosen so that tails occur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flashqla_cp.kernels.builders import register_builder, registered
from flashqla_cp.kernels.spec import KernelSpec, make_spec

HERE = Path(__file__).parent
PRODUCTS = 6  # about one chunk of a forward pass
BOTH = ("sm90", "sm100")
ARCH_OF = {"sm90": "sm_90a", "sm100": "sm_100a"}
NO_TMA = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One proof kernel on one architecture.

    make: seeded inputs, then outputs filled with NaN. expect: outputs from inputs, in float64 where it sums.
    tolerance: against `expect`, 0 for bitwise equality, else relative L2. bitwise: hardware and emulator must agree
    bit for bit (no tensor-core sums, no approximate functions). opcodes: that the machine code must hold.
    """

    spec: KernelSpec
    make: Callable[[torch.Generator], tuple[list[torch.Tensor], list[torch.Tensor]]]
    expect: Callable[..., list[torch.Tensor]]
    tolerance: float
    opcodes: tuple[str, ...] = ()
    bitwise: bool = False
    tag: str = field(default="")

    @property
    def name(self) -> str:
        """Readable id: stage, tag, architecture."""
        return "-".join(part for part in (self.spec.stage, self.tag, self.spec.arch) if part)


def _nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _register() -> None:
    table = [
        ("proof_product_ss", "proof_products:build_product_ss", BOTH, None),
        ("proof_product_registers", "proof_products:build_product_registers", ("sm90",), None),
        ("proof_product_tmem", "proof_products:build_product_tmem", ("sm100",), None),
        ("proof_warp_product", "proof_products:build_warp_product", BOTH, NO_TMA),
        ("proof_tma_tail", "proof_copies:build_tma_tail", BOTH, None),
        ("proof_cp_async", "proof_copies:build_cp_async", BOTH, NO_TMA),
        ("proof_transpose", "proof_copies:build_transpose", ("sm90",), None),
        ("proof_exchange", "proof_barriers:build_exchange", BOTH, None),
        ("proof_row_reduce", "proof_barriers:build_row_reduce", BOTH, None),
        ("proof_chunk_work", "proof_work:build_chunk_work", ("sm90",), None),
    ]
    for stage, function, families, pass_configs in table:
        for family in families:
            if (stage, family) not in registered():
                register_builder(stage, family, function, pass_configs=pass_configs)


def _product_inputs(m: int, n: int, k: int, transposed_a: bool = False):
    def make(generator: torch.Generator):
        a = _normal(generator, *((k, m) if transposed_a else (m, k)))
        return [a, _normal(generator, n, k)], [_nan(m, n)]

    return make


def _tail_inputs(rows: int, columns: int):
    return lambda g: ([_normal(g, rows, columns)], [_nan(rows, columns, dtype=torch.bfloat16)])


def _rows_inputs(rows: int, columns: int, out_rows: int | None):
    return lambda g: (
        [_normal(g, rows, columns, dtype=torch.float32)],
        [_nan(out_rows, columns) if out_rows else _nan(columns)],
    )


def _tmem_inputs(m: int, n: int, k: int):
    def make(generator: torch.Generator):
        return [_normal(generator, m, k), _normal(generator, n, k), _normal(generator, n, n)], [_nan(m, n)]

    return make


def _expect_tmem(a, b, d):
    return [(a.double() @ b.double().T).bfloat16().double() @ d.double()]


def _work_inputs(rows: int, columns: int):
    def make(generator: torch.Generator):
        turn = torch.linalg.qr(
            torch.randn(columns, columns, generator=generator)
        ).Q  # keeps the size of what it acts on
        return [_normal(generator, rows, columns), turn.bfloat16().contiguous()], [
            _nan(rows, columns, dtype=torch.bfloat16)
        ]

    return make


def _expect_work(x, w):
    for _ in range(PRODUCTS):
        x = (x.double() @ w.double()).bfloat16()
    return [x]


def _expect_exchange(x):
    return [x + torch.cat([torch.zeros_like(x[:1]), x[:-1]])]


def _expect_softmax(x):
    power = torch.exp2(x.double() - x.double().max(1, keepdim=True).values)
    return [power / power.sum(1, keepdim=True)]


def proofs() -> list[Proof]:
    """Every proof kernel, for both architectures where it exists for both."""
    _register()
    result = []
    for family in BOTH:
        arch, tensor_core = ARCH_OF[family], {"sm90": "HGMMA", "sm100": "UTCHMMA"}[family]
        result += _products(family, arch, tensor_core) + _copies(family, arch) + _barriers(arch)
    return result


def _products(family: str, arch: str, tensor_core: str) -> list[Proof]:
    product = {"M": 128, "N": 64, "K": 320}
    small = {"M": 32, "N": 32, "K": 64}
    opcodes = (tensor_core, "UTMALDG") + (("LDTM",) if family == "sm100" else ())
    result = [
        Proof(
            spec=make_spec("proof_product_ss", arch, dims=product),
            make=_product_inputs(128, 64, 320),
            expect=lambda a, b: [a.double() @ b.double().T],
            tolerance=1e-5,
            opcodes=opcodes,
        ),
        Proof(
            spec=make_spec("proof_warp_product", arch, dims=small),
            make=_product_inputs(32, 32, 64, transposed_a=True),
            expect=lambda a, b: [a.double().T @ b.double().T],
            tolerance=1e-5,
            opcodes=("HMMA", "LDSM"),
        ),
    ]
    if family == "sm90":
        result.append(
            Proof(
                spec=make_spec("proof_chunk_work", arch, dims={"D": 128, "products": PRODUCTS}),
                make=_work_inputs(128, 128),
                expect=_expect_work,
                tolerance=1e-3,
                opcodes=("HGMMA",),
            )
        )
        result.append(
            Proof(
                spec=make_spec("proof_product_registers", arch, dims={"M": 64, "N": 64, "K": 64}),
                make=_product_inputs(64, 64, 64),
                expect=lambda a, b: [2 * a.double() @ b.double().T],
                tolerance=1e-5,
                opcodes=("HGMMA",),
            )
        )
    else:
        result += [
            Proof(
                spec=make_spec("proof_product_tmem", arch, dims={"M": 128, "N": 64, "K": 64}),
                make=_tmem_inputs(128, 64, 64),
                expect=_expect_tmem,
                tolerance=1e-5,
                opcodes=("UTCHMMA", "LDTM", "STTM"),
            ),
            Proof(
                spec=make_spec("proof_product_ss", arch, dims={"M": 64, "N": 64, "K": 128}),
                make=_product_inputs(64, 64, 128),
                expect=lambda a, b: [a.double() @ b.double().T],
                tolerance=1e-5,
                opcodes=opcodes,
                tag="half-lanes",
            ),
        ]
    return result


def _copies(family: str, arch: str) -> list[Proof]:
    result = [
        Proof(
            spec=make_spec("proof_tma_tail", arch, dims={"D": columns, "swizzle": swizzle}),
            make=_tail_inputs(150, columns),
            expect=lambda x: [-x],
            tolerance=0,
            bitwise=True,
            opcodes=("UTMALDG", "UTMASTG"),
            tag=f"swizzle{swizzle}",
        )
        for swizzle, columns in ((1, 64), (32, 16), (64, 32), (128, 64))
    ]
    result.append(
        Proof(
            spec=make_spec("proof_cp_async", arch, dims={"D": 128, "steps": 4}),
            make=_rows_inputs(200, 128, None),
            expect=lambda x: [x.double().sum(0)],
            tolerance=1e-5,
            bitwise=True,
            opcodes=("LDGSTS",),
        )
    )
    if family == "sm90":
        result.append(
            Proof(
                spec=make_spec("proof_transpose", arch, dims={"D": 64}),
                make=_tail_inputs(64, 64),
                expect=lambda x: [x.T.contiguous()],
                tolerance=0,
                bitwise=True,
                opcodes=("STSM",),
            )
        )
    return result


def _barriers(arch: str) -> list[Proof]:
    return [
        Proof(
            spec=make_spec("proof_exchange", arch, dims={"D": 128}),
            make=_rows_inputs(9, 128, 9),
            expect=_expect_exchange,
            tolerance=0,
            bitwise=True,
            opcodes=("BAR.ARV", "BAR.SYNC"),
        ),
        Proof(
            spec=make_spec("proof_row_reduce", arch, dims={"D": 256}),
            make=_rows_inputs(5, 256, 5),
            expect=_expect_softmax,
            tolerance=1e-5,
            opcodes=("SHFL",),
        ),
    ]
