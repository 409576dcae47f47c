"""What ComfyUI has to know about a checkpoint's latents, read from its JSON files."""

from typing import Any

import torch

from ..parallel_backend.checkpoint import Checkpoint
from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.vaes import LatentScale, Scaling, vae_of


def latent_scale(checkpoint: Checkpoint, default: LatentScale) -> LatentScale:
    """The shape of a checkpoint's latents; ``default``, its family's, if it has no VAE.

    The VAE of pictures that a family of videos uses frame by frame is one of videos.

    Raises:
        InvalidRequest: a VAE that is not supported, or one of videos for a family of pictures.
    """
    if "vae" not in checkpoint.components:
        return default
    scale = vae_of(checkpoint).scale
    if scale.video and not default.video:
        raise InvalidRequest(f"{checkpoint.path.name}: the VAE is one of videos, and the transformer makes pictures")
    return scale if scale.video == default.video else scale.as_video()


def fit_scaling(latent_format: Any, checkpoint: Checkpoint) -> None:
    """Give a latent format of ComfyUI's the numbers of the checkpoint's own VAE, if they lie between it and the model.

    Raises:
        InvalidRequest: the format has no place for them, or another number of channels.
    """
    if "vae" not in checkpoint.components:
        return
    scaling = vae_of(checkpoint).scaling
    if scaling is None:
        return
    _check(latent_format, scaling, checkpoint)
    latent_format.scale_factor = scaling.factor
    if hasattr(latent_format, "shift_factor"):
        latent_format.shift_factor = scaling.shift
    for name, values in (("latents_mean", scaling.mean), ("latents_std", scaling.std)):
        if values:
            setattr(latent_format, name, torch.tensor(values).view(getattr(latent_format, name).shape))


def _check(latent_format: Any, scaling: Scaling, checkpoint: Checkpoint) -> None:
    name, channels = type(latent_format).__name__, latent_format.latent_channels
    if scaling.shift and not hasattr(latent_format, "shift_factor"):
        raise InvalidRequest(
            f"{checkpoint.path.name}: the VAE has shift_factor {scaling.shift}, for which the model's latent format "
            f"{name} has no place"
        )
    if bool(scaling.mean) != hasattr(latent_format, "latents_mean"):
        raise InvalidRequest(
            f"{checkpoint.path.name}: the VAE {'has' if scaling.mean else 'lacks'} latents_mean and latents_std, and "
            f"the model's latent format {name} is of the other kind"
        )
    if scaling.mean and len(scaling.mean) != channels:
        raise InvalidRequest(
            f"{checkpoint.path.name}: the VAE has {len(scaling.mean)} latents_mean, and the model's latent format "
            f"{name} has {channels} channels"
        )
