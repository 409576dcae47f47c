"""What ``ring`` and ``ulysses`` have in common: each rank holds a share of the tokens of a row (see ``tokens``)."""

from ..interfaces.geometry import IMAGE, Extent, Site, common
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout

_FLOAT32 = 4
"""Bytes of a guided prediction's value: guidance is applied in float32, as ComfyUI does."""


class SequenceSplit:
    """Shards the state after ``embed`` and gathers what ``head`` predicted."""

    axes = ("ring", "ulysses")

    def check(self, layout: ParallelLayout, job: Workload) -> None:
        """See ``Strategy.check``: any number of ranks works for any number of tokens."""

    def bytes_sent(self, layout: ParallelLayout, job: Workload, rank: int) -> int:
        """The guided prediction of the own tokens, once to each other rank of the sequence; where the branches have
        other numbers of tokens, each own branch's prediction before guidance."""
        if not job.guided:
            return 0
        place = layout.coordinates(rank)
        if place["pipe"] != layout.pipe - 1:
            return 0
        needs_both = common([extent for _, extent in job.branches]) is not None
        rows = list(job.own(layout, place)) if needs_both else [next(job.own(layout, {**place, "cfg": 0}))]
        values = 0
        for samples, extent in rows:
            own = job.sizes(layout, extent, IMAGE)[place["sequence"]]
            values += samples * own * extent.values
        return (layout.sequence - 1) * values * (job.itemsize if needs_both else _FLOAT32)


def site_tokens(layout: ParallelLayout, job: Workload, extent: Extent, site: Site) -> list[tuple[int, ...]]:
    """The tokens that attend at a site: by place on the ring, then by place on the ulysses axis."""
    parts = [job.sizes(layout, extent, name) for name in site.streams]
    tokens = [sum(sizes) for sizes in zip(*parts, strict=True)]
    return [tuple(tokens[i : i + layout.ulysses]) for i in range(0, len(tokens), layout.ulysses)]
