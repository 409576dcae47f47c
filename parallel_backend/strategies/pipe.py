"""Pipeline stages: each rank of the axis holds a range of the blocks, and a row passes through them in turn.

A single call is exact: the whole row goes from stage to stage, and only different rows overlap. A step loop streams
patches through the stages (see ``step_loop.pipefusion``), which is approximate.
"""

from ..errors import InvalidRequest
from ..interfaces.geometry import IMAGE
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout

_FLOAT32 = 4
"""Bytes of one latent value in a step loop."""


class Pipe:
    """Sends activations from each stage to the next, once for each row."""

    axes = ("pipe",)

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Each stage needs a block, and each patch a token.

        Raises:
            InvalidRequest: there are more stages than blocks, more patches than tokens, or several patches of a model
                that predicts several streams.
        """
        blocks = workload.geometry.layers
        tokens = min(extent.streams[IMAGE] for _, extent in workload.branches)
        if layout.pipe > blocks:
            raise InvalidRequest(f"layout pipe={layout.pipe}: the model has {blocks} blocks, so pipe is at most that")
        if workload.guided and layout.patches > 1 and any(len(extent.predicted) > 1 for _, extent in workload.branches):
            raise InvalidRequest(
                f"layout patches={layout.patches}: this model predicts picture and sound together, and patches are of "
                "the picture alone: use patches=1"
            )
        if workload.guided and layout.patches > tokens:
            raise InvalidRequest(
                f"layout patches={layout.patches}: the latent has {tokens} tokens, so patches is at most that"
            )

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count this rank's tokens of all streams, sent to the next stage.

        The last stage sends only in a step loop: the latent, to the first stage.
        """
        place = layout.coordinates(rank)
        if place["pipe"] == layout.pipe - 1:
            samples, _ = next(workload.local_branches(layout, {**place, "cfg": 0}))
            return samples * workload.latent * _FLOAT32 if workload.guided and layout.pipe > 1 else 0
        values = 0
        for samples, extent in workload.local_branches(layout, place):
            for name in extent.streams:
                local_tokens = workload.tokens_by_rank(layout, extent, name)[place["sequence"]]
                values += samples * extent.rows * local_tokens * workload.geometry.width(name)
        return values * workload.itemsize
