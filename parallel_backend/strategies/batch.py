"""CFG and data parallelism: the branches are split over ``cfg``, the samples over ``data``.

One group of ranks computes each row (one branch of one sample) completely. Exact.
"""

from collections.abc import Mapping

from torch import Tensor

from ..distributed.collectives import all_gather, concat
from ..distributed.mesh import RankMesh
from ..errors import InvalidRequest
from ..interfaces.geometry import common_tokens
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout


class BatchSplit:
    """Splits branches and samples over groups of ranks.

    The batch need not be divisible by the number of groups: of 3 samples, 2 groups compute 2 and 1. With more groups
    than samples, some are idle.
    """

    axes = ("data", "cfg")

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Each group on the cfg axis needs at least one branch.

        Raises:
            InvalidRequest: there are more groups than branches.
        """
        branches = len(workload.branches)
        if layout.cfg > branches == 1:
            raise InvalidRequest(
                f"layout cfg={layout.cfg} needs guidance other than 1.0: without guidance there is only one branch, "
                "and nothing for the other groups to compute"
            )
        if layout.cfg > branches:
            raise InvalidRequest(f"layout cfg={layout.cfg}: there are {branches} branches, so cfg is at most that")

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count the predictions of this rank's rows and tokens.

        In a step loop they go to every other group on the cfg axis. In a single call they go to rank 0, from the first
        of the ranks that hold the same predictions.
        """
        place = layout.coordinates(rank)
        if place["pipe"] != layout.pipe - 1:  # only the last stage predicts
            return 0
        copies = layout.cfg - 1 if workload.guided else int(rank > 0 and place["tensor"] == 0)
        shared_tokens = common_tokens([extent for _, extent in workload.branches]) if workload.guided else None
        values = 0
        for samples, extent in workload.local_branches(layout, place):
            local_tokens = workload.predicted_by_rank(layout, extent)[place["sequence"]]
            values += samples * (local_tokens if shared_tokens is None else sum(shared_tokens)) * extent.values
        return copies * values * workload.itemsize

    @staticmethod
    def branches(mesh: RankMesh, branches: int, place: Mapping[str, int]) -> range:
        """Return the branches that the group at ``place`` computes."""
        part = mesh.split.branches(branches).slice(place["cfg"])
        return range(part.start, part.stop)

    @staticmethod
    def samples(mesh: RankMesh, samples: int, place: Mapping[str, int]) -> slice:
        """Return the samples that the group at ``place`` computes."""
        return mesh.split.samples(samples).slice(place["data"])

    @staticmethod
    def all_branches(local: Tensor, mesh: RankMesh, branches: int) -> Tensor:
        """Gather the predictions of all branches over the cfg axis.

        Args:
            local: predictions ``[local branches, ...]`` of this group.

        Returns:
            The predictions ``[branches, ...]``, on every rank.
        """
        shapes = [(size, *local.shape[1:]) for size in mesh.split.branches(branches).sizes]
        return concat(all_gather(local, shapes, mesh.axes["cfg"]))
