"""The scale and the scaling of a checkpoint's latents as ComfyUI needs them, read from its configs."""

from typing import Any

import torch

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import VAE, LatentScale, Scaling

SAME_MODEL = "use a vae and a transformer that belong to the same model"
"""What to do if the VAE and the transformer do not fit together."""


def latent_scale(vae: VAE | None, default: LatentScale, name: str) -> LatentScale:
    """Return the latent channels of a checkpoint, and how many pixels and frames one latent position covers.

    An image VAE that a video family applies frame by frame counts as a video VAE.

    Args:
        default: the family's, for a checkpoint without a VAE.

    Raises:
        InvalidRequest: an image family has a video VAE.
    """
    if vae is None:
        return default
    if vae.scale.video and not default.video:
        raise InvalidRequest(f"{name}: the VAE is for video, and the transformer generates images; {SAME_MODEL}")
    return vae.scale if vae.scale.video == default.video else vae.scale.as_video()


def fit_scaling(latent_format: Any, vae: VAE | None, name: str) -> None:
    """Set the scaling of one of ComfyUI's latent formats to that of the checkpoint's VAE.

    Does nothing for a VAE that scales its latents itself.

    Raises:
        InvalidRequest: only one of the VAE and the format has a mean and std, the VAE has a shift and the format has
            none, or the number of channels differs.
    """
    scaling = vae.scaling if vae else None
    if scaling is None:
        return
    mismatch = _mismatch(latent_format, scaling)
    if mismatch:
        raise InvalidRequest(f"{name}: {mismatch}; {SAME_MODEL}")
    latent_format.scale_factor = scaling.factor
    if hasattr(latent_format, "shift_factor"):
        latent_format.shift_factor = scaling.shift
    for attribute, values in (("latents_mean", scaling.mean), ("latents_std", scaling.std)):
        if values:
            setattr(latent_format, attribute, torch.tensor(values).view(getattr(latent_format, attribute).shape))


def _mismatch(latent_format: Any, scaling: Scaling) -> str:
    """Return why a latent format cannot hold the scaling of a VAE, or an empty string."""
    kind, channels = type(latent_format).__name__, latent_format.latent_channels
    if scaling.shift and not hasattr(latent_format, "shift_factor"):
        return f"the VAE has shift_factor {scaling.shift}, and the model's latent format {kind} has none"
    if bool(scaling.mean) != hasattr(latent_format, "latents_mean"):
        vae_has, format_has = ("has", "lacks") if scaling.mean else ("lacks", "has")
        return f"the VAE {vae_has} latents_mean and latents_std, and the model's latent format {kind} {format_has} them"
    if scaling.mean and len(scaling.mean) != channels:
        values = f"the VAE's latents_mean has {len(scaling.mean)} values"
        return f"{values}, and the model's latent format {kind} has {channels} channels"
    return ""
