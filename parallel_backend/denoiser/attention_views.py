"""What the attention of a denoiser call sees of a row: all tokens, stale ones of other patches, or its patch alone."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..attention.kernels import Kernel
from ..attention.routing import Route
from ..distributed.collectives import wait
from ..distributed.mesh import DeviceMesh
from ..interfaces.family import Family
from ..interfaces.geometry import IMAGE
from ..layout.partition import Partition
from ..strategies.displaced import DisplacedAttention, Rows
from ..strategies.token_split import StreamPartition, TokenSplit
from . import attention_chain


class FullView:
    """All tokens of the row: exact. ``splits`` are by branch."""

    def __init__(self, mesh: DeviceMesh, splits: Sequence[TokenSplit]) -> None:
        self.mesh, self.splits = mesh, splits

    def routes(self, family: Family, branch: int, masks: Mapping[str, Tensor], kernel: Kernel) -> list[Route]:
        """What goes through the seam: nothing where the modules' own attention is all that is wanted."""
        split = self.splits[branch]
        if split.axis.size == 1 and not masks and kernel.stock:
            return []
        seams = {
            streams: attention_chain.attention(self.mesh, split, streams, masks, kernel)
            for streams in {site.streams for site in family.attentions}
        }
        return [(site.module, seams[site.streams], site.each_sample) for site in family.attentions]


class DisplacedView(FullView):
    """The own patch, and of the others what they were in the call before.

    Attributes:
        fresh, renews: see ``DisplacedAttention``.
    """

    def __init__(self, mesh: DeviceMesh, splits: Sequence[TokenSplit]) -> None:
        super().__init__(mesh, splits)
        self.fresh, self.renews = True, True
        self._rows: dict[tuple[int, nn.Module], Rows] = {}

    def routes(self, family: Family, branch: int, masks: Mapping[str, Tensor], kernel: Kernel) -> list[Route]:
        """See ``FullView.routes``."""
        split = self.splits[branch]
        kept = {
            streams: attention_chain.whole_row(split, streams, masks)
            for streams in {site.streams for site in family.attentions}
        }
        routes = []
        for site in family.attentions:
            inner = DisplacedAttention(
                self.mesh.behind or self.mesh.axes["ring"],
                attention_chain.tokens_by_place(self.mesh, split, site.streams),
                kept[site.streams],
                kernel,
                self._rows.setdefault((branch, site.module), {}),
                fresh=self.fresh,
                renews=self.renews,
            )
            routes.append(
                (site.module, attention_chain.around(self.mesh, split, site.streams, inner), site.each_sample)
            )
        return routes

    def finish(self) -> None:
        """Wait until all keys and values have come, and let go of them."""
        for rows in self._rows.values():
            for row in rows.values():
                wait(row.works)
        self._rows = {}


class LocalPatchView(FullView):
    """Nothing of other patches: text, whole, with each patch of the image stream."""

    def __init__(self, mesh: DeviceMesh, splits: Sequence[TokenSplit]) -> None:
        super().__init__(mesh, [_alone(mesh, split) for split in splits])


def _alone(mesh: DeviceMesh, split: TokenSplit) -> TokenSplit:
    ulysses, place = mesh.axes["ulysses"], mesh.axes["ring"].index
    begin = place * ulysses.size
    ((start, image),) = split.streams[IMAGE].patches
    own = Partition(image.sizes[begin : begin + ulysses.size])
    text = {name: StreamPartition.even(0, shares.total, ulysses.size) for name, shares in split.streams.items()}
    return TokenSplit(axis=ulysses, streams={**text, IMAGE: StreamPartition(((start + image.offsets[begin], own),))})
