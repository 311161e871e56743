"""What plugins refuse, and how they do so on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from flashqla_cp.parallel.comm import Comm
from flashqla_cp.parallel.plan_check import check_plans

Found = TypeVar("Found")


def agree(comm: Comm, source: str, check: Callable[[], Found]) -> Found:
    """Call check() on every rank of a group and return what it returns here; one small collective.

    Where it raises on a rank, that error is raised there, and a RuntimeError that quotes it on the others, which would
    else wait for that rank until it exits. source: what the check is about, the same on every rank.
    """
    found, error = None, None
    try:
        found = check()
    except Exception as caught:  # whatever it is: the other ranks are waiting to be told
        error = caught
    check_plans(comm, source.encode(), error)
    return found  # type: ignore[return-value]


def is_padded(mask: Any) -> bool:
    """Whether a 2-D attention mask has anything but ones."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool((mask == 1).all())


def refuse_padding(mask: torch.Tensor | None) -> None:
    """Raise ValueError for a mask with anything but ones."""
    if mask is None:
        return
    if mask.ndim != 2:
        raise ValueError(f"attention_mask: got shape {list(mask.shape)}, expected None or ones of shape [B, T]")
    if is_padded(mask):
        what = "zeros (padding)" if bool((mask == 0).any()) else "values other than 1"
        raise ValueError(
            f"attention_mask: got {what}, expected ones; pack the documents into one row without padding and tell "
            "their boundaries"
        )


def refuse_labels(told: dict[str, Any], world_size: int) -> None:
    """Raise ValueError for labels of one rank's rows from which a model of transformers would make a loss of its own.

    It would shift them inside these rows, which loses a target at every cut, and divide by this rank's targets.
    """
    if told.get("labels") is None:
        return
    missing = [name for name in ("shift_labels", "num_items_in_batch") if told.get(name) is None]
    if missing:
        raise ValueError(
            f"labels: got them without {' and '.join(missing)}, with the sequence sharded over {world_size} ranks; "
            "transformers would shift them inside this rank's rows and average over these alone; compute the loss from "
            "the logits, or pass shift_labels (shifted before sharding) and num_items_in_batch (targets of all ranks)"
        )


def check_key_offsets(queries: torch.Tensor | None, keys: torch.Tensor | None) -> None:
    """Raise ValueError for cu_seq_lens_k that differ from cu_seq_lens_q: keys and queries are the same tokens here."""
    if keys is not None and (queries is None or (keys is not queries and keys.tolist() != queries.tolist())):
        given = None if queries is None else queries.tolist()[:8]
        raise ValueError(
            f"cu_seq_lens_k: got {keys.tolist()[:8]} with cu_seq_lens_q {given}, expected the same offsets for both"
        )


def need(framework: str, extra: str) -> None:
    """Raise ModuleNotFoundError, with what to install, unless the framework can be found."""
    try:
        there = find_spec(framework) is not None
    except ModuleNotFoundError:  # the package that it is part of
        there = False
    if not there:
        raise ModuleNotFoundError(
            f"{framework} is not installed, which this plugin needs: pip install 'flashqla-cp[{extra}]'", name=framework
        )
