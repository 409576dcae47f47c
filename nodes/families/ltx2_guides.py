"""The guides of LTX-2 that *LTXVAddGuide* adds behind the latent's own frames, as ComfyUI's transformer reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest


def guide_inputs(
    native_class: Any, shape: Sequence[int], count: int, mask: Tensor | None, entries: Sequence[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Return the strengths of guides and the gaps in them, where there are any.

    Args:
        native_class: ComfyUI's class of the transformer.
        shape: of the picture's latent, whose last frames are the guides.
        count: the guides' tokens.
        mask: noise mask ``[B, 1, T, H, W]``, negative where there is a gap.
        entries: the guides, in order.

    Raises:
        InvalidRequest: the guides do not fit the latent.
    """
    per_frame, total = shape[3] * shape[4], shape[2] * shape[3] * shape[4]
    if count % per_frame or count > total:
        raise InvalidRequest(
            f"the guides have {count} tokens, and a frame of this latent has {per_frame}: they are for a latent of "
            "another size, so crop them with LTXVCropGuides before the latent is upscaled"
        )
    kept = torch.ones(total, dtype=torch.bool)
    if mask is not None:  # ComfyUI looks at the first sample alone
        kept = ~(rearrange(mask[:1].cpu(), "1 c t h w -> (t h w) c") < 0).any(dim=1).expand(total)
    inputs = {} if bool(kept.all()) else {"kept_mask": kept[None]}
    weights = _weights(native_class, kept[total - count :], entries)
    if weights is not None:
        own = torch.full((1, total - count), -1.0)
        inputs["guide_weights"] = torch.cat([own, weights[None]], dim=1)
    return inputs


def _weights(native_class: Any, kept: Tensor, entries: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """Return the strength of each place of the guides; None if all are 1."""
    if all(entry["strength"] == 1.0 and entry.get("pixel_mask") is None for entry in entries):
        return None
    counts = [entry["pre_filter_count"] for entry in entries]
    if sum(counts) != len(kept):
        raise InvalidRequest(
            f"the guides' strengths are for {sum(counts)} tokens, and the guides have {len(kept)}: add them with "
            "LTXVAddGuide, and crop them with LTXVCropGuides before the latent changes its size"
        )
    weights = torch.ones(len(kept))
    for entry, part, places in zip(entries, weights.split(counts), kept.split(counts), strict=True):
        found = _strengths(native_class, entry, int(places.sum()))
        part[places.nonzero()[: len(found), 0]] = found
    return None if bool((weights == 1.0).all()) else weights


def _strengths(native_class: Any, entry: Mapping[str, Any], count: int) -> Tensor:
    """Return the strengths of the first tokens of a guide that has ``count``, by its mask if it has one."""
    mask, shape = entry.get("pixel_mask"), entry.get("latent_shape")
    if mask is None or shape is None:
        return torch.full((count,), float(entry["strength"]))
    by_token: Tensor = native_class._downsample_mask_to_latent(mask.float().cpu(), *shape)
    return by_token[0, :count] * float(entry["strength"])
