"""The statistics of a VAE's latent, which ComfyUI's latent upsampler takes from an LTX VAE."""

from functools import cached_property

from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.model_spec import DType
from ...parallel_backend.protocol.tensors import DTYPES
from .stored_values import stored_values

_CLASS = "AutoencoderKLLTXVideo"
_NAMES = {
    "mean": ("per_channel_statistics.mean-of-means", "latents_mean"),
    "std": ("per_channel_statistics.std-of-means", "latents_std"),
}
"""The published names and diffusers' names."""


class LatentStatistics:
    """Stands for the layer of ComfyUI's VAE that normalises latents. It reads the VAE's file when it is first used.

    Args:
        checkpoint: the VAE's.
        dtype: that ComfyUI would keep the VAE's weights in.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: DType) -> None:
        self._checkpoint, self._dtype = checkpoint, DTYPES.get(dtype)

    def un_normalize(self, latent: Tensor) -> Tensor:
        """Return the raw latent ``[B, C, T, H, W]`` of a normalised one."""
        return latent * _by_channel(self._std, latent) + _by_channel(self._mean, latent)

    def normalize(self, latent: Tensor) -> Tensor:
        """Return the normalised latent of a raw one."""
        return (latent - _by_channel(self._mean, latent)) / _by_channel(self._std, latent)

    @cached_property
    def _mean(self) -> Tensor:
        return self._read("mean")

    @cached_property
    def _std(self) -> Tensor:
        factor: float = self._checkpoint.config("vae").get("scaling_factor") or 1.0
        return self._read("std") / factor

    def _read(self, kind: str) -> Tensor:
        weights = self._checkpoint.weights("vae")
        name = next((name for name in _NAMES[kind] if name in weights), None)
        if name is None:
            raise InvalidRequest(f"{self._checkpoint.name} lacks {_NAMES[kind][0]}: download the VAE again")
        values = stored_values(weights[name])
        return values if self._dtype is None else values.to(self._dtype)


def statistics_of(checkpoint: Checkpoint, dtype: DType) -> LatentStatistics | None:
    """Return the statistics of a checkpoint's VAE; None if its latents are not normalised by any."""
    return LatentStatistics(checkpoint, dtype) if checkpoint.components.get("vae") == _CLASS else None


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per channel, for videos."""
    return values.view(1, -1, 1, 1, 1).to(like)
