"""The registry of VAEs. Adding one is a file here and a row below; diffusers is not needed to ask for shapes."""

from ..checkpoint.checkpoint import Checkpoint
from ..errors import InvalidRequest
from .base import VAE, LatentScale, Scaling
from .cogvideox import CogVideoX
from .hunyuan_video import HunyuanVideo
from .images import Flux2, Image, TemporalDecoder
from .ltx import LTXVideo
from .mochi import Mochi
from .wan import QwenImage, Wan

VAES: dict[str, type[VAE]] = {
    "AutoencoderKL": Image,
    "AutoencoderKLCogVideoX": CogVideoX,
    "AutoencoderKLFlux2": Flux2,
    "AutoencoderKLHunyuanVideo": HunyuanVideo,
    "AutoencoderKLLTXVideo": LTXVideo,
    "AutoencoderKLMochi": Mochi,
    "AutoencoderKLQwenImage": QwenImage,
    "AutoencoderKLTemporalDecoder": TemporalDecoder,
    "AutoencoderKLWan": Wan,
}
"""By the name of diffusers' class."""

SMALLEST_TILE = 8
"""Rows and columns of a latent that a tile has at least."""


def vae_of(checkpoint: Checkpoint) -> VAE:
    """The VAE of a checkpoint that has one, from its JSON files alone.

    Raises:
        InvalidRequest: a class that is not listed, with the list, or one for other pictures than RGB.
    """
    name = checkpoint.components["vae"]
    if name not in VAES:
        raise InvalidRequest(f"vae class {name} is not supported; supported: {', '.join(VAES)}")
    vae = VAES[name](checkpoint.config("vae"))
    if vae.colors != 3:
        raise InvalidRequest(f"{checkpoint.path / 'vae'} has {vae.colors} colour channels; RGB, so 3, is supported")
    return vae


__all__ = ["SMALLEST_TILE", "VAE", "VAES", "LatentScale", "Scaling", "vae_of"]
