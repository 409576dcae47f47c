"""Estimates on one rank the traffic between hosts of all ranks like it."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from ...distributed.sent_bytes import BYTES_SENT

_GROUP_ARGUMENT = {"alltoall_base_": 2, "allreduce_": 1, "_allgather_base_": 2, "send": 1, "broadcast_": 1}
"""Which argument of an operator is the group; the others end with the group's name."""


class CrossingBytes(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        hosts: the host of each rank.
        ranks: number of ranks that do the same work, in this rank's groups or in others.

    Attributes:
        total: bytes between hosts from all of these ranks. It assumes that each sends as much as this one, to the rank
            at the same distance in its group. A collective sends around its group in the order of ranks.
    """

    def __init__(self, hosts: Sequence[str], ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hosts, self._ranks = hosts, ranks
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name in BYTES_SENT:
            sent = float(BYTES_SENT[name](*args))
            if sent:
                self.total += sent * self._share(name, args) * self._ranks
        return func(*args, **(kwargs or {}))

    def _share(self, name: str, args: Any) -> float:
        """Return the fraction of all ranks' traffic that crosses hosts, if each sends as this one does."""
        argument = _GROUP_ARGUMENT.get(name)
        group = _resolve_process_group(args[-1]) if argument is None else dist.ProcessGroup.unbox(args[argument])
        ranks = dist.get_process_group_ranks(group)
        if name in ("alltoall_base_", "all_to_all_single"):
            places = range(1, len(ranks))
        else:
            place = args[2] - group.rank() if name == "send" else 1
            places = range(place, place + 1)
        pairs = [
            (hosts[i], hosts[(i + place) % len(hosts)])
            for hosts in self._groups_like(ranks) for place in places for i in range(len(hosts))
        ]  # fmt: skip
        return sum(one != other for one, other in pairs) / len(pairs)

    def _groups_like(self, ranks: Sequence[int]) -> list[list[str]]:
        """Return the hosts of this group and of its parallel groups in the grid of ranks."""
        groups, left = [], set(range(self._ranks))
        for base in range(self._ranks):
            group = [base + rank - ranks[0] for rank in ranks]
            if left.issuperset(group):
                left.difference_update(group)
                groups.append([self._hosts[rank] for rank in group])
        return groups
