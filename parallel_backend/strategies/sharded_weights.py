"""Sharded weights: FSDP2 (https://arxiv.org/abs/2304.11277) over the ranks of ``ring`` and ``ulysses``.

Each rank stores a shard of every block's weights. A block's weights are gathered while the previous block computes and
freed after use. This requires ranks that run the same blocks in lockstep, as those of ``ring`` and ``ulysses`` do.
Exact.
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
    """Stores each block's weights once across the ranks; they are whole on every rank only while it computes."""

    axes = ("ring", "ulysses")

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """See ``Strategy.check``: ``ParallelLayout`` itself refuses ``shard_weights`` without ranks to share with."""

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count this rank's shard of every block, sent to each other rank in every forward.

        Shards are padded to the same number of rows.
        """
        if not layout.shard_weights:
            return 0
        ranks = layout.sequence
        shard = sum(-(-rows // ranks) * math.prod(rest) * itemsize for (rows, *rest), itemsize in workload.parameters)
        return (ranks - 1) * workload.forwards(layout, layout.coordinates(rank)) * shard


def shard(blocks: Sequence[nn.Module], run: Run, axis: Axis, device_type: str) -> Run:
    """Shard the weights of blocks over an axis, each gathered while the block before it computes.

    Args:
        blocks: the modules, in the order in which ``run`` runs them.
        run: runs all blocks.
        axis: the ranks that share the weights.
        device_type: ``"cuda"`` or ``"cpu"``.

    Returns:
        The function to call instead of ``run``.
    """
    assert axis.group is not None
    mesh = TorchMesh.from_group(axis.group, device_type)
    sharded: list[FSDPModule] = [fully_shard(block, mesh=mesh, reshard_after_forward=True) for block in blocks]
    for block, following in itertools.pairwise(sharded):
        block.set_modules_to_forward_prefetch([following])
    root = _Root(blocks, run, trim=device_type == "cpu")
    fully_shard(root, mesh=mesh)
    return root


class _Root(nn.Module):
    """The root module that FSDP requires: its forward runs all blocks."""

    def __init__(self, blocks: Sequence[nn.Module], run: Run, *, trim: bool) -> None:
        super().__init__()
        self.blocks, self.run, self.trim = nn.ModuleList(blocks), run, trim

    def forward(self, state: State) -> State:
        result = self.run(state)
        if self.trim:  # return freed memory of gathered weights to the system; the process would keep it
            processes.trim_heap()
        return result
