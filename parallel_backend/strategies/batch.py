"""CFG and data parallelism, which are one splitter: branches over ``cfg``, samples over ``data``.

Exact: every row (a branch of a sample) is computed whole by one group of ranks.
"""

from collections.abc import Mapping

from torch import Tensor

from ..distributed.collectives import all_gather, join
from ..distributed.mesh import DeviceMesh
from ..errors import InvalidRequest
from ..interfaces.geometry import IMAGE, common
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition


class BatchSplit:
    """Nothing needs to divide: 3 samples on 2 groups are 2 and 1, and groups beyond the samples stay idle."""

    axes = ("data", "cfg")

    def check(self, layout: ParallelLayout, job: Workload) -> None:
        """See ``Strategy.check``: each group on the cfg axis needs a branch of its own.

        Raises:
            InvalidRequest: there are more groups than that.
        """
        branches = len(job.branches)
        if layout.cfg > branches == 1:
            raise InvalidRequest(
                f"layout cfg={layout.cfg} needs guidance other than 1.0: without it there is one branch, and nothing "
                "for other groups to compute"
            )
        if layout.cfg > branches:
            raise InvalidRequest(f"layout cfg={layout.cfg}: there are {branches} branches, so cfg is at most that")

    def bytes_sent(self, layout: ParallelLayout, job: Workload, rank: int) -> int:
        """The predictions of the own rows and tokens: with guidance once to every other group on the cfg axis, else
        once to rank 0, by the first of the ranks that have them."""
        place = layout.coordinates(rank)
        if place["pipe"] != layout.pipe - 1:  # which predicts nothing
            return 0
        first = place["tensor"] == 0
        copies = layout.cfg - 1 if job.guided else int(rank > 0 and first)
        shared = common([extent for _, extent in job.branches]) if job.guided else None
        values = 0
        for samples, extent in job.own(layout, place):
            own = job.sizes(layout, extent, IMAGE)[place["sequence"]]
            values += samples * (own if shared is None else shared) * extent.values
        return copies * values * job.itemsize

    @staticmethod
    def branches(mesh: DeviceMesh, branches: int, place: Mapping[str, int]) -> range:
        """The branches of the group at ``place``."""
        part = Partition.even(branches, mesh.layout.cfg).slice(place["cfg"])
        return range(part.start, part.stop)

    @staticmethod
    def samples(mesh: DeviceMesh, samples: int, place: Mapping[str, int]) -> slice:
        """The samples of the group at ``place``."""
        return Partition.even(samples, mesh.layout.data).slice(place["data"])

    @staticmethod
    def all_branches(own: Tensor, mesh: DeviceMesh, branches: int) -> Tensor:
        """The predictions ``[branches, ...]`` of all branches, from every group's ``[own branches, ...]``."""
        shapes = [(size, *own.shape[1:]) for size in Partition.even(branches, mesh.layout.cfg).sizes]
        gathered = all_gather(own, shapes, mesh.axes["cfg"])
        return join(gathered)
