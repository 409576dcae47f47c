"""Predictions from stale keys and values on one process: what patch parallelism is held to (see ``loops``).

Patch after patch, without stages, ranks, or anything that runs ahead; masks as masks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.routing import routed
from ...denoiser.attention_chain import WithoutPadding
from ...interfaces.family import Family
from ...interfaces.geometry import IMAGE
from ...interfaces.state import State
from ...layout.parallel_layout import ParallelLayout
from ...layout.partition import Partition

Rows = Mapping[str, Tensor]
"""By stream, the indices of some of its tokens."""

Samples = dict[int | None, tuple[Tensor, Tensor]]
"""Keys and values by the sample that they are of."""

Memory = dict[nn.Module, Samples]


Choose = Callable[[Mapping[str, int]], Rows]
"""What is computed, by the lengths of the streams."""


class Renewed:
    """Attention of some tokens to all, whose keys and values are kept from call to call.

    Args:
        kept: takes the new ones in, by sample; seen: what the other tokens' are read from.
        rows: which tokens these are, of the streams one after the other.
        mask: which keys may be attended, ``[B, tokens]``.
    """

    def __init__(self, kept: Samples, seen: Samples, rows: Tensor, mask: Tensor) -> None:
        self.kept, self.seen, self.rows, self.mask = kept, seen, rows, mask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """See ``Attention``."""
        shape = (*key.shape[:2], self.mask.shape[1], key.shape[3])
        seen = [whole.clone() for whole in self.seen.get(sample, _zeros(key, shape))]
        for new, kept, whole in zip((key, value), self.kept.setdefault(sample, _zeros(key, shape)), seen, strict=True):
            kept[:, :, self.rows] = whole[:, :, self.rows] = new
        mask = self.mask if sample is None else self.mask[sample : sample + 1]
        shown = mask.repeat_interleave(len(query) // len(mask), dim=0)[:, None, None]
        return F.scaled_dot_product_attention(query, seen[0], seen[1], attn_mask=shown, scale=scale)


class Keeper:
    """A model that keeps the keys and values of all tokens, and computes some of them anew."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.kept: Memory = {}
        self.seen: Memory = self.kept

    def __call__(self, inputs: Mapping[str, Tensor], choose: Choose, own: bool) -> Tensor:
        """The prediction of the chosen image tokens ``[B, tokens, values]``.

        ``choose`` is given the lengths of the streams; with ``own`` the chosen tokens see nothing but themselves.
        """
        state = self.family.embed(inputs)
        lengths = {name: stream.shape[1] for name, stream in state.streams.items()}
        rows = choose(lengths)
        with routed(self._routes(state, lengths, rows, own)):
            done = self.family.run(_part(state, rows))
        return self.family.head(done)

    def _routes(
        self, state: State, lengths: Mapping[str, int], rows: Rows, own: bool
    ) -> list[tuple[nn.Module, WithoutPadding, bool]]:
        routes = []
        batch = len(next(iter(state.streams.values())))
        for site in self.family.attentions:
            starts = dict(zip(site.streams, [0, lengths[site.streams[0]]], strict=False))
            index = torch.cat([rows[name] + starts[name] for name in site.streams])
            ones = {name: torch.ones(batch, lengths[name], dtype=torch.bool) for name in site.streams}
            mask = torch.cat([state.masks.get(name, ones[name]) for name in site.streams], dim=1)
            mask = mask & torch.zeros_like(mask).index_fill(1, index, True) if own else mask
            kept = self.kept.setdefault(site.module, {})
            renewed = Renewed(kept, self.seen.get(site.module, {}), index, mask)
            routes.append(
                (site.module, WithoutPadding([len(rows[name]) for name in site.streams], renewed), site.each_sample)
            )
        return routes


class Patchwise:
    """Predictions of one branch, patch after patch, as PipeFusion makes them."""

    def __init__(self, family: Family, image: Partition) -> None:
        self.image, self._model = image, Keeper(family)

    def __call__(self, inputs: Mapping[str, Tensor], patches: Sequence[int]) -> Tensor:
        """The prediction of the tokens of some consecutive patches, ``[B, tokens, values]``."""
        count = sum(self.image.sizes[patch] for patch in patches)
        return self._model(inputs, lambda lengths: self._rows(lengths, patches), False)[:, :count]

    def _rows(self, lengths: Mapping[str, int], patches: Sequence[int]) -> Rows:
        start, last = self.image.offsets[patches[0]], patches[-1] == len(self.image.sizes) - 1
        end = lengths[IMAGE] if last else self.image.offsets[patches[-1]] + self.image.sizes[patches[-1]]
        whole = {name: torch.arange(length if patches[0] == 0 else 0) for name, length in lengths.items()}
        return {**whole, IMAGE: torch.arange(start, end)}


class Neighbours:
    """Predictions of one branch in a displaced layout: each patch with what its neighbours were in the call before,
    or with nothing of them."""

    def __init__(self, family: Family, layout: ParallelLayout, tokens: int) -> None:
        self.layout, self.tokens, self._model = layout, tokens, Keeper(family)

    def __call__(self, inputs: Mapping[str, Tensor], *, whole: bool) -> Tensor:
        """The prediction of the latent's tokens, ``[B, tokens, values]``."""
        self._model.seen = {
            module: {sample: (k.clone(), v.clone()) for sample, (k, v) in samples.items()}
            for module, samples in self._model.kept.items()
        }
        places = [range(self.layout.ring)] if whole else [range(i, i + 1) for i in range(self.layout.ring)]
        own = self.layout.stale == "none" and not whole
        parts = [self._model(inputs, partial(self._rows, places=some), own) for some in places]
        return torch.cat(parts, dim=1)[:, : self.tokens]

    def _rows(self, lengths: Mapping[str, int], places: range) -> Rows:
        rows = {}
        speeds = self.layout.balance or (1.0,) * self.layout.ring
        weights = [speed for speed in speeds for _ in range(self.layout.ulysses)]
        for name, length in lengths.items():
            shares = Partition.weighted(length, weights)
            own = range(places.start * self.layout.ulysses, places.stop * self.layout.ulysses)
            start, count = shares.offsets[own.start], sum(shares.sizes[i] for i in own)
            rows[name] = torch.arange(start, start + count)
            if self.layout.stale == "none" and name != IMAGE:
                rows[name] = torch.arange(length)
        return rows


def _part(state: State, rows: Rows) -> State:
    return State(
        streams={name: stream[:, rows[name]] for name, stream in state.streams.items()},
        tables={
            name: {key: table[:, rows[name].to(table.device)] for key, table in tables.items()}
            for name, tables in state.tables.items()
        },
        masks=state.masks,
        context=state.context,
    )


def _zeros(like: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    return like.new_zeros(tuple(shape)), like.new_zeros(tuple(shape))
