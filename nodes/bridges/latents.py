"""What ComfyUI has to know about a checkpoint's latents, read from its JSON files."""

from typing import Any

import torch

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import VAE, LatentScale, Scaling


def latent_scale(vae: VAE | None, default: LatentScale, name: str) -> LatentScale:
    """The shape of a checkpoint's latents; ``default``, its family's, if it has no VAE. ``name`` is for messages.

    The VAE of pictures that a family of videos uses frame by frame is one of videos.

    Raises:
        InvalidRequest: a VAE of videos for a family of pictures.
    """
    if vae is None:
        return default
    if vae.scale.video and not default.video:
        raise InvalidRequest(f"{name}: the VAE is one of videos, and the transformer makes pictures")
    return vae.scale if vae.scale.video == default.video else vae.scale.as_video()


def fit_scaling(latent_format: Any, vae: VAE | None, name: str) -> None:
    """Give a latent format of ComfyUI's the numbers of the checkpoint's own VAE, if they lie between it and the model.

    Raises:
        InvalidRequest: the format has no place for them, or another number of channels.
    """
    scaling = vae.scaling if vae else None
    if scaling is None:
        return
    _check(latent_format, scaling, name)
    latent_format.scale_factor = scaling.factor
    if hasattr(latent_format, "shift_factor"):
        latent_format.shift_factor = scaling.shift
    for attribute, values in (("latents_mean", scaling.mean), ("latents_std", scaling.std)):
        if values:
            setattr(latent_format, attribute, torch.tensor(values).view(getattr(latent_format, attribute).shape))


def _check(latent_format: Any, scaling: Scaling, name: str) -> None:
    kind, channels = type(latent_format).__name__, latent_format.latent_channels
    if scaling.shift and not hasattr(latent_format, "shift_factor"):
        raise InvalidRequest(
            f"{name}: the VAE has shift_factor {scaling.shift}, for which the model's latent format {kind} has no place"
        )
    if bool(scaling.mean) != hasattr(latent_format, "latents_mean"):
        raise InvalidRequest(
            f"{name}: the VAE {'has' if scaling.mean else 'lacks'} latents_mean and latents_std, and the model's "
            f"latent format {kind} is of the other kind"
        )
    if scaling.mean and len(scaling.mean) != channels:
        raise InvalidRequest(
            f"{name}: the VAE has {len(scaling.mean)} latents_mean, and the model's latent format {kind} has "
            f"{channels} channels"
        )
