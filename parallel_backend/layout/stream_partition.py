"""``StreamPartition``: how ranks share the tokens of a stream, all at once or patch by patch."""

from dataclasses import dataclass

from .partition import Partition


@dataclass(frozen=True)
class StreamPartition:
    """The tokens of a stream that are computed together, and how the ranks share them.

    Attributes:
        patches: each patch's offset in the stream, and the ranks' shares of the patch in order.
    """

    patches: tuple[tuple[int, Partition], ...]

    @classmethod
    def even(cls, start: int, length: int, ranks: int) -> "StreamPartition":
        """One patch of ``length`` tokens from ``start`` on, split evenly."""
        return cls(((start, Partition.even(length, ranks)),))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(map(sum, zip(*(shares.sizes for _, shares in self.patches), strict=True)))

    @property
    def total(self) -> int:
        """Number of tokens of all ranks."""
        return sum(self.sizes)

    def of(self, rank: int) -> list[slice]:
        """Return where a rank's tokens are in the stream, one slice for each patch."""
        return [_shifted(shares.slice(rank), start) for start, shares in self.patches]


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
