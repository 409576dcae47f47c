"""Sharded weights: FSDP2 (https://arxiv.org/abs/2304.11277) over the ranks that split tokens.

Each rank stores a shard of every block's weights. They are gathered for use and freed afterwards, on GPUs while the
previous block computes. The ranks have to run the same blocks in lockstep, as they do where they split tokens. Exact.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from .. import processes
from ..distributed.collectives import wait_all
from ..distributed.mesh import Axis
from ..interfaces.state import State
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout

Run = Callable[[State], State]
Used = Callable[[State], Sequence[nn.Module]]


class ShardedWeights:
    """Stores each block's weights once across the ranks; they are whole on every rank only while it computes."""

    axes = ("ring", "ulysses", "dsp")

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Refuse nothing: ``ParallelLayout`` itself refuses ``shard_weights`` without ranks to share with."""

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count this rank's shard of every block, sent to each other rank in every forward.

        Shards are padded to the same number of rows.
        """
        if not layout.shard_weights:
            return 0
        ranks = layout.sequence
        shard = sum(-(-rows // ranks) * math.prod(rest) * itemsize for (rows, *rest), itemsize in workload.parameters)
        return (ranks - 1) * workload.forwards(layout, layout.coordinates(rank)) * shard


def shard(blocks: Sequence[nn.Module], run: Run, axis: Axis, device_type: str, used: Used) -> Run:
    """Shard the weights of blocks over an axis. On GPUs, each is gathered while the block before it computes.

    Args:
        blocks: the modules, in the order in which ``run`` runs them.
        device_type: ``"cuda"`` or ``"cpu"``.
        used: returns the modules of the blocks that ``run`` runs for a state, in order.

    Returns:
        The function to call instead of ``run``.
    """
    assert axis.group is not None
    mesh = DeviceMesh.from_group(axis.group, device_type)
    sharded: list[FSDPModule] = [fully_shard(block, mesh=mesh, reshard_after_forward=True) for block in blocks]
    # A CPU rank's cores are busy with one block, so gathering the next one early would only take memory.
    # torch before 2.9 cannot replace FSDP's own all-gather, which is exact, too, and takes more time and memory.
    replaceable = hasattr(FSDPModule, "set_custom_all_gather")
    gather = _OneBuffer() if device_type == "cpu" and replaceable else None
    if gather:
        processes.return_large_blocks()
        for block in sharded:
            block.set_custom_all_gather(cast(Any, gather))
    before = partial(_gather_early, used) if device_type != "cpu" else lambda state: None
    root = _Root(blocks, run, before=before, after=gather.free if gather else lambda: None)
    fully_shard(root, mesh=mesh)
    return root


def _gather_early(used: Used, state: State) -> None:
    """Let each block that runs gather the next. What a skipped block gathered would stay whole."""
    blocks = [cast(FSDPModule, block) for block in used(state)]
    for block, *following in itertools.zip_longest(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([each for each in following if each is not None])


class _OneBuffer:
    """FSDP's all-gather for CPU ranks, which hold no more than one gathered block and one copy of it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the tensor to gather into. FSDP has copied what the block before it left there."""
        if dtype == torch.uint8:
            processes.trim_heap()  # frees fragments left by decoding the previous block
        count = math.prod(size)
        if self._buffer is None or self._buffer.dtype != dtype or len(self._buffer) < count:
            self._buffer = None  # frees it first
            self._buffer = torch.empty(count, dtype=dtype, device=device)
        return self._buffer[:count].view(*size)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Exchange the shards directly: gloo's all-gather takes as much memory again. Returns when they are there."""
        rank, shards = dist.get_rank(group), output_tensor.chunk(dist.get_world_size(group))
        others = [each for each in range(len(shards)) if each != rank]
        if shards[rank].data_ptr() != input_tensor.data_ptr():
            shards[rank].copy_(input_tensor)
        exchanges = [dist.P2POp(dist.isend, shards[rank], group=group, group_peer=each) for each in others]
        exchanges += [dist.P2POp(dist.irecv, shards[each], group=group, group_peer=each) for each in others]
        wait_all(dist.batch_isend_irecv(exchanges) if exchanges else ())

    def free(self) -> None:
        """Free the memory, to which FSDP has a reference, too, and what the C library keeps."""
        if self._buffer is not None:
            self._buffer.untyped_storage().resize_(0)
            self._buffer = None
        processes.trim_heap()


class _Root(nn.Module):
    """The root module that FSDP requires: its forward runs all blocks."""

    def __init__(
        self, blocks: Sequence[nn.Module], run: Run, *, before: Callable[[State], None], after: Callable[[], None]
    ) -> None:
        super().__init__()
        self.blocks, self.run, self.before, self.after = nn.ModuleList(blocks), run, before, after

    def forward(self, state: State) -> State:
        self.before(state)
        result = self.run(state)
        self.after()
        return result
