"""What the attention of a denoiser call sees of a row.

``FullView`` sees all tokens. The other views are approximate: they see stale keys and values of other patches
(``DisplacedView``, ``CachedView``), or none of them (``LocalPatchView``).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

from torch import nn

from ..attention.kernels import Kernel, for_biases
from ..attention.key_masks import KeyMask
from ..attention.routing import Attention, Route, WholeRoute
from ..distributed.collectives import wait_all
from ..distributed.mesh import RankMesh
from ..distributed.trials import Trials
from ..interfaces.family import AttentionSite, Family
from ..interfaces.geometry import BIAS_CHANNELS, IMAGE
from ..interfaces.state import BIASES, State
from ..layout.partition import Partition
from ..layout.stream_partition import StreamPartition
from ..strategies.displaced import DisplacedAttention, KeyValuesBySample
from ..strategies.dsp import RowsAttention
from ..strategies.patch_attention import KeyValues, PatchSplit
from ..strategies.token_split import TokenSplit
from . import attention_chain


class FullView:
    """All tokens of the row: exact.

    Attributes:
        splits: by branch, how its tokens are split over the ranks of the sequence.
        trials: see ``UlyssesAttention``.
    """

    def __init__(self, mesh: RankMesh, splits: Sequence[TokenSplit], trials: Trials | None = None) -> None:
        self.mesh, self.splits, self.trials = mesh, splits, trials

    def routes(self, family: Family, branch: int, state: State, kernel: Kernel) -> list[Route]:
        """Where each attention of ``family`` goes; empty where the modules' own attention computes the same.

        Args:
            state: its masks and tables are the same in all calls.
        """
        split, masks, kernels = self.splits[branch], state.masks, _kernels(family, state, kernel)
        if split.axis.size == 1 and not masks and kernel.stock and not _has_biases(state):
            return []
        if self.mesh.axes["dsp"].size > 1:
            return [_whole_rows(site, self.mesh, split, kernel) for site in family.attentions]

        @cache
        def chain(streams: tuple[str, ...], queries: tuple[str, ...] | None, biased: bool) -> Attention:
            kernel = kernels(biased)
            if queries is not None:
                return attention_chain.whole_queries(self.mesh, split, streams, masks, kernel)
            return attention_chain.attention(self.mesh, split, streams, masks, kernel, self.trials)

        # Ring and masks change what they get. From Ulysses they get copies.
        changes_keys = self.mesh.axes["ulysses"].size == 1 and (split.axis.size > 1 or bool(masks))
        return _routes(
            family, lambda site: chain(site.streams, site.queries, site.biased), state, changes_keys=changes_keys
        )


class DisplacedView(FullView):
    """New keys and values of this rank's patch, and the other patches' of the call before.

    Attributes:
        fresh: whether this call waits for the other patches' new keys and values, which makes it exact.
        renews: whether this call sends its keys and values for the next one.
    """

    def __init__(self, mesh: RankMesh, splits: Sequence[TokenSplit]) -> None:
        super().__init__(mesh, splits)
        self.fresh, self.renews = True, True
        self._masks: dict[tuple[int, tuple[str, ...]], KeyMask | None] = {}
        self._rows: dict[tuple[int, nn.Module], KeyValuesBySample] = {}

    def routes(self, family: Family, branch: int, state: State, kernel: Kernel) -> list[Route]:
        split, kernels = self.splits[branch], _kernels(family, state, kernel)

        def row_mask(streams: tuple[str, ...]) -> KeyMask | None:
            """The same in each call; to find it, the host waits for a GPU."""
            if (branch, streams) not in self._masks:
                self._masks[branch, streams] = attention_chain.row_mask(split, streams, state.masks)
            return self._masks[branch, streams]

        def chain(site: AttentionSite) -> Attention:
            inner = DisplacedAttention(
                self.mesh.ring_async or self.mesh.axes["ring"],
                attention_chain.tokens_by_ring_rank(self.mesh, split, site.streams),
                row_mask(site.streams),
                kernels(site.biased),
                self._rows.setdefault((branch, site.module), {}),
                fresh=self.fresh,
                renews=self.renews,
            )
            return attention_chain.with_ulysses(self.mesh, split, site.streams, inner)

        return _routes(family, chain, state)

    def finish(self) -> None:
        """Wait for all keys and values in flight, then release them."""
        for rows in self._rows.values():
            for row in rows.values():
                wait_all(row.works)
        self._rows = {}


class LocalPatchView(FullView):
    """The image tokens of one patch with all of the text: nothing of other patches."""

    def __init__(self, mesh: RankMesh, splits: Sequence[TokenSplit]) -> None:
        super().__init__(mesh, [_local_patch(mesh, split) for split in splits])


class CachedView:
    """A pipeline's view of a patch: its new keys and values, and the cached ones of the other patches."""

    def __init__(self, mesh: RankMesh, splits: Sequence[PatchSplit]) -> None:
        self.mesh, self.splits = mesh, splits
        self._caches: dict[tuple[int, nn.Module], KeyValues] = {}
        self._masks: dict[tuple[int, tuple[str, ...]], KeyMask | None] = {}

    def routes(self, family: Family, branch: int, state: State, kernel: Kernel, patch: int | None) -> list[Route]:
        """Where each attention of ``family`` goes for a patch. With ``patch`` None, the whole row fills the cache."""
        split, kernels = self.splits[branch], _kernels(family, state, kernel)

        def chain(site: AttentionSite) -> Attention:
            keys_values = self._caches.setdefault((branch, site.module), KeyValues())
            if (branch, site.streams) not in self._masks:  # equal for all patches; the host waits for a GPU to read it
                self._masks[branch, site.streams] = attention_chain.row_mask(split.whole, site.streams, state.masks)
            mask = self._masks[branch, site.streams]
            return attention_chain.patch_attention(
                self.mesh, split, patch, site.streams, mask, kernels(site.biased), keys_values
            )

        return _routes(family, chain, state)


def _whole_rows(site: AttentionSite, mesh: RankMesh, split: TokenSplit, kernel: Kernel) -> Route:
    """Give each rank whole rows of a module's input."""
    around = partial(RowsAttention, split.axis, split.tokens(site.streams), mesh.split)
    return WholeRoute(site.module, attention_chain.LocalAttention(kernel, None), site.each_sample, around)


def _routes(
    family: Family, chain: Callable[[AttentionSite], Attention], state: State, *, changes_keys: bool = False
) -> list[Route]:
    def attention(site: AttentionSite) -> Attention:
        inner = attention_chain.without_repeats(chain(site), site.repeats)
        inner = attention_chain.with_own_values(inner) if site.keeps_values and changes_keys else inner
        return attention_chain.with_biases(inner, state, site.streams) if site.biased and _has_biases(state) else inner

    return [
        Route(site.module, attention(site), site.each_sample, changes_keys=changes_keys) for site in family.attentions
    ]


def _has_biases(state: State) -> bool:
    return any(BIASES[0] in tables for tables in state.tables.values())


def _kernels(family: Family, state: State, kernel: Kernel) -> Callable[[bool], Kernel]:
    """Return what chooses the kernel of a site, by whether it may have biases."""
    biased = _has_biases(state)
    widths = [kind.head_dim + BIAS_CHANNELS for kind in family.geometry.sites if kind.biased]
    return lambda may: for_biases(kernel, max(widths)) if may and biased else kernel


def _local_patch(mesh: RankMesh, split: TokenSplit) -> TokenSplit:
    """How the ranks of one Ulysses group split the patch at their place on the ring."""
    ulysses, place = mesh.axes["ulysses"], mesh.axes["ring"].index
    begin = place * ulysses.size
    ((start, image),) = split.streams[IMAGE].patches
    local = Partition(image.sizes[begin : begin + ulysses.size])
    text = {name: StreamPartition.even(0, shares.total, ulysses.size) for name, shares in split.streams.items()}
    image_stream = StreamPartition(((start + image.offsets[begin], local),))
    return TokenSplit(axis=ulysses, streams={**text, IMAGE: image_stream})
