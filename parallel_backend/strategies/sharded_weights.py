"""Sharded weights: FSDP2 (https://arxiv.org/abs/2304.11277) over the ranks of ``ring`` and ``ulysses``.

Each rank keeps a shard of every block's weights; a block's weights are gathered while the block before it computes,
and freed after use. Only ranks that run the same blocks in step can share weights so, which those are. Exact.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from .. import processes
from ..distributed.mesh import Axis
from ..interfaces.state import State
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout

Run = Callable[[State], State]


class ShardedWeights:
    """Weights of a block are on one rank each, and everywhere only while it computes."""

    axes = ("ring", "ulysses")

    def check(self, layout: ParallelLayout, job: Workload) -> None:
        """See ``Strategy.check``: the layout itself refuses what has nobody to share with."""

    def bytes_sent(self, layout: ParallelLayout, job: Workload, rank: int) -> int:
        """The own shard of every block, to each other rank, in every forward; shards are padded to equal rows."""
        if not layout.shard_weights:
            return 0
        ranks = layout.sequence
        shard = sum(-(-rows // ranks) * math.prod(rest) * itemsize for (rows, *rest), itemsize in job.parameters)
        return (ranks - 1) * job.forwards(layout, layout.coordinates(rank)) * shard


def shard(blocks: Sequence[nn.Module], run: Run, axis: Axis, device_type: str) -> Run:
    """Shard the weights of modules that ``run`` runs in this order, each gathered while the one before it computes.

    Returns:
        What to run instead of ``run``.
    """
    assert axis.group is not None
    mesh = TorchMesh.from_group(axis.group, device_type)
    sharded: list[FSDPModule] = [fully_shard(block, mesh=mesh, reshard_after_forward=True) for block in blocks]
    for this, following in itertools.pairwise(sharded):
        this.set_modules_to_forward_prefetch([following])
    root = _Root(blocks, run, trims=device_type == "cpu")
    fully_shard(root, mesh=mesh)
    return root


class _Root(nn.Module):
    """What FSDP wants above the blocks: one module whose forward runs them."""

    def __init__(self, blocks: Sequence[nn.Module], run: Run, *, trims: bool) -> None:
        super().__init__()
        self.blocks, self.run, self.trims = nn.ModuleList(blocks), run, trims

    def forward(self, state: State) -> State:
        done = self.run(state)
        if self.trims:  # what was read and gathered is freed, and would stay with the process
            processes.trim()
        return done
