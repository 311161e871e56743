"""Exchange by name; "auto" chooses by group size and topology, alike on every rank."""

from __future__ import annotations

from flashqla_cp.parallel.comm import Comm, Peers
from flashqla_cp.parallel.exchange.all_gather import AllGather
from flashqla_cp.parallel.exchange.base import Exchange, Links
from flashqla_cp.parallel.exchange.hierarchical import GATHER_UP_TO_NODES, Hierarchical
from flashqla_cp.parallel.exchange.sharded import Sharded
from flashqla_cp.parallel.plan import ShardPlan

EXCHANGES = ("auto", "allgather", "sharded", "hierarchical", "headwise")
GATHER_UP_TO_RANKS = 4


def check_exchange_name(name: str) -> None:
    """Raise ValueError for a name that no strategy has."""
    if name not in EXCHANGES:
        raise ValueError(f"exchange: got {name!r}, expected one of {EXCHANGES}")


def resolve_exchange(name: str, comm: Comm) -> str:
    """The strategy that a name stands for on this group. Collective once per group for "auto" on many ranks.

    Up to 4 ranks gather everything in one collective. More ranks of one node shard the fold by head; several nodes
    use the hierarchy, except that a few single-rank nodes gather.
    """
    check_exchange_name(name)
    if name != "auto":
        return name
    if comm.world_size <= GATHER_UP_TO_RANKS:
        return "allgather"
    per_node = comm.ranks_per_node()
    if per_node == comm.world_size:
        return "sharded"
    return "allgather" if per_node == 1 and comm.world_size <= GATHER_UP_TO_NODES else "hierarchical"


def map_exchange(name: str, plan: ShardPlan, comm: Comm) -> Exchange | None:
    """The exchange of boundary maps for a plan, or None when no document was cut.

    Where documents were cut but none crosses ranks, every rank folds its own maps and nothing is sent.
    """
    links = Links.of_plan(plan)
    if not links.chains:
        return None
    if not plan.fragments.crosses_ranks:
        own = [[0] * len(chain) for chain in links.chains if chain[0].owner == comm.rank]
        return AllGather(Links.of_owners(own, 1), Peers(comm, [comm.rank]))
    if name == "allgather":
        return AllGather(links, comm)
    if name == "sharded":
        return Sharded(links, comm)
    return Hierarchical(links, comm, comm.ranks_per_node())
