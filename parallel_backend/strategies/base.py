"""What every strategy says of itself."""

from dataclasses import dataclass
from typing import Protocol

from ..layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Job:
    """The static numbers of a request, known before any weight is loaded.

    ``values`` are the predicted values of a token; ``itemsize`` is that of the model's dtype, in bytes.
    """

    branches: int
    samples: int
    tokens: int
    heads: int
    head_dim: int
    layers: int
    values: int
    itemsize: int


class Strategy(Protocol):
    """A way to split the work over one or more axes of the mesh."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that the strategy uses."""

    def check(self, layout: ParallelLayout, job: Job) -> None:
        """Refuse a layout that cannot work for the job.

        Raises:
            InvalidRequest: names the reason and what would work.
        """

    def bytes_sent(self, layout: ParallelLayout, job: Job, rank: int) -> int:
        """Bytes that ``rank`` sends to others in one denoiser call of ``Sample``."""
