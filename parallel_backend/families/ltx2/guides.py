"""Guides of LTX-2: images or videos whose tokens follow the picture's own, with strengths and gaps.

A guide's strength is a factor on the attention between its tokens and those of no guide, in both directions. The tokens
of one guide, and of several, attend to one another as usual. A guide of a coarser grid has gaps: places of the latent
that are no tokens at all.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...interfaces.geometry import BIAS_CHANNELS
from ...interfaces.state import BIASES

WEIGHTS, KEPT = "guide_weights", "kept_mask"
"""Inputs: the strength of each token, and which tokens there are."""

_NO_WEIGHT = -1e4
"""The bias for a strength of 0. The exponential of it is 0, and it is finite, as products need it."""


def biases(weights: Tensor) -> dict[str, Tensor]:
    """Return the tables of ``state.BIASES`` for strengths ``[B, S]``, negative for tokens of no guide."""
    own = (weights < 0).float()
    guide = (1 - own) * weights.float().log().clamp(min=_NO_WEIGHT).nan_to_num(0.0)
    rest = own.new_zeros(*own.shape, BIAS_CHANNELS - 2)
    pairs = zip(BIASES, ((own, guide), (guide, own)), strict=True)
    return {name: torch.cat([torch.stack(numbers, dim=2), rest], dim=2) for name, numbers in pairs}


@contextmanager
def masked(module: Any, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Let diffusers' own forward see strengths and gaps as masks of all pairs, which its layers take."""
    pairs = _matrix(inputs)
    with ExitStack() as stack:
        for layer in module.transformer_blocks if pairs is not None else ():
            for attention, mask in ((layer.attn1, pairs), (layer.video_to_audio_attn, _keys(inputs))):
                hook = attention.register_forward_pre_hook(partial(_with_mask, mask), with_kwargs=True)
                stack.callback(hook.remove)
        yield


def _with_mask(mask: Tensor | None, module: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
    return arguments, options | {"attention_mask": mask}


def _matrix(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return what is added to the scores of the picture's tokens ``[B, queries, keys]``."""
    keys, found = _keys(inputs), None
    if WEIGHTS in inputs:
        queries, numbers = (biases(inputs[WEIGHTS])[name] for name in BIASES)
        found = queries @ numbers.mT
    if keys is None:
        return found
    return keys.expand(-1, keys.shape[2], -1) if found is None else found + keys


def _keys(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return what is added to the scores of keys ``[B, 1, keys]``; None if all places are tokens."""
    return (~inputs[KEPT][:, None]).float() * _NO_WEIGHT if KEPT in inputs else None
