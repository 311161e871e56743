"""Time of one chunk's work on 512 threads, as CPU time so that a busy machine does not count."""

import time

import pytest
import torch
from proof_table import proofs

PROOF = next(proof for proof in proofs() if proof.name == "proof_chunk_work-sm_90a")
MILLISECONDS = {False: 60, True: 250}  # per chunk of 64 rows and head of 128, without and with race detection
SHORT, LONG = 2, 6


@pytest.mark.parametrize("races", [False, True], ids=["races-off", "races-on"])
def test_time_of_a_chunk(races, emulated, record_property, capsys):
    kernel = emulated(PROOF.name)

    def cpu_seconds(chunks):
        x, w = PROOF.make(torch.Generator().manual_seed(0))[0]
        x = x[:64].repeat(chunks, 1)
        y = torch.empty_like(x)
        started = time.process_time()
        kernel(x, w, y, races=races).assert_clean()
        return time.process_time() - started

    cpu_seconds(1)
    per_chunk = min(cpu_seconds(LONG) - cpu_seconds(SHORT) for _ in range(3)) / (LONG - SHORT) * 1000
    with capsys.disabled():
        print(f" {per_chunk:.1f} ms a chunk")
    assert 0 < per_chunk <= MILLISECONDS[races]
