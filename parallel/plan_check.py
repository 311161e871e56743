"""Compare plans across ranks once, when a context is made, so that ranks that disagree raise instead of hanging."""

from __future__ import annotations

import hashlib

from flashqla_cp.parallel.comm import Comm

_DIGEST = 32
_TEXT = 400


def check_plans(comm: Comm, fingerprint: bytes, error: Exception | None) -> None:
    """Raise on every rank when a rank failed to plan or fingerprints differ. One collective of 433 bytes a rank.

    A rank that failed passes its error and gets it raised; the others get a RuntimeError that quotes it, unless they
    failed themselves, which is how all ranks raise the same text for an argument that is wrong everywhere.
    """
    text = "" if error is None else f"{type(error).__name__}: {error}"
    message = hashlib.sha256(fingerprint).digest() + bytes([error is not None]) + text.encode(errors="replace")
    gathered = comm.all_gather_bytes(message, _DIGEST + 1 + _TEXT)
    if error is not None:
        raise error
    for rank, other in enumerate(gathered):
        if other[_DIGEST]:
            told = other[_DIGEST + 1 :].rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"rank {rank} of the context-parallel group could not make its context: {told}")
    first = [other[:_DIGEST] for other in gathered]
    differing = [rank for rank, digest in enumerate(first) if digest != first[0]]
    if differing:
        raise RuntimeError(
            f"cp_context: ranks {differing} planned something else than rank 0; every rank of the group must pass the "
            "same global cu_seqlens, layout, token_ranges, num_tokens, conv1d_kernel_size and exchange"
        )
