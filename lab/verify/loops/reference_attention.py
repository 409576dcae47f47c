"""Predictions from stale keys and values in one process: the reference for patch parallelism (see ``reference``).

Patches are computed one after another, without stages, ranks or overlap; masks are applied as attention masks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_backend.attention.routing import Route, routed
from parallel_backend.denoiser.attention_chain import WithoutPadding
from parallel_backend.interfaces.family import Family
from parallel_backend.interfaces.geometry import IMAGE
from parallel_backend.interfaces.state import State
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.partition import Partition

TokenIndices = Mapping[str, Tensor]
"""By stream, the indices of some of its tokens."""

KeysValues = dict[int | None, tuple[Tensor, Tensor]]
"""Keys and values of all tokens, by sample; None for all samples together."""

Cache = dict[nn.Module, KeysValues]
"""By attention module."""

Choose = Callable[[Mapping[str, int]], TokenIndices]
"""Chooses the tokens to compute, given the lengths of the streams."""


class CachedAttention:
    """Attention of some tokens to all tokens. Keys and values of the others come from a cache.

    Args:
        cache: receives the new keys and values.
        stale: provides the keys and values of the other tokens; may be ``cache``.
        tokens: indices of the tokens to compute, in the concatenation of the streams.
        mask: keys that may be attended to, ``[B, tokens]``.
    """

    def __init__(self, cache: KeysValues, stale: KeysValues, tokens: Tensor, mask: Tensor) -> None:
        self.cache, self.stale, self.tokens, self.mask = cache, stale, tokens, mask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """See ``Attention``."""
        shape = (*key.shape[:2], self.mask.shape[1], key.shape[3])
        attended = [stale.clone() for stale in self.stale.get(sample, _zeros(key, shape))]
        cached = self.cache.setdefault(sample, _zeros(key, shape))
        for new, cache, whole in zip((key, value), cached, attended, strict=True):
            cache[:, :, self.tokens] = whole[:, :, self.tokens] = new
        mask = self.mask if sample is None else self.mask[sample : sample + 1]
        mask_b11k = mask.repeat_interleave(len(query) // len(mask), dim=0)[:, None, None]
        return F.scaled_dot_product_attention(query, attended[0], attended[1], attn_mask=mask_b11k, scale=scale)


class CachingModel:
    """A model that caches keys and values of all tokens, and computes only some tokens in each call.

    Attributes:
        family: the transformer.
        cache: receives the keys and values of the computed tokens.
        stale: provides the keys and values of all other tokens.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.cache: Cache = {}
        self.stale: Cache = self.cache

    def __call__(self, inputs: Mapping[str, Tensor], choose: Choose, isolated: bool) -> Tensor:
        """Predict the chosen image tokens, ``[B, tokens, values]``.

        Args:
            inputs: of one branch.
            choose: chooses the tokens.
            isolated: whether the chosen tokens attend only to each other.
        """
        state = self.family.embed(inputs)
        lengths = {name: stream.shape[1] for name, stream in state.streams.items()}
        chosen = choose(lengths)
        with routed(self._routes(state, lengths, chosen, isolated)):
            state = self.family.run(_select(state, chosen))
        return self.family.head(state)

    def _routes(self, state: State, lengths: Mapping[str, int], chosen: TokenIndices, isolated: bool) -> list[Route]:
        routes: list[Route] = []
        batch = len(next(iter(state.streams.values())))
        for site in self.family.attentions:
            if site.queries is not None:
                continue  # of models that compute all tokens at once
            starts = dict(zip(site.streams, [0, lengths[site.streams[0]]], strict=False))
            tokens = torch.cat([chosen[name] + starts[name] for name in site.streams])
            ones = {name: torch.ones(batch, lengths[name], dtype=torch.bool) for name in site.streams}
            mask = torch.cat([state.masks.get(name, ones[name]) for name in site.streams], dim=1)
            mask = mask & torch.zeros_like(mask).index_fill(1, tokens, True) if isolated else mask
            cache, stale = self.cache.setdefault(site.module, {}), self.stale.get(site.module, {})
            attention = CachedAttention(cache, stale, tokens, mask)
            sizes = [len(chosen[name]) for name in site.streams]
            routes.append(Route(site.module, WithoutPadding(sizes, attention), site.each_sample))
        return routes


class PipeFusionModel:
    """Predictions of one branch as PipeFusion makes them, patch after patch.

    Args:
        family: the transformer.
        image: image tokens of each patch.
    """

    def __init__(self, family: Family, image: Partition) -> None:
        self.image, self._model = image, CachingModel(family)

    def __call__(self, inputs: Mapping[str, Tensor], patches: Sequence[int]) -> Tensor:
        """Predict the tokens of consecutive patches, ``[B, tokens, values]``."""
        count = sum(self.image.sizes[patch] for patch in patches)
        return self._model(inputs, lambda lengths: self._choose(lengths, patches), False)[:, :count]

    def _choose(self, lengths: Mapping[str, int], patches: Sequence[int]) -> TokenIndices:
        """Choose the patches' image tokens. Text goes with the first patch, tokens after the latent's with the last."""
        start, last = self.image.offsets[patches[0]], patches[-1] == len(self.image.sizes) - 1
        end = lengths[IMAGE] if last else self.image.offsets[patches[-1]] + self.image.sizes[patches[-1]]
        whole = {name: torch.arange(length if patches[0] == 0 else 0) for name, length in lengths.items()}
        return {**whole, IMAGE: torch.arange(start, end)}


class DisplacedModel:
    """Predictions of one branch in a displaced or naive patch layout.

    In a displaced layout, each patch attends to its neighbours' keys and values of the previous call. In a naive one,
    it attends only to itself and to the text.

    Args:
        family: the transformer.
        layout: the layout.
        tokens: image tokens of the latent, without tokens that the family appends.
    """

    def __init__(self, family: Family, layout: ParallelLayout, tokens: int) -> None:
        self.layout, self.tokens, self._model = layout, tokens, CachingModel(family)

    def __call__(self, inputs: Mapping[str, Tensor], *, whole: bool) -> Tensor:
        """Predict the latent's tokens, ``[B, tokens, values]``; with ``whole``, all patches at once."""
        self._model.stale = {
            module: {sample: (k.clone(), v.clone()) for sample, (k, v) in samples.items()}
            for module, samples in self._model.cache.items()
        }
        patches = [range(self.layout.ring)] if whole else [range(i, i + 1) for i in range(self.layout.ring)]
        isolated = self.layout.stale == "none" and not whole
        parts = [self._model(inputs, partial(self._choose, patches=some), isolated) for some in patches]
        return torch.cat(parts, dim=1)[:, : self.tokens]

    def _choose(self, lengths: Mapping[str, int], patches: range) -> TokenIndices:
        """Choose the patches' tokens of every stream; in a naive layout, all tokens of streams other than the image."""
        chosen = {}
        speeds = self.layout.balance or (1.0,) * self.layout.ring
        weights = [speed for speed in speeds for _ in range(self.layout.ulysses)]
        for name, length in lengths.items():
            shares = Partition.weighted(length, weights)
            ranks = range(patches.start * self.layout.ulysses, patches.stop * self.layout.ulysses)
            start, count = shares.offsets[ranks.start], sum(shares.sizes[i] for i in ranks)
            chosen[name] = torch.arange(start, start + count)
            if self.layout.stale == "none" and name != IMAGE:
                chosen[name] = torch.arange(length)
        return chosen


def _select(state: State, chosen: TokenIndices) -> State:
    """Return the state of only the chosen tokens."""
    return State(
        streams={name: stream[:, chosen[name]] for name, stream in state.streams.items()},
        tables={
            name: {key: table[:, chosen[name].to(table.device)] for key, table in tables.items()}
            for name, tables in state.tables.items()
        },
        masks=state.masks,
        context=state.context,
    )


def _zeros(like: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    return like.new_zeros(tuple(shape)), like.new_zeros(tuple(shape))
