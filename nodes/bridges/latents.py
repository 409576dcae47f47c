"""The shape and scaling of a checkpoint's latents as ComfyUI needs them, read from the checkpoint's JSON files."""

from typing import Any

import torch

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import VAE, LatentScale, Scaling


def latent_scale(vae: VAE | None, default: LatentScale, name: str) -> LatentScale:
    """Return the shape of a checkpoint's latents.

    An image VAE that a video family applies frame by frame counts as a video VAE.

    Args:
        vae: the checkpoint's VAE.
        default: the family's shape, for a checkpoint without a VAE.
        name: the checkpoint's name, for error messages.

    Raises:
        InvalidRequest: an image family has a video VAE.
    """
    if vae is None:
        return default
    if vae.scale.video and not default.video:
        raise InvalidRequest(f"{name}: the VAE is for video, and the transformer generates images")
    return vae.scale if vae.scale.video == default.video else vae.scale.as_video()


def fit_scaling(latent_format: Any, vae: VAE | None, name: str) -> None:
    """Set the scaling of one of ComfyUI's latent formats to that of the checkpoint's VAE.

    Does nothing for a VAE that scales its latents itself.

    Raises:
        InvalidRequest: the format has no attribute for a number, or another number of channels.
    """
    scaling = vae.scaling if vae else None
    if scaling is None:
        return
    _check_scaling(latent_format, scaling, name)
    latent_format.scale_factor = scaling.factor
    if hasattr(latent_format, "shift_factor"):
        latent_format.shift_factor = scaling.shift
    for attribute, values in (("latents_mean", scaling.mean), ("latents_std", scaling.std)):
        if values:
            setattr(latent_format, attribute, torch.tensor(values).view(getattr(latent_format, attribute).shape))


def _check_scaling(latent_format: Any, scaling: Scaling, name: str) -> None:
    kind, channels = type(latent_format).__name__, latent_format.latent_channels
    if scaling.shift and not hasattr(latent_format, "shift_factor"):
        raise InvalidRequest(
            f"{name}: the VAE has shift_factor {scaling.shift}, and the model's latent format {kind} has none"
        )
    if bool(scaling.mean) != hasattr(latent_format, "latents_mean"):
        vae_has, format_has = ("has", "lacks") if scaling.mean else ("lacks", "has")
        raise InvalidRequest(
            f"{name}: the VAE {vae_has} latents_mean and latents_std, and the model's latent format {kind} "
            f"{format_has} them"
        )
    if scaling.mean and len(scaling.mean) != channels:
        raise InvalidRequest(
            f"{name}: the VAE has {len(scaling.mean)} latents_mean, and the model's latent format {kind} has "
            f"{channels} channels"
        )
