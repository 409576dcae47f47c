"""The numbers in which families and strategies speak of a model and a request, without either's code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LATENT = "hidden_states"
"""Name of the latent ``[B, C, (T,) H, W]`` among a branch's inputs, as ComfyUI has it: nothing is packed."""

TIMESTEP = "timestep"
"""Name of the timestep ``[B]`` among them, as ComfyUI's model class of the family passes it."""

IMAGE = "image"
"""The stream whose tokens the head predicts; every family has it."""

TEXT = "text"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A kind of attention that passes the seam, found ``count`` times in a model.

    ``streams`` are those whose tokens attend to one another there, in the order of the module's own concatenation.
    """

    streams: tuple[str, ...]
    heads: int
    head_dim: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Outputs of row-parallel layers, or squares of a norm over all heads, that tensor parallelism sums.

    ``tokens`` names a stream or a context of an ``Extent``; ``count`` such sums of ``width`` values a token are in a
    model. ``itemsize`` 0 is that of the model's dtype. ``least`` rows are summed where a rank has no token of a stream:
    those that it makes up.
    """

    tokens: str
    width: int
    count: int
    itemsize: int = 0
    least: int = 0


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The static numbers of a model, read from its config alone.

    Attributes:
        channels: of the latent; ``out_channels``: of the prediction.
        patch: sizes of a patch along the latent's dims after the channels.
        layers: blocks that have weights.
        sites: all attention that passes the seam; ``sums``: all that tensor parallelism sums.
        positions: patches along one axis that the model has positions for; None if there is no such limit.
    """

    channels: int
    out_channels: int
    patch: tuple[int, ...]
    layers: int
    sites: tuple[Site, ...]
    sums: tuple[Sum, ...]
    positions: int | None = None

    def width(self, stream: str) -> int:
        """Values of a token between blocks: as many as those of a row-parallel layer's output."""
        return max(total.width for total in self.sums if total.tokens == stream)

    def grid(self, size: Sequence[int]) -> tuple[int, ...]:
        """Patches along each dim of a latent of that size, which is padded up to whole patches."""
        return tuple(-(-length // patch) for length, patch in zip(size, self.patch, strict=True))


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What the shapes of one branch's inputs come to.

    Attributes:
        streams: tokens of each stream.
        values: predicted values of a token of the image stream.
        context: tokens that are whole on every rank, by name: text in cross-attention.
        rows: rows of attention a sample; more than one where frames attend apart from one another.
    """

    streams: Mapping[str, int]
    values: int
    context: Mapping[str, int] = field(default_factory=dict)
    rows: int = 1


def common(extents: Sequence[Extent]) -> int | None:
    """Image tokens that all branches have, if they have different numbers: references follow the latent's own tokens.

    None if all have the same, so that each rank holds the same tokens of every branch.
    """
    lengths = {extent.streams[IMAGE] for extent in extents}
    return None if len(lengths) == 1 else min(lengths)
