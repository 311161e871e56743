"""How many faults the emulator catches, counted: at least nine in ten of those that change what a kernel does."""

import mutation
import pytest
from proof_table import proofs

FLOOR = 0.9
PROOFS = {proof.name: proof for proof in proofs()}


@pytest.mark.slow
def test_mutation_score(compiled, capsys):
    totals, complaints = [0, 0], []
    for name in mutation.DEFAULT_KERNELS:
        caught, changing, wrong = mutation.score(PROOFS[name], compiled[name], show=lambda text: None)
        with capsys.disabled():
            print(f"\n{name}: {caught} of {changing} mutants caught", end="")
        totals = [totals[0] + caught, totals[1] + changing]
        complaints += wrong
    with capsys.disabled():
        print(f"\nin all: {totals[0]} of {totals[1]} ({100 * totals[0] / totals[1]:.1f} %)")
    assert not complaints, "\n".join(complaints)
    assert totals[0] >= FLOOR * totals[1]


def test_the_unchanged_source_survives(compiled):
    name = mutation.DEFAULT_KERNELS[0]
    kernel = compiled[name]
    assert mutation.fate(PROOFS[name], kernel.device_source(), kernel.host_source()) == "survived"


def test_mutants_change_one_line_each(compiled):
    source = compiled[mutation.DEFAULT_KERNELS[0]].device_source()
    table = mutation.mutants(source)
    assert len(table) >= 20 and len({(m.line, m.what) for m in table}) == len(table)
    for mutant in table:
        pairs = zip(source.splitlines(), mutation.apply(mutant, source).splitlines(), strict=True)
        assert [i for i, (a, b) in enumerate(pairs, 1) if a.strip() != b.strip()] == [mutant.line]
