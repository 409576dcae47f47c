"""The registry of VAE classes. To add one, write a file here and add a row below.

Latent shapes and scales come from ``config.json`` alone, so asking for them does not need diffusers.
"""

from importlib import import_module
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..errors import InvalidRequest
from ..packages import check_diffusers
from .base import VAE, LatentScale, Scaling
from .cogvideox import CogVideoX
from .hunyuan_video import HunyuanVideo
from .images import Flux2, Image, TemporalDecoder
from .ltx import LTXVideo
from .minimax_h3 import MiniMaxH3
from .mochi import Mochi
from .open_sora1 import OpenSora1
from .own_tiles import TiledVAE
from .wan import QwenImage, Wan

VAES: dict[str, type[VAE]] = {
    "AutoencoderKL": Image,
    "AutoencoderKLCogVideoX": CogVideoX,
    "AutoencoderKLFlux2": Flux2,
    "AutoencoderKLHunyuanVideo": HunyuanVideo,
    "AutoencoderKLLTXVideo": LTXVideo,
    "AutoencoderKLMiniMaxH3": MiniMaxH3,
    "AutoencoderKLMochi": Mochi,
    "AutoencoderKLQwenImage": QwenImage,
    "AutoencoderKLTemporalDecoder": TemporalDecoder,
    "AutoencoderKLWan": Wan,
    "VideoAutoencoderPipeline": OpenSora1,
}
"""VAE classes by the name of the module's class."""

MIN_TILE = 8
"""Smallest height and width of a tile, in rows and columns of the latent."""


def vae_of(checkpoint: Checkpoint) -> VAE:
    """Return the VAE of a checkpoint that has one. Reads only the checkpoint's JSON files.

    Raises:
        InvalidRequest: the class is not in ``VAES`` (the message lists them), or the VAE's images are not RGB.
    """
    name = checkpoint.components["vae"]
    if name not in VAES:
        raise InvalidRequest(f"vae class {name} is not supported; supported: {', '.join(VAES)}")
    vae = VAES[name](checkpoint.config("vae"))
    if vae.colors != 3:
        raise InvalidRequest(
            f"{checkpoint.name} has a VAE with {vae.colors} colour channels; only RGB, so 3, is supported"
        )
    return vae


def module_class_of(class_name: str) -> Any:
    """Return the module class of a VAE: diffusers' own, or ours for a VAE that diffusers does not have.

    Raises:
        AttributeError: there is none.
        InvalidRequest: the installed diffusers is too old for it.
    """
    vae = VAES.get(class_name, VAE)
    check_diffusers(class_name, vae.since)
    own = vae.own_module
    return getattr(import_module(f".{own}", __package__) if own else import_module("diffusers"), class_name)


__all__ = ["MIN_TILE", "VAE", "VAES", "LatentScale", "Scaling", "TiledVAE", "module_class_of", "vae_of"]
