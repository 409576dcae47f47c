"""The registry of families. A new family is a file here, a row below, and a bridge in ``nodes/families``."""

from ..errors import InvalidRequest
from ..interfaces.family import Family
from .cogvideox.transformer import CogVideoX
from .dit.transformer import DiT
from .flux.transformer import Flux
from .flux2.transformer import Flux2
from .hunyuan_video.transformer import HunyuanVideo
from .latte.transformer import Latte
from .ltx.transformer import LTXVideo
from .mochi.transformer import Mochi
from .pixart.transformer import PixArt
from .qwen_image.transformer import QwenImage
from .sd3.transformer import SD3
from .wan.transformer import Wan
from .z_image.transformer import ZImage

FAMILIES: dict[str, type[Family]] = {
    "CogVideoXTransformer3DModel": CogVideoX,
    "DiTTransformer2DModel": DiT,
    "Flux2Transformer2DModel": Flux2,
    "FluxTransformer2DModel": Flux,
    "HunyuanVideoTransformer3DModel": HunyuanVideo,
    "LTXVideoTransformer3DModel": LTXVideo,
    "LatteTransformer3DModel": Latte,
    "MochiTransformer3DModel": Mochi,
    "PixArtTransformer2DModel": PixArt,
    "QwenImageTransformer2DModel": QwenImage,
    "SD3Transformer2DModel": SD3,
    "WanTransformer3DModel": Wan,
    "ZImageTransformer2DModel": ZImage,
}
"""Families by the name of their diffusers class."""


def family_of(class_name: str) -> type[Family]:
    """Return the family of a diffusers transformer class.

    Raises:
        InvalidRequest: no family supports the class. The message lists those that are supported.
    """
    if class_name not in FAMILIES:
        raise InvalidRequest(f"transformer class {class_name} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[class_name]


__all__ = ["FAMILIES", "Family", "family_of"]
