"""Stages: each rank of the axis holds a range of the blocks, through which a row passes one after the other.

A single call is exact: the whole row goes from stage to stage, and only rows overlap. A step loop streams patches
(see ``pipefusion``), which is approximate.
"""

from ..errors import InvalidRequest
from ..interfaces.geometry import IMAGE
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout

_FLOAT32 = 4
"""Bytes of a latent's value in a step loop."""


class Pipe:
    """Activations between the blocks, once a boundary and row."""

    axes = ("pipe",)

    def check(self, layout: ParallelLayout, job: Workload) -> None:
        """See ``Strategy.check``: each stage needs a block, and each patch a token.

        Raises:
            InvalidRequest: there are more stages or patches than that.
        """
        layers, tokens = job.geometry.layers, min(extent.streams[IMAGE] for _, extent in job.branches)
        if layout.pipe > layers:
            raise InvalidRequest(f"layout pipe={layout.pipe}: the model has {layers} blocks, so pipe is at most that")
        if job.guided and layout.patches > tokens:
            raise InvalidRequest(
                f"layout patches={layout.patches}: the latent has {tokens} tokens, so patches is at most that"
            )

    def bytes_sent(self, layout: ParallelLayout, job: Workload, rank: int) -> int:
        """All streams of the own tokens, by every stage but the last, which in a step loop sends the latent back."""
        place = layout.coordinates(rank)
        if place["pipe"] == layout.pipe - 1:
            samples, _ = next(job.own(layout, {**place, "cfg": 0}))
            return samples * job.latent * _FLOAT32 if job.guided and layout.pipe > 1 else 0
        values = 0
        for samples, extent in job.own(layout, place):
            for name in extent.streams:
                own = job.sizes(layout, extent, name)[place["sequence"]]
                values += samples * extent.rows * own * job.geometry.width(name)
        return values * job.itemsize
