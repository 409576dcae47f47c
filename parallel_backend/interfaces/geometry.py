"""The numbers by which families and strategies describe a model and a request to each other.

Everything here comes from a config and from shapes, before any weight is loaded. Validation refuses requests
by these numbers, strategies compute the bytes that they send, and the stages of a pipeline are balanced by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LATENT = "hidden_states"
"""Input name of the latent ``[B, C, (T,) H, W]``, in ComfyUI's form: patches are not packed into channels."""

SOUND = "audio_hidden_states"
"""Input name of the latent of the sound, ``[B, C, ...]``, of families that predict picture and sound together."""

TIMESTEP = "timestep"
"""Input name of the timestep ``[B]``, as ComfyUI's model class of the family passes it."""

IMAGE = "image"
"""The stream whose tokens the head predicts. Every family has it."""

AUDIO = "audio"
"""The stream of the sound's tokens, of families that have one of its own."""

TEXT = "text"
"""The stream of text tokens in joint attention."""

BIAS_CHANNELS = 8
"""How much wider heads are in attention with biases of pairs (``State``): GPUs want widths that are multiples of it."""

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """A kind of attention layer: which streams attend to one another, and with how many heads.

    The byte formulas of Ulysses, ring and displaced patch add up what each kind sends. Tensor parallelism refuses more
    ranks than ``groups``, and the balance of pipeline stages counts the work of attention.

    Attributes:
        streams: names of the streams, in the order in which the module concatenates them.
        queries: see ``AttentionSite``.
        heads: number of attention heads, which is that of query heads.
        head_dim: features of one head.
        count: number of such layers in the model.
        key_heads: number of key heads, a divisor of ``heads``, if query heads share them; None if each has its own.
            Ranks send each once (see ``AttentionSite.repeats``).
        within_frames: whether each frame attends only to itself (see ``Extent.rows``), in a module that takes and
            returns ``[rows, tokens, width]``.
        biased: see ``AttentionSite``.
    """

    streams: tuple[str, ...]
    heads: int
    head_dim: int
    count: int
    key_heads: int | None = None
    within_frames: bool = False
    queries: tuple[str, ...] | None = None
    biased: bool = False

    @property
    def groups(self) -> int:
        """Number of parts that tensor parallelism does not cut further: a key head with its query heads."""
        return self.heads if self.key_heads is None else self.key_heads


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A kind of all-reduce in tensor parallelism: over row-parallel outputs, or over squares of a norm over all heads.

    The byte formula of tensor parallelism adds these up. ``Geometry.width`` finds the width of a stream among them.

    Attributes:
        tokens: the stream, or the context entry of an ``Extent``, whose tokens are summed.
        width: values summed per token.
        count: number of such all-reduces in the model.
        itemsize: bytes of a value; 0 for the size of the model's dtype.
        min_rows: minimum number of rows. It is 1 where a rank without tokens of the stream computes a placeholder row.
    """

    tokens: str
    width: int
    count: int
    itemsize: int = 0
    min_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The static numbers of a model, from its config.

    Attributes:
        channels: channels of the latent.
        out_channels: channels of the prediction.
        patch: patch size along each latent dim after the channels.
        layers: number of blocks that have weights: the most stages that a pipeline can have.
        sites: all attention that goes through the attention seam, by kind.
        all_reduces: all sums of tensor parallelism, by kind.
        positions: the most patches along a dim that the model has positions for, or None for no limit.
    """

    channels: int
    out_channels: int
    patch: tuple[int, ...]
    layers: int
    sites: tuple[AttentionKind, ...]
    all_reduces: tuple[AllReduce, ...]
    positions: int | None = None

    @property
    def within_frames(self) -> bool:
        """Whether all attention that goes through the seam is within frames."""
        return all(site.within_frames for site in self.sites)

    def width(self, stream: str) -> int:
        """Return the features of a token between blocks: as many as a row-parallel layer outputs."""
        return max(total.width for total in self.all_reduces if total.tokens == stream)

    def grid(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the number of patches along each dim of a latent of that size, padded to whole patches."""
        return tuple(-(-length // patch) for length, patch in zip(size, self.patch, strict=True))


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The token counts of one branch, from the shapes of its inputs.

    Every rank computes from them which tokens it holds, the patches of a pipeline, and the bytes that are sent.

    Attributes:
        streams: number of tokens in each stream. These are split over ranks.
        values: values that the head predicts per token.
        context: number of tokens in each context entry that every rank holds whole, such as text in cross-attention.
        rows: batch rows per sample inside the blocks: the number of frames where each frame attends only to itself,
            otherwise 1.
        whole: streams that every rank holds whole inside the blocks, where all ranks compute them alike: those that
            are too short to be worth splitting. Only their prediction is split.
        predicted: the streams whose tokens the head predicts.
        biased: whether the tables of the state have biases of pairs of tokens.
    """

    streams: Mapping[str, int]
    values: int
    context: Mapping[str, int] = field(default_factory=dict)
    rows: int = 1
    whole: frozenset[str] = frozenset()
    predicted: tuple[str, ...] = (IMAGE,)
    biased: bool = False


def common_tokens(extents: Sequence[Extent]) -> tuple[int, ...] | None:
    """Return the smallest number of tokens of any branch for each predicted stream, or None if all have the same.

    Branches differ where only some have references, whose tokens follow the latent's. All branches share the first
    tokens then. With equal numbers, each rank holds the same tokens of every branch.
    """
    lengths = {tuple(extent.streams[name] for name in extent.predicted) for extent in extents}
    return None if len(lengths) == 1 else tuple(map(min, zip(*lengths, strict=True)))
