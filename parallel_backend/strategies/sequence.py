"""What ``ring``, ``ulysses`` and ``dsp`` share: each rank holds a part of a row's tokens (see ``token_split``)."""

from ..errors import InvalidRequest
from ..interfaces.geometry import AttentionKind, Extent, common_tokens
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout

_FLOAT32 = 4
"""Bytes of one guided value: guidance is applied in float32, as in ComfyUI."""


class SequenceSplit:
    """Shards the state after ``embed`` and gathers the predictions of ``head``."""

    axes = ("ring", "ulysses", "dsp")

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Refuse stale keys and values where several streams are predicted. Any number of ranks works for any tokens.

        Raises:
            InvalidRequest: such a layout and such a model.
        """
        if layout.stale and any(len(extent.predicted) > 1 for _, extent in workload.branches):
            raise InvalidRequest(
                f"layout stale={layout.stale}: this model predicts picture and sound together, and stale patches are "
                f"of the picture alone: leave out stale={layout.stale}"
            )

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count the guided prediction of this rank's tokens, sent to each other rank of the sequence.

        If the branches have different numbers of tokens, count each of this rank's branches before guidance instead.
        """
        place = layout.coordinates(rank)
        if not workload.guided or place["pipe"] != layout.pipe - 1:
            return 0
        before_guidance = common_tokens([extent for _, extent in workload.branches]) is not None
        branches = workload.local_branches(layout, place if before_guidance else {**place, "cfg": 0})
        values = 0
        for samples, extent in branches if before_guidance else [next(branches)]:
            local_tokens = workload.predicted_by_rank(layout, extent)[place["sequence"]]
            values += samples * local_tokens * extent.values
        return (layout.sequence - 1) * values * (workload.itemsize if before_guidance else _FLOAT32)


def site_tokens(
    layout: ParallelLayout, workload: Workload, extent: Extent, site: AttentionKind
) -> list[tuple[int, ...]]:
    """Return the number of tokens that each rank contributes to a site's attention.

    Returns:
        One tuple for each position on the ring, with one number for each position on the ulysses axis.
    """
    by_stream = [workload.tokens_by_rank(layout, extent, name) for name in site.streams]
    tokens = [sum(sizes) for sizes in zip(*by_stream, strict=True)]
    return [tuple(tokens[i : i + layout.ulysses]) for i in range(0, len(tokens), layout.ulysses)]
